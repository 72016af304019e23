"""Tests of trials as executor tasks: start, reports, stop, continuation, and a killed Session."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slm_lab.experiment.execute.executor import Message, TaskDied
from slm_lab.experiment.execute.local.fork_server import server_in_use
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.files.bundle import VERSION, load, save
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.search.trial_task import TrialJob, Update, copy_checkpoints, run_trial_task
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.spec import Spec
from tests.experiment.commands import rows


@pytest.fixture
def job(tmp_path: Path, make_spec: Callable[..., Spec]) -> Callable[..., TrialJob]:
    """Return a function such as job(trial, …) that makes the job of a trial in the folder of a search."""
    paths = RunPaths(tmp_path / "run folder", "small")
    paths.root.mkdir()
    paths.make_dirs()

    def make(trial: int = 1, common_seeds: bool = False, **sections: object) -> TrialJob:
        plan = Plan(data_dir=tmp_path, engine="processes", common_seeds=common_seeds)
        return TrialJob(make_spec(**sections), paths, trial, plan, "final_strength", 20.0)

    return make


def updates(job: TrialJob, stop_at: int | None = None) -> Iterator[Update]:
    """Yield the updates of a trial until it ends; request a stop once it reaches the frame `stop_at`."""
    with LocalExecutor(stall_notice=None) as executor, server_in_use():
        task = executor.start("trial", run_trial_task, job)
        while True:
            for event in executor.events(0.2):
                match event:
                    case Message(_, "update", (Update() as update,)):
                        yield update
                        if stop_at is not None and update.frame >= stop_at:
                            task.stop(60.0)
                    case TaskDied(code=code):
                        assert code == 0
                        return


def run(job: TrialJob, stop_at: int | None = None) -> tuple[list[tuple[int, float]], Update]:
    seen = list(updates(job, stop_at))
    return [report for update in seen for report in update.reports], seen[-1]


def test_a_trial_writes_its_own_files_and_reports_common_frames(job: Callable[..., TrialJob]) -> None:
    one = job(trial=3, meta={"max_session": 2})
    reports, last = run(one)
    assert (last.outcome.status, last.outcome.metrics["sessions"], last.frame) == ("finished", 2, 1000)
    assert [frame for frame, _ in reports] == [256, 500, 752, 1000] or [frame for frame, _ in reports] == [252, 500, 752, 1000]
    assert reports[-1][1] == pytest.approx(last.outcome.metrics["final_return"] - 20.0)
    assert one.paths.trials() == [3]
    assert one.paths.trial_spec(3).is_file()
    assert not one.paths.spec.exists()  # the search itself writes its spec
    assert one.paths.trial_metrics(3).is_file()
    assert "small: 2 sessions × 1,000 frames" in one.paths.trial_log(3).read_text()


@pytest.mark.slow
def test_a_stopped_trial_is_analysed_and_continues_where_it_was(job: Callable[..., TrialJob]) -> None:
    whole = job(trial=0, common_seeds=True, env={"max_frame": 40_000}, meta={"log_frequency": 1000})
    stopped = replace(whole, trial=1)
    reports, last = run(stopped, stop_at=1000)
    assert last.outcome.status == "stopped", last.outcome.cause
    assert last.outcome.metrics["status"] == "stopped"
    assert last.outcome.metrics["frame"] < 40_000
    more, last = run(replace(stopped, after=reports[-1][0]))
    assert last.outcome.status == "finished"
    assert more[0][0] > reports[-1][0]
    run(whole)
    assert rows(stopped.paths.session_df(0, t=1)) == rows(stopped.paths.session_df(0, t=0))


def test_a_killed_session_is_a_failed_trial_which_a_retry_continues(job: Callable[..., TrialJob]) -> None:
    one = job(env={"max_frame": 30_000}, meta={"log_frequency": 1000, "save_interval": 0})
    killed = False
    for last in updates(one):
        if not killed and last.frame >= 3000 and one.paths.checkpoint(0, "last", 1).exists():
            os.kill(_session_process(one.paths, 1), signal.SIGKILL)
            killed = True
    assert last.outcome.status == "failed"
    assert last.outcome.retry
    assert "SIGKILL" in last.outcome.cause
    frame = load(one.paths.checkpoint(0, "last", 1))["policies"][0]["clock"]["frame"]
    assert frame > 0
    _, last = run(one)
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


def test_a_spec_that_cannot_be_built_is_not_retried(job: Callable[..., TrialJob]) -> None:
    one = job(env={"no_such_argument": 1})
    _, last = run(one)
    assert (last.outcome.status, last.outcome.retry) == ("failed", False)
    assert "no_such_argument" in last.outcome.cause
    assert not one.paths.trial_spec(1).exists()


@pytest.mark.slow
def test_trials_have_their_own_seeds_or_common_ones(job: Callable[..., TrialJob]) -> None:
    tables = {}
    for trial, common in ((0, False), (1, False), (2, True)):
        one = job(trial=trial, common_seeds=common)
        run(one)
        tables[trial] = rows(one.paths.session_df(0, t=trial))
    assert tables[0] != tables[1]
    assert tables[0] == tables[2]
    assert session_seeds(5, 0, 0) != session_seeds(5, 1, 0)


@pytest.mark.slow
def test_a_trial_takes_over_the_state_of_another(job: Callable[..., TrialJob]) -> None:
    source, other = (job(trial=trial, env={"max_frame": 20_000}, meta={"log_frequency": 1000}) for trial in (0, 1))
    run(source, stop_at=4000)
    run(other, stop_at=1000)
    frame = load(source.paths.checkpoint(0, "last", 0))["policies"][0]["clock"]["frame"]
    _, last = run(replace(other, exploit_from=0, sets=("agent.algorithm.gamma=0.5",)))
    assert last.outcome.status == "finished"
    assert f"continues at frame {frame:,}; not exact: agent.algorithm.gamma was changed" in other.paths.trial_log(1).read_text()
    ((_, body),) = json.loads(other.paths.trial_spec(1).read_text()).items()
    assert body["agent"]["algorithm"]["gamma"] == 0.5


def test_nothing_is_taken_over_from_a_finished_trial(job: Callable[..., TrialJob]) -> None:
    paths = job().paths
    save(paths.checkpoint(0, "last", 0), {"version": VERSION, "done": True, "tables": {}, "weights": {}})
    copy_checkpoints(paths, 0, 1)
    assert paths.checkpoints(1) == []
