"""Tests of whole trials with rollout workers whose processes are killed, or whose envs fail, block, start programs or return NaN."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.env import InvalidOutcome
from slm_lab.experiment.collect.workers.task_pool import TaskPool
from slm_lab.experiment.events import Event, SessionEnded
from slm_lab.experiment.execute.local.local_executor import LocalTask
from slm_lab.experiment.execute.local.user_code import WorkerFailed
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Interrupted, Plan, Stop, TrialFailed
from slm_lab.experiment.run.engine import SessionsJob, run_inline
from slm_lab.experiment.run.trial import Trial, TrialResult
from slm_lab.experiment.session.session import Session
from slm_lab.lib.log import logger
from slm_lab.lib.system import has_feature
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.commands import PATIENCE, Command, alive, frame_of, until
from tests.experiment.workers.conftest import source_of, weights_of, worker_spec
from tests.experiment.workers.test_session import DQN, REPLAY

SOON = 30.0 if has_feature("forkserver") else 60.0
"""Seconds; spawned child processes load torch in 2 s each, or 10 s under other load. Faults block for 300 s."""
CENTRAL = {"inference": "central"}
ONE_WORKER = {"num_workers": 1, "num_envs_per_worker": 4}
ENDLESS = {"max_frame": 10**9}
FAULTY = {"name": "tests.env.toys:Faulty-v0", "backend": "sync"}
ENVS = "tests.experiment.workers.envs"
Open = Callable[[Spec], Session]


def open_files(kind: str) -> set[str]:
    """Return the shared memory that this process has open, as anonymous or as named files."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if kind in target:
            found.add(f"{target} {os.stat(entry).st_ino}")
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no child process and no shared memory remains after a test."""
    before = open_files("memfd:slm_lab") | open_files("/dev/shm")
    yield
    assert multiprocessing.active_children() == []
    gc.collect()
    assert open_files("memfd:slm_lab") | open_files("/dev/shm") <= before


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TaskPool]]:
    """Return the list of all pools that the test opens."""
    opened: list[TaskPool] = []
    init = TaskPool.__init__

    def spy(self: TaskPool, *args: Any) -> None:
        init(self, *args)
        opened.append(self)

    monkeypatch.setattr(TaskPool, "__init__", spy)
    yield opened
    opened.clear()


def child_of(pool: TaskPool, name: str) -> LocalTask:
    return next(child.task for child in [*pool.workers, pool.server] if child is not None and child.task.name == name)


def run_while(trial: Trial, action: Callable[[Trial], None]) -> TrialResult:
    """Run a trial in this thread and `action` in another one."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action(trial)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        return trial.run()
    finally:
        thread.join()
        if errors:
            raise errors[0]


def check_saved(paths: RunPaths | None, frame: int | None = None) -> int:
    """Check that the last checkpoint and the last row have the same frame (`frame`, if given), and return it."""
    assert paths is not None
    frames = [int(row["frame"]) for row in complete_rows(paths.session_df(0))]
    assert all(before < after for before, after in pairwise(frames))
    saved = int(state.load(paths.checkpoint(0, "last"))["policies"][0]["clock"]["frame"])
    assert (frames[-1] if frames else 0) == saved
    assert frame in (None, saved)
    return saved


