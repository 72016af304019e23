"""The display of a running search: a live table of the trials that run, or plain lines if there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from slm_lab.experiment.report.progress import LiveTable, duration, number
from slm_lab.experiment.run.search.search_state import SearchState, TrialState

if TYPE_CHECKING:
    from slm_lab.experiment.report.search_report import SearchSummary

_MOST_ROWS = 16


@dataclass
class Totals:
    """The trials of a search, which it counts."""

    trials: list[TrialState]
    """All so far."""
    target: int
    """Number of trials asked for."""
    concurrent: int
    """Maximum number of concurrent trials."""
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


class SearchTable(LiveTable):
    """Shows how many trials are done, running and stopped, the best so far with its values, and the remaining time."""

    totals: Totals
    """Of the trials that run now: the Stage that runs them sets it."""

    def __init__(self, metric: str, console: Console | None = None) -> None:
        super().__init__(console)
        self.metric = metric

    def ended(self, trial: TrialState) -> None:
        """Print the result of a trial that has ended."""
        how = {"finished": "", "stopped": f" stopped at frame {trial.frame:,}", "failed": " failed"}.get(trial.status, f" {trial.status}")
        result = "" if trial.status == "failed" else f"  {self.metric} {number(trial.metric)}"
        cause = f": {trial.cause.rstrip().splitlines()[-1].strip()}" if trial.status == "failed" and trial.cause.strip() else ""
        self.say_end(f"trial {trial.trial}{how}{cause}{result}  {shown_values(trial.values)}  {duration(trial.seconds)}")
        self.show(now=True)

    def rows(self) -> Table:
        table, max_frame = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), self.totals.max_frame
        for name in ("trial", "frame", self.metric, "time"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("values", overflow="ellipsis", no_wrap=True)
        running = [trial for trial in self.totals.trials if trial.status == "running"]
        for trial in running[:_MOST_ROWS]:
            frame = f"{trial.frame:,}/{max_frame:,}"
            table.add_row(str(trial.trial), frame, number(trial.metric), duration(trial.seconds), shown_values(trial.values))
        return table

    def summary(self) -> str:
        """Return the numbers of trials, the best one, and the remaining time in one line."""
        totals = self.totals
        counts = {name: totals.count(name) for name in ("running", "stopped", "failed")}
        done = totals.count("finished", "stopped", "failed")
        shown = (f"{count} {name}" for name, count in counts.items() if count or name == "running")
        left, best = totals.seconds_left(), totals.best
        eta = "-" if left is None else duration(left)
        line = f"{', '.join([f'{done}/{totals.target} trials done', *shown])}, eta {eta}"
        if best is None:
            return f"{line}; no trial has finished yet"
        return f"{line}; best {self.metric} {number(best.metric)}: trial {best.trial}  {shown_values(best.values)}"


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
