"""The scale on which a critic is trained, and the scale of advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.losses import symexp, symlog
from slm_lab.agent.ops.returns import standardize
from slm_lab.lib.heap import PRIVATE, Heap


class ValueScale:
    """Between values in reward units and the critic's outputs. This one changes nothing."""

    def update(self, return_TN: Tensor, valid_TN: Tensor) -> None:
        """Take note of the returns of valid rows."""

    def encode(self, value: Tensor) -> Tensor:
        """Reward units → what the critic should put out."""
        return value

    def decode(self, output: Tensor) -> Tensor:
        """What the critic put out → reward units."""
        return output

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class SymlogScale(ValueScale):
    """The critic predicts symlog(value) (arXiv:2301.04104, eq. 9)."""

    def encode(self, value: Tensor) -> Tensor:
        return symlog(value)

    def decode(self, output: Tensor) -> Tensor:
        return symexp(output)


class RunningScale(ValueScale):
    """The critic predicts values standardised by moving moments of the returns (PopArt, arXiv:1602.07714, less its output correction).

    Moments are averages over updates with weight DECAY on the past, corrected for their start at zero.
    """

    DECAY = 0.99

    def __init__(self, heap: Heap = PRIVATE) -> None:
        self.heap = heap
        self.moments = heap.array(np.zeros(3))
        """Of weight, value and square: sums of what was decayed."""

    def update(self, return_TN: Tensor, valid_TN: Tensor) -> None:
        return_B = return_TN[valid_TN]
        if return_B.numel():
            news = np.array([1.0, float(return_B.mean()), float(return_B.square().mean())])
            if self.heap.takes(news):
                with self.heap.exclusive("statistics"):
                    self.moments[:] = self.DECAY * self.moments + (1.0 - self.DECAY) * news

    @property
    def mean(self) -> float:
        weight, first, _ = self.moments.tolist()
        return first / weight if weight else 0.0

    @property
    def std(self) -> float:
        weight, first, second = self.moments.tolist()
        return max(second / weight - (first / weight) ** 2, 1e-8) ** 0.5 if weight else 1.0

    def encode(self, value: Tensor) -> Tensor:
        return (value - self.mean) / self.std

    def decode(self, output: Tensor) -> Tensor:
        return output * self.std + self.mean

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("weight", "first", "second"), self.moments.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments[:] = state["weight"], state["first"], state["second"]


class PercentileScale:
    """Divides advantages by max(1, S), S the moving range between the 5th and 95th percentile of returns (arXiv:2301.04104, eq. 11–12)."""

    DECAY = 0.99

    def __init__(self, heap: Heap = PRIVATE) -> None:
        self.heap = heap
        self._range = heap.array(np.full(1, np.nan))

    @property
    def range(self) -> float | None:
        """S; None before the first returns."""
        return None if np.isnan(self._range[0]) else float(self._range[0])

    @range.setter
    def range(self, value: float | None) -> None:
        self._range[0] = np.nan if value is None else value

    def __call__(self, advantage_B: Tensor, return_B: Tensor) -> Tensor:
        if return_B.numel():
            low, high = torch.quantile(return_B.float(), torch.tensor([0.05, 0.95], device=return_B.device)).tolist()
            if self.heap.takes(high - low):
                with self.heap.exclusive("statistics"):
                    self.range = high - low if self.range is None else self.DECAY * self.range + (1.0 - self.DECAY) * (high - low)
        return advantage_B / max(1.0, self.range or 0.0)


def standardize_valid(x_TN: Tensor, valid_TN: Tensor) -> Tensor:
    """Standardised over the valid rows; the others are whatever they are."""
    if bool(valid_TN.all()):
        return standardize(x_TN)
    out_TN = torch.zeros_like(x_TN)
    out_TN[valid_TN] = standardize(x_TN[valid_TN])
    return out_TN
