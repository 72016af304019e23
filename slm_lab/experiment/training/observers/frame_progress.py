"""Progress reports, and the limit of training time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter

from slm_lab.experiment.events import Row, RowValues
from slm_lab.experiment.training.observers.base import Observer
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode, Metrics

_INTERVAL = 0.25
"""Seconds between two reports."""
_WINDOW = 60.0
"""Seconds over which the speed is measured, and more if updates are rarer."""


class ProgressReporter(Observer):
    """Reports progress a few times a second and at each training row: report(frame, frames per second, row or None, seconds left).

    The speed is measured from the end of one update to the end of another, so that collecting and learning count in their proportion; it
    is 0, for unknown, before the first update. What came before the first update, such as filling a replay buffer, counts until the second.

    Args:
        learns: there are updates.
        max_seconds: limit of training time, from which the seconds left are counted.
    """

    def __init__(
        self,
        clock: Clock,
        report: Callable[[int, float, RowValues | None, float], None],
        *,
        learns: bool = True,
        max_seconds: float | None = None,
    ) -> None:
        self.clock, self.report, self.learns = clock, report, learns
        self.max_seconds = math.inf if max_seconds is None else max_seconds
        self.due = perf_counter() + _INTERVAL
        self.updates = 0
        self.last = (clock.moment, clock.frame)
        """Time and frame of the last update."""
        self.marks = deque([self.last])
        """The same of earlier updates, _INTERVAL apart; the speed is measured from the first."""

    def on_update(self, metrics: Metrics) -> None:
        self.updates += 1
        if self.updates == 2:
            self.marks = deque([self.last])
        self._mark()

    def on_step(self, episodes: list[Episode]) -> None:
        if perf_counter() >= self.due:
            if not self.learns:
                self._mark()
            self._report(None)

    def on_row(self, row: Row) -> None:
        if row.mode == "train":
            self._report(row.values)

    def _mark(self) -> None:
        marks, now = self.marks, self.clock.moment
        self.last = (now, self.clock.frame)
        if now - marks[-1][0] >= _INTERVAL:
            marks.append(self.last)
        while len(marks) > 1 and marks[1][0] <= now - _WINDOW:
            marks.popleft()

    def _report(self, row: RowValues | None) -> None:
        (begin, first), (end, last) = self.marks[0], self.last
        fps = (last - first) / (end - begin) if end > begin else 0.0
        self.due = perf_counter() + _INTERVAL
        self.report(self.clock.frame, fps, row, self.max_seconds - self.clock.wall_t)


class TimeLimit(Observer):
    """Calls `end` at the first step past the given seconds of training."""

    def __init__(self, clock: Clock, seconds: float, end: Callable[[], None]) -> None:
        self.clock, self.seconds, self.end = clock, seconds, end

    def on_step(self, episodes: list[Episode]) -> None:
        if self.clock.wall_t >= self.seconds:
            self.end()
