"""Running statistics, which scale value losses and advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import A, full_like
from slm_lab.agent.ops.objective import VALUE_LIMIT
from slm_lab.agent.ops.returns import standardize
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, is_shared


class SharedStatistic:
    """Base class of running statistics: an array of numbers that several processes update, one process at a time.

    Args: name: key of the array among the shared arrays and in the state dict. size: length of the array.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.numbers = name, np.zeros(size)
        self._store: Store | None = None

    def run_exclusively(self, section: Callable[..., None], *args: float) -> None:
        """Call `section`, a method of this object that changes `numbers`, while other processes wait."""
        if self._store is None:
            section(*args)
        else:
            self._store.run_locked("statistics", section, *args)

    def shared_arrays(self) -> Named:
        return {self.name: SharedArray(self.numbers, "merge")}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._store, self.numbers = store, arrays[self.name]

    def state_dict(self) -> dict[str, Any]:
        return {} if is_shared(self._store) else {self.name: self.numbers.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_shared(self._store):
            self.numbers[:] = state[self.name]


class ValueTargetMoments(SharedStatistic):
    """Running mean and variance of the value targets, updated in batches (Chan, Golub & LeVeque 1979).

    Batches with a target that is not finite are ignored. The array `numbers` contains the number of targets, their mean, and the sum of
    squared differences from the mean.
    """

    def __init__(self) -> None:
        super().__init__("moments", 3)

    def update(self, target_B: Tensor) -> None:
        """Update mean and variance with the value targets target_B [B]."""
        if not target_B.numel():
            return
        variance, mean = torch.var_mean(target_B, correction=0)
        new_variance, new_mean = (float(variance), float(mean)) if target_B.device.type == "cpu" else torch.stack((variance, mean)).tolist()
        if math.isfinite(new_variance) and math.isfinite(new_mean):
            self.run_exclusively(self._merge_moments, target_B.numel(), new_mean, new_variance)

    def _merge_moments(self, new: int, new_mean: float, new_variance: float) -> None:
        count = float(self.numbers[0])
        difference = new_mean - float(self.numbers[1])
        self.numbers[0] += new
        self.numbers[1] += difference * new / (count + new)
        self.numbers[2] += new_variance * new + difference * difference * count * new / (count + new)


class ValueTargetDeviation(ValueTargetMoments):
    """Running standard deviation of the value targets. Each target counts once for each minibatch that contains the target."""

    @property
    def std(self) -> float:
        """Standard deviation of the value targets, but at least 1."""
        count, _, squares = self.numbers.tolist()
        return max(1.0, math.sqrt(squares / count + 1e-8)) if count > 1 else 1.0

    def scale(self, value_B: Tensor) -> Tensor:
        """Divide values or targets [B] by the standard deviation `std`, and clamp the results."""
        return (value_B / self.std).clamp(-VALUE_LIMIT, VALUE_LIMIT)


class ValueNormalizer(ValueTargetMoments):
    """Normaliser that converts between values and the critic's outputs.

    The critic's output is the value minus the mean of all targets so far, divided by the standard deviation of these targets. The targets
    of each rollout are added to the statistics once. Before the first rollout, values and critic outputs are equal.
    """

    def normalize(self, value: Tensor) -> Tensor:
        """Convert values of any shape to the scale of the critic's outputs."""
        mean, std = self._mean_and_std()
        return (value - mean) / std

    def denormalize(self, output: Tensor) -> Tensor:
        """Convert the critic's outputs of any shape to values."""
        mean, std = self._mean_and_std()
        return output * std + mean

    def _mean_and_std(self) -> tuple[float, float]:
        count, mean, squares = self.numbers.tolist()
        return (mean, math.sqrt(squares / count + 1e-5)) if count > 1 else (0.0, 1.0)


class PercentileScale(SharedStatistic):
    """Function that divides advantages by max(1, S). S is a moving average of the range from their 5th to their 95th percentile.

    The division by a percentile range is adapted from arXiv:2301.04104, equations 11 and 12. The moving average S starts at 0. Percentile
    ranges that are not finite are ignored.
    """

    DECAY = 0.99

    def __init__(self) -> None:
        super().__init__("range", 1)

    @property
    def percentile_range(self) -> float:
        """Moving average S of the range between the percentiles of the advantages."""
        return float(self.numbers[0])

    def __call__(self, advantage_B: Tensor) -> Tensor:
        if advantage_B.numel():
            ends = torch.tensor([0.05, 0.95], device=advantage_B.device)
            low, high = torch.quantile(advantage_B.float(), ends).tolist()
            if math.isfinite(high - low):
                self.run_exclusively(self._update_range, high - low)
        return advantage_B / max(1.0, self.percentile_range)

    def _update_range(self, new_range: float) -> None:
        self.numbers[0] = self.DECAY * self.percentile_range + (1.0 - self.DECAY) * new_range

    def state_dict(self) -> dict[str, Any]:
        return {name: values[0] for name, values in super().state_dict().items()}


def standardize_valid(x_TN: A, valid_TN: A) -> A:
    """Return x_TN with standardised valid entries, and with invalid entries set to 0."""
    if bool(valid_TN.all()):
        return standardize(x_TN)
    out_TN = full_like(x_TN, 0.0)
    out_TN[valid_TN] = standardize(x_TN[valid_TN])
    return out_TN
