from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.experiment import checkpoint
from slm_lab.experiment.engine import cause
from slm_lab.experiment.observers import (
    COLUMNS,
    Checkpointer,
    CSVWriter,
    DevCheckError,
    DevChecks,
    Evaluator,
    Observer,
    Recorder,
    Row,
    TensorBoard,
    hooks,
)
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode, Metrics, VecStep


class Rates:
    lr, explore_var, entropy_coef = 0.001, None, 0.01


def step(*returns: float) -> VecStep:
    none = np.zeros(3, bool)
    return VecStep(none, none, none, none, none, none, none, [Episode(0, value, 9) for value in returns])


def drive(clock: Clock, recorder: Observer, frames: int, num_envs: int, *returns: float) -> None:
    """Step `num_envs` envs until `frames`; each return is that of an episode that ends in the first steps."""
    waiting = list(returns)
    while clock.frame < frames:
        clock.tick(num_envs)
        recorder.on_step(step(*([waiting.pop(0)] if waiting else [])))


def rows_of(every: int, num_envs: int, frames: int, *returns: float) -> list[Row]:
    rows: list[Row] = []
    clock = Clock()
    recorder = Recorder(clock, Rates(), every, lambda mode, row: rows.append(row))
    drive(clock, recorder, frames, num_envs, *returns)
    recorder.on_end()
    return rows


def test_one_row_per_crossing_and_the_last_frame() -> None:
    """Defect 6: the final row is missed when num_envs does not divide max_frame."""
    assert [row["frame"] for row in rows_of(10, 3, 31)] == [12, 21, 30, 33]
    assert [row["frame"] for row in rows_of(10, 5, 30)] == [10, 20, 30]
    assert [row["frame"] for row in rows_of(1000, 3, 31)] == [33]
    assert [row["frame"] for row in rows_of(2, 8, 16)] == [8, 16]


def test_total_reward_is_empty_before_the_first_episode_then_the_mean_of_the_last_100() -> None:
    assert rows_of(10, 1, 10)[0]["total_reward"] is None
    assert rows_of(10, 1, 10)[0]["total_reward_ma"] is None
    returns = [float(value) for value in range(150)]
    assert rows_of(150, 1, 150, *returns)[0]["total_reward"] == np.mean(returns[50:])


def test_moving_average_is_over_the_last_100_rows() -> None:
    rows = rows_of(1, 1, 130, *[1.0] * 30, *[2.0] * 100)
    rewards = [row["total_reward"] for row in rows]
    assert rows[49]["total_reward_ma"] == pytest.approx(np.mean(rewards[:50]))
    assert rows[129]["total_reward_ma"] == pytest.approx(np.mean(rewards[30:]))


def test_update_columns_are_means_since_the_row_before() -> None:
    rows: list[Row] = []
    clock = Clock()
    recorder = Recorder(clock, Rates(), 10, lambda mode, row: rows.append(row))
    recorder.on_update(Metrics(1.0, 3.0))
    recorder.on_update(Metrics(2.0, 5.0))
    drive(clock, recorder, 20, 10)
    assert (rows[0]["loss"], rows[0]["grad_norm"], rows[0]["entropy"]) == (1.5, 4.0, None)
    assert (rows[1]["loss"], rows[1]["lr"], rows[1]["entropy_coef"]) == (None, 0.001, 0.01)


def test_recorder_goes_on_from_its_state() -> None:
    def run(stop_at: int | None) -> list[Row]:
        rows: list[Row] = []
        clock = Clock()
        recorder = Recorder(clock, Rates(), 4, lambda mode, row: rows.append(row))
        for count in range(20):
            if count == stop_at:
                state, before = recorder.state_dict(), clock.state_dict()
                clock = Clock()
                clock.load_state_dict(before)
                recorder = Recorder(clock, Rates(), 4, lambda mode, row: rows.append(row))
                recorder.load_state_dict(state)
            recorder.on_update(Metrics(float(count)))
            clock.tick(1)
            recorder.on_step(step(float(count)))
        return [{name: value for name, value in row.items() if name not in ("wall_t", "fps")} for row in rows]

    assert run(6) == run(None)


