"""Display of a running study, as a live table of the runs, or as plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from rich.console import Console
from rich.table import Table

from slm_lab.experiment.report.progress import LiveTable, format_duration
from slm_lab.lib.text import last_line
from slm_lab.spec.models.study import StudyRun

RunStatus = Literal["waiting", "running", "done", "failed"]


@dataclass
class RunState:
    """The state of a run of a study while the study runs."""

    run: StudyRun
    status: RunStatus = "waiting"
    failures: int = 0
    """Number of starts of the run that failed."""
    cause: str = ""
    start_time: float = 0.0
    """Time at which the run was started, in seconds of perf_counter."""
    share_at_start: float = 0.0
    """Fraction of the run's frames that had already been trained when the run was started."""
    share: float = 0.0
    """Fraction of the run's frames that have been trained so far."""
    seconds: float | None = None
    """Duration of the run in seconds, or None if the run did not start and end during this execution of the study."""


class StudyTable(LiveTable):
    """Live table that displays the running runs of a study with their progress, the counts of runs by status, and the remaining time."""

    def __init__(self, states: Sequence[RunState], concurrent: int, console: Console | None = None) -> None:
        super().__init__(console)
        self.states, self.concurrent = states, concurrent

    def print_run_end(self, state: RunState) -> None:
        """Print how a run of the study ended."""
        took = "" if state.seconds is None else f"  {format_duration(state.seconds)}"
        cause = f": {last_line(state.cause)}" if state.cause.strip() else ""
        self.print_end(f"{state.run.name}: {state.status}{cause}{took}  ({self.summary()})")

    def active_runs_table(self) -> Table:
        table, now = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True), perf_counter()
        for name in ("entry", "env"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
        for name in ("random_seed", "frames", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        for state in self.states:
            if state.status == "running":
                run = state.run
                table.add_row(run.entry, run.env, str(run.random_seed), f"{state.share:.0%}", format_duration(now - state.start_time))
        return table

    def count(self, status: RunStatus) -> int:
        return sum(state.status == status for state in self.states)

    def summary(self) -> str:
        failed = f", {count} failed" if (count := self.count("failed")) else ""
        left = self.seconds_left()
        numbers = (
            f"{self.count('done')}/{len(self.states)} runs done, {self.count('running')} running, {self.count('waiting')} waiting{failed}"
        )
        return f"{numbers}, eta {'-' if left is None else format_duration(left)}"

    def seconds_left(self) -> float | None:
        """Return the estimated remaining time of the study in seconds, based on the runs of each entry so far, or None if the time is
        unknown."""
        now, durations = perf_counter(), dict[str, list[float]]()
        for state in self.states:
            seconds = state.seconds
            if state.status == "running" and state.share > state.share_at_start + 0.01:
                seconds = (now - state.start_time) / (state.share - state.share_at_start)
            if seconds is not None:
                durations.setdefault(state.run.digest, []).append(seconds)
        if not durations:
            return None
        each = {name: sum(times) / len(times) for name, times in durations.items()}
        other = sum(each.values()) / len(each)
        left = sum(
            each.get(state.run.digest, other) * (1.0 - state.share) for state in self.states if state.status in ("waiting", "running")
        )
        return left / max(1, min(self.concurrent, self.count("waiting") + self.count("running")))
