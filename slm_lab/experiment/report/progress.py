"""Display the progress of runs in the terminal: as a live table or, if the output is not a terminal, as plain lines.

An OSError that occurs when a display writes to the terminal is stored, not raised. A display also writes its lines, without colours, to a
log file.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slm_lab.experiment.events import Event, Notice, Progress, RowValues, SessionEnded
from slm_lab.experiment.report.screen import console_on

_LINE_EVERY, _FIRST_LINE, _QUIET = 5.0, 1.0, 30.0
"""Times in seconds for the plain lines of a Session: minimum time between two lines, delay of the first line if the table has no row yet,
and time between two lines if the table has no new row."""
_REFRESH = 0.5
"""Minimum time in seconds between two refreshes of the live table of several runs."""
_MAX_ROWS = 16
"""Maximum number of rows of the live table. If a trial has more Sessions or policies, the table shows only Sessions and policies that are
not done."""

_COLUMNS = ("session", "bar", "frame", "fps", "return", "eta")
_DROPPED = ("bar", "fps", "eta", "session", "return")
"""Columns of the live table that are omitted, in this order, if the terminal is narrow."""


_QUEUED = "queued"


@dataclass
class _SessionProgress:
    """The latest progress of a Session or of a policy of a Session."""

    frame: int = 0
    fps: float = 0.0
    row: RowValues = field(default_factory=dict)
    status: str = "starts"
    seconds_left: float = math.inf
    line_due: float = 0.0
    """Earliest time at which a plain line for a new table row is printed."""
    quiet_due: float | None = None
    """Time at which a plain line is printed even if the table has no new row."""


class Display:
    """Base class of the progress displays. In a terminal, a display shows a live table and prints lines above the table.

    Args: transient: whether the live table is removed when the display ends.
    """

    def __init__(self, console: Console | None = None, *, transient: bool = True) -> None:
        self.console = console or console_on(sys.stdout)
        self.live = Live(console=self.console, auto_refresh=False, transient=transient) if self.console.is_terminal else None
        self._said: set[str] = set()
        self._log: Path | None = None
        self._unlogged: list[str] = []

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def print_line(self, text: str) -> None:
        """Print a line and append the line to the log file. If there is a live table, the line is printed above the table."""
        self.console.print(text, markup=False)
        self.log(text)

    def log(self, text: str) -> None:
        """Append a line to the log file.

        Until `set_log_file` is called, the lines are kept in memory. Errors on write, such as a full disk, are ignored.
        """
        self._unlogged.append(text)
        if self._log is not None:
            with suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in self._unlogged)
            self._unlogged.clear()

    def set_log_file(self, file: Path) -> None:
        """Set the path of the log file, whose folder must exist.

        The next call of `log` writes all lines since the start of the display to the file.
        """
        self._log = file.absolute()

    def say_progress(self, text: str) -> None:
        """Append a line to the log file. The line is also printed, unless there is a live table, which shows the same information."""
        (self.log if self.live else self.print_line)(text)

    def notice(self, text: str) -> None:
        """Print a line and append the line to the log file, unless an earlier call of `notice` printed the same line."""
        if text not in self._said:
            self._said.add(text)
            self.print_line(text)


class LiveTable(Display):
    """Base class of the displays of several runs, such as the trials of a search.

    In a terminal, the display shows a live table of the active runs and a summary. Without a terminal, the display prints only the summary,
    at intervals.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._due = self._line_due = 0.0

    def active_runs_table(self) -> Table:
        """Return the live table of the active runs, as a rich Table."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return a line with the number of runs of each status and the remaining time."""
        raise NotImplementedError

    def show(self, *, now: bool = False) -> None:
        """Refresh the live table, at most twice a second unless now=True, and print the summary at intervals of 30 seconds."""
        time = perf_counter()
        if self.live and (now or time >= self._due):
            self._due = time + _REFRESH
            self.live.update(Group(self.active_runs_table(), Text(self.summary(), no_wrap=True, overflow="ellipsis")), refresh=True)
        if time >= self._line_due:
            if self._line_due:
                self.say_progress(self.summary())
            self._line_due = time + _QUIET

    def print_end(self, text: str) -> None:
        """Print a line that says how a run ended, and delay the next line with the summary."""
        self._line_due = perf_counter() + _QUIET
        self.print_line(text)


