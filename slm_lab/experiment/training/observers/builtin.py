"""Built-in observers, which save checkpoints, report progress, limit the training time, and perform the checks of the mode dev."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NoReturn

from slm_lab.experiment.events import Mode, Row, RowValues
from slm_lab.experiment.files.bundle import weights_sort_key
from slm_lab.experiment.files.sink import CheckpointKind
from slm_lab.experiment.training.observers.base import CURRENT_COLUMNS, Observer
from slm_lab.lib.clock import Clock
from slm_lab.lib.log import PlainError, notice
from slm_lab.lib.records import Episode, Metrics

Save = Callable[[CheckpointKind, dict[str, Any]], None]


class SaveTimer:
    """Timer that determines when the state of a Session is saved: after an update or a row, but at most once per `interval` seconds.

    If saving is slow, as with a replay buffer of 7 GB, the interval is extended so that at most a tenth of the time is spent on saving.

    Attributes:
        wanted: whether the state should be saved now.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.wanted = False
        self.restart()

    def restart(self, seconds: float = 0.0) -> None:
        """Restart the interval after the state was saved.

        Args: seconds: time in seconds that the saving took.
        """
        self.due, self.wanted = perf_counter() + max(self.interval, 10.0 * seconds), False

    def request_save_if_due(self) -> None:
        """Set `wanted` to True if the interval has passed."""
        self.wanted = self.wanted or perf_counter() >= self.due


