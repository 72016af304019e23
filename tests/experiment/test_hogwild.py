"""One net that several Sessions train, each in a process of its own: whole trials, and what befalls their processes."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.experiment import checkpoint
from slm_lab.experiment.engine import processes
from slm_lab.experiment.observers import COLUMNS, GLOBAL_COLUMNS, CSVWriter, Row, complete_rows
from slm_lab.experiment.observers.rows import Recorder, Table
from slm_lab.experiment.paths import DataMode, RunPaths, new_run, runs
from slm_lab.experiment.plan import TrialFailed
from slm_lab.experiment.session import Session
from slm_lab.experiment.trial import Trial
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import CommonHeap, common_file
from slm_lab.lib.records import Metrics
from slm_lab.spec.base import SpecError
from slm_lab.spec.spec import Spec
from tests.experiment.test_trial import Command, until

Deed = Callable[[Trial], None]
_PATIENCE = 150.0
"""Seconds in which Sessions have begun on a machine with much else to do."""

FRAGILE = '''
"""CartPole of which one copy, in whichever Session, raises at step 300."""
import os
from pathlib import Path
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Fragile(CartPoleEnv):
    def __init__(self, mark="raises", **kwargs):
        super().__init__(**kwargs)
        self.left = -1
        try:
            os.close(os.open(Path(mark), os.O_CREAT | os.O_EXCL))
            self.left = 300
        except FileExistsError:
            pass

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("the pole is broken")
        return super().step(action)

gym.register("Fragile-v0", entry_point=Fragile, max_episode_steps=500)
'''

HOLDER = """
import sys, time
from slm_lab.lib.heap import CommonHeap
heap = CommonHeap(int(sys.argv[1]), 1, 2, synced=True, locked=True)
with heap.exclusive("statistics"), heap.update():
    print("inside", flush=True)
    time.sleep(600)
"""


def body(mode: str = "synced", *, frames: int = 2000, **sections: Any) -> dict[str, Any]:
    """A spec of two Sessions with `frames` each: A3C if "synced", DQN if "shared"; `sections` hold what differs."""
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


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Command]]:
    made: list[Command] = []

    def make(spec_body: dict[str, Any]) -> Command:
        made.append(Command(tmp_path, spec_body))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes():
            os.kill(process, signal.SIGKILL)


# ---- looking at processes and files


def workers(parent: int) -> dict[int, int]:
    """The living process of each Session, by its index; told by the log that it prints to."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdecimal()
                and f"\nPPid:\t{parent}\n" in (status := (entry / "status").read_text())
                and "State:\tZ" not in status
            ):
                log = re.search(r"(?:_s(\d+)|/(\d+)_\d+)\.log$", os.readlink(entry / "fd" / "1"))
                if log:
                    found[int(log[1] or log[2])] = int(entry.name)
    return found


def memfds(process: int | str = "self") -> set[int]:
    """Inodes of the common memory that a process has open."""
    found = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            if "memfd:slm_lab" in os.readlink(entry):
                found.add(entry.stat().st_ino)
    return found


def in_dev_shm(process: int) -> list[str]:
    """What a process has of named shared memory, which would stay behind if all processes were killed."""
    return [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "/dev/shm/" in line]


def holds_update_lock(process: int) -> bool:
    """A process that is stopped holds the lock of meta.hogwild_lock."""
    return re.search(rf"POSIX .* WRITE {process} \S+ 0 0$", Path("/proc/locks").read_text(), re.MULTILINE) is not None


def frame_of(paths: RunPaths | None, index: int) -> int:
    """Frame of the last row of a table that is being written, 0 where there is none."""
    if paths is None or not paths.session_df(index).exists():
        return 0
    lines = paths.session_df(index).read_bytes().split(b"\n")[1:-1]
    return int(lines[-1].split(b",")[0]) if lines else 0


def table(paths: RunPaths, index: int) -> list[dict[str, float | None]]:
    """A Session's rows, after a check that each is whole and that nothing in them goes back or begins anew."""
    header, *lines = csv.reader(paths.session_df(index).read_text().splitlines())
    assert header.count("frame") == 1
    assert [line for line in lines if len(line) != len(header) or line == header] == []
    rows = [{name: float(cell) if cell else None for name, cell in zip(header, line, strict=True)} for line in lines]
    assert all(before["frame"] < after["frame"] for before, after in pairwise(rows))  # type: ignore[operator]
    for column in ("epi", "t", "opt_step", "wall_t", "global_frame"):
        values = [row[column] for row in rows]
        assert values == sorted(values), column  # type: ignore[type-var]
    rewards: list[float] = []
    for row in rows:
        if row["total_reward"] is not None:
            rewards.append(row["total_reward"])
        expected = fmean(rewards[-100:]) if rewards else None
        assert row["total_reward_ma"] == pytest.approx(expected, rel=1e-6), f"at frame {row['frame']}"
    return rows


