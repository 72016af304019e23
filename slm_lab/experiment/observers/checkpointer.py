"""When checkpoints are written, and which weights are the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from slm_lab.experiment.events import Mode, Values
from slm_lab.experiment.observers.base import Observer
from slm_lab.experiment.sink import Which
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode, Metrics


class Saved(Protocol):
    """What is saved: the whole state, and what it takes to play the policy."""

    def state_dict(self) -> dict[str, Any]: ...

    def playable(self) -> dict[str, Any]: ...


class Checkpointer(Observer):
    """Saves the state at most every `interval` seconds, on an interrupt and at the end, and with it the best weights so far.

    Best is the highest total_reward_ma of the rows of `mode`. The best weights wait in memory for the next checkpoint.
    """

    def __init__(self, saved: Saved, clock: Clock, interval: float, mode: Mode, save: Callable[[Which, dict[str, Any]], None]) -> None:
        self.saved, self.clock, self.interval, self.mode, self.save = saved, clock, interval, mode, save
        self.due = perf_counter() + interval
        self.best_value = -math.inf
        self.best: dict[str, Any] | None = None
        self.wanted = self.interrupted = False

    def on_row(self, mode: Mode, values: Values) -> None:
        value = values["total_reward_ma"]
        if mode == self.mode and value is not None and value > self.best_value:
            self.best_value = value
            self.best = {**self.saved.playable(), "frame": values["frame"], "total_reward_ma": value}
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
            self.best = {**self.saved.playable(), "frame": self.clock.frame, "total_reward_ma": None}
        self._save()

    def _save(self) -> None:
        if self.best is not None:  # first, since the bundle of the last state says which value is the best
            self.save("best", self.best)
            self.best = None
        self.save("last", self.saved.state_dict())
        self.due, self.wanted = perf_counter() + self.interval, False

    def resume_best(self, best: dict[str, Any] | None) -> None:
        """Continue with the best weights on disk, which may be newer than the last checkpoint."""
        if best is not None and best["total_reward_ma"] is not None:
            self.best_value = max(self.best_value, best["total_reward_ma"])

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value = state["best_value"]