class InlineJob:
    """A job of one Session in this process, without the analysis of a trial."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.folder, self.stop = spec, folder, Stop()
        self.events: list[Event] = []
        self.paths: RunPaths | None = None

    def run(self) -> SessionEnded:
        (end,) = run_inline(SessionsJob(self.spec, Plan(), 0, self._open, self.events.append, self.stop))
        return end

    def _open(self, backend: str) -> RunPaths:
        self.paths = new_run(self.folder, "small")
        return self.paths


# ---- killed processes


def check_kills(sampler: dict[str, Any], names: list[str], seed: int, quota: int, folder: Path, pools: list[TaskPool], capsys: Any) -> None:
    """Send SIGKILL to each of `names` at random moments, ready or not: all are restarted, and no rollout is lost."""
    rng, most = random.Random(seed), max(names.count(name) for name in names)
    moments = sorted((int(rng.uniform(0.05, 0.5) * quota), rng.uniform(0, 0.1), name) for name in names)
    trial = Trial(worker_spec(env={"max_frame": quota}, sampler=sampler, meta={"max_restart": most}), folder)

    def kill(trial: Trial) -> None:
        killed: set[int] = set()
        for frame, delay, name in moments:
            until(lambda: frame_of(trial.paths, 0) >= frame)  # noqa: B023
            time.sleep(delay)
            until(lambda: child_of(pools[0], name).pid not in killed, seconds=SOON)  # noqa: B023
            killed.add(pid := child_of(pools[0], name).pid)
            os.kill(pid, signal.SIGKILL)

    assert not run_while(trial, kill).get("failed")
    pattern = r"^(.+) killed by SIGKILL .*; restarting it \((\d+) of (\d+)\)$"
    notices = re.findall(pattern, capsys.readouterr().out, re.MULTILINE)
    assert sorted(notices) == sorted((name, str(count + 1), str(most)) for name in set(names) for count in range(names.count(name)))
    check_saved(trial.paths, quota)
    if not sampler["async_rl"]:  # every round was complete and collected by the latest policy
        assert trial.paths is not None
        rows = complete_rows(trial.paths.session_df(0))
        assert int(rows[-1]["opt_step"]) == quota // 64 * 2
        assert {float(row["lag_max"]) for row in rows if row["lag_max"]} == {0.0}
        assert state.load(trial.paths.checkpoint(0, "last"))["source"]["restarts"] == len(names)


def test_killed_processes_are_restarted(tmp_path: Path, pools: list[TaskPool], capsys: Any) -> None:
    """Two workers and the inference server are killed and restarted, with synchronous collection."""
    names = ["rollout worker 0", "inference server", "rollout worker 1"]
    check_kills({"async_rl": False} | CENTRAL, names, 3, 3200, tmp_path, pools, capsys)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("async_rl", [False, True])
@pytest.mark.parametrize("inference", ["local", "central"])
def test_processes_killed_at_many_moments(async_rl: bool, inference: str, tmp_path: Path, pools: list[TaskPool], capsys: Any) -> None:
    names = ["rollout worker 0", "rollout worker 1", "rollout worker 0", "rollout worker 1"]
    names += ["inference server" if inference == "central" else "rollout worker 0"]
    check_kills({"async_rl": async_rl, "inference": inference}, names, 7, 19200, tmp_path, pools, capsys)


def fails(spec: Spec, folder: Path, action: Callable[[Trial], None] = lambda trial: None) -> Trial:
    """Run a trial whose only Session fails, and return the trial."""
    trial = Trial(spec, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "propagate", False)  # pytest would keep the traceback and thereby the Session
        with pytest.raises(TrialFailed, match="session 0 failed: "):
            run_while(trial, action)
    return trial


def test_a_worker_that_is_killed_too_often(tmp_path: Path, pools: list[TaskPool], capsys: Any) -> None:
    """The run ends, and its progress is saved."""
    killed = []

    def kill(trial: Trial) -> None:
        until(lambda: frame_of(trial.paths, 0) >= 500)
        os.kill(child_of(pools[0], "rollout worker 0").pid, signal.SIGKILL)
        killed.append(time.monotonic())

    trial = fails(worker_spec(env=ENDLESS, meta={"max_restart": 0, "save_interval": 3600}, sampler=ONE_WORKER), tmp_path, kill)
    assert time.monotonic() < killed[0] + SOON
    assert check_saved(trial.paths) >= 500
    assert trial.paths is not None
    assert trial.paths.timeline(0).is_file()
    out = capsys.readouterr().out
    assert "session 0 failed: rollout worker 0 killed by SIGKILL (often: out of memory) after 0 restarts (meta.max_restart)" in out
    assert "Traceback" not in out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "text"),
    [("step", 'raise ValueError("the robot fell over")'), ("die", "ended with exit code 3 after 1 restart (meta.max_restart)")],
)
def test_an_env_that_fails(fault: str, text: str, tmp_path: Path, capsys: Any) -> None:
    """An exception of the env is reported as the cause; a process that ends without a message is restarted first."""
    begin = time.monotonic()
    trial = fails(worker_spec(env=FAULTY | {"fault": fault, "after": 9}, sampler=ONE_WORKER), tmp_path)
    assert time.monotonic() < begin + SOON
    assert check_saved(trial.paths) == 0
    out = capsys.readouterr().out
    assert text in out
    assert re.search(r"session 0 failed: rollout worker \d (failed|ended)", out)
    assert ("Traceback" in out) == (fault == "step")
    assert "workers/task_pool.py" not in out, "where the learner received it is no cause"
    assert ("ended with exit code 3; restarting it (1 of 1)" in out) == (fault == "die")


def test_an_env_that_cannot_be_built_in_a_worker(tmp_path: Path) -> None:
    """An env that cannot be built in a worker is a spec error, and no file is written."""
    with pytest.raises(
        SpecError, match=r"cannot build tests\.env\.toys:Faulty-v0 with its arguments fault: OSError: no licence in this process"
    ):
        Trial(worker_spec(env=FAULTY | {"fault": "make"}, sampler=ONE_WORKER), tmp_path).run()
    assert list(tmp_path.iterdir()) == []


# ---- the trial is killed or interrupted


def endless(sessions: int, **sections: Any) -> dict[str, Any]:
    """Return the body of a spec that trains endlessly, with one worker per Session."""
    meta = {"max_session": sessions, "save_interval": 3600, "eval_episodes": 0}
    spec = worker_spec(env=ENDLESS | sections.get("env", {}), meta=meta, sampler=ONE_WORKER | sections.get("sampler", {}))
    body: dict[str, Any] = dump_spec(spec)["small"]
    return body


def simulators_in(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir() if file.name.isdecimal()]


@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_trial_is_killed(sessions: int, command: Callable[..., Command], tmp_path: Path) -> None:
    """No process remains, including the envs' simulators, and no temporary file. Sessions in child processes save themselves."""
    (simulators := tmp_path / "simulators").mkdir()
    env = {"name": f"{ENVS}:RunsSimulator-v0", "backend": "sync", "folder": str(simulators), "tidy": False}
    run = command(endless(sessions, env=env, sampler=CENTRAL | {"async_rl": True}))
    process = run.start("--jobs", "2")
    until(run.has_rows(sessions), process)
    assert len([pid for pid in simulators_in(simulators) if alive(pid)]) == (4 + 1) * sessions  # includes the one of the trial step
    process.kill()
    run.leaves_nothing(SOON)
    assert not [pid for pid in simulators_in(simulators) if alive(pid)]
    for index in range(sessions if sessions > 1 else 0):
        check_saved_session(run.paths, index)


