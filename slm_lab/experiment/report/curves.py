"""Columns of tables as curves, and the curves of several Sessions brought to one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Table = dict[str, np.ndarray]
"""Column → float64 [rows]; NaN where a cell is empty or not a number."""
_MAX_POINTS = 5000
"""Interpolated curves keep at most this many points."""


class Curve(NamedTuple):
    """Values over frames, or over another increasing column (seconds, global frames); both float64 [points] and finite."""

    frame: np.ndarray
    value: np.ndarray


def curve(table: Table, column: str, x_column: str = "frame") -> Curve:
    """Return a column's finite values over `x_column`, empty without such a column; of rows with equal x the last counts."""
    none = np.full(len(table["frame"]), np.nan)
    frame, value = table.get(x_column, none), table.get(column, none)
    known = np.isfinite(frame) & np.isfinite(value)
    frame, value = frame[known], value[known]
    if x_column == "frame":
        return Curve(frame, value)
    order = np.argsort(frame, kind="stable")
    frame, value = frame[order], value[order]
    last = np.append(np.diff(frame) > 0, True)[: len(frame)]
    return Curve(frame[last], value[last])


@dataclass(frozen=True)
class Aligned:
    """Curves of several Sessions on one axis: frames or another increasing column."""

    frame: np.ndarray
    """[F], increasing."""
    value_SF: np.ndarray
    """[sessions, F], NaN where a Session has no value at the frame."""

    def mean(self) -> Curve:
        """Return the mean over the Sessions that have a value at the frame."""
        return Curve(self.frame, np.nanmean(self.value_SF, axis=0) if len(self.frame) else np.empty(0))

    def std(self) -> np.ndarray:
        """Return the population standard deviation over the Sessions that have a value at the frame, [F]."""
        return np.asarray(np.nanstd(self.value_SF, axis=0)) if len(self.frame) else np.empty(0)

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean minus and plus one standard deviation."""
        mean, std = self.mean().value, self.std()
        return mean - std, mean + std


def evenly(count: int, most: int) -> np.ndarray:
    """Return the indices of `most` of `count` points, evenly spaced; of all points if there are fewer."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def align(curves: Sequence[Curve], min_count: int = 1) -> Aligned:
    """Align curves at the frames that at least `min_count` of them have."""
    frame = np.unique(np.concatenate([np.empty(0), *(one.frame for one in curves)]))
    value_SF = np.full((len(curves), len(frame)), np.nan)
    for row, one in zip(value_SF, curves, strict=True):
        row[np.searchsorted(frame, one.frame)] = one.value
    kept = np.isfinite(value_SF).sum(axis=0) >= max(min_count, 1)
    return Aligned(frame[kept], value_SF[:, kept])


def align_or_interpolate(curves: Sequence[Curve], min_count: int = 2) -> Aligned:
    """Align curves that share a grid of frames; interpolate curves that do not, such as those of policies that share envs."""
    min_count = min(min_count, len(curves))
    aligned = align(curves, min_count)
    shortest = min((len(one.frame) for one in curves if len(one.frame)), default=0)
    return aligned if min_count < 2 or 2 * len(aligned.frame) >= shortest else interpolate(curves)


def interpolate(curves: Sequence[Curve]) -> Aligned:
    """Align curves at all their points in the range that all cover, by linear interpolation.

    Curves without points are left out. More than _MAX_POINTS points are thinned evenly.
    """
    curves = [one for one in curves if len(one.frame)]
    if not curves:
        return align([])
    frame = np.unique(np.concatenate([one.frame for one in curves]))
    shared = (frame >= max(one.frame[0] for one in curves)) & (frame <= min(one.frame[-1] for one in curves))
    frame = frame[shared]
    frame = frame[evenly(len(frame), _MAX_POINTS)]
    return Aligned(frame, np.stack([np.interp(frame, one.frame, one.value) for one in curves]))
