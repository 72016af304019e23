"""A tree of sums, to sample indices in proportion to their weights."""

from __future__ import annotations

import numpy as np


class SumTree:
    """Weights ≥ 0 of `size` indices, and their sums in a wide tree.

    Each node is the sum of FANOUT children, always recomputed from them, so that no rounding error accumulates. The tree is wide and
    shallow because in numpy the time goes into the number of calls.
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
        """Return the weights of indices."""
        return self.levels[0].reshape(-1).take(index_B)

    def set(self, index_B: np.ndarray, weight_B: np.ndarray | float) -> None:
        """Set weights; the last one counts for an index that occurs twice. A weight that is not finite leaves the old one."""
        finite_B = np.isfinite(weight_B)
        if not finite_B.all():
            if isinstance(weight_B, float):
                return
            index_B, weight_B = index_B[finite_B], weight_B[finite_B]
        self.levels[0].reshape(-1)[index_B] = weight_B
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            index_B = index_B // self.FANOUT
            above.reshape(-1)[index_B] = below.take(index_B, axis=0).sum(axis=1)

    def find(self, mass_B: np.ndarray) -> np.ndarray:
        """Return the index i at which the sum of the weights up to and with i first exceeds each mass in [0, total).

        An index of weight 0 is never found, as long as any weight is above 0.
        """
        index_B = np.zeros(len(mass_B), np.int64)
        for level in reversed(self.levels):
            sums_BF = level.take(index_B, axis=0).cumsum(axis=1)
            # rounding can move a mass to the end of the group: keep it inside
            mass_B = np.minimum(mass_B, np.nextafter(sums_BF[:, -1], 0.0))
            child_B = (sums_BF <= mass_B[:, None]).sum(axis=1)
            before_B = np.where(child_B > 0, sums_BF[np.arange(len(child_B)), child_B - 1], 0.0)
            mass_B, index_B = mass_B - before_B, index_B * self.FANOUT + child_B
        return index_B
