"""A tree of sums, to draw indices in proportion to their weights."""

from __future__ import annotations

import numpy as np


class SumTree:
    """Weights ≥ 0 of `size` indices, their sums in a wide tree.

    Each node is the sum of FANOUT children and is always summed afresh from them, so that no rounding error builds up; wide and
    shallow, because in numpy the number of calls is what costs.
    """

    FANOUT = 64

    def __init__(self, size: int) -> None:
        self.size = size
        self.levels: list[np.ndarray] = []
        """From the leaves up, float64 [groups, FANOUT] each; the last has one group."""
        count = size
        while True:
            groups = -(-count // self.FANOUT)
            self.levels.append(np.zeros((groups, self.FANOUT)))
            if groups == 1:
                break
            count = groups

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self.levels[-1].sum())

    def get(self, index_B: np.ndarray) -> np.ndarray:
        """Weights of indices."""
        return self.levels[0].reshape(-1).take(index_B)

    def set(self, index_B: np.ndarray, weight_B: np.ndarray | float) -> None:
        """Set weights; of an index that occurs twice the last counts."""
        self.levels[0].reshape(-1)[index_B] = weight_B
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            index_B = index_B // self.FANOUT
            above.reshape(-1)[index_B] = below.take(index_B, axis=0).sum(axis=1)

    def find(self, mass_B: np.ndarray) -> np.ndarray:
        """The index i at which the sum of the weights up to and with i first exceeds each mass in [0, total).

        An index of weight 0 is never found, as long as any weight is above 0.
        """
        index_B = np.zeros(len(mass_B), np.int64)
        for level in reversed(self.levels):
            sums_BF = level.take(index_B, axis=0).cumsum(axis=1)
            # rounding may carry a mass to the group's end: keep it inside
            mass_B = np.minimum(mass_B, np.nextafter(sums_BF[:, -1], 0.0))
            child_B = (sums_BF <= mass_B[:, None]).sum(axis=1)
            before_B = np.where(child_B > 0, sums_BF[np.arange(len(child_B)), child_B - 1], 0.0)
            mass_B, index_B = mass_B - before_B, index_B * self.FANOUT + child_B
        return index_B