class Checkpointer(Observer):
    """Observer that saves the best weights of a policy, and the policy's current weights every `frequency` frames.

    The best weights are the weights with the highest current_return in the table rows whose mode is in `modes` (see `weights_sort_key`).
    The best weights are kept in memory until the state of the Session is saved.

    Args:
        policy_bundle: function that returns the data that is needed to act with the policy.
        timer: SaveTimer, which is checked after each update and each row.
        modes: modes ("train", "eval") of the rows whose current_return is compared.
        save: function that saves a checkpoint.
        frequency: number of frames between numbered checkpoints, or None to save no numbered checkpoints.
        newest: whether the newest weights count as the best weights. In self-play, this is True, since the return depends on the opponents.
    """

    def __init__(
        self,
        policy_bundle: Callable[[], dict[str, Any]],
        clock: Clock,
        timer: SaveTimer,
        modes: Sequence[Mode],
        save: Save,
        frequency: int | None = None,
        newest: bool = False,
    ) -> None:
        self.policy_bundle, self.clock, self.timer = policy_bundle, clock, timer
        self.modes, self.save, self.frequency, self.newest = modes, save, frequency, newest
        self.best_rank = weights_sort_key(None)
        self.best: dict[str, Any] | None = None
        self.interrupted = False

    def on_row(self, row: Row) -> None:
        if row.mode in self.modes and row.values["epi_new"] and not self.interrupted:
            measured = {name: row.values[name] for name in ("frame", *CURRENT_COLUMNS)} | {"mode": row.mode}
            if self.newest:
                measured["elo"] = row.values.get("elo")
            if self.newest or weights_sort_key(measured) > self.best_rank:
                self.best_rank = weights_sort_key(measured)
                self.best = {**self.policy_bundle(), **measured}
        self.timer.request_save_if_due()

    def on_update(self, metrics: Metrics) -> None:
        self.timer.request_save_if_due()

    def on_step(self, episodes: list[Episode]) -> None:
        if self.frequency is not None and self.clock.is_multiple_crossed(self.frequency):
            self.save(self.clock.frame // self.frequency * self.frequency, {**self.policy_bundle(), "frame": self.clock.frame})

    def on_interrupt(self) -> None:
        self.interrupted = True  # a continued run will not contain the last row, which is not at a regular frame

    def on_end(self) -> None:
        if self.best_rank == weights_sort_key(None):  # no episode has ended: use the current weights
            self.best = {**self.policy_bundle(), "frame": self.clock.frame, **dict.fromkeys(CURRENT_COLUMNS), "mode": self.modes[0]}

    def save_best(self) -> None:
        """Save the best weights of the policy, unless these weights have already been saved."""
        if self.best is not None:
            self.save("best", self.best)
            self.best = None

    def raise_best_rank(self, best: Mapping[str, Any] | None) -> None:
        """Raise the best rank to the rank of the best weights on disk, which may be newer than the restored state of the Session.

        Args: best: checkpoint with the best weights, or the header of the checkpoint, or None if there are no best weights on disk.
        """
        self.best_rank = max(self.best_rank, weights_sort_key(best))

    def state_dict(self) -> dict[str, Any]:
        return {"best_rank": list(self.best_rank)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        level, value = state["best_rank"]
        self.best_rank = (int(level), value)


_INTERVAL = 0.25
"""Time in seconds between two progress reports."""
_WINDOW = 60.0
"""Time window in seconds over which the speed is measured. The time window is longer if two consecutive updates are further apart."""


class ProgressReporter(Observer):
    """Observer that calls report(frame, frames per second, row or None, seconds left) a few times per second and after each row.

    The speed (frames per second) is measured from the end of one update to the end of a later update, so that the speed includes collecting
    and learning in their usual proportion. The speed is 0 (unknown) before the first update. The time before the first update, in which for
    example a replay buffer is filled, is included in the measurement only until the second update.

    Args:
        learns: whether the agent is updated.
        evaluates: whether the reported current return is taken from the last evaluation (meta.rigorous_eval).
        max_seconds: maximum training time, from which the remaining seconds are computed, or None if there is no maximum.
    """

    def __init__(
        self,
        clock: Clock,
        report: Callable[[int, float, RowValues | None, float], None],
        *,
        learns: bool = True,
        evaluates: bool = False,
        max_seconds: float | None = None,
    ) -> None:
        self.clock, self.report, self.learns, self.evaluates = clock, report, learns, evaluates
        self.max_seconds = math.inf if max_seconds is None else max_seconds
        self.due = perf_counter() + _INTERVAL
        self.updates = 0
        self.row: RowValues = {}
        self.evaluated: RowValues = dict.fromkeys(CURRENT_COLUMNS) if evaluates else {}
        """Values of the CURRENT_COLUMNS in the last evaluation row, which replace those of training rows if `evaluates` is True."""
        self.last = (clock.time, clock.frame)
        """(time, frame) of the last update."""
        self.marks = deque([self.last])
        """(time, frame) of earlier updates, at intervals of _INTERVAL. The speed is measured from the first entry of `marks`."""

    def on_update(self, metrics: Metrics) -> None:
        self.updates += 1
        if self.updates == 2:
            self.marks = deque([self.last])
        self._record_update_time()

    def on_step(self, episodes: list[Episode]) -> None:
        if perf_counter() >= self.due:
            if not self.learns:
                self._record_update_time()
            self._report(None)

    def on_row(self, row: Row) -> None:
        if row.mode == "train":
            self.row = row.values
        elif self.evaluates:
            self.evaluated = {name: row.values[name] for name in CURRENT_COLUMNS}
        self._report(self.row | self.evaluated)

    def _record_update_time(self) -> None:
        marks, now = self.marks, self.clock.time
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
    """Observer that calls the function `end` at the first step after `seconds` seconds of training."""

    def __init__(self, clock: Clock, seconds: float, end: Callable[[], None]) -> None:
        self.clock, self.seconds, self.end = clock, seconds, end

    def on_step(self, episodes: list[Episode]) -> None:
        if self.clock.wall_t >= self.seconds:
            self.end()


class DevCheckError(PlainError):
    """Error that is raised if a check of the mode dev fails."""


DEV_CHECKS = {
    "env": "env: reset and a step returned what its spaces allow",
    "updates": "updates of the weights: {}",
    "finite": "loss and gradient norm of every update are finite",
    "target": "target net: changes in due updates, and in no other",
    "weights": "weights differ from the initial ones",
}
"""Name → description of each check of the mode dev, in the order of the report. The check "env" is performed by training.env_check before
the run."""


class DevChecks(Observer):
    """Observer that performs the checks of the mode dev during training.

    The checks require at least one update, finite losses and gradient norms, changed weights at the end, and a target net that changes when
    its update is due and at no other time. At the end of training, or when a check fails, a notice lists the checks with their results.

    Args:
        weights: function that returns copies of the agent's weights.
        target: function that returns (number of target net updates that were due, copy of the target net), or None if there is no target
            net.
    """

    def __init__(self, weights: Callable[[], dict[str, Any]], target: Callable[[], tuple[int, Any] | None] = lambda: None) -> None:
        self.weights, self.before, self.updates = weights, weights(), 0
        self.target, self.target_before = target, target()
        self.first_target = self.target_before
        self.early_targets = 0
        """Number of target net updates that were due until the first update of the weights, and that may have copied unchanged weights."""

    def on_update(self, metrics: Metrics) -> None:
        self.updates += 1
        for name, value in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm)):
            if value is not None and not math.isfinite(value):
                self._fail("finite", f"{name} is {value} in update {self.updates}")
        before, now = self.target_before, self.target()
        if before is not None and now is not None and now[0] == before[0] and not _equal(now[1], before[1]):
            but = "although no update of the target net was due (agent.net.update_frequency)"
            self._fail("target", f"the target net changed in update {self.updates}, {but}")
        self.target_before = now
        if self.updates == 1 and now is not None:
            self.early_targets = now[0]

    def on_interrupt(self) -> None:
        self.before = {}

    def on_end(self) -> None:
        if not self.before:
            return
        if self.updates == 0:
            lower = "lower training_start_step, training_frequency or batch_size"
            self._fail("updates", f"the run ended before the first update: raise env.max_frame, or {lower}")
        first, last, due = self.first_target, self.target_before, self._expected_target_updates
        if first is not None and last is not None and due > 0 and _equal(first[1], last[1]):
            self._fail("target", f"{due} updates of the target net were due, but its parameters did not change")
        if _equal(self.before, self.weights()):
            self._fail("weights", f"no weight changed in {self.updates} updates")
        notice(self._report())

    @property
    def _expected_target_updates(self) -> int:
        """Number of target net updates that must have changed the parameters of the target net."""
        return 0 if self.target_before is None else self.target_before[0] - self.early_targets

    def _fail(self, check: str, reason: str) -> NoReturn:
        """Print the results of the checks, in which the check `check` has failed, and raise DevCheckError."""
        notice(self._report(check))
        raise DevCheckError(reason)

    def _report(self, failed: str | None = None) -> str:
        """Return a text with one line per check, which contains the result of the check.

        Args: failed: name of the check that failed, or None. Checks that follow the failed check in DEV_CHECKS are listed as not reached.
        """
        target = "no target net" if self.target_before is None else "ok" if self._expected_target_updates > 0 else "none was due"
        marks = dict.fromkeys(DEV_CHECKS, "ok") | {"target": target}
        if failed is not None:
            later = list(DEV_CHECKS)[list(DEV_CHECKS).index(failed) + 1 :]
            marks |= {failed: "failed", **dict.fromkeys(later, "not reached")}
        lines = [f"  {mark:<13}  {DEV_CHECKS[check].format(self.updates)}" for check, mark in marks.items()]
        return "\n".join(["checks:", *lines])


def _equal(left: Any, right: Any) -> bool:
    """Return whether two nested dicts and lists of tensors are equal in every element."""
    if isinstance(left, dict):
        return all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return all(_equal(*pair) for pair in zip(left, right, strict=True))
    equal = left == right
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
