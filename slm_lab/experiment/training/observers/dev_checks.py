"""Checks of mode dev."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slm_lab.experiment.training.observers.base import Observer
from slm_lab.lib.errors import PlainError
from slm_lab.lib.records import Metrics


class DevCheckError(PlainError):
    """A check of mode dev failed."""


class DevChecks(Observer):
    """Mode dev: loss and gradient of each update are finite, there is an update, the weights move, and a target net when it should.

    Args:
        weights: returns copies of the agent's weights.
        target: returns how many updates of the target net were due, and a copy of it; None without a target net.
    """

    def __init__(self, weights: Callable[[], dict[str, Any]], target: Callable[[], tuple[int, Any] | None] = lambda: None) -> None:
        self.weights, self.before, self.updates = weights, weights(), 0
        self.target, self.target_before = target, target()
        self.first_target = self.target_before
        self.early_targets = 0
        """Updates of the target net up to the first update of the weights, which may have copied equal ones."""

    def on_update(self, metrics: Metrics) -> None:
        self.updates += 1
        for name, value in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm)):
            if value is not None and not math.isfinite(value):
                raise DevCheckError(f"{name} is {value} in update {self.updates}")
        before, now = self.target_before, self.target()
        if before is not None and now is not None and now[0] == before[0] and not _equal(now[1], before[1]):
            raise DevCheckError(f"the target net changed in update {self.updates} although no update was due (agent.net.update_frequency)")
        self.target_before = now
        if self.updates == 1 and now is not None:
            self.early_targets = now[0]

    def on_interrupt(self) -> None:
        self.before = {}

    def on_end(self) -> None:
        if not self.before:
            return
        if self.updates == 0:
            raise DevCheckError(
                "the run ended before the first update: raise env.max_frame, or lower training_start_step, training_frequency or batch_size"
            )
        if _equal(self.before, self.weights()):
            raise DevCheckError(f"no weight changed in {self.updates} updates")
        first, last = self.first_target, self.target_before
        if first is not None and last is not None and last[0] > self.early_targets and _equal(first[1], last[1]):
            raise DevCheckError(f"{last[0] - self.early_targets} updates of the target net were due, but its parameters did not change")


def _equal(left: Any, right: Any) -> bool:
    """Whether two nested dicts and lists of tensors are equal in every element."""
    if isinstance(left, dict):
        return all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return all(_equal(one, other) for one, other in zip(left, right, strict=True))
    same = left == right
    return bool(same.all()) if hasattr(same, "all") else bool(same)
