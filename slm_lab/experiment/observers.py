"""Observers: what watches a Session and turns what happens into rows, files, checkpoints and messages.

The loop knows none of them: a Session calls the hooks that an observer overrides, in the order of its list.
"""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

from slm_lab.experiment.paths import DataMode
from slm_lab.lib.clock import Clock
from slm_lab.lib.log import notice
from slm_lab.lib.records import Metrics, VecStep

Row = dict[str, float | int | None]
"""One line of a Session's table, a value for each of COLUMNS."""
Emit = Callable[[DataMode, Row], None]

COLUMNS = (
    *("frame", "epi", "t", "wall_t", "fps", "opt_step", "total_reward", "total_reward_ma"),
    *("loss", "lr", "grad_norm", "entropy", "explore_var", "entropy_coef"),
)
_FORMATS = {"wall_t": ".3f", "fps": ".1f"}
_EPISODES = 100
"""total_reward is the mean over so many finished episodes."""
_ROWS = 100
"""total_reward_ma is the mean over so many rows."""
_REPORT_EVERY = 0.25
"""Seconds between two reports of progress."""


class Rates(Protocol):
    """What of an Agent stands in a row."""

    @property
    def lr(self) -> float | None: ...
    @property
    def explore_var(self) -> float | None: ...
    @property
    def entropy_coef(self) -> float | None: ...


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


class _Mean:
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


class Table:
    """Moving averages and speed, which turn a total_reward into a row."""

    def __init__(self, clock: Clock, rates: Rates) -> None:
        self.clock, self.rates = clock, rates
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
        row: Row = dict.fromkeys(COLUMNS)
        row.update(frame=clock.frame, epi=clock.epi, t=clock.t, wall_t=wall_t, fps=fps, opt_step=clock.opt_step)
        row.update(total_reward=total_reward, total_reward_ma=_mean(self.rewards))
        row.update(lr=self.rates.lr, explore_var=self.rates.explore_var, entropy_coef=self.rates.entropy_coef)
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "frame": self.frame, "wall_t": self.wall_t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards = deque(state["rewards"], maxlen=_ROWS)
        self.frame, self.wall_t = state["frame"], state["wall_t"]


class Recorder(Observer):
    """Makes a row each `every` frames and at the end, from finished episodes and updates."""

    def __init__(self, clock: Clock, rates: Rates, every: int, emit: Emit) -> None:
        self.clock, self.every, self.emit = clock, every, emit
        self.table = Table(clock, rates)
        self.returns: deque[float] = deque(maxlen=_EPISODES)
        self.means = {name: _Mean() for name in ("loss", "grad_norm", "entropy")}

    def on_step(self, step: VecStep) -> None:
        if step.episodes:
            self.returns.extend([episode.total_reward for episode in step.episodes])
        if self.clock.due(self.every):
            self._write()

    def on_update(self, metrics: Metrics) -> None:
        self.means["loss"].add(metrics.loss)
        self.means["grad_norm"].add(metrics.grad_norm)
        self.means["entropy"].add(metrics.entropy)

    def on_end(self) -> None:
        if self.table.frame != self.clock.frame:
            self._write()

    def _write(self) -> None:
        row = self.table.row(_mean(self.returns))
        row.update((name, mean.drain()) for name, mean in self.means.items())
        self.emit("train", row)

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

    def __init__(self, clock: Clock, rates: Rates, every: int, emit: Emit, evaluate: Callable[[], float | None]) -> None:
        self.clock, self.every, self.emit, self.evaluate = clock, every, emit, evaluate
        self.table = Table(clock, rates)
        self.interrupted = False

    def on_step(self, step: VecStep) -> None:
        if self.clock.due(self.every):
            self._write()

    def on_interrupt(self) -> None:
        self.interrupted = True

    def on_end(self) -> None:
        if self.table.frame != self.clock.frame and not self.interrupted:
            self._write()

    def _write(self) -> None:
        total_reward = self.evaluate()
        if total_reward is not None:
            self.emit("eval", self.table.row(total_reward))

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table.load_state_dict(state["table"])


