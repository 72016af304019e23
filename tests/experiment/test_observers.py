from __future__ import annotations

import errno
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from slm_lab.experiment.events import Mode, Row, RowValues
from slm_lab.experiment.execute.local.interrupt import UserCodeBlocked
from slm_lab.experiment.execute.local.user_code import WorkerFailed, describe_failure
from slm_lab.experiment.files.bundle import weights_sort_key
from slm_lab.experiment.training.observers.base import COLUMNS, CURRENT_COLUMNS, EPISODE_COLUMNS, SHARED_COLUMNS, Observer, hooks
from slm_lab.experiment.training.observers.builtin import Checkpointer, DevCheckError, DevChecks, ProgressReporter, SaveTimer
from slm_lab.experiment.training.observers.rows import Evaluator, Recorder, RowBuilder
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import CurrentReturn, EpisodeWindow
from slm_lab.lib.records import Episode, Metrics


class ScheduledValues:
    lr, explore_var, entropy_coef = 0.001, None, 0.01


def episodes(*returns: float) -> list[Episode]:
    return [Episode(0, value, 9) for value in returns]


class Rows(list[RowValues]):
    """List of the rows that an observer emits."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars: list[RowValues] = []

    def __call__(self, row: Row) -> None:
        self.append(row.values)
        self.scalars.append(row.scalars)


def drive(clock: Clock, recorder: Observer, frames: int, num_envs: int, *returns: float) -> None:
    """Step `num_envs` envs until `frames`; the first steps end one episode each, with these returns."""
    waiting = list(returns)
    while clock.frame < frames:
        clock.tick(num_envs)
        recorder.on_step(episodes(*([waiting.pop(0)] if waiting else [])))


def rows_of(every: int, num_envs: int, frames: int, *returns: float) -> Rows:
    rows = Rows()
    clock = Clock()
    recorder = Recorder(clock, ScheduledValues(), every, rows)
    drive(clock, recorder, frames, num_envs, *returns)
    recorder.on_end()
    return rows


def test_one_row_per_crossing_and_the_last_frame() -> None:
    """The last row must not be missing if num_envs does not divide max_frame."""
    assert [row["frame"] for row in rows_of(10, 3, 31)] == [12, 21, 30, 33]
    assert [row["frame"] for row in rows_of(10, 5, 30)] == [10, 20, 30]
    assert [row["frame"] for row in rows_of(1000, 3, 31)] == [33]
    assert [row["frame"] for row in rows_of(2, 8, 16)] == [8, 16]


def test_total_reward_is_empty_before_the_first_episode_then_the_mean_of_the_last_100() -> None:
    assert rows_of(10, 1, 10)[0]["total_reward"] is None
    assert rows_of(10, 1, 10)[0]["total_reward_ma"] is None
    returns = [float(value) for value in range(150)]
    assert rows_of(150, 1, 150, *returns)[0]["total_reward"] == np.mean(returns[50:])


def test_current_return_is_of_the_last_20_th_or_20_episodes_but_of_none_older_than_a_fifth() -> None:
    # an episode per frame, whose return is its frame: mean of the last 5 % of 1,000 frames
    late = rows_of(1000, 1, 1000, *map(float, range(1, 1001)))[0]
    assert (late["current_return"], late["current_epi"]) == (np.mean(range(951, 1001)), 50)
    expected = CurrentReturn.from_training_returns(np.arange(951.0, 1001.0))
    assert late["current_return_se"] == pytest.approx(expected.error if expected else None)
    # the last 20 episodes, since the last 5 % of frames has only 10
    assert rows_of(200, 1, 200, *map(float, range(1, 201)))[0]["current_return"] == np.mean(range(181, 201))
    # a fifth of 50 frames has 10 episodes
    assert rows_of(50, 1, 50, *map(float, range(1, 51)))[0]["current_return"] == np.mean(range(41, 51))
    # if episodes of several envs end at the same frame, all of them count
    window = EpisodeWindow()
    for frame in (1000, 2000):
        window.record(list(range(30)), frame)
    assert [window.current_return(frame) for frame in (2000, 2400)] == [CurrentReturn.from_training_returns(np.arange(30.0))] * 2
    assert window.current_return(2500) is None
    # at most 100
    assert rows_of(3000, 1, 3000, *map(float, range(1, 3001)))[0]["current_epi"] == 100


def test_there_is_no_current_return_without_an_episode_in_the_last_fifth() -> None:
    rows = rows_of(10, 1, 20, *[5.0] * 12)
    assert (rows[0]["current_return"], rows[0]["current_return_se"], rows[0]["current_epi"]) == (5.0, 0.0, 2)
    assert [rows[1][name] for name in CURRENT_COLUMNS] == [None, None, None]
    assert rows[1]["total_reward"] == 5.0


def test_moving_average_is_over_the_last_100_rows() -> None:
    rows = rows_of(1, 1, 130, *[1.0] * 30, *[2.0] * 100)
    rewards = [row["total_reward"] for row in rows]
    assert rows[49]["total_reward_ma"] == pytest.approx(np.mean(rewards[:50]))
    assert rows[129]["total_reward_ma"] == pytest.approx(np.mean(rewards[30:]))


def test_update_columns_are_means_since_the_row_before() -> None:
    rows = Rows()
    clock = Clock()
    recorder = Recorder(clock, ScheduledValues(), 10, rows)
    recorder.on_update(Metrics(1.0, 3.0))
    recorder.on_update(Metrics(2.0, 5.0))
    drive(clock, recorder, 20, 10)
    assert (rows[0]["loss"], rows[0]["grad_norm"], rows[0]["entropy"]) == (1.5, 4.0, None)
    assert (rows[1]["loss"], rows[1]["lr"], rows[1]["entropy_coef"]) == (None, 0.001, 0.01)


def test_recorder_goes_on_from_its_state() -> None:
    def run(stop_at: int | None) -> list[RowValues]:
        rows = Rows()
        clock = Clock()
        recorder = Recorder(clock, ScheduledValues(), 4, rows)
        for count in range(20):
            if count == stop_at:
                state, before = recorder.state_dict(), clock.state_dict()
                clock = Clock()
                clock.load_state_dict(before)
                recorder = Recorder(clock, ScheduledValues(), 4, rows)
                recorder.load_state_dict(state)
            recorder.on_update(Metrics(float(count)))
            clock.tick(1)
            recorder.on_step(episodes(float(count)))
        return [{name: value for name, value in row.items() if name not in ("wall_t", "fps")} for row in rows]

    assert run(6) == run(None)


def test_evaluator_rows_are_due_by_frames_and_at_the_end_but_not_after_an_interrupt() -> None:
    def frames(interrupted: bool) -> list[Any]:
        rows = Rows()
        clock = Clock()
        evaluator = Evaluator(clock, ScheduledValues(), 10, rows, lambda: [6.0, 8.0])
        drive(clock, evaluator, 25, 1)
        if interrupted:
            evaluator.on_interrupt()
        evaluator.on_end()
        assert all((row["total_reward"], row["epi_new"], row["return_new"]) == (7.0, 2, 7.0) for row in rows)
        assert all([row[name] for name in CURRENT_COLUMNS] == [7.0, 1.0, 2] for row in rows)
        return [row["frame"] for row in rows]

    assert frames(False) == [10, 20, 25]
    assert frames(True) == [10, 20]


def current(value: float | None, episodes: int = 20) -> dict[str, Any]:
    return {"current_return": value, "current_return_se": None if value is None else 1.0, "current_epi": episodes}


class Saved:
    """A Checkpointer with a clock, weights and a list of the bundles that it saves."""

    def __init__(
        self, interval: float = 3600, modes: tuple[Mode, ...] = ("train",), frequency: int | None = None, newest: bool = False
    ) -> None:
        self.clock, self.weight, self.timer = Clock(), 0.0, SaveTimer(interval)
        self.written: list[tuple[str | int, dict[str, Any]]] = []
        self.observer = Checkpointer(self.policy_bundle, self.clock, self.timer, modes, self.save, frequency, newest)

    def save(self, which: str | int, bundle: dict[str, Any]) -> None:
        self.written.append((which, bundle))

    def policy_bundle(self) -> dict[str, Any]:
        return {"weights": self.weight}

    def of(self, which: str | int) -> list[dict[str, Any]]:
        return [bundle for written, bundle in self.written if written == which]

    def row(self, value: float | None, episodes: int = 20) -> None:
        self.clock.tick(10)
        self.weight += 1.0
        self.observer.on_row(Row(0, "train", {"frame": self.clock.frame, "epi_new": 1, **current(value, episodes)}))
        self.observer.on_step([])


def test_checkpoints_keep_their_distance_in_time() -> None:
    saved = Saved()
    saved.row(1.0)
    saved.observer.on_update(Metrics(0.0))
    assert not saved.timer.wanted
    saved.timer.due = 0.0
    assert not saved.timer.wanted
    saved.observer.on_update(Metrics(0.0))
    assert saved.timer.wanted
    saved.timer.restart()
    saved.row(2.0)
    assert not saved.timer.wanted


def test_best_weights_are_those_of_the_highest_current_return() -> None:
    """Rows count if they are of the right mode and an episode ended; rows over 5 or more episodes take precedence. They are saved once."""
    saved = Saved()
    for value, count in ((None, 0), (50.0, 4), (1.0, 5), (60.0, 4), (3.0, 20), (2.0, 20)):
        saved.row(value, count)
    saved.observer.on_row(Row(0, "train", {"frame": 55, "epi_new": 0, **current(98.0)}))
    saved.observer.on_row(Row(0, "eval", {"frame": 60, "epi_new": 1, **current(99.0)}))
    saved.observer.on_end()
    assert saved.written == []
    saved.observer.save_best()
    saved.observer.save_best()
    assert saved.written == [("best", {"weights": 5.0, "frame": 50, "mode": "train", **current(3.0)})]
    assert saved.observer.state_dict() == {"best_rank": [1, 3.0]}
    evaluated = Saved(modes=("eval",))
    for value in (2.0, 1.0):
        evaluated.observer.on_row(Row(0, "eval", {"frame": 40, "epi_new": 1, **current(value, 1)}))
    assert evaluated.observer.best_rank == (2, 2.0), "an evaluation counts with any number of episodes"
    empty = Saved()
    empty.row(None)
    empty.observer.on_end()
    empty.observer.save_best()
    assert empty.of("best") == [
        {"weights": 1.0, "frame": 10, "mode": "train", "current_return": None, "current_return_se": None, "current_epi": None}
    ], "no episode has ended: the last weights"


def test_an_evaluation_replaces_better_returns_in_training() -> None:
    """If evaluations are few, the best weights are those of training rows until the first evaluation."""
    saved = Saved(modes=("train", "eval"))
    saved.row(50.0)
    saved.observer.save_best()
    saved.observer.on_row(Row(0, "eval", {"frame": 15, "epi_new": 3, **current(20.0, 3)}))
    saved.row(60.0)
    saved.observer.on_row(Row(0, "eval", {"frame": 25, "epi_new": 3, **current(19.0, 3)}))
    saved.observer.save_best()
    assert [(one["frame"], one["mode"], one["current_return"]) for one in saved.of("best")] == [(10, "train", 50.0), (15, "eval", 20.0)]


def test_weights_of_self_play_are_the_newest_and_ranked_by_their_rating() -> None:
    saved = Saved(newest=True)
    for value, elo in ((50.0, 300.0), (-1.0, 250.0)):
        saved.weight += 1.0
        saved.observer.on_row(Row(0, "train", {"frame": 10, "epi_new": 1, **current(value), "elo": elo}))
    saved.observer.save_best()
    (best,) = saved.of("best")
    assert (best["weights"], best["elo"]) == (2.0, 250.0)
    assert weights_sort_key(best) == (3, 250.0) < weights_sort_key({**current(-1.0), "mode": "train", "elo": 260.0})
    assert weights_sort_key({**current(0.5), "mode": "train", "elo": math.nan}) == (1, 0.5), "no snapshot was rated"


def test_numbered_checkpoints_are_named_by_the_multiple_that_was_crossed() -> None:
    saved = Saved(frequency=25)
    for _ in range(8):
        saved.row(None)
    assert [(which, bundle["frame"]) for which, bundle in saved.written] == [(25, 30), (50, 50), (75, 80)]


def test_best_weights_on_disk_are_not_replaced_by_worse_ones() -> None:
    """A restarted process may find a best file that is newer than the last checkpoint."""
    after = Saved()
    for value in (5.0, 3.0, None):
        after.observer.raise_best_rank({"weights": 1.0, "mode": "train", **current(value)})
    after.observer.raise_best_rank(None)
    after.row(4.0)
    after.observer.save_best()
    assert after.of("best") == []
    after.row(6.0)
    after.observer.save_best()
    assert [best["current_return"] for best in after.of("best")] == [6.0]


@pytest.mark.parametrize(("frame", "frames"), [(20, [20, 30]), (17, [20, 30]), (30, [30])])
def test_a_row_that_was_due_when_a_process_died_is_written_by_the_next(frame: int, frames: list[int]) -> None:
    """The table in the file ends at frame 10, and the process died at `frame`."""
    rows = Rows()
    clock = Clock()
    clock.load_state_dict({**clock.state_dict(), "frame": frame, "prev_frame": frame})
    recorder = Recorder(clock, ScheduledValues(), 10, rows)
    recorder.means["loss"].add(100.0)  # this loss is in the checkpoint and also in the row of frame 10
    recorder.restore_row_history([{"frame": "10", "wall_t": "1.0", "epi": "1", "t": "10", "opt_step": "3", "total_reward": "7"}])
    drive(clock, recorder, 30, 1, 1.0)
    assert [row["frame"] for row in rows] == frames
    assert rows[0]["loss"] is None
    assert recorder.table.rewards[0] == 7.0


@pytest.mark.parametrize("wall_t", [1.0, 3.0], ids=["continued", "takeover"])
def test_the_speed_after_a_restored_history_is_that_of_the_new_frames(wall_t: float) -> None:
    """A continued run does not know the time of the frames between the last row and its begin; a takeover in a running trial does."""
    times = SimpleNamespace(wall_t=wall_t, frame=190, epi=0, t=0, opt_step=0, advance_wall_time_to=lambda seconds: None)
    table = RowBuilder(cast(Clock, times), SimpleNamespace(lr=0.0, explore_var=None, entropy_coef=None))  # type: ignore[arg-type]
    table.restore_row_history([{"frame": "100", "wall_t": "1.0", "epi": "1", "t": "10", "opt_step": "3", "total_reward": "7"}])
    assert table.row(None, 0, None, None)["fps"] is None, "a row at the frame of the restoration"
    times.frame, times.wall_t = 290, wall_t + 0.5
    assert table.row(None, 0, None, None)["fps"] == pytest.approx(200.0)
    times.frame, times.wall_t = 390, wall_t + 1.5
    assert table.row(None, 0, None, None)["fps"] == pytest.approx(100.0)


@pytest.mark.parametrize("metrics", [Metrics(math.nan), Metrics(1.0, math.inf)])
def test_dev_refuses_what_is_not_finite(metrics: Metrics) -> None:
    with pytest.raises(DevCheckError, match="update 1"):
        DevChecks(lambda: {"w": torch.zeros(2)}).on_update(metrics)


def test_dev_wants_weights_that_move() -> None:
    weight = torch.zeros(3)
    checks = DevChecks(lambda: {"w": weight.clone()})
    with pytest.raises(DevCheckError, match="before the first update"):
        checks.on_end()
    checks.on_update(Metrics(1.0, 1.0))
    with pytest.raises(DevCheckError, match="no weight changed"):
        checks.on_end()
    weight[1] += 1e-6
    checks.on_end()


def test_dev_lists_its_checks(caplog: pytest.LogCaptureFixture) -> None:
    """The list shows the result of each check; checks after a failure are marked as not reached."""

    def marks() -> list[str]:
        return [line[2:17].strip() for line in caplog.messages[-1].splitlines()[1:]]

    weight = torch.zeros(3)
    checks = DevChecks(lambda: {"w": weight.clone()})
    with pytest.raises(DevCheckError):
        checks.on_end()
    assert marks() == ["ok", "failed", "not reached", "not reached", "not reached"]
    checks.on_update(Metrics(1.0, 1.0))
    with pytest.raises(DevCheckError):
        checks.on_end()
    assert marks() == ["ok", "ok", "ok", "no target net", "failed"]
    weight[1] = 1.0
    checks.on_end()
    assert marks() == ["ok", "ok", "ok", "no target net", "ok"]
    with pytest.raises(DevCheckError):
        checks.on_update(Metrics(math.nan))
    assert marks() == ["ok", "ok", "failed", "not reached", "not reached"]
    assert "updates of the weights: 2" in caplog.messages[-1]


def test_an_error_that_explains_itself_needs_no_traceback() -> None:
    assert describe_failure(DevCheckError("no weight changed in 3 updates")) == "no weight changed in 3 updates"
    assert describe_failure(UserCodeBlocked("the env's close() did not return")) == "the env's close() did not return"
    assert describe_failure(WorkerFailed("worker 1 raised")) == "worker 1 raised"
    assert describe_failure(OSError(errno.ENOSPC, "No space")) == "the disk of the data folder is full (No space)"
    limited = describe_failure(OSError(errno.EFBIG, "File too large"))
    assert limited == "a file exceeds the limit on the size of files, see `ulimit -f` (File too large)"
    assert describe_failure(ValueError("else")).startswith(("Traceback", "ValueError"))


def test_dev_watches_the_target_net() -> None:
    weight, due, target = torch.zeros(1), [0], torch.zeros(2)
    checks = DevChecks(lambda: {"w": weight.clone()}, lambda: (due[0], target.clone()))
    weight += 1.0
    checks.on_update(Metrics(1.0, 1.0))
    due[0] = 1
    checks.on_update(Metrics(1.0, 1.0))
    assert checks.early_targets == 0
    with pytest.raises(DevCheckError, match="1 updates of the target net were due, but its parameters did not change"):
        checks.on_end()
    due[0], target[0] = 2, 0.5
    checks.on_update(Metrics(1.0, 1.0))
    checks.on_end()
    target[1] = 0.5
    with pytest.raises(
        DevCheckError, match=r"changed in update 4, although no update of the target net was due \(agent\.net\.update_frequency\)"
    ):
        checks.on_update(Metrics(1.0, 1.0))


def test_dev_allows_copies_of_a_net_that_has_not_learned() -> None:
    weight, target = torch.zeros(1), torch.zeros(2)
    checks = DevChecks(lambda: {"w": weight.clone()}, lambda: (3, target.clone()))  # three copies before the first update
    weight += 1.0
    checks.on_update(Metrics(1.0, 1.0))
    checks.on_end()


def test_hooks_are_those_that_are_overridden() -> None:
    class Updates(Observer):
        def on_update(self, metrics: Metrics) -> None: ...

    observer = Updates(cast(Any, None))
    assert hooks([observer, Observer(cast(Any, None))], "on_update") == [observer.on_update]
    assert hooks([observer], "on_step") == []


HEADER = "frame,epi,t,wall_t,opt_step,total_reward"
ROWS = ("200,3,100,1.500,12,20.5", "400,5,200,2.500,25,", "600,9,300,3.250,37,31.5")


def test_a_table_continues_from_its_rows() -> None:
    """Rows that are also in the checkpoint count once, and the clock's other counts never decrease."""
    rows = [dict(zip(HEADER.split(","), row.split(","), strict=True)) for row in ROWS]

    fresh = RowBuilder(Clock(), ScheduledValues())
    fresh.restore_row_history(rows)
    assert (fresh.frame, list(fresh.rewards)) == (600, [20.5, 31.5])
    assert (fresh.clock.epi, fresh.clock.t, fresh.clock.opt_step) == (9, 300, 37)
    fresh.clock.frame = 800
    assert fresh.row(41.0, 1, 41.0, None)["total_reward_ma"] == (20.5 + 31.5 + 41.0) / 3

    saved = RowBuilder(Clock(), ScheduledValues())
    saved.load_state_dict({"rewards": [7.0, 20.5], "frame": 400, "wall_t": 2.5})
    saved.clock.epi, saved.clock.t, saved.clock.opt_step = 10, 310, 38
    saved.restore_row_history(rows)
    assert (saved.frame, list(saved.rewards)) == (600, [7.0, 20.5, 31.5])
    assert (saved.clock.epi, saved.clock.t, saved.clock.opt_step) == (10, 310, 38)


