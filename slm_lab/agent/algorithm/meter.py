"""`GradientMeter`, which takes the gradient steps of an update and averages the reported losses, gradient norms and diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from slm_lab.agent.ops.device import to_floats
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.rollout.minibatch import Minibatch, RolloutBatch
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Metrics


class GradientMeter:
    """Helper that takes the gradient steps of an algorithm, and averages losses and diagnostics over the steps of an update.

    Reported values on a CUDA device are copied to the host together, at the end of the update.
    """

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock
        self._sums: dict[str, float] = {}
        self._unread: list[tuple[str, float, Tensor | float]] = []
        """(name, weight, value) of reported values on a CUDA device, which are not yet added to `_sums`."""
        self._steps = 0

    def begin(self) -> None:
        """Start an update: set the learning rates for the current frame, and switch layers to training mode."""
        self.trainer.begin_update(self.clock.global_frame)
        self.trainer.set_train_mode(True)

    def add(self, loss: Tensor, weight: float = 1.0, **values: Tensor | float) -> None:
        """Add `weight` times the gradient of the loss to `Parameter.grad`. Report the loss and other scalars, multiplied by `weight`."""
        self._report(weight, {"loss": self.trainer.backward(loss, weight), **values})

    def report_loss(self, loss: Tensor | float, weight: float = 1.0, **values: Tensor | float) -> None:
        """Report a loss and other scalars, multiplied by `weight`.

        The caller has already added `weight` times the gradient of the loss to `Parameter.grad`.
        """
        self._report(weight, {"loss": self.trainer.check_finite(loss), **values})

    def report(self, **values: Tensor | float) -> None:
        """Report scalars of the next gradient step, such as diagnostics."""
        self._report(1.0, values)

    def _report(self, weight: float, values: Mapping[str, Tensor | float]) -> None:
        sums = self._sums
        for name, value in values.items():
            if self.trainer.deferred and isinstance(value, Tensor):
                self._unread.append((name, weight, value.detach()))
            else:
                sums[name] = sums.get(name, 0.0) + weight * (value if isinstance(value, float) else value.item())

    def step(self) -> None:
        """Take one gradient step with the accumulated gradient."""
        self.report(grad_norm=self.trainer.step())
        if self.trainer.shared is not None:
            self.report(**self.trainer.shared.report)
        self._steps += 1
        self.clock.opt_step += 1

    def train_on_rollout(
        self, rollout: Rollout, prepare: Callable[[Rollout], RolloutBatch], add_loss: Callable[[Minibatch[Any], float], None]
    ) -> Metrics:
        """Take one gradient step on a complete rollout, and return the metrics of this update.

        Args: prepare: function (rollout) that returns the RolloutBatch with advantages and targets. add_loss: function (microbatch, weight)
        that adds `weight` times the gradient of the microbatch's loss to `Parameter.grad`.
        """
        self.trainer.begin_update(self.clock.global_frame)
        batch = prepare(rollout)  # with the current shared weights, and with layers in evaluation mode
        self.trainer.set_train_mode(True)
        for microbatch, weight in batch.microbatches():
            add_loss(microbatch, weight)
        self.step()
        return self.end()

    def end(self) -> Metrics:
        """End an update: switch layers to evaluation mode, and return the means of the reported values over the gradient steps."""
        self.trainer.set_train_mode(False)
        if self._unread:
            for (name, weight, _), number in zip(self._unread, to_floats([value for *_, value in self._unread]), strict=True):
                self._sums[name] = self._sums.get(name, 0.0) + weight * number
            self._unread.clear()
        self.trainer.end_update()
        means = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        return Metrics(means.pop("loss"), means.pop("grad_norm"), means.pop("entropy", None), means)