class CSVWriter(Observer):
    """Appends each row to the table's file at once, in a fixed format: equal numbers give equal bytes."""

    def __init__(self, paths: dict[DataMode, Path]) -> None:
        self.paths = paths
        self.files: dict[DataMode, Any] = {}

    def on_row(self, mode: DataMode, row: Row) -> None:
        if mode not in self.files:
            self.files[mode] = file = self.paths[mode].open("a", newline="", encoding="utf-8")
            if file.tell() == 0:
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)
        csv.writer(self.files[mode], lineterminator="\n").writerow([_text(name, row[name]) for name in COLUMNS])
        self.files[mode].flush()

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class TensorBoard(Observer):
    """Scalars for TensorBoard: the rows, and what else updates report. A failure is a notice, never the end of the run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder))
        self.extra: dict[str, _Mean] = {}

    @staticmethod
    def installed() -> bool:
        return find_spec("tensorboard") is not None

    def on_update(self, metrics: Metrics) -> None:
        for name, value in metrics.extra.items():
            self.extra.setdefault(name, _Mean()).add(value)

    def on_row(self, mode: DataMode, row: Row) -> None:
        frame = row["frame"]
        scalars = {name: value for name, value in row.items() if name != "frame"}
        if mode == "train":
            scalars |= {name: mean.drain() for name, mean in self.extra.items()}
        self._try(lambda: [self.writer.add_scalar(f"{mode}/{name}", value, frame) for name, value in scalars.items() if value is not None])

    def on_checkpoint(self) -> None:
        self._try(lambda: self.writer.flush())

    def close(self) -> None:
        self._try(lambda: self.writer.close())

    def _try(self, write: Callable[[], object]) -> None:
        if self.writer is None:
            return
        try:
            write()
        except Exception as error:
            self.writer = None
            notice(f"TensorBoard stopped: {error}")


class Reporter(Observer):
    """Reports progress a few times a second and at each row: report(frame, fps, last row or None)."""

    def __init__(self, clock: Clock, report: Callable[[int, float, Row | None], None]) -> None:
        self.clock, self.report = clock, report
        self.due = perf_counter() + _REPORT_EVERY
        self.frame, self.time = clock.frame, perf_counter()

    def on_step(self, step: VecStep) -> None:
        if perf_counter() >= self.due:
            self._report(None)

    def on_row(self, mode: DataMode, row: Row) -> None:
        if mode == "train":
            self._report(row)

    def _report(self, row: Row | None) -> None:
        now = perf_counter()
        fps = (self.clock.frame - self.frame) / max(now - self.time, 1e-9)
        if now - self.time >= _REPORT_EVERY:
            self.frame, self.time = self.clock.frame, now
        self.due = now + _REPORT_EVERY
        self.report(self.clock.frame, fps, row)


class DevCheckError(Exception):
    """A check of mode dev failed."""


class DevChecks(Observer):
    """Mode dev: each update has a finite loss and gradient, there is an update, and the weights move."""

    def __init__(self, weights: Callable[[], dict[str, Any]]) -> None:
        self.weights, self.before, self.updates = weights, weights(), 0
        self.interrupted = False

    def on_update(self, metrics: Metrics) -> None:
        self.updates += 1
        for name, value in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm)):
            if value is not None and not math.isfinite(value):
                raise DevCheckError(f"{name} is {value} in update {self.updates}")

    def on_interrupt(self) -> None:
        self.before = {}

    def on_end(self) -> None:
        if not self.before:
            return
        if self.updates == 0:
            raise DevCheckError("the run ended before the first update; raise env.max_frame or train more often")
        if _equal(self.before, self.weights()):
            raise DevCheckError(f"no weight moved in {self.updates} updates")


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

        checkpoint.save(self.last_path, self.collect())
        if self.best is not None:
            checkpoint.save(self.best_path, self.best)
            self.best = None
        self.due, self.wanted = perf_counter() + self.interval, False
        self.written()

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value = state["best_value"]


def _mean(values: Sequence[float] | deque[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _text(name: str, value: float | int | None) -> str:
    match value:
        case None:
            return ""
        case int():
            return str(value)
    return format(value, _FORMATS.get(name, ".8g"))


def _equal(left: Any, right: Any) -> bool:
    """Whether two nested dicts and lists of tensors are equal in every element."""
    if isinstance(left, dict):
        return all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return all(_equal(one, other) for one, other in zip(left, right, strict=True))
    same = left == right
    return bool(same.all()) if hasattr(same, "all") else bool(same)
