"""Tables of rows: read from a Session's CSV, and several Sessions' columns brought together by frame, time or the like."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

Table = dict[str, np.ndarray]
"""Column → float64 [rows]; NaN where the file has an empty cell, or one that is no number."""
_MOST_POINTS = 5000
"""More than a graph shows, and few enough to hold for many Sessions with points of their own."""


def read_table(path: Path) -> Table:
    """Read a Session's table. No file, an empty one, or a last line that was cut off when its writer died: what there is.

    Raises: OSError where a file that is there cannot be read.
    """
    if not path.exists():
        return no_rows()
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        names = next(reader, ["frame"])
        rows = [[number(cell) for cell in row] for row in reader if len(row) == len(names)]
    values = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    known = values[:, names.index("frame")] > 0 if "frame" in names else np.zeros(len(values), bool)
    return no_rows() | {name: values[known, column] for column, name in enumerate(names)}


def read_records(path: Path) -> list[dict[str, str]]:
    """Read the lines of a file that has no frame in each, cells as text. No file, or a last line that was cut off: what there is.

    Raises: OSError where a file that is there cannot be read.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        return [dict(zip(names, row, strict=True)) for row in reader if len(row) == len(names)]


def no_rows() -> Table:
    return {"frame": np.empty(0)}


def number(cell: str) -> float:
    """NaN where it is none."""
    try:
        return float(cell)
    except ValueError:
        return np.nan


class Curve(NamedTuple):
    """Numbers over frames, or over another column that rises (seconds, global frames); both float64 [points] and finite."""

    frame: np.ndarray
    value: np.ndarray


def curve(table: Table, column: str, over: str = "frame") -> Curve:
    """A column's finite values over the column `over`, of rows at one place there the last; empty where there is no such column."""
    none = np.full(len(table["frame"]), np.nan)
    frame, value = table.get(over, none), table.get(column, none)
    known = np.isfinite(frame) & np.isfinite(value)
    frame, value = frame[known], value[known]
    if over == "frame":
        return Curve(frame, value)
    order = np.argsort(frame, kind="stable")
    frame, value = frame[order], value[order]
    last = np.append(np.diff(frame) > 0, True)[: len(frame)]
    return Curve(frame[last], value[last])


@dataclass(frozen=True)
class Aligned:
    """Curves of several Sessions on one axis of frames, or of what else they go over."""

    frame: np.ndarray
    """[F], rising."""
    value_SF: np.ndarray
    """[sessions, F], NaN where a Session has no value at that frame."""

    def mean(self) -> Curve:
        """Mean over the Sessions that have the frame."""
        return Curve(self.frame, np.nanmean(self.value_SF, axis=0) if len(self.frame) else np.empty(0))

    def std(self) -> np.ndarray:
        """Standard deviation (of the population) over the Sessions that have the frame, [F]."""
        return np.asarray(np.nanstd(self.value_SF, axis=0)) if len(self.frame) else np.empty(0)


def align(curves: Sequence[Curve], least: int = 1) -> Aligned:
    """Bring curves together at the frames that at least `least` of them have."""
    frame = np.unique(np.concatenate([np.empty(0), *(one.frame for one in curves)]))
    value_SF = np.full((len(curves), len(frame)), np.nan)
    for row, one in zip(value_SF, curves, strict=True):
        row[np.searchsorted(frame, one.frame)] = one.value
    kept = np.isfinite(value_SF).sum(axis=0) >= max(least, 1)
    return Aligned(frame[kept], value_SF[:, kept])


def gathered(curves: Sequence[Curve], least: int = 1) -> Aligned:
    """The same where the curves have a grid in common; where each has points of its own, as of policies that share envs, interpolated."""
    aligned = align(curves, least)
    shortest = min((len(one.frame) for one in curves if len(one.frame)), default=0)
    return aligned if least < 2 or 2 * len(aligned.frame) >= shortest else interpolate(curves)


def interpolate(curves: Sequence[Curve]) -> Aligned:
    """Bring curves together at all their points in the range that they share, each as straight lines between its own points.

    Curves without points are left out. More than _MOST_POINTS are thinned evenly.
    """
    curves = [one for one in curves if len(one.frame)]
    if not curves:
        return align([])
    frame = np.unique(np.concatenate([one.frame for one in curves]))
    shared = (frame >= max(one.frame[0] for one in curves)) & (frame <= min(one.frame[-1] for one in curves))
    frame = frame[shared]
    if len(frame) > _MOST_POINTS:
        frame = frame[np.linspace(0, len(frame) - 1, _MOST_POINTS).round().astype(int)]
    return Aligned(frame, np.stack([np.interp(frame, one.frame, one.value) for one in curves]))
