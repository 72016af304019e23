"""Tests of envs that block, start programs or change the working directory, of badly timed signals, and of what remains afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.execute.local import user_code
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.plan import TrialFailed
from slm_lab.experiment.run import sessions as sessions_module
from slm_lab.experiment.run.trial import Trial
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.commands import Command, frame_of, gone, rows, run_while, session_processes, until

ENV = "tests.experiment.faulty_env:Flawed-v0"
MakeSpec = Callable[..., Spec]
SpecBody = Callable[..., dict[str, Any]]


def env_of(folder: Path, **faults: Any) -> dict[str, Any]:
    return {"name": ENV, "num_envs": 1, "backend": "sync", "folder": str(folder), **faults}


pytestmark = pytest.mark.usefixtures("no_baseline")


def simulators(folder: Path) -> list[int]:
    return [int(path.name.rpartition("_")[2]) for path in folder.glob("simulator_*")]


# ---- processes that an env starts, and its close()


@pytest.mark.parametrize("simulator", [pytest.param("ends", marks=pytest.mark.slow), "forgets"])
def test_an_env_that_runs_a_simulator(simulator: str, make_spec: MakeSpec, tmp_path: Path) -> None:
    """In two Sessions, terminate() and wait() in close() must not hang, and a simulator that is not ended must end with its Session."""
    env = env_of(tmp_path, simulator=simulator, num_envs=2)
    metrics = Trial(make_spec(env=env, meta={"max_session": 2}), tmp_path).run()
    assert (metrics["sessions"], metrics["status"]) == (2, "done")
    assert len(simulators(tmp_path)) == 2 * (2 + 1)  # including that of the trial step
    assert gone(*simulators(tmp_path))


def test_an_env_whose_close_blocks(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions count as done and their processes are ended after a time limit.

    In this process, the blocked close() is abandoned with a notice.
    """
    monkeypatch.setattr(sessions_module, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(user_code, "CLOSE_SECONDS", 0.5)
    for sessions in (1, 2):
        env = env_of(tmp_path, blocks="close", copies=3, simulator="ends")
        begin = time.monotonic()
        metrics = Trial(make_spec(env=env, meta={"max_session": sessions}), tmp_path).run()
        assert (metrics["sessions"], metrics["status"], metrics["frame"]) == (sessions, "done", 1000)
        assert time.monotonic() - begin < (15 if has_feature("forkserver") else 60)  # spawned processes must import torch
        if sessions == 1:
            for pid in simulators(tmp_path):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                (tmp_path / f"simulator_{pid}").unlink()
    assert gone(*simulators(tmp_path))


@pytest.mark.slow
def test_what_a_killed_session_started(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a Session is killed by SIGKILL, the simulator of its env ends too; the other Session continues."""
    env = env_of(tmp_path, simulator="ends", blocks="step", after=100, copies=1)
    trial = Trial(make_spec(env=env, meta={"max_session": 2, "log_frequency": 20}), tmp_path)

    def kill(trial: Trial) -> None:
        until(
            lambda: (
                (tmp_path / "blocks").exists() and trial.paths is not None and frame_of(trial.paths, 0) + frame_of(trial.paths, 1) >= 1000
            )
        )
        running = session_processes(trial.paths)
        os.kill(min(running.items(), key=lambda item: frame_of(trial.paths, item[0]))[1], signal.SIGKILL)

    with pytest.raises(TrialFailed, match="1 of 2 sessions failed"):
        run_while(trial, kill)
    assert "killed by SIGKILL" in capsys.readouterr().out
    assert len(simulators(tmp_path)) == 2 * (1 + 1)  # including that of the trial step
    assert gone(*simulators(tmp_path))


@pytest.mark.slow
def test_the_trial_is_killed(command: Callable[..., Command], spec_body: SpecBody, tmp_path: Path) -> None:
    """The Sessions of a killed trial save their state and end, and so do the simulators that their envs leave running."""
    meta = {"max_session": 2, "log_frequency": 100, "save_interval": 3600, "eval_episodes": 1}
    run = command(spec_body(env=env_of(tmp_path, simulator="forgets", max_frame=10**9), meta=meta))
    process = run.start()
    until(run.has_rows(2), process)
    process.kill()
    run.leaves_nothing(30.0)
    assert len(simulators(tmp_path)) == 2 * (1 + 1 + 1)  # including those of the trial step and of evaluation
    assert gone(*simulators(tmp_path))
    for index in (0, 1):
        assert (
            0
            < state.load(run.paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"]
            == int(rows(run.paths.session_df(index))[-1]["frame"])
        )


# ---- envs that block

STALL = {"stall_notice": 0.3, "stall_limit": 3.0, "log_frequency": 20}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("where", "backend"), [("constructor", "sync"), ("reset", "sync"), ("step", "sync"), ("step", "async")])
def test_an_env_that_blocks_in_this_process(
    where: str, backend: str, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notice follows after meta.stall_notice, and the run ends with the cause after meta.stall_limit.

    If the run has begun, it has rows, a checkpoint and graphs.
    """
    alone = backend == "sync"
    stall = STALL if alone else STALL | {"stall_limit": 6.0}  # worker processes need seconds to start
    copies = 1 if alone else 2  # the first copy is built in this process only to read the spaces
    env = env_of(tmp_path, blocks=where, after=70 * (where == "step"), backend=backend, copies=copies)
    trial = Trial(make_spec(env=env, meta=stall), tmp_path)
    phase = {"constructor": "building", "reset": "resetting", "step": "stepping"}[where]
    if where != "step":  # the env blocks before anything is written
        with pytest.raises(SpecError, match=rf"env\.name: .*cannot be built: the env has been {phase} for 3 seconds.*meta\.stall_limit"):
            trial.run()
        assert trial.paths is None
        return
    with pytest.raises(TrialFailed, match="session 0 failed"):
        trial.run()
    output = capsys.readouterr().out
    phase = {"reset": "resetting", "step": "stepping"}[where]
    assert output.count(f" s ({phase})") == 1, "a notice"
    assert f"session 0 failed: the env has been {phase} for" in output
    assert json.loads(trial.paths.session_metrics(0).read_text())["status"] == "failed"
    assert trial.paths.checkpoint(0, "last").is_file()
    frames = [int(row["frame"]) for row in rows(trial.paths.session_df(0))]
    assert frames[:3] == [20, 40, 60]
    assert state.load(trial.paths.checkpoint(0, "last"))["policies"][0]["clock"]["frame"] == frames[-1]
    assert trial.paths.trial_graph("mean_returns", "png").is_file()


@pytest.mark.parametrize("where", [*(pytest.param(where, marks=pytest.mark.slow) for where in ("constructor", "reset")), "step"])
def test_an_env_that_blocks_in_one_of_two_sessions(
    where: str, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocked Session fails with the cause; the other one continues."""
    trial = Trial(make_spec(env=env_of(tmp_path, blocks=where, after=70 * (where == "step")), meta={"max_session": 2, **STALL}), tmp_path)
    with pytest.raises(TrialFailed, match="1 of 2 sessions failed"):
        trial.run()
    output = capsys.readouterr().out
    phase = {"constructor": "building", "reset": "resetting", "step": "stepping"}[where]
    assert f": no progress for 0 s ({phase})" in output
    assert f"failed: made no progress for 3 s ({phase}; meta.stall_limit)" in output
    metrics = json.loads(trial.paths.trial_metrics().read_text())
    assert (metrics["sessions"], metrics["failed"], metrics["frame"]) == (1, 1, 1000)


@pytest.mark.parametrize("where", [pytest.param("constructor", marks=pytest.mark.slow), "step"])
def test_an_env_that_blocks_where_sessions_train_one_net(
    where: str, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All Sessions wait until every env is built. The process that blocks is restarted, and the trial completes."""
    spec = make_spec(
        env=env_of(tmp_path, blocks=where, after=70 * (where == "step")),
        meta={"max_session": 2, "distributed": "shared", "max_restart": 1, **STALL},
    )
    trial = Trial(spec, tmp_path)
    metrics = trial.run()
    assert (metrics["sessions"], metrics["status"]) == (2, "done")
    phase = {"constructor": "building", "step": "stepping"}[where]
    assert f"made no progress for 3 s ({phase}; meta.stall_limit); restarting it (1 of 1)" in capsys.readouterr().out
    assert [rows(trial.paths.session_df(index))[-1]["frame"] for index in (0, 1)] == ["500", "500"]


CTRL_C: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "async": ({"backend": "async", "copies": 2}, {}),
    "two Sessions": ({"copies": 2}, {"max_session": 2}),
}


@pytest.mark.slow
def test_ctrl_c_while_an_env_blocks(tmp_path: Path, spec_body: SpecBody) -> None:
    """The run ends in bounded time with the last rows, checkpoint and graphs. Both kinds of run are started at once to save time."""
    runs = {}
    for name, (env, meta) in CTRL_C.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        env = env_of(folder, blocks="step", after=150, **env) | {"max_frame": 10**9}
        run = Command(folder, spec_body(env=env, meta={"log_frequency": 40, "save_interval": 3600, **meta}))
        runs[name] = (run, run.start())
    try:
        for name, (run, process) in runs.items():
            sessions = CTRL_C[name][1].get("max_session", 1)
            until(lambda: (run.folder / "blocks").exists() and run.has_rows(sessions)(), process)  # noqa: B023
        time.sleep(1.0)
        begin = time.monotonic()
        for _, process in runs.values():
            os.killpg(process.pid, signal.SIGINT)
        for name, (run, process) in runs.items():
            output = process.communicate(timeout=60)[0]
            assert process.returncode == 130, f"{name}: {output}"
            assert "Traceback" not in output, f"{name}: {output}"
            for index in range(CTRL_C[name][1].get("max_session", 1)):
                frame = state.load(run.paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"]
                assert 120 <= frame == int(rows(run.paths.session_df(index))[-1]["frame"]), name
            assert run.paths.trial_graph("mean_returns", "png").is_file(), name
            assert json.loads(run.paths.trial_metrics().read_text())["status"] == "stopped", name
            run.leaves_nothing()
        assert time.monotonic() - begin < 40
    finally:
        for run, _ in runs.values():
            for pid in run.processes():
                os.kill(pid, signal.SIGKILL)


# ---- the random baseline


@pytest.mark.parametrize(("number", "sessions"), [pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow), (signal.SIGINT, 2)])
def test_a_signal_while_the_random_baseline_is_measured(
    number: signal.Signals, sessions: int, command: Callable[..., Command], spec_body: SpecBody
) -> None:
    """At this time every Session is done and metrics and graphs are written, so the exit code is 0."""
    env = {"name": "tests.experiment.faulty_env:Slow-v0", "num_envs": 2, "max_frame": 100, "backend": "sync"}
    run = command(spec_body(env=env, meta={"max_session": sessions, "log_frequency": 50}))
    process = run.start()
    output = ""
    while "measuring the random baseline" not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    paths = run.paths
    assert paths.trial_metrics().is_file()
    begin = time.monotonic()
    os.killpg(process.pid, number)
    output += process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert time.monotonic() - begin < 10
    assert "interrupted; strength metrics are omitted" in output
    assert json.loads(paths.trial_metrics().read_text())["status"] == "done"
    assert paths.trial_graph("mean_returns", "png").is_file()
    assert [json.loads(paths.session_metrics(index).read_text())["status"] for index in range(sessions)] == ["done"] * sessions


# ---- working directory and scripts


@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_env_that_changes_the_folder(
    sessions: int, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a relative data folder, every file is written to it, and paths are shown relative to the original working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trial = Trial(
        make_spec(env=env_of(tmp_path, chdir=True), meta={"max_session": sessions, "rigorous_eval": 1, "eval_frequency": 500}), "data"
    )
    assert trial.run()["sessions"] == sessions
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert trial.paths.root.parent == tmp_path / "data"
    for index in range(sessions):
        assert trial.paths.checkpoint(index, "best").is_file()
        assert rows(trial.paths.session_df(index))[-1]["frame"] == "1000"
    shown = re.findall(r"^(?:open |all files: )(data/.+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(shown) == 2
    assert all((tmp_path / path).exists() for path in shown)


SCRIPT = """
import json
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from slm_lab import Trial
from slm_lab.spec.report import SpecError
from slm_lab.spec.models.spec import Spec

class Own(CartPoleEnv):
    pass

gym.register("Own-v0", entry_point=Own, max_episode_steps=500)
body = json.load(open("spec.json"))["small"]
for name, sessions, backend in [("CartPole-v1", 1, "async"), ("Own-v0", 1, "sync"), ("Own-v0", 2, "sync")]:
    body["env"] |= {"name": name, "backend": backend}
    body["meta"]["max_session"] = sessions
    try:
        print("RESULT", name, Trial(Spec.model_validate({"name": "small", **body}), "data").run()["sessions"])
    except SpecError as error:
        print("ERROR", error)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard(command: Callable[..., Command], spec_body: SpecBody) -> None:
    """The script runs with the async backend.

    If it registers an env that other processes cannot build, the message says so and tells what to do.
    """
    run = command(spec_body(env={"max_frame": 200, "num_envs": 2}))
    process = run.script(SCRIPT)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    results = [line for line in output.splitlines() if line.startswith("RESULT")]
    assert results == ["RESULT CartPole-v1 1", "RESULT Own-v0 1"], output
    error = output[output.index("ERROR") :]
    assert "Own-v0" in error
    assert "registered in a script" in error
    assert '"package.module:Own-v0"' in error
    assert "Traceback" not in output
    run.leaves_nothing()
