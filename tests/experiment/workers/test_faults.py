"""Whole trials with rollout workers, and what befalls their processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment import checkpoint
from slm_lab.experiment.engine.spawned import CommonFile
from slm_lab.experiment.observers import complete_rows
from slm_lab.experiment.paths import runs
from slm_lab.experiment.plan import TrialFailed
from slm_lab.experiment.sampler.process import WorkerProcess
from slm_lab.experiment.sampler.session import SampledSession
from slm_lab.experiment.trial import Trial
from slm_lab.lib.heap import common_file
from slm_lab.lib.log import logger
from slm_lab.spec.loader import dump_spec
from slm_lab.spec.spec import Spec
from tests.experiment.sampler.conftest import sampled
from tests.experiment.test_hogwild import Deed, command, frame_of, in_dev_shm, memfds, run_while
from tests.experiment.test_hogwild import workers as sessions
from tests.experiment.test_trial import Command, until

__all__ = ["command"]
_PATIENCE = 150.0
"""Seconds in which processes have begun on a machine with much else to do."""
_SOON = 10.0
CENTRAL = {"inference": "central"}
ALONE = {"num_workers": 1, "num_envs_per_worker": 4}
FAULTY = {"name": "tests.env.toys:Faulty-v0", "backend": "sync"}


def helpers(parent: int) -> set[int]:
    """Living rollout workers and inference processes of a learner: those of its children that print into memory."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and "memfd:slm_lab" in os.readlink(entry / "fd" / "1"):
                status = (entry / "status").read_text()
                if f"\nPPid:\t{parent}\n" in status and "State:\tZ" not in status:
                    found.add(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no common memory outlives the test's trial."""
    before, shared = memfds(), in_dev_shm(os.getpid())  # other tests of this process may have left some
    yield
    assert multiprocessing.active_children() == []
    assert set(in_dev_shm(os.getpid())) <= set(shared)
    gc.collect()
    assert memfds() <= before


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """Every process that was begun, in order."""
    begun: list[WorkerProcess] = []
    init = WorkerProcess.__init__

    def spy(self: WorkerProcess, *args: Any) -> None:
        init(self, *args)
        begun.append(self)

    monkeypatch.setattr(WorkerProcess, "__init__", spy)
    return begun


def random_kills(made: list[WorkerProcess], names: list[str], seed: int, quota: int) -> Deed:
    """SIGKILL each of `names` at a moment drawn at random, or whichever process has taken its place by then, ready or not."""
    rng = random.Random(seed)
    moments = sorted((int(rng.uniform(0.05, 0.5) * quota), rng.uniform(0, 0.3), name) for name in names)

    def deed(trial: Trial) -> None:
        for frame, delay, name in moments:
            until(lambda: frame_of(trial.paths, 0) >= frame, seconds=_PATIENCE)  # noqa: B023
            time.sleep(delay)
            until(lambda: newest(made, name).process.exitcode is None, seconds=_SOON)  # noqa: B023
            os.kill(newest(made, name).process.pid or 0, signal.SIGKILL)

    return deed


def newest(made: list[WorkerProcess], name: str) -> WorkerProcess:
    return next(one for one in reversed(made) if one.name == name)


def check_complete(trial: Trial) -> list[dict[str, str]]:
    """Table and checkpoint run to the last frame."""
    assert trial.paths is not None
    rows = complete_rows(trial.paths.session_df(0))
    frames = [int(row["frame"]) for row in rows]
    assert all(before < after for before, after in pairwise(frames))
    saved = checkpoint.load(trial.paths.checkpoint(0, "last"))["clock"]
    assert frames[-1] == saved["frame"] == trial.spec.env.max_frame
    return rows


def check_replaced(said: str, names: list[str], most: int) -> None:
    """A notice for each that was killed."""
    notices = re.findall(r"^(.+) killed by SIGKILL .*; a new process takes its place \((\d+) of (\d+)\)$", said, re.MULTILINE)
    assert sorted(notices) == sorted((name, str(count + 1), str(most)) for name in set(names) for count in range(names.count(name)))


def check_kills(
    sampler: dict[str, Any], names: list[str], seed: int, quota: int, folder: Path, made: list[WorkerProcess], capsys: Any
) -> None:
    most = max(names.count(name) for name in names)
    trial = Trial(sampled(env={"max_frame": quota}, sampler=sampler, meta={"max_restart": most}), folder)
    metrics = run_while(trial, random_kills(made, names, seed, quota))
    check_replaced(capsys.readouterr().out, names, most)
    assert not metrics.get("failed")
    rows = check_complete(trial)
    if not sampler["async_rl"]:  # every round was whole, and of the newest policy
        assert int(rows[-1]["opt_step"]) == quota // 64 * 2
        assert {float(row["lag_max"]) for row in rows if row["lag_max"]} == {0.0}


def test_killed_processes_are_replaced(tmp_path: Path, made: list[WorkerProcess], capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers and central inference, while they take turns with the learner."""
    check_kills({"async_rl": False} | CENTRAL, ["rollout worker 0", "inference", "rollout worker 1"], 3, 6400, tmp_path, made, capsys)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("async_rl", [False, True])
@pytest.mark.parametrize("inference", ["local", "central"])
def test_processes_killed_at_many_moments(
    async_rl: bool, inference: str, tmp_path: Path, made: list[WorkerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """Five kills each."""
    names = ["rollout worker 0", "rollout worker 1", "rollout worker 0", "rollout worker 1"]
    names += ["inference" if inference == "central" else "rollout worker 0"]
    check_kills({"async_rl": async_rl, "inference": inference}, names, 7, 19200, tmp_path, made, capsys)


def fails(spec: Spec, folder: Path, *deeds: Deed) -> tuple[Trial, float]:
    """Run a trial whose only Session fails. Returns it, and how long it took from when all processes had loaded what they need."""
    trial = Trial(spec, folder)
    begun: list[float] = []
    start = SampledSession.run

    def run(self: SampledSession, *args: Any) -> Any:
        ready = [one for one in self._processes if one.connection.poll(_PATIENCE)]  # says that it is ready, or why not
        assert len(ready) == len(self._processes)
        begun.append(time.monotonic())
        return start(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampledSession, "run", run)
        patch.setattr(logger, "propagate", False)  # pytest would keep the traceback, and the Session with it
        with pytest.raises(TrialFailed, match="1 of 1 Sessions failed: 0"):
            run_while(trial, *deeds)
    return trial, time.monotonic() - begun[0]


def check_saved(trial: Trial) -> int:
    """The frame of the checkpoint, where the table ends too."""
    assert trial.paths is not None
    frame = int(checkpoint.load(trial.paths.checkpoint(0, "last"))["clock"]["frame"])
    assert frame == frame_of(trial.paths, 0)
    assert trial.paths.timeline(0).is_file()
    return frame


def test_a_worker_that_is_killed_too_often(tmp_path: Path, made: list[WorkerProcess], capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends with what it has learned saved."""
    waited = []

    def deed(trial: Trial) -> None:
        until(lambda: frame_of(trial.paths, 0) >= 500, seconds=_PATIENCE)
        os.kill(newest(made, "rollout worker 0").process.pid or 0, signal.SIGKILL)
        waited.append(time.monotonic())

    spec = sampled(env={"max_frame": 10**9}, meta={"max_restart": 0, "save_interval": 3600}, sampler=ALONE)
    trial, _ = fails(spec, tmp_path, deed)
    assert time.monotonic() < waited[0] + _SOON
    assert check_saved(trial) >= 500
    said = capsys.readouterr().out
    assert "session 0 failed: rollout worker 0 killed by SIGKILL (often: out of memory), after 0 new processes (meta.max_restart)" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("make", 'raise OSError("no licence in this process")'),
        ("step", 'raise ValueError("the robot fell over")'),
        ("die", "ended with exit code 3, after 1 new process (meta.max_restart)"),
    ],
)
def test_an_env_that_fails(fault: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial, seconds = fails(sampled(env=FAULTY | {"fault": fault}, sampler=ALONE), tmp_path)
    assert seconds < (_SOON if fault != "die" else _PATIENCE)
    said = capsys.readouterr().out
    assert says in said
    assert re.search(r"session 0 failed: rollout worker \d (failed|ended)", said)
    assert ("Traceback" in said) == (fault != "die")
    assert "sampler/crew.py" not in said, "where the learner heard of it is no cause"
    if fault != "make":
        assert check_saved(trial) == 0
    if fault == "die":
        assert "ended with exit code 3; a new process takes its place (1 of 1)" in said


def endless(sessions: int, **sampler: Any) -> dict[str, Any]:
    """The body of a spec without end, with Sessions of one worker each."""
    meta = {"max_session": sessions, "save_interval": 3600}
    spec = sampled(env={"max_frame": 10**9}, meta=meta, sampler=ALONE | sampler)
    body: dict[str, Any] = dump_spec(spec)["small"]
    return body


def begun(run: Command, sessions: int) -> bool:
    """All Sessions have written rows."""
    return bool(runs(run.folder / "data", "small")) and min(frame_of(run.paths, index) for index in range(sessions)) > 0


@pytest.mark.timeout(400)
def test_learners_are_killed(command: Callable[..., Command]) -> None:
    """Their workers and inference processes end with them, and the trial says so."""
    run = command(endless(2, **CENTRAL))
    process = run.start("--jobs", "2")
    until(lambda: begun(run, 2), process, _PATIENCE)
    learners = sessions(process.pid)
    assert sorted(learners) == [0, 1]
    for learner in learners.values():
        theirs = helpers(learner)
        assert len(theirs) == 2
        assert [in_dev_shm(one) for one in (learner, *theirs)] == [[]] * 3
        os.kill(learner, signal.SIGKILL)
        until(lambda: not theirs & set(run.processes()), seconds=_SOON)  # noqa: B023
    said = process.communicate(timeout=_PATIENCE)[0]
    assert process.returncode == 1, said
    assert [f"session {index} failed: killed by SIGKILL" in said for index in (0, 1)] == [True, True]
    assert said.splitlines()[-1] == "2 of 2 Sessions failed: 0, 1"
    assert run.processes() == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_parent_is_killed(count: int, command: Callable[..., Command]) -> None:
    """Of two Sessions, learners in processes of their own save themselves; they and their workers end."""
    run = command(endless(count, async_rl=True))
    process = run.start("--jobs", "2")
    until(lambda: begun(run, count), process, _PATIENCE)
    assert len(run.processes()) > count
    process.kill()
    until(lambda: run.processes() == [], seconds=_SOON)
    for index in range(count if count > 1 else 0):
        frame = checkpoint.load(run.paths.checkpoint(index, "last"))["clock"]["frame"]
        assert 0 < frame == frame_of(run.paths, index)


@pytest.mark.timeout(400)
def test_ctrl_c_to_one_of_two_runs_beside_each_other(command: Callable[..., Command], tmp_path: Path) -> None:
    """The other one, in this process, runs to its end."""
    run = command(endless(1, **CENTRAL, async_rl=True))
    process = run.start()
    until(lambda: begun(run, 1), process, _PATIENCE)
    assert len(helpers(process.pid)) == 2
    beside = Trial(sampled(env={"max_frame": 1024}, sampler=ALONE), tmp_path / "beside")
    beside.run()
    check_complete(beside)
    check_ctrl_c(run, process)


def check_ctrl_c(run: Command, process: subprocess.Popen[str]) -> None:
    at = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: run.paths.checkpoint(0, "last").exists(), seconds=_SOON)
    until(lambda: helpers(process.pid) == set(), seconds=max(0.0, at + _SOON - time.monotonic()))
    said = process.communicate(timeout=_PATIENCE)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert 0 < checkpoint.load(run.paths.checkpoint(0, "last"))["clock"]["frame"] == frame_of(run.paths, 0)
    assert run.processes() == []


def test_the_last_lines_of_a_process_that_printed_much() -> None:
    """What is shown of a dead one is its end, not its beginning."""
    process = WorkerProcess.__new__(WorkerProcess)
    process.process = multiprocessing.Process()
    process.process._popen = None  # type: ignore[attr-defined]
    process.printed = os.memfd_create("test")
    for number in range(20_000):
        os.write(process.printed, f"{number}: {'x' * 100}\n".encode())
    process.how_it_ended = lambda: "ended"  # type: ignore[method-assign]
    how, printed = process.death()
    os.close(process.printed)
    assert how == "ended"
    assert [line.partition(":")[0] for line in printed.split("\n")[1:]] == [str(number) for number in range(19_980, 20_000)]


def test_what_a_process_prints_is_kept_in_bounded_memory() -> None:
    memory = common_file()
    process = WorkerProcess(0, CommonFile(memory))
    try:
        os.write(process.printed, b"x\n" * 2**20)
        os.write(process.printed, b"the last before\n")
        assert list(process.messages()) == []
        assert os.fstat(process.printed).st_size == 2**16
        os.write(process.printed, b"and on\n")
        assert process.death()[1].endswith("\nx\nthe last before\nand on")
    finally:
        process.kill()
        os.close(memory)