def check_complete(trial: Trial, sessions: Sequence[int] = (0, 1)) -> None:
    """The tables of `sessions` run to their quota, the checkpoints too."""
    assert trial.paths is not None
    quota = trial.spec.session_frames
    for index in sessions:
        assert table(trial.paths, index)[-1]["frame"] == quota
        assert checkpoint.load(trial.paths.checkpoint(index, "last"))["clock"]["frame"] == quota
    ends = [table(trial.paths, index)[-1]["global_frame"] for index in sessions]
    if len(sessions) == trial.spec.meta.max_session:
        assert max(ends) == quota * len(sessions)  # type: ignore[type-var]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process and no common memory outlives the test's trial, which runs in this process."""
    before = memfds()
    yield
    assert workers(os.getpid()) == {}
    assert memfds() <= before


def run_while(trial: Trial, *deeds: Deed) -> dict[str, Any]:
    """Run the trial in this process, while each deed is done in a thread."""
    with ThreadPoolExecutor(max(1, len(deeds))) as pool:
        done = [pool.submit(deed, trial) for deed in deeds]
        try:
            return trial.run()
        finally:
            for one in done:
                one.result()


# ---- deeds


def kill_at(victim: int, frames: Sequence[int], delays: Sequence[float]) -> Deed:
    """SIGKILL Session `victim` some time after each of `frames`, whether its new process has begun by then or not."""

    def deed(trial: Trial) -> None:
        killed = [0]
        for frame, delay in zip(frames, delays, strict=True):
            until(lambda: frame_of(trial.paths, victim) >= frame, seconds=_PATIENCE)  # noqa: B023
            until(lambda: workers(os.getpid()).get(victim, killed[-1]) not in killed, seconds=_PATIENCE)
            time.sleep(delay)
            killed.append(workers(os.getpid())[victim])
            os.kill(killed[-1], signal.SIGKILL)

    return deed


def random_kills(seed: int, count: int, quota: int) -> list[Deed]:
    """`count` moments drawn anew for each seed."""
    rng = random.Random(seed)
    moments = sorted((rng.randrange(2), int(rng.uniform(0.05, 0.5) * quota), rng.uniform(0, 0.3)) for _ in range(count))
    by_victim = [[moment for moment in moments if moment[0] == victim] for victim in range(2)]
    return [kill_at(victim, [m[1] for m in those], [m[2] for m in those]) for victim, those in enumerate(by_victim) if those]


# ---- whole trials


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("mode", "sessions"), [("synced", 2), ("shared", 2), ("synced", 1)])
def test_a_trial(mode: str, sessions: int, tmp_path: Path) -> None:
    trial = Trial(spec_of(mode, frames=1000, env={"max_frame": 995 * sessions}, meta={"max_session": sessions}), tmp_path)
    before, seen = memfds(), set()

    def look(trial: Trial) -> None:
        until(lambda: sorted(workers(os.getpid())) == [*range(sessions)])
        seen.update(memfds() - before)

    metrics = run_while(trial, look)
    assert trial.spec.session_frames == 996  # of 995, whole steps of two envs
    check_complete(trial, range(sessions))
    assert len(seen) == 1
    assert metrics["sessions"] == sessions
    assert not metrics.get("failed")
    assert trial.paths is not None
    assert all(trial.paths.session_metrics(index).is_file() for index in range(sessions))


def check_kills(trial: Trial, kills: int, deeds: Sequence[Deed], said: Callable[[], str]) -> None:
    metrics = run_while(trial, *deeds)
    check_complete(trial)
    assert metrics["sessions"] == 2
    assert not metrics.get("failed")
    notices = re.findall(r"^Session (\d) killed by SIGKILL .*; a new process takes its place \((\d+) of (\d+)\)$", said(), re.MULTILINE)
    assert len(notices) == kills
    for index in "01":
        count = sum(one[0] == index for one in notices)
        assert [int(one[1]) for one in notices if one[0] == index] == [*range(1, count + 1)]
    assert trial.paths is not None
    for session in range(2):
        begun = trial.paths.session_log(session).read_text().count("begins: seeds")
        assert 1 <= begun <= 1 + sum(one[0] == str(session) for one in notices)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(600)
