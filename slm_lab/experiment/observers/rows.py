"""Rows of training and of evaluation, made from what happened."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slm_lab.experiment.observers.base import COLUMNS, GLOBAL_COLUMNS, SAMPLER_COLUMNS, Emit, Mean, Observer, Row, mean
from slm_lab.experiment.paths import DataMode
from slm_lab.lib.clock import Clock
from slm_lab.lib.log import notice
from slm_lab.lib.records import Metrics, VecStep

_EPISODES = 100
"""total_reward is the mean over so many finished episodes."""
_ROWS = 100
"""total_reward_ma is the mean over so many rows."""


class Rates(Protocol):
    """What of an Agent stands in a row."""

    @property
    def lr(self) -> float | None: ...
    @property
    def explore_var(self) -> float | None: ...
    @property
    def entropy_coef(self) -> float | None: ...


class Table:
    """Moving averages and speed, which turn a total_reward into a row."""

    def __init__(self, clock: Clock, rates: Rates, columns: Sequence[str] = COLUMNS) -> None:
        self.clock, self.rates, self.columns = clock, rates, columns
        self.rewards: deque[float] = deque(maxlen=_ROWS)
        self.frame = 0
        """Frame of the last row."""
        self.wall_t = 0.0

    def row(self, total_reward: float | None) -> Row:
        """The next row, at the clock's frame; columns of the update are None."""
        clock, wall_t = self.clock, self.clock.wall_t
        if total_reward is not None:
            self.rewards.append(total_reward)
        fps = (clock.frame - self.frame) / max(wall_t - self.wall_t, 1e-9)
        self.frame, self.wall_t = clock.frame, wall_t
        row: Row = dict.fromkeys(self.columns)
        if "global_frame" in row:
            row["global_frame"] = clock.global_frame
        row.update(frame=clock.frame, epi=clock.epi, t=clock.t, wall_t=wall_t, fps=fps, opt_step=clock.opt_step)
        row.update(total_reward=total_reward, total_reward_ma=mean(self.rewards))
        row.update(lr=self.rates.lr, explore_var=self.rates.explore_var, entropy_coef=self.rates.entropy_coef)
        return row

    def go_on(self, rows: Sequence[dict[str, str]]) -> None:
        """Take up the rows, as they stand in the file, that were written since this table's last; the clock never goes back."""
        for row in rows:
            if int(row["frame"]) > self.frame:
                self.frame, self.wall_t = int(row["frame"]), float(row["wall_t"])
                for name in ("epi", "t", "opt_step"):
                    setattr(self.clock, name, max(getattr(self.clock, name), int(row[name])))
                if row["total_reward"]:
                    self.rewards.append(float(row["total_reward"]))

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "frame": self.frame, "wall_t": self.wall_t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards = deque(state["rewards"], maxlen=_ROWS)
        self.frame, self.wall_t = state["frame"], state["wall_t"]


class Recorder(Observer):
    """Makes a row each `every` frames and at the end, from finished episodes and updates."""

    mode: DataMode = "train"

    def __init__(self, clock: Clock, rates: Rates, every: int, emit: Emit, columns: Sequence[str] = COLUMNS) -> None:
        self.clock, self.every, self.emit = clock, every, emit
        self.table = Table(clock, rates, columns)
        self.returns: deque[float] = deque(maxlen=_EPISODES)
        self.finite = True
        self.apart = "global_frame" in columns
        """Many Sessions train one net, from which a step that is not finite is kept: nothing has diverged, and its Session says so."""
        self.extra = [name for name in (*GLOBAL_COLUMNS[1:], *SAMPLER_COLUMNS) if name in columns]
        self.means = {name: Mean() for name in ("loss", "grad_norm", "entropy", *self.extra)}

    def on_step(self, step: VecStep) -> None:
        if step.episodes:
            self.returns.extend([episode.total_reward for episode in step.episodes])
        if self.clock.due(self.every):
            self._write()

    def on_update(self, metrics: Metrics) -> None:
        finite = math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm or 0.0)
        if not finite and self.apart:
            return
        if self.finite and not finite:
            self.finite = False  # once
            notice(f"frame {self.clock.frame}: loss {metrics.loss}, grad_norm {metrics.grad_norm}; training has diverged, try a lower lr")
        self.means["loss"].add(metrics.loss)
        self.means["grad_norm"].add(metrics.grad_norm)
        self.means["entropy"].add(metrics.entropy)
        for name in self.extra:
            self.means[name].add(metrics.extra.get(name))

    def on_end(self) -> None:
        if self.table.frame != self.clock.frame:
            self._write()

    def go_on(self, rows: Sequence[dict[str, str]]) -> None:
        """Go on behind the rows in the file; one that was due when the process before this one died is written now."""
        before = self.table.frame
        self.table.go_on(rows)
        if self.table.frame > before:  # what is in a row already
            for mean in self.means.values():
                mean.drain()
        if self.clock.frame // self.every > self.table.frame // self.every:
            self._write()

    def _write(self) -> None:
        row = self.table.row(mean(self.returns))
        row.update((name, mean.drain()) for name, mean in self.means.items())
        self.emit(self.mode, row)

    def state_dict(self) -> dict[str, Any]:
        means = {name: [mean.total, mean.count] for name, mean in self.means.items()}
        return {"table": self.table.state_dict(), "returns": list(self.returns), "means": means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
        self.returns = deque(state["returns"], maxlen=_EPISODES)
        for name, (total, count) in state["means"].items():
            self.means[name].total, self.means[name].count = total, count


class Evaluator(Observer):
    """Makes a row of the evaluation table each `every` frames and at the end: the mean return of `evaluate()`."""

    mode: DataMode = "eval"

    def __init__(
        self,
        clock: Clock,
        rates: Rates,
        every: int,
        emit: Emit,
        evaluate: Callable[[], float | None],
        columns: Sequence[str] = COLUMNS,
    ) -> None:
        self.clock, self.every, self.emit, self.evaluate = clock, every, emit, evaluate
        self.table = Table(clock, rates, columns)
        self.interrupted = False

    def on_step(self, step: VecStep) -> None:
        if self.clock.due(self.every):
            self._write()

    def go_on(self, rows: Sequence[dict[str, str]]) -> None:
        """Go on behind the rows in the file."""
        self.table.go_on(rows)

    def on_interrupt(self) -> None:
        self.interrupted = True

    def on_end(self) -> None:
        if self.table.frame != self.clock.frame and not self.interrupted:
            self._write()

    def _write(self) -> None:
        total_reward = self.evaluate()
        if total_reward is not None:
            self.emit(self.mode, self.table.row(total_reward))

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
