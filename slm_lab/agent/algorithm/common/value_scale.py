"""Moving statistics by which value losses and advantages are scaled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import A, full_like
from slm_lab.agent.ops.objective import VALUE_LIMIT
from slm_lab.agent.ops.returns import standardize
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, several


class TargetDeviation:
    """Running standard deviation of the value targets (Chan et al. 1979).

    A target counts once for each minibatch that contains it. Targets that are not finite are ignored.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self.moments = np.zeros(3)
        """Number, mean and sum of squared differences from the mean."""

    def update(self, target_B: Tensor) -> None:
        """Add value targets [B]."""
        if not target_B.numel():
            return
        variance, mean = torch.var_mean(target_B, correction=0)
        new_variance, new_mean = (float(variance), float(mean)) if target_B.device.type == "cpu" else torch.stack((variance, mean)).tolist()
        if math.isfinite(new_variance) and math.isfinite(new_mean):
            added = target_B.numel(), new_mean, new_variance
            if self._store is None:
                self._merge(*added)
            else:
                self._store.run("statistics", self._merge, *added)

    def _merge(self, new: int, new_mean: float, new_variance: float) -> None:
        count = float(self.moments[0])
        difference = new_mean - float(self.moments[1])
        self.moments[0] += new
        self.moments[1] += difference * new / (count + new)
        self.moments[2] += new_variance * new + difference * difference * count * new / (count + new)

    @property
    def std(self) -> float:
        """The standard deviation, at least 1."""
        count, _, squares = self.moments.tolist()
        return max(1.0, math.sqrt(squares / count + 1e-8)) if count > 1 else 1.0

    def scale(self, value_B: Tensor) -> Tensor:
        """Divide values or targets by the deviation, and clamp them."""
        return (value_B / self.std).clamp(-VALUE_LIMIT, VALUE_LIMIT)

    def shared_arrays(self) -> Named:
        return {"moments": SharedArray(self.moments, "merge")}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._store, self.moments = store, arrays["moments"]

    def state_dict(self) -> dict[str, Any]:
        return {} if several(self._store) else {"moments": self.moments.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        if not several(self._store):
            self.moments[:] = state["moments"]


class PercentileScale:
    """Divide advantages by max(1, S), S the moving range between their 5th and 95th percentile (after arXiv:2301.04104, eq. 11–12).

    S starts at 0. Advantages whose range is not finite are ignored.
    """

    DECAY = 0.99

    def __init__(self) -> None:
        self._store: Store | None = None
        self._range = np.zeros(1)

    @property
    def range(self) -> float:
        """S."""
        return float(self._range[0])

    def __call__(self, advantage_B: Tensor) -> Tensor:
        if advantage_B.numel():
            ends = torch.tensor([0.05, 0.95], device=advantage_B.device)
            low, high = torch.quantile(advantage_B.float(), ends).tolist()
            if math.isfinite(high - low):
                if self._store is None:
                    self._move(high - low)
                else:
                    self._store.run("statistics", self._move, high - low)
        return advantage_B / max(1.0, self.range)

    def _move(self, new_range: float) -> None:
        self._range[0] = self.DECAY * self.range + (1.0 - self.DECAY) * new_range

    def shared_arrays(self) -> Named:
        return {"range": SharedArray(self._range, "merge")}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._store, self._range = store, arrays["range"]

    def state_dict(self) -> dict[str, Any]:
        return {} if several(self._store) else {"range": self.range}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        if not several(self._store):
            self._range[0] = state["range"]


def standardize_valid(x_TN: A, valid_TN: A) -> A:
    """Standardise over the valid rows; the others become 0."""
    if bool(valid_TN.all()):
        return standardize(x_TN)
    out_TN = full_like(x_TN, 0.0)
    out_TN[valid_TN] = standardize(x_TN[valid_TN])
    return out_TN
