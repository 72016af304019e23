"""The display of a running study: a live table of the runs, or plain lines if there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import IO, Literal, Self, cast

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slm_lab.experiment.report.progress import duration
from slm_lab.experiment.report.screen import Screen
from slm_lab.spec.models.study import StudyRun

_REFRESH, _LINE_EVERY = 0.5, 30.0
"""Seconds between two refreshes of the table; between two lines without a terminal, if no run ends."""

RunStatus = Literal["waiting", "running", "done", "failed"]


@dataclass
class RunState:
    """What is known of a run."""

    run: StudyRun
    status: RunStatus = "waiting"
    failures: int = 0
    """Starts that failed."""
    cause: str = ""
    began: float = 0.0
    """Time at which it was started, by perf_counter."""
    begun_at: float = 0.0
    """Share of its frames that it had then."""
    share: float = 0.0
    """Share of its frames that it has trained."""
    seconds: float | None = None
    """Time that it took, if it was run from its beginning to its end by this process."""


class StudyTable:
    """Shows how many runs are done, running, waiting and failed, how far each is, and the remaining time."""

    def __init__(self, states: Sequence[RunState], concurrent: int, console: Console | None = None) -> None:
        self.states, self.concurrent = states, concurrent
        self.console = console or Console(file=cast(IO[str], Screen(sys.stdout)), highlight=False, soft_wrap=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        self._due, self._line_due = 0.0, perf_counter() + _LINE_EVERY
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line, above the live table."""
        self.console.print(text, markup=False)

    def notice(self, text: str) -> None:
        """Print a line once."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def ended(self, state: RunState) -> None:
        """Print how a run ended."""
        took = "" if state.seconds is None else f"  {duration(state.seconds)}"
        cause = f": {state.cause.strip().splitlines()[-1].strip()}" if state.cause.strip() else ""
        self.say(f"{state.run.name}: {state.status}{cause}{took}  ({self.summary()})")
        self._line_due = perf_counter() + _LINE_EVERY

    def show(self) -> None:
        """Refresh the table, at most twice a second."""
        now = perf_counter()
        if self.live and now >= self._due:
            self._due = now + _REFRESH
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for name in ("entry", "env"):
                table.add_column(name, no_wrap=True, overflow="ellipsis")
            for name in ("random_seed", "frames", "time"):
                table.add_column(name, justify="right", no_wrap=True)
            for state in self.states:
                if state.status == "running":
                    run = state.run
                    table.add_row(run.entry, run.env, str(run.random_seed), f"{state.share:.0%}", duration(now - state.began))
            self.live.update(Group(table, Text(self.summary(), no_wrap=True, overflow="ellipsis")), refresh=True)
        elif not self.live and now >= self._line_due:
            self._line_due = now + _LINE_EVERY
            self.say(self.summary())

    def count(self, status: RunStatus) -> int:
        return sum(state.status == status for state in self.states)

    def summary(self) -> str:
        """Return the numbers of runs and the remaining time in one line."""
        failed = f", {count} failed" if (count := self.count("failed")) else ""
        left = self.seconds_left()
        numbers = (
            f"{self.count('done')}/{len(self.states)} runs done, {self.count('running')} running, {self.count('waiting')} waiting{failed}"
        )
        return f"{numbers}, eta {'-' if left is None else duration(left)}"

    def seconds_left(self) -> float | None:
        """Return the remaining time if the other runs of an entry take as long as its first ones; None until it can be estimated."""
        now, known = perf_counter(), dict[str, list[float]]()
        for state in self.states:
            seconds = state.seconds
            if state.status == "running" and state.share > state.begun_at + 0.01:
                seconds = (now - state.began) / (state.share - state.begun_at)
            if seconds is not None:
                known.setdefault(state.run.digest, []).append(seconds)
        if not known:
            return None
        each = {name: sum(times) / len(times) for name, times in known.items()}
        other = sum(each.values()) / len(each)
        left = sum(
            each.get(state.run.digest, other) * (1.0 - state.share) for state in self.states if state.status in ("waiting", "running")
        )
        return left / max(1, min(self.concurrent, self.count("waiting") + self.count("running")))