def test_evaluator_rows_are_due_by_frames_and_at_the_end_but_not_after_an_interrupt() -> None:
    def frames(interrupted: bool) -> list[Any]:
        rows: list[Row] = []
        clock = Clock()
        evaluator = Evaluator(clock, Rates(), 10, lambda mode, row: rows.append(row), lambda: 7.0)
        drive(clock, evaluator, 25, 1)
        if interrupted:
            evaluator.on_interrupt()
        evaluator.on_end()
        assert all(row["total_reward"] == 7.0 for row in rows)
        return [row["frame"] for row in rows]

    assert frames(False) == [10, 20, 25]
    assert frames(True) == [10, 20]


def test_csv_has_the_columns_in_order_and_one_format(tmp_path: Path) -> None:
    writer = CSVWriter({"train": tmp_path / "train.csv", "eval": tmp_path / "eval.csv"})
    row: Row = dict.fromkeys(COLUMNS)
    writer.on_row("train", row | {"frame": 1000, "wall_t": 1.23456, "fps": 999.96, "total_reward": 1 / 3, "loss": 1e-9})
    lines = (tmp_path / "train.csv").read_text().splitlines()  # flushed, not closed
    assert lines[0] == "frame,epi,t,wall_t,fps,opt_step,total_reward,total_reward_ma,loss,lr,grad_norm,entropy,explore_var,entropy_coef"
    assert lines[1] == "1000,,,1.235,1000.0,,0.33333333,,1e-09,,,,,"
    assert not (tmp_path / "eval.csv").exists()
    writer.close()


def test_csv_appends_without_a_second_header(tmp_path: Path) -> None:
    for frame in (1, 2):
        writer = CSVWriter({"train": tmp_path / "train.csv"})
        writer.on_row("train", dict.fromkeys(COLUMNS) | {"frame": frame})
        writer.close()
    assert [line.split(",")[0] for line in (tmp_path / "train.csv").read_text().splitlines()] == ["frame", "1", "2"]


class Saved:
    """A Checkpointer with its surroundings."""

    def __init__(self, folder: Path, interval: float) -> None:
        self.clock, self.weight, self.written = Clock(), 0.0, 0
        self.last, self.best = folder / "last.pt", folder / "best.pt"
        self.observer = Checkpointer((self.last, self.best), self.clock, interval, "train", self.collect, self.weights, self.count)

    def collect(self) -> dict[str, Any]:
        return {"frame": self.clock.frame}

    def weights(self) -> dict[str, Any]:
        return {"weights": torch.tensor(self.weight)}

    def count(self) -> None:
        self.written += 1

    def row(self, total_reward_ma: float | None) -> None:
        self.clock.tick(10)
        self.weight += 1.0
        self.observer.on_row("train", {"frame": self.clock.frame, "total_reward_ma": total_reward_ma})
        self.observer.on_step(step())


def test_checkpoints_keep_their_distance_in_time(tmp_path: Path) -> None:
    saved = Saved(tmp_path, interval=3600)
    saved.row(1.0)
    saved.observer.on_update(Metrics(0.0))
    saved.observer.on_step(step())
    assert saved.written == 0
    saved.observer.due = 0.0
    saved.observer.on_update(Metrics(0.0))
    assert saved.written == 0, "saved before the other observers are done with the step"
    saved.observer.on_step(step())
    saved.observer.on_step(step())
    assert saved.written == 1


def test_best_weights_are_those_of_the_highest_moving_average(tmp_path: Path) -> None:
    saved = Saved(tmp_path, interval=3600)
    for value in (None, 1.0, 3.0, 2.0):
        saved.row(value)
    saved.observer.on_row("eval", {"frame": 40, "total_reward_ma": 99.0})
    saved.observer.on_end()
    best = checkpoint.load(saved.best)
    assert (best["weights"].item(), best["frame"], best["total_reward_ma"]) == (3.0, 30, 3.0)
    assert checkpoint.load(saved.last) == {"frame": 40}


def test_without_an_episode_the_last_weights_are_the_best(tmp_path: Path) -> None:
    saved = Saved(tmp_path, interval=3600)
    saved.row(None)
    saved.observer.on_end()
    assert checkpoint.load(saved.best)["total_reward_ma"] is None