def check_saved_session(paths: RunPaths, index: int) -> None:
    assert 0 < state.load(paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"] == frame_of(paths, index)


def test_a_session_is_killed(command: Callable[..., Command]) -> None:
    """Its workers and its inference server end with it; the other Session is saved on Ctrl-C."""
    run = command(endless(2, sampler=CENTRAL))
    process = run.start("--jobs", "2")
    until(run.has_rows(2), process)
    sessions = {int(log[1]): pid for pid in run.processes() if (log := re.search(r"_s(\d)\.log$", os.readlink(f"/proc/{pid}/fd/1")))}
    everything = len(run.processes())
    os.kill(sessions[0], signal.SIGKILL)
    until(lambda: len(run.processes()) == everything - 3, process, SOON)
    os.killpg(process.pid, signal.SIGINT)
    out = process.communicate(timeout=PATIENCE)[0]
    assert "session 0 failed: killed by SIGKILL" in out
    check_saved_session(run.paths, 1)
    run.leaves_nothing(SOON)


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_beside_it_alone(command: Callable[..., Command], tmp_path: Path) -> None:
    """Ctrl-C in one run does not affect another run, which finishes in this process."""
    run = command(endless(1, sampler=CENTRAL | {"async_rl": True}))
    process = run.start()
    until(run.has_rows(1), process)
    beside = InlineJob(worker_spec(sampler=ONE_WORKER), tmp_path / "beside")
    assert beside.run() == SessionEnded(0, "done")
    check_saved(beside.paths, 1024)
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: run.paths.checkpoint(0, "last").exists(), seconds=SOON)
    out = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 130, out
    assert "Traceback" not in out
    check_saved_session(run.paths, 0)
    run.leaves_nothing(SOON)


# ---- envs that start programs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tidy", [True, False])
def test_an_env_ends_its_simulator_and_waits_for_it(tidy: bool, tmp_path: Path) -> None:
    """In the processes of an env, signals are neither blocked nor ignored; processes that the env leaves behind end with the worker."""
    (simulators := tmp_path / "simulators").mkdir()
    env = {"name": f"{ENVS}:RunsSimulator-v0", "backend": "sync", "folder": str(simulators), "tidy": tidy, "max_frame": 256}
    begin = time.monotonic()
    assert InlineJob(worker_spec(env=env), tmp_path / "data").run() == SessionEnded(0, "done")
    assert time.monotonic() < begin + SOON
    assert len(simulators_in(simulators)) == 2 * (4 + 1)  # includes those of the trial step
    until(lambda: not [pid for pid in simulators_in(simulators) if alive(pid)], seconds=2.0)
    assert len(list(simulators.glob("*.closed"))) == (4 + 1 if tidy else 0)


# ---- envs that block


def blocking_spec(folder: Path, where: str, times: int = 1000, **sections: Any) -> Spec:
    env = {"name": f"{ENVS}:Blocking-v0", "backend": "sync", "folder": str(folder), "where": where, "times": times, "max_frame": 256}
    meta = {"stall_notice": 0.3, "stall_limit": 3.0, "log_frequency": 64} | sections.get("meta", {})
    return worker_spec(env=env | sections.get("env", {}), meta=meta, sampler=ONE_WORKER | sections.get("sampler", {}))


