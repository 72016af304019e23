"""Trials in a worker, without Ray: started, reported, stopped, continued, and with a Session that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slm_lab.experiment.files.bundle import VERSION, load, save
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.search.trial_worker import TrialJob, TrialWorker, Update, copy_checkpoints
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.spec import Spec
from tests.experiment.commands import rows, until


@pytest.fixture
def worker() -> TrialWorker:
    return TrialWorker({})


@pytest.fixture
def job(tmp_path: Path, make_spec: Callable[..., Spec]) -> Callable[..., TrialJob]:
    """job(trial, …): a trial in a folder that holds those of a search."""
    paths = RunPaths(tmp_path / "run folder", "small")
    paths.root.mkdir()
    paths.make_dirs()

    def make(trial: int = 1, common_seeds: bool = False, **sections: object) -> TrialJob:
        plan = Plan(data_dir=tmp_path, engine="processes", common_seeds=common_seeds)
        return TrialJob(make_spec(**sections), paths, trial, plan, "final_strength", 20.0)

    return make


def updates(worker: TrialWorker, stop_at: int | None = None) -> Iterator[Update]:
    """The updates of a trial until it has ended; a stop is requested once it has reached a frame."""
    stop = False
    while True:
        update = worker.update(stop)
        yield update
        stop = stop_at is not None and update.frame >= stop_at
        if update.outcome is not None:
            return


def run(worker: TrialWorker, job: TrialJob, stop_at: int | None = None) -> tuple[list[tuple[int, float]], Update]:
    worker.begin(job)
    seen = list(updates(worker, stop_at))
    return [report for update in seen for report in update.reports], seen[-1]


def test_a_trial_writes_its_own_files_and_reports_common_frames(worker: TrialWorker, job: Callable[..., TrialJob]) -> None:
    one = job(trial=3, meta={"max_session": 2})
    reports, last = run(worker, one)
    assert last.outcome is not None
    assert (last.outcome.status, last.outcome.metrics["sessions"], last.frame) == ("finished", 2, 1000)
    assert [frame for frame, _ in reports] == [256, 500, 752, 1000] or [frame for frame, _ in reports] == [252, 500, 752, 1000]
    assert reports[-1][1] == pytest.approx(last.outcome.metrics["final_return"] - 20.0)
    assert one.paths.trials() == [3]
    assert one.paths.trial_spec(3).is_file()
    assert not one.paths.spec.exists()  # that of the search, which writes it itself
    assert one.paths.trial_metrics(3).is_file()
    assert "small: 2 sessions × 1,000 frames" in one.paths.trial_log(3).read_text()


@pytest.mark.slow
def test_a_stopped_trial_is_analysed_and_continues_where_it_was(worker: TrialWorker, job: Callable[..., TrialJob]) -> None:
    whole = job(trial=0, common_seeds=True, env={"max_frame": 40_000}, meta={"log_frequency": 1000})
    stopped = replace(whole, trial=1)
    reports, last = run(worker, stopped, stop_at=1000)
    assert last.outcome is not None
    assert last.outcome.status == "stopped", last.outcome.cause
    assert last.outcome.metrics["status"] == "stopped"
    assert last.outcome.metrics["frame"] < 40_000
    more, last = run(worker, replace(stopped, after=reports[-1][0]))
    assert last.outcome is not None
    assert last.outcome.status == "finished"
    assert more[0][0] > reports[-1][0]
    run(worker, whole)
    assert rows(stopped.paths.session_df(0, t=1)) == rows(stopped.paths.session_df(0, t=0))


def test_a_killed_session_is_a_failed_trial_which_a_retry_continues(worker: TrialWorker, job: Callable[..., TrialJob]) -> None:
    one = job(env={"max_frame": 30_000}, meta={"log_frequency": 1000, "save_interval": 0})
    worker.begin(one)
    until(lambda: one.paths.checkpoint(0, "last", 1).exists() and worker.update(seconds=0.1).frame >= 3000)
    os.kill(_session_process(one.paths, 1), signal.SIGKILL)
    last = list(updates(worker))[-1]
    assert last.outcome is not None
    assert last.outcome.status == "failed"
    assert last.outcome.retry
    assert "SIGKILL" in last.outcome.cause
    frame = load(one.paths.checkpoint(0, "last", 1))["policies"][0]["clock"]["frame"]
    assert frame > 0
    _, last = run(worker, one)
    assert last.outcome is not None
    assert (last.outcome.status, last.frame) == ("finished", 30_000)
    assert f"continues at frame {frame:,}" in one.paths.trial_log(1).read_text()


def _session_process(paths: RunPaths, trial: int) -> int:
    log = str(paths.session_log(0, trial).absolute())
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "fd" / "1") == log:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("no process prints to the log of the session")


def test_a_spec_that_cannot_be_built_is_not_retried(worker: TrialWorker, job: Callable[..., TrialJob]) -> None:
    one = job(env={"no_such_argument": 1})
    _, last = run(worker, one)
    assert last.outcome is not None
    assert (last.outcome.status, last.outcome.retry) == ("failed", False)
    assert "no_such_argument" in last.outcome.cause
    assert not one.paths.trial_spec(1).exists()


@pytest.mark.slow
def test_trials_have_their_own_seeds_or_common_ones(worker: TrialWorker, job: Callable[..., TrialJob]) -> None:
    tables = {}
    for trial, common in ((0, False), (1, False), (2, True)):
        one = job(trial=trial, common_seeds=common)
        run(worker, one)
        tables[trial] = rows(one.paths.session_df(0, t=trial))
    assert tables[0] != tables[1]
    assert tables[0] == tables[2]
    assert session_seeds(5, 0, 0) != session_seeds(5, 1, 0)


def test_a_trial_takes_over_the_state_of_another(worker: TrialWorker, job: Callable[..., TrialJob]) -> None:
    source, other = (job(trial=trial, env={"max_frame": 20_000}, meta={"log_frequency": 1000}) for trial in (0, 1))
    run(worker, source, stop_at=4000)
    run(worker, other, stop_at=1000)
    frame = load(source.paths.checkpoint(0, "last", 0))["policies"][0]["clock"]["frame"]
    _, last = run(worker, replace(other, take_over=0, sets=("agent.algorithm.gamma=0.5",)))
    assert last.outcome is not None
    assert last.outcome.status == "finished"
    assert f"continues at frame {frame:,}; not exact: agent.algorithm.gamma was changed" in other.paths.trial_log(1).read_text()
    ((_, body),) = json.loads(other.paths.trial_spec(1).read_text()).items()
    assert body["agent"]["algorithm"]["gamma"] == 0.5


def test_nothing_is_taken_over_from_a_finished_trial(job: Callable[..., TrialJob]) -> None:
    paths = job().paths
    save(paths.checkpoint(0, "last", 0), {"version": VERSION, "done": True, "tables": {}, "weights": {}})
    copy_checkpoints(paths, 0, 1)
    assert paths.checkpoints(1) == []
