"""Tests of one net trained by several Sessions, each in a separate process: whole trials, and processes that are killed or interrupted."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.experiment.execute.local.local_executor import LocalTask
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import DataMode, RunPaths, new_run
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.plan import TrialFailed
from slm_lab.experiment.run import engine
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.session.session_process import make_shared_arrays
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.commands import Command, Deed, alive, frame_of, run_while, session_processes, until

HOLDER = """
import sys, time
from slm_lab.lib.store import SharedArrays
store = SharedArrays(int(sys.argv[1]), 1, 2, synced=True, locked=True)
with store.hold_lock("statistics"), store.updating():
    print("inside", flush=True)
    time.sleep(600)
"""


def body(mode: str = "synced", *, frames: int = 2000, **sections: Any) -> dict[str, Any]:
    """Return the spec body of two Sessions with `frames` each, A3C for "synced" and DQN for "shared"; `sections` override single keys."""
    net = {"name": "MLPNet", "hid_layers": [16, 16], "hid_layers_activation": "tanh", "optim_spec": {"name": "GlobalAdam", "lr": 0.002}}
    a3c = {"algorithm": {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16}, "memory": {"name": "OnPolicyBatchReplay"}}
    dqn = {
        "algorithm": {
            "name": "DQN",
            "action_policy": "epsilon_greedy",
            "explore_var_spec": {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "start_step": 0, "end_step": 1000},
            "training_frequency": 4,
            "training_start_step": 100,
        },
        "memory": {"name": "Replay", "batch_size": 32, "max_size": 2000},
    }
    meta = {"max_session": 2, "log_frequency": 200, "random_seed": 5, "distributed": mode, "save_interval": 0.5} | sections.get("meta", {})
    return {
        "agent": {"name": "agent", **(a3c if mode == "synced" else dqn), "net": net},
        "env": {"name": "CartPole-v1", "num_envs": 2, "max_frame": frames * meta["max_session"]} | sections.get("env", {}),
        "meta": meta,
    }


def spec_of(mode: str = "synced", **sections: Any) -> Spec:
    return Spec.model_validate({"name": "small", **body(mode, **sections)})


# ---- looking at processes and files


def memfds(process: int | str = "self") -> set[int]:
    """Return the inodes of the shared memory that a process has open."""
    found = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if "memfd:slm_lab" in target or (not has_feature("memfd") and re.search(r"/#\d+ \(deleted\)$", target)):
                found.add(entry.stat().st_ino)
    return found


def in_dev_shm(process: int) -> list[str]:
    """Return the mappings of named shared memory of a process, which would remain if all processes were killed."""
    return [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "/dev/shm/" in line]


def holds_update_lock(process: int) -> bool:
    """Return whether a stopped process holds the lock of meta.hogwild_lock."""
    return re.search(rf"POSIX .* WRITE {process} \S+ 0 0$", Path("/proc/locks").read_text(), re.MULTILINE) is not None


def table(paths: RunPaths, index: int) -> list[dict[str, float | None]]:
    """Return a Session's rows, after a check that each row is complete and that no count decreases or restarts."""
    header, *lines = csv.reader(paths.session_df(index).read_text().splitlines())
    assert header.count("frame") == 1
    assert [line for line in lines if len(line) != len(header) or line == header] == []
    rows = [{name: float(cell) if cell else None for name, cell in zip(header, line, strict=True)} for line in lines]
    assert all(before["frame"] < after["frame"] for before, after in pairwise(rows))  # type: ignore[operator]
    for column in ("epi", "t", "opt_step", "wall_t", "global_frame"):
        values = [row[column] for row in rows]
        assert values == sorted(values), (column, values)  # type: ignore[type-var]
    rewards: list[float] = []
    for row in rows:
        if row["total_reward"] is not None:
            rewards.append(row["total_reward"])
        expected = fmean(rewards[-100:]) if rewards else None
        assert row["total_reward_ma"] == (expected and pytest.approx(expected, rel=1e-6)), f"at frame {row['frame']}"
    return rows


