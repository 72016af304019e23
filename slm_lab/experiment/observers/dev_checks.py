"""The checks of mode dev."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from slm_lab.experiment.observers.base import Observer
from slm_lab.lib.records import Metrics


class DevCheckError(Exception):
    """A check of mode dev failed."""


class DevChecks(Observer):
    """Mode dev: each update has a finite loss and gradient, there is an update, and the weights move."""

    def __init__(self, weights: Callable[[], dict[str, Any]]) -> None:
        self.weights, self.before, self.updates = weights, weights(), 0
        self.interrupted = False

    def on_update(self, metrics: Metrics) -> None:
        self.updates += 1
        for name, value in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm)):
            if value is not None and not math.isfinite(value):
                raise DevCheckError(f"{name} is {value} in update {self.updates}")

    def on_interrupt(self) -> None:
        self.before = {}

    def on_end(self) -> None:
        if not self.before:
            return
        if self.updates == 0:
            raise DevCheckError("the run ended before the first update; raise env.max_frame or train more often")
        if _equal(self.before, self.weights()):
            raise DevCheckError(f"no weight moved in {self.updates} updates")


def _equal(left: Any, right: Any) -> bool:
    """Whether two nested dicts and lists of tensors are equal in every element."""
    if isinstance(left, dict):
        return all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return all(_equal(one, other) for one, other in zip(left, right, strict=True))
    same = left == right
    return bool(same.all()) if hasattr(same, "all") else bool(same)
