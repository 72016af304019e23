"""When checkpoints are written, and which weights are the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from slm_lab.experiment.events import Mode, Row
from slm_lab.experiment.files.sink import CheckpointKind
from slm_lab.experiment.training.observers.base import Observer
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode, Metrics

Playable = Callable[[], dict[str, Any]]
Save = Callable[[CheckpointKind, dict[str, Any]], None]


class SaveTimer:
    """Decides when the state of a Session is saved: after an update or a row, at most every `interval` seconds.

    And at most a tenth of the time is spent on it: a replay buffer of 7 GB takes long to write.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.wanted = False
        self.restart()

    def restart(self, seconds: float = 0.0) -> None:
        """Start the interval anew after the state has been saved, which took `seconds`."""
        self.due, self.wanted = perf_counter() + max(self.interval, 10.0 * seconds), False

    def check(self) -> None:
        self.wanted = self.wanted or perf_counter() >= self.due


class Checkpointer(Observer):
    """Saves a policy's best weights, and its weights each `frequency` frames; tells the timer of the Session about updates and rows.

    The best weights are those at the highest total_reward_ma of the rows of `mode`. They are kept in memory until the state is saved.

    Args:
        playable: returns what it takes to act.
        frequency: of numbered checkpoints, in frames; None: none.
    """

    def __init__(self, playable: Playable, clock: Clock, timer: SaveTimer, mode: Mode, save: Save, frequency: int | None = None) -> None:
        self.playable, self.clock, self.timer, self.mode, self.save, self.frequency = playable, clock, timer, mode, save, frequency
        self.best_value = -math.inf
        self.best: dict[str, Any] | None = None
        self.interrupted = False

    def on_row(self, row: Row) -> None:
        value = row.values["total_reward_ma"]
        if row.mode == self.mode and value is not None and value > self.best_value and not self.interrupted:
            self.best_value = value
            self.best = {**self.playable(), "frame": row.values["frame"], "total_reward_ma": value}
        self.timer.check()

    def on_update(self, metrics: Metrics) -> None:
        self.timer.check()

    def on_step(self, episodes: list[Episode]) -> None:
        if self.frequency is not None and self.clock.due(self.frequency):
            self.save(self.clock.frame // self.frequency * self.frequency, {**self.playable(), "frame": self.clock.frame})

    def on_interrupt(self) -> None:
        self.interrupted = True  # the last row is off the grid of rows: a continued run does not have it

    def on_end(self) -> None:
        if self.best_value == -math.inf:  # no episode has ended: the present weights
            self.best = {**self.playable(), "frame": self.clock.frame, "total_reward_ma": None}

    def save_best(self) -> None:
        """Save the best weights if they are newer than those saved."""
        if self.best is not None:
            self.save("best", self.best)
            self.best = None

    def resume_best(self, best: Mapping[str, Any] | None) -> None:
        """Continue with the best weights on disk, given their bundle or its header: they may be newer than the state of the Session."""
        if best is not None and best["total_reward_ma"] is not None:
            self.best_value = max(self.best_value, best["total_reward_ma"])

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value = state["best_value"]
