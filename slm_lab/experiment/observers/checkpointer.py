"""When checkpoints are written, and which weights are the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from slm_lab.experiment.events import Mode, Row
from slm_lab.experiment.observers.base import Observer
from slm_lab.experiment.sink import CheckpointKind
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode, Metrics

State = Callable[[], dict[str, Any]]
Save = Callable[[CheckpointKind, dict[str, Any]], None]


class Checkpointer(Observer):
    """Saves the state at most every `interval` seconds, on an interrupt and at the end, and with it the best weights so far.

    Best is the highest total_reward_ma of the rows of `mode`. The best weights wait in memory for the next checkpoint.

    Args: state, playable: return what is saved: everything stateful, and what it takes to act.
    """

    def __init__(self, state: State, playable: State, clock: Clock, interval: float, mode: Mode, save: Save) -> None:
        self.state, self.playable, self.clock, self.interval, self.mode, self.save = state, playable, clock, interval, mode, save
        self.due = perf_counter() + interval
        self.best_value = -math.inf
        self.best: dict[str, Any] | None = None
        self.wanted = self.interrupted = False

    def on_row(self, row: Row) -> None:
        value = row.values["total_reward_ma"]
        if row.mode == self.mode and value is not None and value > self.best_value:
            self.best_value = value
            self.best = {**self.playable(), "frame": row.values["frame"], "total_reward_ma": value}
        self.wanted |= perf_counter() >= self.due

    def on_update(self, metrics: Metrics) -> None:
        self.wanted |= perf_counter() >= self.due

    def on_step(self, episodes: list[Episode]) -> None:
        if self.wanted:  # this observer is the last in the list: the others have finished the step
            self._save()

    def on_interrupt(self) -> None:
        # saved before the final row, which is off the grid of rows: a continued run must not see it
        self.interrupted = True
        self._save_final()

    def on_end(self) -> None:
        if not self.interrupted:
            self._save_final()
        elif self.best is not None:  # the final row is the best one
            self.save("best", self.best)
            self.best = None

    def _save_final(self) -> None:
        if self.best_value == -math.inf:  # no episode has ended: the present weights
            self.best = {**self.playable(), "frame": self.clock.frame, "total_reward_ma": None}
        self._save()

    def _save(self) -> None:
        if self.best is not None:  # first, since the bundle of the last state says which value is the best
            self.save("best", self.best)
            self.best = None
        self.save("last", self.state())
        self.due, self.wanted = perf_counter() + self.interval, False

    def resume_best(self, best: dict[str, Any] | None) -> None:
        """Continue with the best weights on disk, which may be newer than the last checkpoint."""
        if best is not None and best["total_reward_ma"] is not None:
            self.best_value = max(self.best_value, best["total_reward_ma"])

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value = state["best_value"]