WHERE = {"constructor": "building", "reset": "resetting", "step": "stepping"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", WHERE)
def test_a_worker_that_blocks_is_restarted(where: str, tmp_path: Path, caplog: Any) -> None:
    """A worker that blocks once is restarted, and the run is complete."""
    (blocked := tmp_path / "blocked").mkdir()
    job = InlineJob(blocking_spec(blocked, where, times=1), tmp_path / "data")
    assert job.run() == SessionEnded(0, "done")
    check_saved(job.paths, 256)
    assert len(list(blocked.iterdir())) == 1
    notice = rf"rollout worker 0: no progress for \d s \({WHERE[where]}\)"
    restart = rf"rollout worker 0 made no progress for \d s \({WHERE[where]}; meta.stall_limit\); restarting it \(1 of 1\)"
    for text in (notice, restart):  # on a busy machine, other workers may also be slow briefly
        assert any(re.fullmatch(text, message) for message in caplog.messages), caplog.messages


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_worker_that_blocks_again_ends_the_run(where: str, tmp_path: Path) -> None:
    """The run fails with the cause, and its progress is saved."""
    (blocked := tmp_path / "blocked").mkdir()
    job = InlineJob(blocking_spec(blocked, where), tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "propagate", False)
        end = job.run()
    assert end.status == "failed"
    text = rf"rollout worker 0 made no progress for \d s \({WHERE[where]}; meta.stall_limit\) after 1 restart \(meta.max_restart\)"
    assert re.match(text, end.detail)
    if where == "step":  # otherwise nothing was learned
        assert check_saved(job.paths) == 2 * 64
    assert len(list(blocked.iterdir())) == 2


@pytest.mark.slow
def test_a_worker_whose_constructor_blocks_again(tmp_path: Path) -> None:
    """The error is reported to the user, and no file is written."""
    (blocked := tmp_path / "blocked").mkdir()
    begin = time.monotonic()
    text = r"Blocking-v0 cannot be built: rollout worker 0 made no progress for \d s \(building; meta.stall_limit\) after 1 restart"
    with pytest.raises(SpecError, match=text):
        Trial(blocking_spec(blocked, "constructor"), tmp_path / "data").run()
    assert time.monotonic() < begin + SOON
    assert not (tmp_path / "data").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("where", "serial"), [("step", False), ("step", True), ("reset", False), ("constructor", False)])
def test_a_stop_while_a_worker_blocks(where: str, serial: bool, tmp_path: Path) -> None:
    """The run ends in bounded time; if training has begun, its last row and checkpoint are written."""
    (blocked := tmp_path / "blocked").mkdir()
    spec = blocking_spec(blocked, where, meta={"stall_limit": 60.0, "stall_notice": 30.0}, sampler={"serial_mode": serial})
    job, ended = InlineJob(spec, tmp_path / "data"), []
    job_patches = pytest.MonkeyPatch()
    job_patches.setattr("slm_lab.experiment.run.engine.STOP_GRACE", 0.5)

    def request() -> None:
        until(lambda: any(blocked.iterdir()))
        time.sleep(0.5)
        job.stop.requested = True
        ended.append(time.monotonic())

    thread = threading.Thread(target=request)
    thread.start()
    try:
        status = job.run().status
    except Interrupted:
        status = "stopped"
    finally:
        thread.join()
        job_patches.undo()
    assert status == "stopped"
    assert time.monotonic() < ended[0] + 15.0, "the round is waited for a few seconds, a blocked worker is not"
    if where == "step":
        assert check_saved(job.paths) == 64
    elif job.paths is not None:
        assert check_saved(job.paths) == 0


# ---- envs that return NaN or infinity


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["on-policy", "replay"])
def test_observations_that_are_not_finite(memory: str, open_session: Open) -> None:
    """Infinite numbers are clipped, and do not change the statistics. NaN is an error that names env and step."""
    sections = {} if memory == "on-policy" else {"algorithm": DQN, "memory": REPLAY, "sampler": {"async_rl": True, "serial_mode": True}}
    env = {"name": f"{ENVS}:NotFinite-v0", "backend": "sync", "max_frame": 1024, "normalize_obs": True}
    for rate in (1.0, 0.02):
        session = open_session(worker_spec(env=env | {"rate": rate}, **sections)).build()
        before = weights_of(session)
        session.run()
        after, stats = weights_of(session), session.learners[0].normalizers.state_dict()["obs_stats"]
        assert session.clock.frame >= 1024
        assert np.isfinite(after).all()
        assert np.isfinite([*stats["mean"], *stats["m2"]]).all()
        assert not np.array_equal(before, after)
        assert stats["count"] == 0 if rate == 1.0 else stats["count"] > 950, "only what is not finite is left out"
        for weights in source_of(session).arrays.weights:
            assert np.isfinite(weights._arrays["param"]).all()
    failing = open_session(worker_spec(env=env | {"rate": 0.0, "nan": 0.02}, **sections)).build()
    with pytest.raises((WorkerFailed, InvalidOutcome), match=r"NotFinite-v0, env \d+, (step \d+|reset): the observation contains nan"):
        failing.run()
