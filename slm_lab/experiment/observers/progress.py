"""Progress reports."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from slm_lab.experiment.events import Row, Values
from slm_lab.experiment.observers.base import Observer
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode

_INTERVAL = 0.25
"""Seconds between two reports."""


class ProgressReporter(Observer):
    """Reports progress a few times a second and at each training row: report(frame, frames per second, row or None)."""

    def __init__(self, clock: Clock, report: Callable[[int, float, Values | None], None]) -> None:
        self.clock, self.report = clock, report
        self.due = perf_counter() + _INTERVAL
        self.frame, self.time = clock.frame, clock.moment

    def on_step(self, episodes: list[Episode]) -> None:
        if perf_counter() >= self.due:
            self._report(None)

    def on_row(self, row: Row) -> None:
        if row.mode == "train":
            self._report(row.values)

    def _report(self, row: Values | None) -> None:
        now = self.clock.moment
        fps = (self.clock.frame - self.frame) / max(now - self.time, 1e-9)
        if now - self.time >= _INTERVAL:
            self.frame, self.time = self.clock.frame, now
        self.due = perf_counter() + _INTERVAL
        self.report(self.clock.frame, fps, row)