def check_complete(trial: Trial, sessions: Sequence[int] = (0, 1)) -> None:
    """Check that the tables and the checkpoints of `sessions` reach their number of frames."""
    quota = trial.spec.session_frames
    for index in sessions:
        assert table(trial.paths, index)[-1]["frame"] == quota
        assert state.load(trial.paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"] == quota
    ends = [table(trial.paths, index)[-1]["global_frame"] for index in sessions]
    if len(sessions) == trial.spec.meta.max_session:
        assert max(ends) == quota * len(sessions)  # type: ignore[type-var]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Yield the processes that a trial in this process starts, by the Session's name.

    After the test, no such process and no shared memory may be left.
    """
    before = memfds()
    started: dict[str, int] = {}
    pids: list[int] = []
    launch = LocalTask.start

    def start(self: LocalTask, *arguments: Any) -> None:
        launch(self, *arguments)
        started[self.name] = self.pid
        pids.append(self.pid)

    monkeypatch.setattr(LocalTask, "start", start)
    yield started
    assert [pid for pid in pids if alive(pid)] == []
    assert memfds() <= before


def pid_of(trial: Trial, index: int) -> int:
    """Return the process of a Session that has begun, or 0 if there is none."""
    return session_processes(trial.paths).get(index, 0)


# ---- actions during a run


def kill_at(victim: int, frames: Sequence[int], delays: Sequence[float]) -> Deed:
    """Return a function that kills Session `victim` with SIGKILL after each of `frames` and a delay, even before its new process begins."""

    def deed(trial: Trial) -> None:
        killed = [0]
        for frame, delay in zip(frames, delays, strict=True):
            until(lambda: frame_of(trial.paths, victim) >= frame)  # noqa: B023
            until(lambda: pid_of(trial, victim) not in killed)
            time.sleep(delay)
            killed.append(pid_of(trial, victim))
            os.kill(killed[-1], signal.SIGKILL)

    return deed


def random_kills(seed: int, count: int, quota: int) -> list[Deed]:
    """Return functions that kill Sessions at `count` random moments, which depend on the seed."""
    rng = random.Random(seed)
    moments = sorted((rng.randrange(2), int(rng.uniform(0.05, 0.5) * quota), rng.uniform(0, 0.3)) for _ in range(count))
    by_victim = [[moment for moment in moments if moment[0] == victim] for victim in range(2)]
    return [kill_at(victim, [m[1] for m in those], [m[2] for m in those]) for victim, those in enumerate(by_victim) if those]


# ---- whole trials


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("children")
@pytest.mark.parametrize(("mode", "sessions"), [("shared", 2), pytest.param("synced", 2, marks=pytest.mark.slow), ("synced", 1)])
def test_a_trial(mode: str, sessions: int, tmp_path: Path) -> None:
    trial = Trial(spec_of(mode, frames=1000, env={"max_frame": 995 * sessions}, meta={"max_session": sessions}), tmp_path)
    metrics = trial.run()
    assert trial.spec.session_frames == 996  # of 995, whole steps of two envs
    check_complete(trial, range(sessions))
    assert metrics["sessions"] == sessions
    assert not metrics.get("failed")
    assert all(trial.paths.session_metrics(index).is_file() for index in range(sessions))


def check_kills(trial: Trial, kills: int, deeds: Sequence[Deed], said: Callable[[], str]) -> None:
    metrics = run_while(trial, *deeds)
    check_complete(trial)
    assert metrics["sessions"] == 2
    assert not metrics.get("failed")
    notices = re.findall(r"^session (\d) killed by SIGKILL .*; restarting it \((\d+) of (\d+)\)$", said(), re.MULTILINE)
    assert len(notices) == kills
    for index in "01":
        count = sum(one[0] == index for one in notices)
        assert [int(one[1]) for one in notices if one[0] == index] == [*range(1, count + 1)]
    for session in range(2):
        begun = trial.paths.session_log(session).read_text().count("begins: index")
        assert 1 <= begun <= 1 + sum(one[0] == str(session) for one in notices)


@pytest.mark.usefixtures("children")
@pytest.mark.timeout(600)
def test_killed_sessions_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sessions are killed three times at random moments in the first eighth, with and without a checkpoint to continue from."""
    trial = Trial(spec_of(frames=16_000, meta={"max_restart": 3, "rigorous_eval": 1, "eval_frequency": 4000}), tmp_path)
    check_kills(trial, 3, random_kills(2, 3, 4000), lambda: capsys.readouterr().out)


@pytest.mark.slow
def test_a_session_killed_before_training_begins_is_replaced(
    children: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial(spec_of(), tmp_path)

    def deed(trial: Trial) -> None:
        until(lambda: "session 0" in children)
        assert trial.paths is None
        os.kill(children["session 0"], signal.SIGKILL)

    check_kills(trial, 1, [deed], lambda: capsys.readouterr().out)


@pytest.mark.usefixtures("children")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synced", "shared"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lock", [False, True])
def test_sessions_killed_at_many_moments(mode: str, seed: int, lock: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sessions are killed five times; with a checkpoint after every update, some kills happen while a checkpoint is written."""
    interval = (0.0, 0.5, 3600.0)[seed % 3]
    trial = Trial(spec_of(mode, frames=10_000, meta={"max_restart": 5, "hogwild_lock": lock, "save_interval": interval}), tmp_path)
    check_kills(trial, 5, random_kills(100 + seed, 5, 10_000), lambda: capsys.readouterr().out)


@pytest.mark.usefixtures("children")
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system does not list its locks")
@pytest.mark.slow
def test_the_holder_of_the_lock_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel releases the lock of a dead process, so the other Session must continue within 10 seconds."""
    trial = Trial(spec_of(frames=6000, meta={"hogwild_lock": True}), tmp_path)
    waited = []

    def deed(trial: Trial) -> None:
        until(lambda: min(frame_of(trial.paths, index) for index in (0, 1)) >= 200)
        holder = pid_of(trial, 0)
        while True:
            os.kill(holder, signal.SIGSTOP)
            time.sleep(0.002)
            if holds_update_lock(holder):
                break
            os.kill(holder, signal.SIGCONT)
            time.sleep(random.uniform(0.001, 0.005))
        stands = frame_of(trial.paths, 1)
        os.kill(holder, signal.SIGKILL)
        begin = time.monotonic()
        until(lambda: frame_of(trial.paths, 1) > stands or stands == 6000, seconds=10.0)
        waited.append(time.monotonic() - begin)

    check_kills(trial, 1, [deed], lambda: capsys.readouterr().out)
    assert waited[0] < 10


def test_a_dead_process_holds_no_lock(fd: int) -> None:
    store = SharedArrays(fd, 0, 2, synced=True, locked=True)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "inside\n"
        with store.hold_lock("update", wait=False) as mine:
            assert not mine
        holder.kill()
    begin = time.monotonic()
    with store.updating(), store.hold_lock("statistics"):
        assert time.monotonic() < begin + 1


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("max_restart", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_session_that_is_killed_too_often_fails(max_restart: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(spec_of(meta={"max_restart": max_restart}), tmp_path)
    moments = [200, 400][: max_restart + 1]
    with pytest.raises(TrialFailed, match="1 of 2 sessions failed: 0") as failed:
        run_while(trial, kill_at(0, moments, [0.0] * len(moments)))
    check_complete(trial, [1])
    assert (failed.value.metrics["sessions"], failed.value.metrics["failed"]) == (1, 1)
    said = capsys.readouterr().out
    assert said.count("restarting it") == max_restart
    assert "session 0 failed: killed by SIGKILL" in said


def endless(**meta: Any) -> dict[str, Any]:
    return body(frames=10**9, meta={"save_interval": 3600, **meta})


def test_the_parent_is_killed(command: Callable[..., Command]) -> None:
    """The Sessions save their state and end; no shared memory has a name that could be left behind."""
    run = command(endless())
    process = run.start()
    until(run.has_rows(2), process)
    sessions = session_processes(run.paths)
    assert sorted(sessions) == [0, 1]
    for session in sessions.values():
        assert memfds(session)
        assert in_dev_shm(session) == []
    process.kill()
    run.leaves_nothing(15.0)
    for index in (0, 1):
        frame = state.load(run.paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"]
        assert 0 < frame == table(run.paths, index)[-1]["frame"]


def check_interrupted(run: Command, process: subprocess.Popen[str], sessions: Sequence[int]) -> None:
    """Check that the checkpoint and the table of each of `sessions` end at the same frame."""
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    for index in sessions:
        frame = state.load(run.paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"]
        assert 0 < frame == table(run.paths, index)[-1]["frame"]
    assert run.paths.trial_graph("mean_returns", "png").is_file()
    run.leaves_nothing()


@pytest.mark.slow
def test_ctrl_c_while_a_session_is_replaced(command: Callable[..., Command]) -> None:
    run = command(endless())
    process = run.start()
    until(run.has_rows(2), process)
    killed = session_processes(run.paths)[0]
    before = set(run.processes())
    os.kill(killed, signal.SIGKILL)
    until(lambda: not set(run.processes()) <= before, process)
    os.killpg(process.pid, signal.SIGINT)
    check_interrupted(run, process, [1])
    assert table(run.paths, 0)
    assert json.loads(run.paths.trial_metrics().read_text())["sessions"] == 2


@pytest.mark.slow
def test_a_session_that_raises_is_not_replaced(command: Callable[..., Command], tmp_path: Path) -> None:
    fatal = {"name": "tests.experiment.fatal_env:Fatal-v0", "does": "ValueError", "after": 300, "folder": str(tmp_path), "copy": 3}
    run = command(body(env={**fatal, "num_envs": 1, "backend": "sync", "max_frame": 2000}))
    process = run.start()
    said = process.communicate()[0]
    assert process.returncode == 1, said
    assert "ValueError: the reason" in said
    assert "restarting" not in said
    failed = re.fullmatch(r"1 of 2 sessions failed: (\d)", said.splitlines()[-1])
    assert table(run.paths, 1 - int(failed[1]))[-1]["frame"] == 1000
    metrics = json.loads(run.paths.trial_metrics().read_text())
    assert (metrics["sessions"], metrics["failed"]) == (1, 1)
    run.leaves_nothing()


# ---- several Sessions in this process


def flat(session: Session) -> torch.Tensor:
    """Return the global weights as one vector."""
    trainer = session.agent.algorithm.trainer
    return trainer.flat.master


def sharing(spec: Spec, fd: int, index: int = 0) -> Session:
    return Session(spec, index, context=SessionContext(store=make_shared_arrays(spec, fd, index)))


def restarted(spec: Spec, fd: int, paths: RunPaths | None = None, sink: LocalSink | None = None) -> Session:
    """Return Session 0 as in the process that replaces one that died."""
    store = make_shared_arrays(spec, fd, 0, fresh=False)
    return Session(spec, 0, sink=sink, context=SessionContext(store=store, restart=1, resumed=paths))


def test_sessions_share_weights_and_differ_in_random_numbers(fd: int) -> None:
    """A restarted process keeps the weights and the count of frames, but has different random numbers."""
    spec = spec_of(frames=400)
    made = [sharing(spec, fd, index).build() for index in (0, 1)]
    initial = flat(made[0]).clone()
    assert torch.equal(flat(made[1]), initial)
    made[0].run()
    trained = flat(made[0]).clone()
    assert not torch.equal(trained, initial)
    made[1].close()
    made.append(restarted(spec, fd).build())
    assert torch.equal(flat(made[2]), trained)
    assert made[2].clock.frame == 400
    seeds = [session.parts.seeds(0) for session in made]
    for name in ("act", "update", "env"):
        assert len({getattr(one, name) for one in seeds}) == 3, name
    made[2].close()


@pytest.mark.parametrize("saved", [True, False])
def test_a_session_killed_after_its_last_frame(saved: bool, tmp_path: Path, fd: int) -> None:
    """The new process does nothing, adds no row, and has the counts of the old one, read from a checkpoint or from the table."""
    paths = new_run(tmp_path, "small")
    spec = spec_of(frames=400, meta={"rigorous_eval": 1, "eval_frequency": 300})
    old = sharing(spec, fd)
    old.run(LocalSink(paths))
    modes: tuple[DataMode, ...] = ("train", "eval")
    tables = [paths.session_df(0, mode).read_bytes() for mode in modes]
    if not saved:
        paths.checkpoint(0, "last").unlink()
    new = restarted(spec, fd, paths)
    assert new.run(LocalSink(paths)).frame == 400
    assert [paths.session_df(0, mode).read_bytes() for mode in modes] == tables
    assert (new.clock.epi, new.clock.t, new.clock.opt_step) == (old.clock.epi, old.clock.t, old.clock.opt_step)
    assert new.clock.t == 200
    assert new.clock.wall_t == pytest.approx(old.clock.wall_t, abs=0.5)  # counted since the old process began


def test_a_damaged_checkpoint_does_not_end_a_restarted_session(tmp_path: Path, caplog: pytest.LogCaptureFixture, fd: int) -> None:
    """The weights and counts are in shared memory, so the Session can continue without its checkpoint."""
    paths, spec = new_run(tmp_path, "small"), spec_of(frames=400)
    sharing(spec, fd).run(LocalSink(paths))
    path = paths.checkpoint(0, "last")
    assert isinstance(path, Path)
    path.write_bytes(path.read_bytes()[:300])
    caplog.clear()
    new = restarted(spec, fd, paths).build()
    assert [str(path) in message for message in caplog.messages] == [True]
    assert (new.clock.frame, new.clock.t) == (400, 200)
    new.close()


def test_a_restarted_session_reads_no_torn_line(tmp_path: Path, fd: int) -> None:
    """An incomplete last row is removed and written again when it is due, with the time since the first process began."""
    paths = new_run(tmp_path, "small")
    half, spec = spec_of(frames=200), spec_of(frames=400)
    killed = sharing(half, fd)
    killed.run(LocalSink(paths))
    killed.context.store.arrays["clock/started_moment"][0] -= 100  # type: ignore[union-attr]  # as if it had begun 100 s earlier
    paths.checkpoint(0, "last").unlink()
    header, row = paths.session_df(0).read_bytes().splitlines(keepends=True)
    paths.session_df(0).write_bytes(header + row.rstrip()[:-3])
    restarted(spec, fd, paths).run(LocalSink(paths))
    rows = table(paths, 0)
    assert [row["frame"] for row in rows] == [200, 400]
    assert rows[0]["wall_t"] >= 100  # type: ignore[operator]


def test_a_replay_memory_outlives_its_process(tmp_path: Path) -> None:
    """The replay memory is restored with meta.save_replay; otherwise the new process starts with an empty one."""
    for kept in (True, False):
        paths = new_run(tmp_path, "small")
        fd, spec = create_shared_file(), spec_of("shared", frames=400, meta={"save_replay": kept})
        old = sharing(spec, fd)
        old.run(LocalSink(paths))
        new = restarted(spec, fd, paths, sink=LocalSink(paths)).build()
        new.begin()
        assert new.agent.replay.seen == (old.agent.replay.seen if kept else 0)
        if kept:
            assert np.array_equal(new.agent.replay.columns["reward"], old.agent.replay.columns["reward"])
        new.close()
        os.close(fd)


# ---- memory


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize(("method", "there", "fits"), [("spawn", 2**30, 6), ("spawn", 2**20, 0), ("forkserver", 2**27, 4)])
def test_workers_that_do_not_fit_memory(method: str, there: int, fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "memory_bytes", lambda: there)
    monkeypatch.setattr(engine, "start_method", lambda: method)
    with pytest.raises(SpecError) as error:
        Trial(spec_of(meta={"max_session": 8}), tmp_path / "data").run()
    (problem,) = error.value.problems
    assert problem.path == "meta.max_session"
    assert problem.message.endswith(f" enough for {fits}")
    assert not (tmp_path / "data").exists()