def test_killed_sessions_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three kills at random moments, with and without a checkpoint to go on from."""
    trial = Trial(spec_of(frames=4000, meta={"max_restart": 3, "rigorous_eval": 1, "eval_frequency": 1000}), tmp_path)
    check_kills(trial, 3, random_kills(2, 3, 4000), lambda: capsys.readouterr().out)


@pytest.mark.usefixtures("nothing_left")
def test_a_session_killed_before_training_begins_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(spec_of(), tmp_path)

    def deed(trial: Trial) -> None:
        until(lambda: 0 in workers(os.getpid()), seconds=_PATIENCE)
        assert trial.paths is None
        os.kill(workers(os.getpid())[0], signal.SIGKILL)

    check_kills(trial, 1, [deed], lambda: capsys.readouterr().out)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synced", "shared"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lock", [False, True])
def test_sessions_killed_at_many_moments(mode: str, seed: int, lock: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five kills each; with a checkpoint after every update, some of them while one is written."""
    interval = (0.0, 0.5, 3600.0)[seed % 3]
    trial = Trial(spec_of(mode, frames=10_000, meta={"max_restart": 5, "hogwild_lock": lock, "save_interval": interval}), tmp_path)
    check_kills(trial, 5, random_kills(100 + seed, 5, 10_000), lambda: capsys.readouterr().out)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system does not list its locks")
def test_the_holder_of_the_lock_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel gives the lock of a dead Session to the next: the other goes on within 10 seconds."""
    trial = Trial(spec_of(frames=6000, meta={"hogwild_lock": True}), tmp_path)
    waited = []

    def deed(trial: Trial) -> None:
        until(lambda: min(frame_of(trial.paths, index) for index in (0, 1)) >= 200, seconds=_PATIENCE)
        holder = workers(os.getpid())[0]
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


def test_a_dead_process_holds_no_lock() -> None:
    fd = common_file()
    heap = CommonHeap(fd, 0, 2, synced=True, locked=True)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "inside\n"
        with heap.claim("update") as mine:
            assert not mine
        holder.kill()
    begin = time.monotonic()
    with heap.update(), heap.exclusive("statistics"):
        assert time.monotonic() < begin + 1
    os.close(fd)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("max_restart", [0, 1])
def test_a_session_that_is_killed_too_often_fails(max_restart: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(spec_of(meta={"max_restart": max_restart}), tmp_path)
    moments = [200, 400][: max_restart + 1]
    with pytest.raises(TrialFailed, match="1 of 2 Sessions failed: 0") as failed:
        run_while(trial, kill_at(0, moments, [0.0] * len(moments)))
    check_complete(trial, [1])
    assert (failed.value.metrics["sessions"], failed.value.metrics["failed"]) == (1, 1)
    said = capsys.readouterr().out
    assert said.count("takes its place") == max_restart
    assert "session 0 failed: killed by SIGKILL" in said


def endless(**meta: Any) -> dict[str, Any]:
    return body(frames=10**9, meta={"save_interval": 3600, **meta})


def begun(run: Command) -> Callable[[], bool]:
    """Both Sessions have written rows, and no checkpoint yet."""
    return lambda: bool(runs(run.folder / "data", "small")) and min(frame_of(run.paths, index) for index in (0, 1)) > 0


def test_the_parent_is_killed(command: Callable[..., Command]) -> None:
    """Its Sessions save themselves and end; nothing has a name that could be left behind."""
    run = command(endless())
    process = run.start()
    until(begun(run), process, _PATIENCE)
    children = workers(process.pid)
    assert sorted(children) == [0, 1]
    for child in children.values():
        assert memfds(child)
        assert in_dev_shm(child) == []
    process.kill()
    until(lambda: run.processes() == [], seconds=10.0)
    for index in (0, 1):
        frame = checkpoint.load(run.paths.checkpoint(index, "last"))["clock"]["frame"]
        assert 0 < frame == table(run.paths, index)[-1]["frame"]


def check_interrupted(run: Command, process: subprocess.Popen[str], sessions: Sequence[int]) -> None:
    """Of `sessions`, checkpoint and table end at the same frame."""
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    for index in sessions:
        frame = checkpoint.load(run.paths.checkpoint(index, "last"))["clock"]["frame"]
        assert 0 < frame == table(run.paths, index)[-1]["frame"]
    assert run.paths.trial_graph("mean_returns", "png").is_file()
    assert run.processes() == []


def test_ctrl_c(command: Callable[..., Command]) -> None:
    run = command(endless())
    process = run.start()
    until(begun(run), process, _PATIENCE)
    os.killpg(process.pid, signal.SIGINT)
    check_interrupted(run, process, [0, 1])


def test_ctrl_c_while_a_session_is_replaced(command: Callable[..., Command]) -> None:
    run = command(endless())
    process = run.start()
    until(begun(run), process, _PATIENCE)
    killed = workers(process.pid)[0]
    os.kill(killed, signal.SIGKILL)
    until(lambda: workers(process.pid).get(0, killed) != killed, process, _PATIENCE)
    os.killpg(process.pid, signal.SIGINT)
    check_interrupted(run, process, [1])
    assert table(run.paths, 0)
    assert run.paths.session_log(0).read_text().count("begins: seeds") == 1, "the new process had begun already"
    assert json.loads(run.paths.trial_metrics().read_text())["sessions"] == 2


def test_a_session_that_raises_is_not_replaced(command: Callable[..., Command]) -> None:
    run = command(body(env={"name": "fragile:Fragile-v0", "num_envs": 1, "backend": "sync", "max_frame": 2000}))
    (run.folder / "fragile.py").write_text(FRAGILE)
    process = run.start()
    said = process.communicate()[0]
    assert process.returncode == 1, said
    assert 'raise ArithmeticError("the pole is broken")' in said
    assert "takes its place" not in said
    failed = re.fullmatch(r"1 of 2 Sessions failed: (\d)", said.splitlines()[-1])
    assert failed is not None
    assert table(run.paths, 1 - int(failed[1]))[-1]["frame"] == 1000
    metrics = json.loads(run.paths.trial_metrics().read_text())
    assert (metrics["sessions"], metrics["failed"]) == (1, 1)
    assert run.processes() == []


# ---- Sessions side by side in this process


def flat(session: Session) -> torch.Tensor:
    """The global weights."""
    trainer = session.agent.algorithm.trainer
    assert trainer is not None
    return trainer.flat.master


def test_sessions_share_weights_and_differ_in_luck() -> None:
    """A process that takes a Session's place keeps what has been learned, and its count of frames; its luck is its own."""
    fd, spec = common_file(), spec_of(frames=400)
    made = [Session(spec, index, heap=CommonHeap(fd, index, 2, synced=True)).build() for index in (0, 1)]
    initial = flat(made[0]).clone()
    assert torch.equal(flat(made[1]), initial)
    assert made[0].seeds.net == made[1].seeds.net
    made[0].run()
    trained = flat(made[0]).clone()
    assert not torch.equal(trained, initial)
    made[1].close()
    made.append(Session(spec, 0, heap=CommonHeap(fd, 0, 2, synced=True, fresh=False), restart=1).build())
    assert torch.equal(flat(made[2]), trained)
    assert made[2].clock.frame == 400
    for name in ("act", "update", "env"):
        assert len({getattr(session.seeds, name) for session in made}) == 3, name
    made[2].close()
    os.close(fd)