class ProgressDisplay(Display):
    """Display of the progress of a trial: frames, speed, current return with standard error, and remaining time of each Session.

    The display is refreshed when an event arrives, not by a thread, since a thread would slow down a Session in this process.

    Args:
        sessions: number of Sessions.
        max_frame: number of frames of a Session.
        policies: names of the policies of a Session.
        concurrent: maximum number of Sessions that run at the same time, by default all. Sessions that must wait are shown as queued.
    """

    def __init__(
        self,
        sessions: int,
        max_frame: int,
        console: Console | None = None,
        *,
        policies: Sequence[str] = ("0",),
        concurrent: int | None = None,
    ) -> None:
        super().__init__(console, transient=False)
        self.max_frame, self.policy_names, self.policies = max_frame, policies, len(policies)
        self.states = [_SessionProgress() for _ in range(sessions * self.policies)]
        """Progress of each Session or, if Sessions have several policies, of each policy of each Session."""
        for state in self.states[(concurrent or sessions) * self.policies :]:
            state.status = _QUEUED
        self.begun = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._refresh()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.transient = not self.begun  # remove the live table if no Session has begun
        super().__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        """Update the display for an event of the run."""
        match event:
            case Progress(table, frame, fps, row, seconds_left):
                self.update(table, frame, fps, row, seconds_left)
            case Notice(text):
                self.notice(text)
            case SessionEnded(session, status, detail):
                self.show_session_end(session, status, detail)

    def start(self, name: str) -> None:
        """If there is no live table, print that the trial starts, since the first event of the trial arrives only after some seconds."""
        if not self.live:
            self.print_line(f"starting {name} …")

    def begin(self, text: str) -> None:
        """Print `text`, which describes the run. The caller calls this method when the first Session can begin."""
        self.begun = True
        self.print_line(text)

    def update(self, index: int, frame: int, fps: float, row: RowValues | None, seconds_left: float = math.inf) -> None:
        """Show that the Session or policy with index `index` has reached the frame `frame`.

        Args:
            index: index of the Session or policy: session · policies + policy.
            fps: frames per second, or 0 if the speed is not known yet.
            row: values of the new table row, or None if there is no new row.
            seconds_left: remaining time until meta.max_seconds, s.
        """
        state, now = self.states[index], perf_counter()
        state.frame, state.fps, state.seconds_left, state.status = frame, fps, seconds_left, ""
        if state.quiet_due is None:
            state.quiet_due = now + _FIRST_LINE
        if row is not None:
            state.row = row
        if self.live:
            self._refresh()
        if (row is not None and (now >= state.line_due or frame >= self.max_frame)) or now >= state.quiet_due:
            state.line_due, state.quiet_due = now + _LINE_EVERY, now + _QUIET
            self.say_progress(f"{self._name(index)}  frame {frame:,}/{self.max_frame:,}  {self._line(state)}")

    def show_session_end(self, index: int, status: str, detail: str) -> None:
        """Show that Session `index` has ended with the given status, and that the next queued Session starts."""
        for state in self.states[index * self.policies : (index + 1) * self.policies]:
            state.status = status
        queued = [state for state in self.states if state.status == _QUEUED]
        for state in queued[: self.policies]:  # the process of the next queued Session starts now
            state.status = "starts"
        if self.live:
            self._refresh()
        if status == "failed":
            self.print_line(f"session {index} failed: {detail.rstrip()}")

    def _name(self, index: int) -> str:
        """Return the name of the Session or policy with index `index`, for the display."""
        session, policy = divmod(index, self.policies)
        if self.policies == 1:
            return f"session {session}"
        name = f"policy {self.policy_names[policy]}"
        return name if len(self.states) == self.policies else f"session {session} {name}"

    def _refresh(self) -> None:
        if self.live:
            self.live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        """Return the live table with as many columns as fit the width of the terminal without clipped numbers."""
        columns = list(_COLUMNS)
        for dropped in _DROPPED:
            table = self._table_with_columns(columns)
            if Measurement.get(self.console, self.console.options, table).minimum < self.console.width:
                return table
            columns.remove(dropped)
        return self._table_with_columns(columns)

    def _table_with_columns(self, columns: list[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in columns:
            table.add_column("" if name == "bar" else name, justify="right", no_wrap=True)
        not_done = [index for index, state in enumerate(self.states) if state.status != "done"]
        for index in range(len(self.states)) if len(self.states) <= _MAX_ROWS else not_done[:_MAX_ROWS]:
            cells = self._cells(index)
            table.add_row(*(cells[name] for name in columns))
        return table

    def _cells(self, index: int) -> dict[str, RenderableType]:
        state = self.states[index]
        return {
            "session": self._name(index).removeprefix("session ") if self.policies == 1 else self._name(index),
            "bar": ProgressBar(total=self.max_frame, completed=min(state.frame, self.max_frame), width=8),
            "frame": f"{state.frame:,}/{self.max_frame:,}",
            "fps": _speed(state.fps),
            "return": _return_text(state),
            "eta": state.status or self._eta(state),
        }

    def _line(self, state: _SessionProgress) -> str:
        shown = _return_text(state) if state.row.get("elo") is not None else f"return {_return_text(state)}"
        return f"fps {_speed(state.fps)}  {shown}  eta {self._eta(state)}"

    def _eta(self, state: _SessionProgress) -> str:
        """Return the remaining time at the current speed, limited by meta.max_seconds, as text in the form h:mm:ss or m:ss."""
        if state.fps <= 0:
            return "-"
        return format_duration(min(max(0.0, (self.max_frame - state.frame) / state.fps), state.seconds_left))


def _return_text(state: _SessionProgress) -> str:
    """Return the current return as text. In self-play, return the Elo rating, since returns in self-play depend on the opponents."""
    if (elo := state.row.get("elo")) is not None:
        return f"Elo {rating_text(elo, state.row.get('elo_se'))}"
    return format_with_error(state.row.get("current_return"), state.row.get("current_return_se"))


def rating_text(elo: float, error: float | None) -> str:
    """Format an Elo rating with its standard error, both rounded to integers, such as "842 ± 35"."""
    return f"{elo:.0f}" if error is None else f"{elo:.0f} ± {error:.0f}"


def _speed(fps: float) -> str:
    return f"{fps:,.0f}" if fps > 0 else "-"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds as m:ss or h:mm:ss."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value of a metric is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_number(value: float | None) -> str:
    """Format a number with four significant digits. Integers and numbers from 10,000 to 10^15 have no decimals, and None becomes "-"."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) < 1e15 and (float(value).is_integer() or abs(value) >= 1e4) else f"{value:.4g}"


def format_with_error(value: float | None, error: float | None) -> str:
    """Format an estimate with its standard error, such as "487.2 ± 6.1". If the value is None, return "-".

    The standard error has two significant digits. A standard error that is None, zero or not finite is omitted.
    """
    if value is None or not error or not (math.isfinite(error) and math.isfinite(value)):
        return format_number(value)
    decimals = 1 - math.floor(math.log10(float(f"{error:.1e}")))
    if not -15 < decimals < 5:
        return f"{value:.4g} ± {error:.2g}"
    return f"{round(value, decimals):.{max(0, decimals)}f} ± {round(error, decimals):.{max(0, decimals)}f}"
