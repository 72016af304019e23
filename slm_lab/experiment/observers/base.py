"""What every observer is, and the rows that they pass on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from slm_lab.experiment.paths import DataMode
from slm_lab.lib.records import Metrics, VecStep

Row = dict[str, float | int | None]
"""One line of a Session's table: a value for each of COLUMNS, and of GLOBAL_COLUMNS where Sessions train one net."""
Emit = Callable[[DataMode, Row], None]

COLUMNS = (
    *("frame", "epi", "t", "wall_t", "fps", "opt_step", "total_reward", "total_reward_ma"),
    *("loss", "lr", "grad_norm", "entropy", "explore_var", "entropy_coef"),
)

GLOBAL_COLUMNS = ("global_frame", "staleness", "lock_wait")
"""Further ones where Sessions train one net: frames of all of them; per update, means of the global updates of others between pull and
push, and of the milliseconds it waited for the lock."""


SAMPLER_COLUMNS = (
    *("lag_min", "lag_mean", "lag_max", "lag_masked"),
    *("rollout_busy", "inference_busy", "learner_busy"),
)
"""Further ones where rollout workers collect: policy lag of the datasets trained on, in gradient steps, and the share of transitions above
max_policy_lag; shares of the time in which workers stepped their envs, actions were computed, and the learner trained."""


class Observer:
    """The hooks; an observer overrides those it needs."""

    def on_step(self, step: VecStep) -> None:
        """After each vector step and the update it may have led to."""

    def on_update(self, metrics: Metrics) -> None:
        """After each update."""

    def on_row(self, mode: DataMode, row: Row) -> None:
        """A row is there."""

    def on_checkpoint(self) -> None:
        """A checkpoint was written."""

    def on_interrupt(self) -> None:
        """The Session ends early (Ctrl-C); on_end follows."""

    def on_end(self) -> None:
        """After the last step."""

    def close(self) -> None:
        """Release files; also after a failure."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Hook = Literal["on_step", "on_update", "on_row", "on_checkpoint", "on_interrupt", "on_end"]


def hooks(observers: Sequence[Observer], name: Hook) -> list[Callable[..., None]]:
    """The methods called `name` of those observers that override it."""
    return [getattr(observer, name) for observer in observers if getattr(type(observer), name) is not getattr(Observer, name)]


def mean(values: Collection[float]) -> float | None:
    """None where there are none."""
    return math.fsum(values) / len(values) if values else None


class Mean:
    """Mean of the values since it was last drained; None where there were none."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    def drain(self) -> float | None:
        mean = self.total / self.count if self.count else None
        self.total, self.count = 0.0, 0
        return mean
