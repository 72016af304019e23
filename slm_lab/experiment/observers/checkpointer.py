"""When checkpoints are written, and which weights are the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from slm_lab.experiment.observers.base import Observer, Row
from slm_lab.experiment.paths import DataMode
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Metrics, VecStep


class Checkpointer(Observer):
    """Writes the bundle at most every `interval` seconds, on an interrupt and at the end, and with it the best weights so far.

    Best is the highest total_reward_ma of the rows of `mode`; the best weights wait in memory for the next checkpoint.
    """

    def __init__(
        self,
        paths: tuple[Path, Path],
        clock: Clock,
        interval: float,
        mode: DataMode,
        collect: Callable[[], dict[str, Any]],
        best: Callable[[], dict[str, Any]],
        written: Callable[[], None],
    ) -> None:
        self.last_path, self.best_path = paths
        self.clock, self.interval, self.mode = clock, interval, mode
        self.collect, self.collect_best, self.written = collect, best, written
        self.due = perf_counter() + interval
        self.best_value = -math.inf
        self.best: dict[str, Any] | None = None
        self.wanted = False
        self.interrupted = False

    def on_row(self, mode: DataMode, row: Row) -> None:
        value = row["total_reward_ma"]
        if mode == self.mode and value is not None and value > self.best_value:
            self.best_value = value
            self.best = {**self.collect_best(), "frame": row["frame"], "total_reward_ma": value}
        self.wanted |= perf_counter() >= self.due

    def on_update(self, metrics: Metrics) -> None:
        self.wanted |= perf_counter() >= self.due

    def on_step(self, step: VecStep) -> None:
        if self.wanted:  # here, where all other observers are done with the step
            self._save()

    def on_interrupt(self) -> None:
        # before the row of the end, which is off the grid: a run that goes on from here must not see it
        self.interrupted = True
        self._save_final()

    def on_end(self) -> None:
        if not self.interrupted:
            self._save_final()

    def _save_final(self) -> None:
        if self.best_value == -math.inf:  # no episode has ended: the weights there are
            self.best = {**self.collect_best(), "frame": self.clock.frame, "total_reward_ma": None}
        self._save()

    def _save(self) -> None:
        from slm_lab.experiment import checkpoint

        if self.best is not None:  # first: the last one says what the best is
            checkpoint.save(self.best_path, self.best)
            self.best = None
        checkpoint.save(self.last_path, self.collect())
        self.due, self.wanted = perf_counter() + self.interval, False
        self.written()

    def go_on(self) -> None:
        """Go on with the best weights in the file, which may be newer than the last checkpoint."""
        from slm_lab.experiment import checkpoint

        if self.best_path.exists():
            value = checkpoint.load(self.best_path)["total_reward_ma"]
            self.best_value = max(self.best_value, -math.inf if value is None else value)

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value = state["best_value"]
