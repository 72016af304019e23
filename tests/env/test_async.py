"""Tests of the worker processes of the backend async: their start, signals and environment, and the end of all their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.env.make import make_env_request
from slm_lab.experiment.execute.local import fork_server as server
from slm_lab.lib.process import STOP_SIGNALS, hide_main_module
from slm_lab.spec.models.env import EnvSpec
from tests.env.test_step import build
from tests.env.toys import PREFIX
from tests.experiment.commands import gone, number_in

ROOT = Path(__file__).parents[2]
HEAD = "from slm_lab.env import make_env\nfrom slm_lab.spec.models.env import EnvSpec\n"


def start(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    """Start a user's script that has no main guard (`if __name__ == "__main__"`)."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def run(tmp_path: Path, script: str) -> str:
    return shown_by(start(tmp_path, script))


def shown_by(process: subprocess.Popen[str]) -> str:
    """Return the output of a process, read until the process and all processes that it leaves behind have ended."""
    try:
        return process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired as error:
        process.kill()
        pytest.fail(f"no end after 60 s; exit status {process.returncode}, output: {error.output!r}")


def test_a_script_without_main_guard_that_never_closes(tmp_path: Path) -> None:
    script = "env = make_env(EnvSpec(name='CartPole-v1', max_frame=9, num_envs=2, backend='async'), 0)\nprint('shape', env.reset().shape)"
    assert run(tmp_path, script) == "shape (2, 4)\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("entry", ["Own", "'__main__:Own'"])
def test_an_env_that_is_defined_in_the_script(tmp_path: Path, entry: str) -> None:
    """Worker processes do not import the script; the message says so and what to do."""
    script = f"""
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
class Own(CartPoleEnv): pass
gym.register("Own-v0", entry_point={entry}, max_episode_steps=9)
spec = EnvSpec(name="Own-v0", max_frame=9, num_envs=2)
print(make_env(spec, 0).reset().shape)
try:
    make_env(spec.model_copy(update={{"backend": "async"}}), 0)
except Exception as error:
    print(error)
"""
    shown = run(tmp_path, script)
    assert shown.startswith("(2, 4)")
    assert "env.backend: cannot use backend 'async': Own-v0 is defined in the script that runs (__main__)" in shown
    assert 'name the env "package.module:Own-v0"' in shown


def test_an_id_that_only_the_script_registers(tmp_path: Path) -> None:
    """Worker processes can import the class of the env, but do not know its id; the message says what to do."""
    script = """
import gymnasium as gym
gym.register("Own-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=9)
try:
    make_env(EnvSpec(name="Own-v0", max_frame=9, num_envs=2, backend="async"), 0)
except Exception as error:
    print(error)
"""
    assert 'move it to a module and name the env "package.module:Own-v0"' in run(tmp_path, script)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_constructors_that_change_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Each env is constructed in the initial working directory, so that the relative path is valid for the second env too."""
    (tmp_path / "assets").mkdir()
    monkeypatch.chdir(tmp_path)
    env = build(PREFIX + "Wanderer-v0", 2, backend=backend, folder="assets")
    env.reset()
    env.step(np.zeros(2, np.int64))
    env.close()
    assert Path.cwd() == (tmp_path if backend == "async" else tmp_path / "assets")


def test_a_simulator_gets_no_blocked_and_no_ignored_signals(tmp_path: Path) -> None:
    """A simulator blocks and ignores no stop signal, so that terminate() ends it; the worker itself does not react to stop signals."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    env = build(PREFIX + "Simulated-v0", 1, backend="async", folder=str(tmp_path))
    env.reset()
    simulator, worker = number_in(tmp_path / "simulator"), number_in(tmp_path / "worker")
    for line in Path(f"/proc/{simulator}/status").read_text().splitlines():
        if line.startswith(("SigBlk", "SigIgn")):
            mask = int(line.split()[1], 16)
            assert not [number for number in STOP_SIGNALS if mask & 1 << (number - 1)], line
    for number in STOP_SIGNALS:
        os.kill(worker, number)
    env.step(np.zeros(1, np.int64))
    os.kill(simulator, signal.SIGTERM)
    env.close()
    assert gone(simulator)
    assert gone(worker)


