"""Events that a running Session reports. A Session passes its events, which are of five kinds, to one callable.

The state of a Session is written to files and is never sent as an event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["train", "eval"]
RowValues = dict[str, float | int | None]
"""Column → value; None if the column has no value in this row."""
Status = Literal["done", "stopped", "failed"]
"""How a Session ended. "stopped": it saved its state and ended early, as requested."""


@dataclass(frozen=True)
class Row:
    """A row of a table. If each Session has P policies, table s · P + p belongs to policy p of Session s."""

    table: int
    mode: Mode
    values: RowValues
    scalars: RowValues = field(default_factory=dict)
    """Means of further values over the updates since the previous row; only trackers receive them."""


@dataclass(frozen=True)
class Progress:
    """Progress of a Session, or of one of its policies."""

    table: int
    frame: int
    fps: float
    row: RowValues | None = None
    """The row that was just added, if any."""
    seconds_left: float = math.inf
    """Seconds until meta.max_seconds is reached."""


@dataclass(frozen=True)
class Notice:
    """A one-line notice for the user that is not an error."""

    text: str


@dataclass(frozen=True)
class CheckpointWritten:
    """The state of a Session, or of one of its policies, was written."""

    table: int
    frame: int


@dataclass(frozen=True)
class SessionEnded:
    """A Session has ended."""

    session: int
    status: Status
    detail: str = ""
    """If the status is "failed": the cause, the traceback, or the name of the signal."""


Event = Row | Progress | Notice | CheckpointWritten | SessionEnded
Emit = Callable[[Event], None]
