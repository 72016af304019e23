"""The display of a running search: a live table of the trials that run, or plain lines if there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, cast

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slm_lab.experiment.report.progress import duration, number
from slm_lab.experiment.report.screen import Screen
from slm_lab.experiment.run.search.search_state import SearchState, TrialState

if TYPE_CHECKING:
    from slm_lab.experiment.report.search_report import SearchSummary

_REFRESH, _LINE_EVERY = 0.5, 30.0
"""Seconds between two refreshes of the table; between two lines without a terminal, if no trial ends."""
_MOST_ROWS = 16


@dataclass(frozen=True)
class Totals:
    """The trials of a search in numbers."""

    trials: Sequence[TrialState]
    target: int
    """Trials asked for."""
    concurrent: int
    """Trials at a time."""
    max_frame: int

    def count(self, *statuses: str) -> int:
        return sum(trial.status in statuses for trial in self.trials)

    @property
    def best(self) -> TrialState | None:
        """The best trial that has finished."""
        finished = [trial for trial in self.trials if trial.status == "finished" and trial.metric is not None]
        return max(finished, key=lambda trial: trial.metric or 0.0, default=None)

    def seconds_left(self) -> float | None:
        """Remaining time if the other trials take as long as those that have ended; None until one has, or its time can be estimated."""
        ended = [trial.seconds for trial in self.trials if trial.ended]
        begun = [trial for trial in self.trials if trial.status == "running" and trial.frame > 0]
        whole = [trial.seconds * self.max_frame / trial.frame for trial in begun]
        if not ended and not whole:
            return None
        each = sum(ended) / len(ended) if ended else sum(whole) / len(whole)
        left = [max(0.0, min(seconds, 2.0 * each) - trial.seconds) for trial, seconds in zip(begun, whole, strict=True)]
        waiting = max(0, self.target - self.count("finished", "stopped", "failed") - len(begun))
        return (sum(left) + waiting * each) / max(1, min(self.concurrent, waiting + len(begun)))


class SearchTable:
    """Shows how many trials are done, running and stopped, the best so far with its values, and the remaining time."""

    def __init__(self, metric: str, console: Console | None = None) -> None:
        self.metric = metric
        self.console = console or Console(file=cast(IO[str], Screen(sys.stdout)), highlight=False, soft_wrap=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        self._due = self._line_due = 0.0
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

    def show(self, totals: Totals, *, now: bool = False) -> None:
        """Refresh the table, at most twice a second unless `now`."""
        time = perf_counter()
        if self.live and (now or time >= self._due):
            self._due = time + _REFRESH
            self.live.update(self._table(totals), refresh=True)
        elif not self.live and time >= self._line_due:
            if self._line_due:
                self.say(summary(totals, self.metric))
            self._line_due = time + _LINE_EVERY

    def ended(self, trial: TrialState, totals: Totals) -> None:
        """Print the result of a trial that has ended."""
        how = {"finished": "", "stopped": f" stopped at frame {trial.frame:,}", "failed": " failed"}.get(trial.status, f" {trial.status}")
        result = "" if trial.status == "failed" else f"  {self.metric} {number(trial.metric)}"
        cause = f": {trial.cause.rstrip().splitlines()[-1].strip()}" if trial.status == "failed" and trial.cause.strip() else ""
        self._line_due = perf_counter() + _LINE_EVERY
        self.say(f"trial {trial.trial}{how}{cause}{result}  {shown_values(trial.values)}  {duration(trial.seconds)}")
        self.show(totals, now=True)

    def _table(self, totals: Totals) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("trial", "frame", self.metric, "time"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("values", overflow="ellipsis", no_wrap=True)
        running = [trial for trial in totals.trials if trial.status == "running"]
        for trial in running[:_MOST_ROWS]:
            frame = f"{trial.frame:,}/{totals.max_frame:,}"
            table.add_row(str(trial.trial), frame, number(trial.metric), duration(trial.seconds), shown_values(trial.values))
        return Group(table, Text(summary(totals, self.metric), no_wrap=True, overflow="ellipsis"))


def summary(totals: Totals, metric: str) -> str:
    """Return the numbers of trials, the best one, and the remaining time in one line."""
    counts = {"running": totals.count("running"), "stopped": totals.count("stopped"), "failed": totals.count("failed")}
    done = totals.count("finished", "stopped", "failed")
    parts = [f"{done}/{totals.target} trials done", *(f"{count} {name}" for name, count in counts.items() if count or name == "running")]
    left, best = totals.seconds_left(), totals.best
    parts.append(f"eta {'-' if left is None else duration(left)}")
    if best is None:
        return f"{', '.join(parts)}; no trial has finished yet"
    return f"{', '.join(parts)}; best {metric} {number(best.metric)}: trial {best.trial}  {shown_values(best.values)}"


def result_lines(state: SearchState, summary: SearchSummary) -> list[str]:
    """Return the end of a search as lines: numbers of trials, the best of them, importance of the keys, files."""
    records = summary.ranked
    counts = {name: sum(record.status == name for record in records) for name in ("finished", "stopped", "failed", "running")}
    seconds = sum(record.seconds for record in records)
    lines = [f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)}; {duration(seconds)} of training"]
    for record in [one for one in records if one.metric is not None][: max(3, state.confirm)]:
        line = f"trial {record.trial}: {state.metric} {number(record.metric)}"
        if record.confirmed is not None:
            low_high = "" if record.confirmed_interval is None else f" ({' to '.join(map(number, record.confirmed_interval))})"
            line += f", confirmed {number(record.confirmed)}{low_high}"
        lines.append(f"{line}  {shown_values(record.values)}")
    if summary.importance is not None:
        shares = sorted(summary.importance.shares.items(), key=lambda item: -item[1])
        method = f"PED-ANOVA, best {summary.importance.best} of {summary.importance.trials} trials"
        lines.append(f"importance ({method}): {', '.join(f'{key} {share:.0%}' for key, share in shares)}")
    return [*lines, *map(str, summary.files)]


def shown_values(values: Mapping[str, Any]) -> str:
    """Return values by the last parts of their key paths: as many as tell the keys apart."""
    return "  ".join(f"{_short(key, values)} {_value(value)}" for key, value in values.items())


def _short(key: str, values: Mapping[str, Any]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if sum(other == short or other.endswith(f".{short}") for other in values) == 1:
            return short
    return key


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