def test_best_weights_in_the_file_are_not_replaced_by_worse_ones(tmp_path: Path) -> None:
    """A process that takes another's place may find a best file newer than the last checkpoint."""
    saved = Saved(tmp_path, interval=3600)
    saved.row(5.0)
    saved.observer.on_end()
    after = Saved(tmp_path, interval=3600)
    after.observer.go_on()
    after.row(4.0)
    after.observer.on_end()
    assert checkpoint.load(saved.best)["total_reward_ma"] == 5.0
    after.row(6.0)
    after.observer.on_end()
    assert checkpoint.load(saved.best)["total_reward_ma"] == 6.0


@pytest.mark.parametrize(("frame", "frames"), [(20, [20, 30]), (17, [20, 30]), (30, [30])])
def test_a_row_that_was_due_when_a_process_died_is_written_by_the_next(frame: int, frames: list[int]) -> None:
    """The table in the file ends at frame 10; the process died at `frame`."""
    rows: list[Row] = []
    clock = Clock()
    clock.load_state_dict({**clock.state_dict(), "frame": frame, "prev_frame": frame})
    recorder = Recorder(clock, Rates(), 10, lambda mode, row: rows.append(row))
    recorder.means["loss"].add(100.0)  # from the checkpoint, and in the row of frame 10 too
    recorder.go_on([{"frame": "10", "wall_t": "1.0", "epi": "1", "t": "10", "opt_step": "3", "total_reward": "7"}])
    drive(clock, recorder, 30, 1, 1.0)
    assert [row["frame"] for row in rows] == frames
    assert rows[0]["loss"] is None
    assert recorder.table.rewards[0] == 7.0


def test_an_interrupt_saves_once_before_the_row_of_the_end(tmp_path: Path) -> None:
    saved = Saved(tmp_path, interval=3600)
    saved.observer.on_interrupt()
    saved.observer.on_end()
    assert saved.written == 1


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
    with pytest.raises(DevCheckError, match="no weight moved"):
        checks.on_end()
    weight[1] += 1e-6
    checks.on_end()


def test_what_dev_finds_is_told_in_one_line() -> None:
    assert cause(DevCheckError("no weight moved in 3 updates")) == "no weight moved in 3 updates"
    assert cause(ValueError("else")).startswith(("Traceback", "ValueError"))


def test_dev_watches_the_target_net() -> None:
    weight, due, target = torch.zeros(1), [0], torch.zeros(2)
    checks = DevChecks(lambda: {"w": weight.clone()}, lambda: (due[0], target.clone()))
    weight += 1.0
    checks.on_update(Metrics(1.0, 1.0))
    due[0] = 1
    checks.on_update(Metrics(1.0, 1.0))
    with pytest.raises(DevCheckError, match="due to follow 1 times and never moved"):
        checks.on_end()
    due[0], target[0] = 2, 0.5
    checks.on_update(Metrics(1.0, 1.0))
    checks.on_end()
    target[1] = 0.5
    with pytest.raises(DevCheckError, match=r"update 4, before agent\.net\.update_frequency was due"):
        checks.on_update(Metrics(1.0, 1.0))


def test_tensorboard_that_fails_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = TensorBoard(tmp_path)

    class Broken:
        def add_scalar(self, *arguments: object) -> None:
            raise OSError("disk full")

    board.close()
    board.writer = Broken()
    board.on_row("train", {"frame": 1, "loss": 2.0})
    board.on_row("train", {"frame": 2, "loss": 2.0})
    board.close()


def test_tensorboard_on_a_full_disk_is_one_notice(tmp_path: Path) -> None:
    """Its writer's thread keeps its traceback to itself."""
    code = f"""
import resource
from pathlib import Path
from slm_lab.experiment.observers import TensorBoard
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
board = TensorBoard(Path({str(tmp_path)!r}))
board.on_row("train", {{"frame": 1, "loss": 2.0}})
board.close()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("TensorBoard stopped: [Errno 27]") == 1, done.stderr


def test_hooks_are_those_that_are_overridden() -> None:
    class Updates(Observer):
        def on_update(self, metrics: Metrics) -> None: ...

    observer = Updates()
    assert hooks([observer, Observer()], "on_update") == [observer.on_update]
    assert hooks([observer], "on_step") == []