@pytest.mark.parametrize("saved", [True, False])
def test_a_session_killed_after_its_last_frame(saved: bool, tmp_path: Path) -> None:
    """Its new process has nothing left to do, adds no row, and counts as the old one did, with a checkpoint or from the table."""
    paths = new_run(tmp_path, "small")
    fd, spec = common_file(), spec_of(frames=400, meta={"rigorous_eval": 1, "eval_frequency": 300})
    old = Session(spec, 0, heap=CommonHeap(fd, 0, 2, synced=True))
    old.run(paths)
    modes: tuple[DataMode, ...] = ("train", "eval")
    tables = [paths.session_df(0, mode).read_bytes() for mode in modes]
    if not saved:
        paths.checkpoint(0, "last").unlink()
    new = Session(spec, 0, heap=CommonHeap(fd, 0, 2, synced=True, fresh=False), restart=1)
    result = new.run(paths)
    assert (result.frame, result.rows, result.eval_rows) == (400, [], [])
    assert [paths.session_df(0, mode).read_bytes() for mode in modes] == tables
    assert (new.clock.epi, new.clock.t, new.clock.opt_step) == (old.clock.epi, old.clock.t, old.clock.opt_step)
    assert new.clock.t == 200
    assert new.clock.wall_t == pytest.approx(old.clock.wall_t, abs=0.1)  # since the old one began
    os.close(fd)


@pytest.mark.parametrize("kept", [True, False])
def test_a_replay_memory_outlives_its_process(kept: bool, tmp_path: Path) -> None:
    """With meta.save_replay; else the new process gathers its own."""
    paths = new_run(tmp_path, "small")
    fd, spec = common_file(), spec_of("shared", frames=400, meta={"save_replay": kept})
    old = Session(spec, 0, heap=CommonHeap(fd, 0, 2, synced=False))
    old.run(paths)
    new = Session(spec, 0, heap=CommonHeap(fd, 0, 2, synced=False, fresh=False), restart=1).build()
    new.begin(paths)
    assert old.agent.replay is not None
    assert new.agent.replay is not None
    assert new.agent.replay.seen == (old.agent.replay.seen if kept else 0)
    if kept:
        assert np.array_equal(new.agent.replay.columns["reward"], old.agent.replay.columns["reward"])
    new.close()
    os.close(fd)


