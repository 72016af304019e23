"""Tests that several workers which train one net count as one experiment, on synthetic trials with known returns."""

from __future__ import annotations

import os

import numpy as np
import pytest

from slm_lab.experiment.events import Row, RowValues
from slm_lab.experiment.report.metrics import Table
from slm_lab.experiment.report.run import join_worker_tables
from slm_lab.experiment.report.seed_result import SeedResult, recent_returns
from slm_lab.experiment.training.observers.base import COLUMNS, SHARED_COLUMNS
from slm_lab.experiment.training.observers.rows import Recorder
from slm_lab.lib.clock import Clock
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.records import Episode
from slm_lab.lib.store import SharedArrays, create_shared_file
from tests.experiment.test_observers import ScheduledValues

STEP, EPISODE, JUMP, END, ROWS = 10, 90, 50_000, 80_000, 1000
"""Numbers of global frames: per vector step, per episode, at the jump of the return, of the trial, and between two rows of a worker."""


def return_at(frame: int) -> float:
    return (20.0 if frame <= JUMP else 500.0) + frame % 7 / 10


class Worker:
    def __init__(self, fd: int, index: int, workers: int, rows: list[RowValues], *, fresh: bool = True) -> None:
        self.clock, self.window = Clock(), EpisodeWindow()
        SharedArrays(fd, index, workers, fresh=fresh).attach({"clock": self.clock, "episodes": self.window})
        self.recorder = Recorder(
            self.clock,
            ScheduledValues(),
            ROWS // workers,
            lambda row: rows.append(row.values),
            (*COLUMNS, *SHARED_COLUMNS),
            window=self.window,
        )
        if not fresh:  # as a Session does that replaces a dead one and has no checkpoint
            self.clock.load_unshared_state({}, 1)
            self.recorder.restore_row_history([{name: str(value) for name, value in row.items()} for row in rows])


