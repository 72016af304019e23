"""Observers that produce the rows of the training table and of the evaluation table."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slm_lab.experiment.events import Mode, Row, RowValues
from slm_lab.experiment.training.observers.base import (
    COLUMNS,
    EPISODE_COLUMNS,
    EmitRow,
    Mean,
    Observer,
    RunningMax,
    info_column,
    mean,
    schedule_column,
)
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EPISODES, CurrentReturn, EpisodeWindow
from slm_lab.lib.log import notice
from slm_lab.lib.records import Episode, Metrics

if TYPE_CHECKING:
    from slm_lab.agent.agent import Agent

_ROWS = 100
"""Number of rows over which the column total_reward_ma averages the column total_reward."""


class RowBuilder:
    """Builder of the rows of one table, with the counters of the clock, the moving average of total_reward, and the speed."""

    def __init__(self, clock: Clock, agent: Agent, columns: Sequence[str] = COLUMNS) -> None:
        self.clock, self.agent, self.columns = clock, agent, columns
        self.rewards: deque[float] = deque(maxlen=_ROWS)
        self.frame = 0
        """Frame of the last row that was built."""
        self.timed_frame, self.timed_wall_t = 0, 0.0
        """Frame and wall time from which the speed in the next row is computed. They are those of the last row or, after the row history
        was restored from a file, those of the restoration, because the training time before the restoration may be unknown."""

    def row(self, total_reward: float | None, epi_new: int, return_new: float | None, current: CurrentReturn | None) -> RowValues:
        """Build a row at the current frame of the clock. Columns with values from updates, such as loss, are None in the returned row.

        Args:
            total_reward: value of the column total_reward.
            epi_new: number of episodes since the previous row.
            return_new: mean return of the episodes since the previous row.
            current: estimate of the return of the current policy.
        """
        clock, wall_t = self.clock, self.clock.wall_t
        if total_reward is not None:
            self.rewards.append(total_reward)
        frames = clock.frame - self.timed_frame  # 0 if the row is due at the frame of a restoration: then the speed is not known
        fps = frames / max(wall_t - self.timed_wall_t, 1e-9) if frames else None
        self.frame = self.timed_frame = clock.frame
        self.timed_wall_t = wall_t
        row: RowValues = dict.fromkeys(self.columns)
        if "global_frame" in row:
            row["global_frame"] = clock.global_frame
        row.update(frame=clock.frame, epi=clock.epi, t=clock.t, wall_t=wall_t, fps=fps, opt_step=clock.opt_step)
        row.update(total_reward=total_reward, total_reward_ma=mean(self.rewards), epi_new=epi_new, return_new=return_new)
        if current is not None:
            row.update(current_return=current.mean, current_return_se=current.error, current_epi=current.episodes)
        row.update(lr=self.agent.lr, explore_var=self.agent.explore_var, entropy_coef=self.agent.entropy_coef)
        return row

    def restore_row_history(self, rows: Sequence[dict[str, str]], *, rebuild: bool = False) -> None:
        """Restore the row history from the rows of a table file. Only the rows after the last row that was built are added. The counters of
        the clock are advanced to the counters in the last row of the file, and are never set back.

        Args:
            rows: rows of the file, as column → text.
            rebuild: whether to forget the row history first, because it may contain rows that are not in the file.
        """
        if rebuild:
            self.rewards.clear()
            self.frame = 0
        for row in rows:
            if int(row["frame"]) > self.frame:
                self.frame = int(row["frame"])
                self.clock.advance_wall_time_to(float(row["wall_t"]))
                for name in ("epi", "t", "opt_step"):
                    setattr(self.clock, name, max(getattr(self.clock, name), int(row[name])))
                if row["total_reward"]:
                    self.rewards.append(float(row["total_reward"]))
        self.timed_frame, self.timed_wall_t = max(self.frame, self.clock.frame), self.clock.wall_t

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "frame": self.frame, "timed_frame": self.timed_frame, "wall_t": self.timed_wall_t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards = deque(state["rewards"], maxlen=_ROWS)
        self.frame, self.timed_wall_t = state["frame"], state["wall_t"]
        self.timed_frame = state.get("timed_frame", self.frame)  # absent in checkpoints of earlier versions


class Recorder(Observer):
    """Observer that produces a training row every `every` frames and at the end of training, from finished episodes and updates.

    An update whose loss or gradient norm is not finite is left out, since the agent has skipped the gradient step and reported the problem.

    Args:
        emit: function that receives the rows.
        columns: columns of the rows. Values from Metrics.extra are means over the updates since the previous row.
        index: number of the table (see events.Row).
        infos: keys of Episode.info. Each key has a column with the mean of its values over the last 100 episodes of this Session (see
            info_column).
        window: the episodes over which total_reward is averaged, or None to create a new window. All Sessions that train one net share the
            window.
        scheduled: keys of env.schedule. Each key has a column with the mean of its values over the episodes since the previous row (see
            schedule_column).
    """

    mode: Mode = "train"

    def __init__(
        self,
        clock: Clock,
        agent: Agent,
        every: int,
        emit: EmitRow,
        columns: Sequence[str] = COLUMNS,
        index: int = 0,
        infos: Sequence[str] = (),
        window: EpisodeWindow | None = None,
        scheduled: Sequence[str] = (),
    ) -> None:
        self.clock, self.every, self.emit, self.index, self.scheduled = clock, every, emit, index, scheduled
        self.table = RowBuilder(clock, agent, columns)
        self.window = window or EpisodeWindow()
        self.infos: dict[str, deque[float | None]] = {key: deque(maxlen=EPISODES) for key in infos}
        extra = [name for name in columns if name not in (*COLUMNS, "global_frame", "worker_reward", *map(info_column, infos))]
        self.means = {name: Mean() for name in ("loss", "grad_norm", "entropy", *EPISODE_COLUMNS, *extra)} | {"epi_len_max": RunningMax()}
        self.scalars: dict[str, Mean] = {}
        """Name → mean of each metric that updates report and that has no column in the table."""

    def on_step(self, episodes: list[Episode]) -> None:
        if episodes:
            self.window.record([episode.total_reward for episode in episodes], self.clock.global_frame)
            for key, values in self.infos.items():
                values.extend([getattr(episode, "info", {}).get(key) for episode in episodes])
            for episode in episodes:
                for name, number in zip(EPISODE_COLUMNS, (episode.length, episode.length, episode.truncated), strict=True):
                    self.means[name].add(number)
                for key in self.scheduled:
                    self.means[schedule_column(key)].add(episode.info[f"env.{key}"])
        if self.clock.is_multiple_crossed(self.every):
            self._emit_row()

    def on_update(self, metrics: Metrics) -> None:
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm or 0.0)):
            return
        means = self.means
        means["loss"].add(metrics.loss)
        means["grad_norm"].add(metrics.grad_norm)
        means["entropy"].add(metrics.entropy)
        for name, value in metrics.extra.items():
            mean = means.get(name)
            if mean is None:
                mean = self.scalars.setdefault(name, Mean())
            mean.add(value)

    def on_end(self) -> None:
        if self.table.frame != self.clock.frame:
            self._emit_row(last=True)
        for key, values in self.infos.items():
            if values and all(value is None for value in values):
                notice(f"meta.track_info: the env's info had no '{key}' at the end of the last {len(values)} episodes")

    def restore_row_history(self, rows: Sequence[dict[str, str]], *, rebuild: bool = False) -> None:
        """Restore the row history from the rows of the table file. If a row was due when the previous process died, produce the row now.

        Args:
            rows: rows of the file, as column → text.
            rebuild: whether to forget the row history first, because it may contain rows that are not in the file.
        """
        before = self.table.frame
        self.table.restore_row_history(rows, rebuild=rebuild)
        if self.table.frame > before:  # a row in the file already includes the updates in `means`
            for mean in self.means.values():
                mean.take_mean()
        if self.clock.frame // self.every > self.table.frame // self.every:
            self._emit_row()

    def _emit_row(self, *, last: bool = False) -> None:
        """Build a training row and pass the row to `emit`.

        Args: last: whether the row is the last row of the training. If the run is continued later, the last row is dropped, and the next
            row counts the episodes of the dropped row again.
        """
        total_reward = mean(self.window.returns)
        current = self.window.current_return(self.clock.global_frame)
        row = self.table.row(total_reward, *self.window.take_new_episodes(count_again=last), current)
        if "worker_reward" in row:
            row["worker_reward"] = mean(self.window.own_returns)
        row.update((name, mean.take_mean()) for name, mean in self.means.items())
        for key, values in self.infos.items():
            row[info_column(key)] = mean([value for value in values if value is not None])
        self.emit(Row(self.index, self.mode, row, {name: mean.take_mean() for name, mean in self.scalars.items()}))

    def state_dict(self) -> dict[str, Any]:
        means = {name: [mean.total, mean.count] for name, mean in self.means.items()}
        infos = {key: list(values) for key, values in self.infos.items()}
        return {"table": self.table.state_dict(), "episodes": self.window.state_dict(), "means": means, "infos": infos}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
        self.window.load_state_dict(state["episodes"])
        for key, values in state["infos"].items():
            self.infos[key] = deque(values, maxlen=EPISODES)
        for name, (total, count) in state["means"].items():
            self.means[name].total, self.means[name].count = total, count

    def forget_episodes(self) -> None:
        """Clear the history of episodes. Call this method when the policy is replaced, since the episodes were played by the old policy."""
        self.window.clear()
        for values in self.infos.values():
            values.clear()


class Evaluator(Observer):
    """Observer that evaluates the policy regularly, and produces evaluation rows with the mean of the returns.

    An evaluation row is produced `ahead` frames before each multiple of `every` frames, and at the end of training.

    Args:
        emit: function that receives the rows.
        evaluate: function that plays episodes and returns the returns of the episodes, or [] if a stop request interrupts the evaluation.
        index: number of the table (see events.Row).
        ahead: number of frames by which the evaluations precede the multiples of `every` frames.
    """

    mode: Mode = "eval"

    def __init__(
        self,
        clock: Clock,
        agent: Agent,
        every: int,
        emit: EmitRow,
        evaluate: Callable[[], Sequence[float]],
        columns: Sequence[str] = COLUMNS,
        index: int = 0,
        ahead: int = 0,
    ) -> None:
        self.clock, self.every, self.ahead, self.emit, self.evaluate, self.index = clock, every, ahead, emit, evaluate, index
        self.table = RowBuilder(clock, agent, columns)
        self.interrupted = False
        self.pending = False
        """Whether a stop request interrupted the last evaluation, so that a continued run must repeat the evaluation."""

    def on_step(self, episodes: list[Episode]) -> None:
        if self.clock.is_multiple_crossed(self.every, self.ahead):
            self._evaluate_and_emit()

    def restore_row_history(self, rows: Sequence[dict[str, str]], *, rebuild: bool = False) -> None:
        """Restore the row history from the rows of the table file.

        Args:
            rows: rows of the file, as column → text.
            rebuild: whether to forget the row history first, because it may contain rows that are not in the file.
        """
        self.table.restore_row_history(rows, rebuild=rebuild)

    def on_interrupt(self) -> None:
        self.interrupted = True

    def on_end(self) -> None:
        if self.table.frame != self.clock.frame and not self.interrupted:
            self._evaluate_and_emit()

    def _evaluate_and_emit(self) -> None:
        returns = self.evaluate()
        self.pending = not returns
        if returns:
            value = sum(returns) / len(returns)
            self.emit(
                Row(self.index, self.mode, self.table.row(value, len(returns), value, CurrentReturn.from_independent_returns(returns)))
            )

    def repeat_interrupted_evaluation(self) -> None:
        """Repeat the last evaluation if it was interrupted."""
        if self.pending:
            self._evaluate_and_emit()

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table.state_dict(), "pending": self.pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
        self.pending = state["pending"]
