"""The scale on which a critic is trained, and the scale of advantages."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.losses import symexp, symlog
from slm_lab.agent.ops.returns import standardize
from slm_lab.lib.store import Arrays, Named, SharedArray, SharedArrays
from slm_lab.spec.base import Problem, SpecError


def build_value_scale(symlog: bool, normalize: bool) -> ValueScale:
    """Build the critic's scale by the keys symlog and normalize_v_targets."""
    if symlog and normalize:
        message = "symlog and normalize_v_targets cannot be combined; remove one of them"
        raise SpecError("agent", [Problem("agent.algorithm.symlog", message)])
    return SymlogScale() if symlog else RunningScale() if normalize else ValueScale()


def _merging(store: SharedArrays | None) -> AbstractContextManager[object]:
    return nullcontext() if store is None else store.exclusive("statistics")


class ValueScale:
    """Between values in reward units and the critic's outputs; here they are equal."""

    def update(self, return_TN: Tensor, valid_TN: Tensor) -> None:
        """Update statistics by the returns of valid rows."""

    def encode(self, value: Tensor) -> Tensor:
        """Map reward units to outputs of the critic."""
        return value

    def decode(self, output: Tensor) -> Tensor:
        """Map outputs of the critic to reward units."""
        return output

    def shared_arrays(self) -> Named:
        return {}

    def attach(self, store: SharedArrays, arrays: Arrays) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""


class SymlogScale(ValueScale):
    """The critic predicts symlog(value) (arXiv:2301.04104, eq. 9)."""

    def encode(self, value: Tensor) -> Tensor:
        return symlog(value)

    def decode(self, output: Tensor) -> Tensor:
        return symexp(output)


class RunningScale(ValueScale):
    """The critic predicts values standardised by moving moments of the returns (PopArt, arXiv:1602.07714, less its output correction).

    Moments are averages over updates with weight DECAY on the past, corrected for their start at zero. Returns that are not finite are
    ignored.
    """

    DECAY = 0.99

    def __init__(self) -> None:
        self._store: SharedArrays | None = None
        self.moments = np.zeros(3)
        """Decayed sums of weight, value and square."""

    def update(self, return_TN: Tensor, valid_TN: Tensor) -> None:
        return_B = return_TN[valid_TN]
        if return_B.numel():
            new = np.array([1.0, float(return_B.mean()), float(return_B.square().mean())])
            if np.isfinite(new).all():
                with _merging(self._store):
                    self.moments[:] = self.DECAY * self.moments + (1.0 - self.DECAY) * new

    def shared_arrays(self) -> Named:
        return {"moments": SharedArray(self.moments, "merge")}

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        self._store, self.moments = store, arrays["moments"]

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
    """Divides advantages by max(1, S), S the moving range between the 5th and 95th percentile of returns (arXiv:2301.04104, eq. 11–12).

    Returns whose range is not finite are ignored.
    """

    DECAY = 0.99

    def __init__(self) -> None:
        self._store: SharedArrays | None = None
        self._range = np.full(1, np.nan)

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
            if math.isfinite(high - low):
                with _merging(self._store):
                    self.range = high - low if self.range is None else self.DECAY * self.range + (1.0 - self.DECAY) * (high - low)
        return advantage_B / max(1.0, self.range or 0.0)

    def shared_arrays(self) -> Named:
        return {"range": SharedArray(self._range, "merge")}

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        self._store, self._range = store, arrays["range"]

    def state_dict(self) -> dict[str, Any]:
        return {"range": self.range}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.range = state["range"]


def standardize_valid(x_TN: Tensor, valid_TN: Tensor) -> Tensor:
    """Standardise over the valid rows; the others become 0."""
    if bool(valid_TN.all()):
        return standardize(x_TN)
    out_TN = torch.zeros_like(x_TN)
    out_TN[valid_TN] = standardize(x_TN[valid_TN])
    return out_TN