def test_updates_that_are_not_finite_are_left_out_of_rows() -> None:
    """Such updates change no weights, so the means of a row are computed over the other updates."""
    rows, clock = Rows(), Clock()
    recorder = Recorder(clock, ScheduledValues(), 100, rows, (*COLUMNS, *SHARED_COLUMNS))
    for loss in (1.0, math.nan, 3.0, math.nan):
        recorder.on_update(Metrics(loss, 0.5))
    clock.frame = 50
    recorder.on_end()
    assert rows[0]["loss"] == 2.0


def test_what_updates_report_besides_is_a_column_or_a_scalar() -> None:
    rows, clock = Rows(), Clock()
    recorder = Recorder(clock, ScheduledValues(), 100, rows, (*COLUMNS, "approx_kl"))
    for value in (1.0, 3.0):
        recorder.on_update(Metrics(0.0, extra={"approx_kl": value, "alpha": 2 * value}))
    clock.frame = 50
    recorder.on_end()
    assert (rows[0]["approx_kl"], rows.scalars[0]) == (2.0, {"alpha": 4.0})
    assert "alpha" not in rows[0]


def test_a_policy_that_is_replaced_begins_a_new_history() -> None:
    recorder = Recorder(Clock(), ScheduledValues(), 100, Rows())
    recorder.on_step(episodes(1.0, 2.0))
    recorder.forget_episodes()
    recorder.on_step(episodes(7.0))
    assert recorder.window.returns == [7.0]
    assert recorder.window.take_new_episodes() == (1, 7.0)


