"""Events that a running Session reports.

A Session passes every event to one callable (`Emit`). The state of a Session is written to files and is never sent as an event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["train", "eval"]
RowValues = dict[str, float | int | None]
"""Values of one table row: column name → value, or None if the column has no value in the row."""
Status = Literal["done", "stopped", "failed"]
"""How a Session ended. The status "stopped" means that the Session saved its state and ended early because a stop was requested."""


@dataclass(frozen=True)
class Row:
    """A new row for the table (CSV file) of one policy, with training values (mode "train") or evaluation values (mode "eval").

    If each Session has P policies, the table with index s · P + p belongs to policy p of Session s.
    """

    table: int
    mode: Mode
    values: RowValues
    scalars: RowValues = field(default_factory=dict)
    """Means, over the updates since the previous row, of metrics that have no column in the table. `scalars` is sent only to trackers (such
    as TensorBoard)."""


@dataclass(frozen=True)
class Progress:
    """Progress of a Session or, if the Session trains several policies, of one policy."""

    table: int
    frame: int
    fps: float
    row: RowValues | None = None
    """Row that was just added to the table, or None if no row was added."""
    seconds_left: float = math.inf
    """Seconds until meta.max_seconds is reached."""


@dataclass(frozen=True)
class Notice:
    """A one-line message for the user. A Notice does not report an error."""

    text: str


@dataclass(frozen=True)
class CheckpointWritten:
    """Event that is reported after a checkpoint of one policy of a Session was written."""

    table: int
    frame: int


@dataclass(frozen=True)
class SessionEnded:
    """Event that is reported after a Session has ended."""

    session: int
    status: Status
    detail: str = ""
    """Cause of the failure if the status is "failed": a message, a traceback, or the name of the signal that ended the process."""


Event = Row | Progress | Notice | CheckpointWritten | SessionEnded
Emit = Callable[[Event], None]
