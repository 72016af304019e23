"""What every algorithm is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from slm_lab.agent.rollout.minibatch import Batch, Minibatch
from slm_lab.agent.algorithm.common.target import TargetNet
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.replay.sil import SILReplay
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, Metrics, VecStep
from slm_lab.spec.schedule import Schedule


class Tuning(NamedTuple):
    """Hyperparameters other than the spec's, as population-based training changes them."""

    lr: float = 1.0
    """Factor of the learning rate."""
    entropy_coef: float = 1.0
    """Factor of the entropy coefficient."""
    gamma: float | None = None
    """In place of the spec's."""


class Algorithm:
    """Learns a policy from what it observes: gathers steps in its memory, and learns when the memory is ready."""

    policy: Policy
    """What acts."""
    clock: Clock
    memory: RolloutStorage | Replay | None = None
    """What is learned from; None for what learns nothing."""
    trainer: Trainer | None = None
    """What steps the parameters; None for what learns nothing."""
    target: TargetNet[Any] | None = None
    """A net that follows the one that learns; None for what has none."""
    entropy_schedule: Schedule | None = None
    """Weight of the entropy bonus over frames; None where there is none."""
    spec: Any
    """The algorithm's section of the spec."""
    tuning: Tuning = Tuning()
    """What is not as the spec says."""
    _given: Any = None
    """The section as the spec has it, once something is not."""

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Remember one step. `first_N`: obs_N begins an episode; `state_N`: the hidden state before it."""
        if self.memory is not None:
            self.memory.add(obs_N, first_N, state_N, out, step)

    def ready(self) -> bool:
        """True when `update` has something to learn from."""
        return self.memory is not None and self.memory.ready

    def update(self) -> Metrics:
        """Learn from what was observed."""
        if not isinstance(self.memory, RolloutStorage):
            raise RuntimeError(f"{type(self).__name__} does not learn from rollouts")
        return self.learn(self.memory.rollout())

    def learn(self, rollout: Rollout) -> Metrics:
        """Learn from a rollout, wherever it was gathered."""
        raise RuntimeError(f"{type(self).__name__} does not learn from rollouts")

    @property
    def acting(self) -> Trainer | None:
        """The trainer of the net that the policy acts with; None for a policy without any."""
        return self.trainer

    @property
    def lr(self) -> float | None:
        """Learning rate of the last update; None for what does not learn."""
        return None if self.trainer is None else self.trainer.lr

    @property
    def entropy_coef(self) -> float | None:
        """Weight of the entropy bonus now; None where there is none."""
        return None if self.entropy_schedule is None else self.entropy_schedule.value(self.clock.global_frame)

    def tune(self, tuning: Tuning) -> None:
        """Go on with other hyperparameters."""
        self.tuning = tuning
        if self.trainer is not None:
            self.trainer.lr_factor = tuning.lr
            self.trainer.begin(self.clock.global_frame)
        if self.entropy_schedule is not None:
            own = self.spec.entropy_coef_spec
            ends = {end: value * tuning.entropy_coef for end in ("start_val", "end_val") if (value := getattr(own, end)) is not None}
            self.entropy_schedule = own.model_copy(update=ends)
        self._given = self._given or self.spec
        self.spec = self._given if tuning.gamma is None else self._given.model_copy(update={"gamma": tuning.gamma})

    def replay_buffer(self) -> Replay | SILReplay | None:
        """The memory of what is learned from again and again; None for what learns from each step once."""
        return self.memory if isinstance(self.memory, Replay) else None

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, without the transitions that it is learned from."""
        state: dict[str, Any] = {"tuning": tuple(self.tuning)}
        state |= {} if self.trainer is None else {"trainer": self.trainer.state_dict()}
        return state | ({"memory": self.memory.state_dict()} if isinstance(self.memory, Replay) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if (tuning := Tuning(*state["tuning"])) != self.tuning:
            self.tune(tuning)
        if self.trainer is not None:
            self.trainer.load_state_dict(state["trainer"])
        if isinstance(self.memory, Replay):
            self.memory.load_state_dict(state["memory"])


class GradientMeter:
    """Gradient steps with their count and the means of what they report."""

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock
        self._sums: dict[str, float] = {}
        self._steps = 0

    def begin(self) -> None:
        """Before the steps of an update: learning rates of this frame, layers as for learning."""
        self.trainer.begin(self.clock.global_frame)
        self.trainer.set_train_mode(True)

    def add(self, loss: Tensor, share: float = 1.0, **values: Tensor) -> None:
        """Add the gradient of `share` of the loss to the next step's; `values` are scalars to report beside it."""
        self.trainer.backward(loss if share == 1.0 else share * loss)
        for name, value in (("loss", loss), *values.items()):
            self._sums[name] = self._sums.get(name, 0.0) + share * value.item()

    def step(self) -> None:
        """One gradient step on what was added."""
        reports = {"grad_norm": self.trainer.step()}
        if self.trainer.common is not None:
            reports |= self.trainer.common.report
        for name, value in reports.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        self.clock.opt_step += 1

    def step_on(self, rollout: Rollout, prepare: Callable[[Rollout], Batch], loss: Callable[[Minibatch], tuple[Tensor, Tensor]]) -> Metrics:
        """An update of one step on a whole rollout, with what `prepare` adds to it. `loss` gives the mean loss and entropy of a part."""
        self.trainer.begin(self.clock.global_frame)
        batch = prepare(rollout)  # by the weights that learn, with layers as for acting
        self.trainer.set_train_mode(True)
        for piece, share in batch.pieces():
            value, entropy = loss(piece)
            self.add(value, share, entropy=entropy)
        self.step()
        return self.end()

    def end(self) -> Metrics:
        """After them: layers as for acting; the means since `begin`."""
        self.trainer.set_train_mode(False)
        means = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        return Metrics(means.pop("loss"), means.pop("grad_norm"), means.pop("entropy", None), means)