@pytest.mark.parametrize("evaluates", [True, False])
def test_progress_is_reported_at_each_row_and_a_few_times_a_second(evaluates: bool) -> None:
    """With meta.rigorous_eval, the current return is that of the last evaluation, and unknown before the first one."""
    clock, reports = Clock(), []
    reporter = ProgressReporter(clock, lambda *report: reports.append(report), evaluates=evaluates)
    clock.time = 1.0 + reporter.last[0]
    clock.tick(500)
    reporter.on_update(Metrics(0.0))
    reporter.on_step([])
    assert reports == []
    reporter.on_row(Row(0, "train", {"frame": 500, **current(0.5)}))
    reporter.on_row(Row(0, "eval", {"frame": 500, **current(9.0)}))
    reporter.on_row(Row(0, "train", {"frame": 500, **current(1.0)}))
    reporter.due = 0.0
    reporter.on_step([])
    reporter.on_step([])
    shown = [dict.fromkeys(current(1.0)), current(9.0), current(9.0)] if evaluates else [current(0.5), current(0.5), current(1.0)]
    assert [(frame, row) for frame, _, row, _ in reports] == [*((500, {"frame": 500, **values}) for values in shown), (500, None)]
    assert reports[0][1] == pytest.approx(500)


def test_lengths_and_truncations_of_the_episodes_of_a_row() -> None:
    """The columns are mean and maximum length and truncated share, empty if no episode ended.

    The values are kept if the state is saved between two rows.
    """
    rows, clock = Rows(), Clock()
    recorder = Recorder(clock, ScheduledValues(), 100, rows)
    clock.tick(50)
    recorder.on_step([Episode(0, 1.0, 30, {}, True), Episode(1, 1.0, 10)])
    other = Recorder(clock, ScheduledValues(), 100, rows)
    other.load_state_dict(recorder.state_dict())
    clock.tick(50)
    other.on_step([Episode(0, 1.0, 20), Episode(1, 1.0, 0)])
    clock.tick(100)
    other.on_step([])
    clock.tick(100)
    other.on_step([Episode(0, 1.0, 7, {}, True)])
    found = [tuple(row[name] for name in EPISODE_COLUMNS) for row in rows]
    assert found == [(15.0, 30.0, 0.25), (None, None, None), (7.0, 7.0, 1.0)]
