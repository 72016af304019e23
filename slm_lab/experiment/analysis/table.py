"""Tables read from CSV files, and columns of several Sessions brought to one axis.

`read_columns` is the only CSV reader of the analysis. It uses numpy and the standard library: pandas takes 0.25 s to import, 6 % of a
short run, so DataFrames are built only on request (see run.py).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

Table = dict[str, np.ndarray]
"""Column → float64 [rows]; NaN where a cell is empty or not a number."""
_MAX_POINTS = 5000
"""Interpolated curves keep at most this many points."""


def read_columns(path: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV file as text, {} if the file does not exist or is empty.

    A file may still be written to, or its writer may have been killed: a last line without a newline is dropped, even where it looks
    complete, and so is a line with a wrong number of cells.

    Raises OSError if an existing file cannot be read.
    """
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        text = file.read()
    reader = csv.reader(StringIO(text[: text.rfind("\n") + 1]))
    names = next(reader, [])
    rows = [row for row in reader if len(row) == len(names)]
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def read_table(path: Path) -> Table:
    """Return the rows of a Session's table that have a frame above 0. Raises OSError like read_columns."""
    columns = {name: numbers(cells) for name, cells in read_columns(path).items()}
    frame = columns.get("frame")
    if frame is None:
        return no_rows()
    return {name: values[frame > 0] for name, values in columns.items()}


def no_rows() -> Table:
    return {"frame": np.empty(0)}


def numbers(cells: Sequence[str]) -> np.ndarray:
    """Return cells as float64, NaN where a cell is not a number."""
    return np.array([_number(cell) for cell in cells], dtype=np.float64)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


class Curve(NamedTuple):
    """Values over frames, or over another increasing column (seconds, global frames); both float64 [points] and finite."""

    frame: np.ndarray
    value: np.ndarray


def curve(table: Table, column: str, over: str = "frame") -> Curve:
    """Return a column's finite values over the column `over`, empty without such a column; of rows with equal `over` the last counts."""
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


def align(curves: Sequence[Curve], min_count: int = 1) -> Aligned:
    """Align curves at the frames that at least `min_count` of them have."""
    frame = np.unique(np.concatenate([np.empty(0), *(one.frame for one in curves)]))
    value_SF = np.full((len(curves), len(frame)), np.nan)
    for row, one in zip(value_SF, curves, strict=True):
        row[np.searchsorted(frame, one.frame)] = one.value
    kept = np.isfinite(value_SF).sum(axis=0) >= max(min_count, 1)
    return Aligned(frame[kept], value_SF[:, kept])


def align_or_interpolate(curves: Sequence[Curve], min_count: int = 1) -> Aligned:
    """Align curves that share a grid of frames; interpolate curves that do not, such as those of policies that share envs."""
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
    if len(frame) > _MAX_POINTS:
        frame = frame[np.linspace(0, len(frame) - 1, _MAX_POINTS).round().astype(int)]
    return Aligned(frame, np.stack([np.interp(frame, one.frame, one.value) for one in curves]))
