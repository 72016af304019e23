"""What a Session reports while it runs: five kinds of events, handed to one callable. State travels as files, never as an event."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["train", "eval"]
RowValues = dict[str, float | int | None]
"""Column → value; None if the column has no value in this row."""
Status = Literal["done", "stopped", "failed"]
"""How a Session ended; stopped: saved early, as requested."""


@dataclass(frozen=True)
class Row:
    """A row of a table. With P policies, table s · P + p is that of policy p of Session s."""

    table: int
    mode: Mode
    values: RowValues
    scalars: RowValues = field(default_factory=dict)
    """Further means over the row's updates, for TensorBoard."""


@dataclass(frozen=True)
class Progress:
    """How far a Session, or one of its policies, has come."""

    table: int
    frame: int
    fps: float
    row: RowValues | None = None
    """The row that was just made, if any."""
    seconds_left: float = math.inf
    """Until meta.max_seconds."""


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
    """failed: the cause, the traceback, or the signal's name."""


Event = Row | Progress | Notice | CheckpointWritten | SessionEnded
Emit = Callable[[Event], None]
