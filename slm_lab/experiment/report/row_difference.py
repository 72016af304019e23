"""Find the first row and column in which two tables differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slm_lab.experiment.training.observers.base import MEASURED

Columns = Mapping[str, Sequence[str]]
"""Table with the cells as texts: column → cells of the column (see run.read_columns)."""


class CellDifference(NamedTuple):
    """A cell that differs between two compared tables. The cell is in the row with the frame `frame`."""

    frame: int
    row: int
    """Number of the row in the first of the two tables. The first row of a table has the number 1."""
    column: str
    a: str
    """Text of the cell in the first table, while `b` is the text of the cell in the second table."""
    b: str


@dataclass(frozen=True)
class RowComparison:
    """Comparison of two tables in the rows and columns that both tables have, without the columns of times and speeds."""

    rows: int
    """Number of compared rows. Only rows whose frame is in both tables are compared."""
    equal: int
    """Number of equal rows before the first row that differs."""
    first: CellDifference | None = None
    """The first cell that differs, in the first differing column of the first differing row, or None if all compared rows are equal."""
    columns: tuple[str, ...] = ()
    """Names of all columns that differ in the first differing row."""
    only: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Frames of the rows that only the first table has, and frames of the rows that only the second table has."""
    only_columns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of the columns that only the first table has, and names of the columns that only the second table has."""

    @property
    def rows_equal(self) -> bool:
        """Whether both tables have rows with the same frames, and these rows are equal in the columns that both tables have."""
        return self.first is None and not any(self.only)


def compare_rows(a: Columns, b: Columns, *, after: float = 0.0, up_to: float = math.inf) -> RowComparison:
    """Compare each row of table `a` with the row of table `b` that has the same frame, for frames with `after` < frame ≤ `up_to`.

    Two cells are equal if their texts or their numbers are equal.
    """
    rows_a, rows_b = (_positions(table, after, up_to) for table in (a, b))
    frames = [frame for frame in rows_a if frame in rows_b]
    only = (tuple(frame for frame in rows_a if frame not in rows_b), tuple(frame for frame in rows_b if frame not in rows_a))
    names = [name for name in a if name in b and name not in MEASURED]
    only_columns = tuple(tuple(name for name in table if name not in rest) for table, rest in ((a, b), (b, a)))
    for count, frame in enumerate(frames):
        i, j = rows_a[frame], rows_b[frame]
        if differ := tuple(name for name in names if not _cells_equal(a[name][i], b[name][j])):
            cell = CellDifference(frame, i + 1, differ[0], a[differ[0]][i], b[differ[0]][j])
            return RowComparison(len(frames), count, cell, differ, only, (only_columns[0], only_columns[1]))
    return RowComparison(len(frames), len(frames), None, (), only, (only_columns[0], only_columns[1]))


def _positions(table: Columns, after: float, up_to: float) -> dict[int, int]:
    """Return a dict: frame of each row with `after` < frame ≤ `up_to` → position of the row in the table."""
    cells = enumerate(table.get("frame", ()))
    return {int(cell): index for index, cell in cells if cell.isdecimal() and after < int(cell) <= up_to}


def _cells_equal(a: str, b: str) -> bool:
    if a == b:
        return True
    try:
        return float(a) == float(b)
    except ValueError:
        return False
