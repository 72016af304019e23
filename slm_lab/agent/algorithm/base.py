"""What every algorithm is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from slm_lab.agent.policy import Policy
from slm_lab.lib.records import ActOut, Metrics, VecStep


class Algorithm(ABC):
    """Learns a policy from what it observes."""

    policy: Policy
    """What acts."""

    @abstractmethod
    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Remember one step. `first_N`: obs_N begins an episode; `state_N`: the hidden state before it."""

    @abstractmethod
    def ready(self) -> bool:
        """True when `update` has something to learn from."""

    @abstractmethod
    def update(self) -> Metrics:
        """Learn from what was observed."""

    @property
    def lr(self) -> float | None:
        """Learning rate now; None for what does not learn."""
        return None

    @property
    def entropy_coef(self) -> float | None:
        """Weight of the entropy bonus now."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, without what is gathered for the next training."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # what learns nothing has nothing to load
        """Take over what `state_dict` gave."""


class Meter:
    """Means of what an update's gradient steps report."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, **values: float) -> None:
        self._steps += 1
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def drain(self) -> Metrics:
        """The means since the last drain."""
        means = {name: total / max(self._steps, 1) for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        return Metrics(means.pop("loss"), means.pop("grad_norm", None), means.pop("entropy", None), means)