class NoRates:
    lr = explore_var = entropy_coef = None


HEADER = "frame,epi,t,wall_t,opt_step,total_reward"
ROWS = ("200,3,100,1.500,12,20.5", "400,5,200,2.500,25,", "600,9,300,3.250,37,31.5")


@pytest.mark.parametrize("torn", ["800,1", "800,12,400,4.000,50,40.0", "8"])
def test_a_torn_line_is_cut_off(torn: str, tmp_path: Path) -> None:
    """Also one that lacks nothing but its end: it may be a number cut short. The next row stands on a line of its own."""
    path = tmp_path / "table.csv"
    path.write_text("\n".join([HEADER, *ROWS, torn]))
    rows = complete_rows(path)
    assert [row["frame"] for row in rows] == ["200", "400", "600"]
    assert path.read_text() == "\n".join([HEADER, *ROWS, ""])
    writer = CSVWriter({"train": path}, HEADER.split(","))
    writer.on_row("train", {"frame": 800, "epi": 12, "t": 400, "wall_t": 4.0, "opt_step": 50, "total_reward": None})
    writer.close()
    assert path.read_text().splitlines() == [HEADER, *ROWS, "800,12,400,4.000,50,"]


@pytest.mark.parametrize("text", ["", "frame,ep", HEADER, f"{HEADER}\n", f"{HEADER}\n200,3"])
def test_a_table_without_a_whole_row(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    assert complete_rows(path) == []
    assert not path.exists()
    path.write_text(text)
    assert complete_rows(path) == []
    writer = CSVWriter({"train": path}, HEADER.split(","))
    writer.on_row("train", dict.fromkeys(HEADER.split(","), 1))
    writer.close()
    assert path.read_text() == f"{HEADER}\n1,1,1,1,1,1\n"


def test_a_table_goes_on_from_its_rows(tmp_path: Path) -> None:
    """Rows that a checkpoint knows already count once; the clock's other counts never go back."""
    path = tmp_path / "table.csv"
    path.write_text("\n".join([HEADER, *ROWS, "800,1"]))
    rows = complete_rows(path)

    fresh = Table(Clock(), NoRates())
    fresh.go_on(rows)
    assert (fresh.frame, fresh.wall_t, list(fresh.rewards)) == (600, 3.25, [20.5, 31.5])
    assert (fresh.clock.epi, fresh.clock.t, fresh.clock.opt_step) == (9, 300, 37)
    fresh.clock.frame = 800
    assert fresh.row(41.0)["total_reward_ma"] == (20.5 + 31.5 + 41.0) / 3

    saved = Table(Clock(), NoRates())
    saved.load_state_dict({"rewards": [7.0, 20.5], "frame": 400, "wall_t": 2.5})
    saved.clock.epi, saved.clock.t, saved.clock.opt_step = 10, 310, 38
    saved.go_on(rows)
    assert (saved.frame, list(saved.rewards)) == (600, [7.0, 20.5, 31.5])
    assert (saved.clock.epi, saved.clock.t, saved.clock.opt_step) == (10, 310, 38)


def test_updates_kept_from_a_global_net_are_no_divergence(caplog: pytest.LogCaptureFixture) -> None:
    """They have changed nothing, so the means of a row are those of the others."""
    rows: list[Row] = []
    clock = Clock()
    recorder = Recorder(clock, NoRates(), 100, lambda mode, row: rows.append(row), (*COLUMNS, *GLOBAL_COLUMNS))
    for loss in (1.0, math.nan, 3.0):
        recorder.on_update(Metrics(loss, 0.5))
    clock.frame = 50
    recorder.on_end()
    assert rows[0]["loss"] == 2.0
    assert not caplog.messages


# ---- memory


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("there", "fits"), [(2**30, 6), (2**20, 0)])
def test_workers_that_do_not_fit_memory(there: int, fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "memory_bytes", lambda: there)
    with pytest.raises(SpecError) as error:
        Trial(spec_of(meta={"max_session": 8}), tmp_path / "data").run()
    (problem,) = error.value.problems
    assert problem.path == "meta.max_session"
    assert f" {fits} " in problem.message
    assert not (tmp_path / "data").exists()