def trial(workers: int, killed_at: int | None = None) -> dict[int, Table]:
    """Return the tables of workers that step in turn; every EPISODE global frames, an episode ends in the worker that steps then."""
    fd = create_shared_file()
    rows: list[list[RowValues]] = [[] for _ in range(workers)]
    made = [Worker(fd, index, workers, rows[index]) for index in range(workers)]
    for step in range(END // STEP):
        frame, index = (step + 1) * STEP, step % workers
        if frame == killed_at:
            made[-1] = Worker(fd, workers - 1, workers, rows[-1], fresh=False)
        made[index].clock.tick(STEP)
        made[index].recorder.on_step([Episode(0, return_at(frame), 9)] if frame % EPISODE == 0 else [])
    for one in made:
        one.recorder.on_end()
    os.close(fd)
    return {index: table_of(one) for index, one in enumerate(rows)}


def table_of(rows: list[RowValues]) -> Table:
    return {name: np.array([np.nan if row[name] is None else row[name] for row in rows], np.float64) for name in rows[0]}


def expected(frame: float) -> float:
    """Return the mean of the last 100 episodes of all workers up to a global frame."""
    ends = np.arange(EPISODE, int(frame) + 1, EPISODE)[-100:]
    return float(np.mean([return_at(int(end)) for end in ends]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("workers", "killed_at"), [(1, None), (2, None), (4, None), (2, 40_000), (4, 50_440)])
def test_the_global_curve_does_not_depend_on_the_number_of_workers(workers: int, killed_at: int | None) -> None:
    """This must hold also if a worker is killed: the window has no gap, and the rows of each worker count every episode once."""
    tables = trial(workers, killed_at)
    one = join_worker_tables(tables)
    assert np.array_equal(one["frame"], one["global_frame"])
    assert set(range(ROWS, END + 1, ROWS)) <= set(one["frame"].tolist())
    assert one["total_reward"] == pytest.approx([expected(frame) for frame in one["frame"]], rel=1e-12)
    passed = one["frame"][one["total_reward"] >= 250][0]
    assert JUMP < passed <= JUMP + 100 * EPISODE
    for table in tables.values():
        assert table["epi_new"].sum() == table["global_frame"][-1] // EPISODE
        after = np.flatnonzero(table["global_frame"] > JUMP)[0]
        assert int(table["return_new"][after]) == 500
        assert np.all(table["return_new"][:after] < 21)
    solved = SeedResult([one], worker_tables=list(tables.values())).first_reached(250, "global_frame")
    assert solved is not None
    assert JUMP < solved.point <= JUMP + ROWS


def test_a_worker_has_its_own_episodes_in_a_column() -> None:
    (one, other) = trial(2).values()
    assert not np.allclose(one["worker_reward"], other["worker_reward"])
    played = [frame for frame in range(EPISODE, END + 1, EPISODE) if frame // STEP % 2 == 1][-100:]
    assert one["worker_reward"][-1] == pytest.approx(np.mean([return_at(frame) for frame in played]))


def test_a_threshold_is_judged_on_ten_episodes_or_more() -> None:
    table = {
        "frame": np.arange(1.0, 8.0),
        "epi_new": np.array([4.0, 5, 1, 0, 12, 3, 8]),
        "return_new": np.array([1.0, 2, 6, np.nan, 5, 9, 3]),
        "total_reward": np.zeros(7),
    }
    frame, value = recent_returns(table, "frame")
    assert frame.tolist() == [3, 4, 5, 6, 7]
    assert value == pytest.approx([2.0, 2.0, 5.0, (60 + 27) / 15, (27 + 24) / 11])
    seed = SeedResult([table])
    assert (seed.threshold_rule, seed.first_reached(5, "frame"), seed.first_reached(6, "frame")) == ("return_new", (5, False), None)
    evaluated = SeedResult([table], evaluation=[{"frame": np.array([2.0, 4]), "total_reward": np.array([3.0, 6])}])
    assert (evaluated.threshold_rule, evaluated.first_reached(6, "frame")) == ("evaluation", (4, False))
    old = SeedResult([{"frame": np.array([2.0, 4]), "total_reward": np.array([3.0, 6])}])
    assert (old.threshold_rule, old.first_reached(6, "frame")) == ("total_reward", (4, False))


def test_rows_of_a_plain_run_count_their_new_episodes() -> None:
    """Each episode counts once; a continued recorder also counts the episodes before the last row, which is off the grid."""
    rows: list[Row] = []
    clock = Clock()
    recorder = Recorder(clock, ScheduledValues(), 10, rows.append)
    for frame in range(1, 16):
        clock.tick(1)
        recorder.on_step([Episode(0, float(frame), 1)] if frame % 2 else [])
    state, counted = recorder.state_dict(), clock.state_dict()
    recorder.on_end()
    assert [(row.values["epi_new"], row.values["return_new"]) for row in rows] == [(5, 5.0), (3, 13.0)]
    clock = Clock()
    clock.load_state_dict(counted)
    recorder = Recorder(clock, ScheduledValues(), 10, rows.append)
    recorder.load_state_dict(state)
    for _ in range(15):
        clock.tick(1)
        recorder.on_step([])
    assert [(row.values["epi_new"], row.values["return_new"]) for row in rows[2:]] == [(3, 13.0), (0, None)]


def test_the_wall_time_continues_after_the_rows_in_the_file() -> None:
    """A row may be newer than the state from which a run is continued."""
    clock, rows = Clock(), list[Row]()
    recorder = Recorder(clock, ScheduledValues(), 10, rows.append)
    clock.begin()
    clock.tick(10)
    counts = dict.fromkeys(("epi", "t", "opt_step"), "1")
    recorder.restore_row_history([{"frame": "10", "wall_t": "70.5", "total_reward": "", **counts}])
    clock.tick(10)
    recorder.on_step([])
    assert rows[0].values["frame"] == 20
    assert rows[0].values["wall_t"] > 70.5  # type: ignore[operator]