def test_a_simulator_that_the_env_forgets_ends_with_its_worker(tmp_path: Path) -> None:
    env = build(PREFIX + "Simulated-v0", 1, backend="async", folder=str(tmp_path))
    simulator = number_in(tmp_path / "simulator")
    env.close()
    assert gone(simulator)


@pytest.mark.skipif(server.start_method() == "spawn", reason="no fork server on this system")
def test_processes_come_from_the_fork_server_as_if_they_were_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has the current environment variables, its own random numbers and process group, and runs its exit hooks."""
    server.ensure_server()
    monkeypatch.setenv("SLM_LAB_TEST", "later than the server")
    env = build(PREFIX + "Reporting-v0", 2, backend="async", folder=str(tmp_path))
    env.reset()
    env.close()
    one, other = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert one["server"] == other["server"] != os.getpid()
    assert one["variable"] == other["variable"] == "later than the server"
    assert one["random"] != other["random"]
    assert (one["group"], other["group"]) == (one["pid"], other["pid"])
    assert len(list(tmp_path.glob("*.exit"))) == 2


METHOD = "from slm_lab.experiment.execute.local.fork_server import use_start_method\nuse_start_method({!r})\n"


@pytest.mark.parametrize("method", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_death_of_the_parent_ends_workers_and_simulators(tmp_path: Path, blocks: bool, method: str) -> None:
    """The parent is killed by SIGKILL, also while an env blocks in its step."""
    script = f"""
{METHOD.format(method)}
env = make_env(EnvSpec(name="{PREFIX}Simulated-v0", max_frame=9, backend="async", folder={str(tmp_path)!r}, blocks={blocks}), 0)
env.reset()
print("ready", flush=True)
import numpy, time
env.step(numpy.zeros(1, int))
time.sleep(60)
"""
    parent = start(tmp_path, script)
    assert parent.stdout.readline() == "ready\n"
    simulator, worker = number_in(tmp_path / "simulator"), number_in(tmp_path / "worker")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(worker)
    assert gone(simulator)


def test_a_constructor_that_blocks_can_be_interrupted(tmp_path: Path) -> None:
    keys = {"name": f"{PREFIX}Faulty-v0", "fault": "block", "mark": str(tmp_path / "blocks"), "max_frame": 9, "num_envs": 2}
    script = f"""
import faulthandler
faulthandler.dump_traceback_later(25, exit=True)
print("ready", flush=True)
try:
    make_env(EnvSpec(backend="async", **{keys!r}), 0)
except KeyboardInterrupt:
    import multiprocessing
    print("interrupted", multiprocessing.active_children())
"""
    process = start(tmp_path, script)
    assert process.stdout.readline() == "ready\n"
    number_in(tmp_path / "blocks")
    process.send_signal(signal.SIGINT)
    assert shown_by(process) == "interrupted []\n"  # without the signal it would block for ever


def test_a_step_that_blocks_can_be_interrupted(tmp_path: Path) -> None:
    env = build(PREFIX + "Simulated-v0", 1, backend="async", folder=str(tmp_path), blocks=True)
    env.reset()
    worker = number_in(tmp_path / "worker")

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.step(np.zeros(1, np.int64))
    finally:
        signal.signal(signal.SIGALRM, before)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 5
    assert gone(worker)


def test_the_main_module_is_hidden_for_a_while() -> None:
    main = sys.modules["__main__"]
    with hide_main_module():
        assert sys.modules["__main__"] is not main
    assert sys.modules["__main__"] is main


def test_target_of_a_module_is_known_elsewhere() -> None:
    spec: Any = EnvSpec(name=PREFIX + "Toy-v0", max_frame=1)
    assert make_env_request(spec, 1).main_module_reason is None
