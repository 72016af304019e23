"""Whole trials, in processes of their own: what fails, what is interrupted, what is repeated."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slm_lab
from slm_lab.experiment import checkpoint
from slm_lab.experiment.paths import RunPaths, runs
from slm_lab.experiment.plan import TrialFailed
from slm_lab.experiment.trial import Trial
from slm_lab.spec.loader import load_spec
from slm_lab.spec.spec import Spec

ROOT = Path(slm_lab.__file__).parent.parent
SpecBody = Callable[..., dict[str, Any]]

TROUBLE = '''
"""CartPole whose first two makers, whichever Sessions they are in, come to grief at step 50."""
import os, signal
from pathlib import Path
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Trouble(CartPoleEnv):
    def __init__(self, marks=".", **kwargs):
        super().__init__(**kwargs)
        self.count, self.fate = 0, "lives"
        for fate in ("raises", "is killed"):
            try:
                os.close(os.open(Path(marks) / fate, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            self.fate = fate
            break

    def step(self, action):
        self.count += 1
        if self.count == 50 and self.fate == "raises":
            raise ArithmeticError("the pole is broken")
        if self.count == 50 and self.fate == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

gym.register("Trouble-v0", entry_point=Trouble, max_episode_steps=500)
'''


class Command:
    """run_lab.py in a process group of its own, with a mark by which all its processes are found."""

    def __init__(self, folder: Path, body: dict[str, Any]) -> None:
        self.folder = folder
        self.spec_file = folder / "spec.json"
        self.spec_file.write_text(json.dumps({"small": body}))
        self.mark = f"SLM_LAB_TEST={folder}"
        self.environment = {**os.environ, "SLM_LAB_TEST": str(folder), "PYTHONPATH": f"{folder}:{ROOT}"}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(ROOT / "run_lab.py"),
            str(self.spec_file),
            "small",
            "train",
            "--data-dir",
            str(self.folder / "data"),
            *words,
        ]
        return self._start(command)

    def python(self, code: str) -> subprocess.Popen[str]:
        return self._start([sys.executable, "-c", code])

    def script(self, code: str) -> subprocess.Popen[str]:
        (self.folder / "script.py").write_text(code)
        return self._start([sys.executable, "script.py"])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def paths(self) -> RunPaths:
        return RunPaths(runs(self.folder / "data", "small")[-1], "small")

    def processes(self) -> list[int]:
        """Those alive."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                marked = entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if marked and "State:\tZ" not in (entry / "status").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Command]]:
    made: list[Command] = []

    def make(body: dict[str, Any]) -> Command:
        made.append(Command(tmp_path, body))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes():
            os.kill(process, signal.SIGKILL)


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 60.0) -> None:
    """Wait for `condition`, while `process` runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [{key: value for key, value in row.items() if key not in ("wall_t", "fps")} for row in csv.DictReader(file)]


def test_two_commands_give_equal_tables_whatever_the_jobs(command: Callable[..., Command], spec_body: SpecBody) -> None:
    """Also from a script without `if __name__ == "__main__"`, which spawn would run again; and the saved spec is loadable."""
    run = command(spec_body(meta={"max_session": 2, "rigorous_eval": 1, "eval_frequency": 500}))
    first = run.start("--jobs", "2")
    said = first.communicate()[0]
    assert first.returncode == 0, said
    before = run.paths
    assert "random_seed 5" in said
    assert str(before.root) in said.splitlines()
    assert str(before.trial_graph("mean_returns", "html")) in said.splitlines()
    second = run.script(f"""
from pathlib import Path
from slm_lab import Trial, load_spec
from slm_lab.experiment.plan import Plan
print(Trial(load_spec({str(before.spec)!r}, "small"), plan=Plan(data_dir=Path({str(run.folder / "data")!r}), jobs=1)).run())
""")
    said = second.communicate()[0]
    assert second.returncode == 0, said
    after = run.paths
    assert after.root != before.root
    assert after.sessions() == [0, 1]
    for index in (0, 1):
        assert rows(before.session_df(index)) == rows(after.session_df(index))
        assert rows(before.session_df(index, "eval")) == rows(after.session_df(index, "eval"))
        assert len(rows(after.session_df(index))) == 4
    assert rows(after.session_df(0)) != rows(after.session_df(1))
    assert json.loads(before.trial_metrics().read_text()).keys()
    spec = load_spec(before.spec, "small")
    assert spec.meta.max_session == 2
    assert json.loads(before.spec.read_text())["small"]["meta"]["run"]["backend"] == "native"


def test_a_session_that_fails_and_one_that_is_killed(command: Callable[..., Command], spec_body: SpecBody) -> None:
    """Defect 5: a dead session gives exit 0. The third goes on, is analysed, and the exit code is 1."""
    run = command(spec_body(env={"name": "trouble:Trouble-v0", "num_envs": 1, "backend": "sync"}, meta={"max_session": 3}))
    (run.folder / "trouble.py").write_text(TROUBLE)
    process = run.start("--jobs", "2")
    said = process.communicate()[0]
    assert process.returncode == 1, said
    assert "the pole is broken" in said
    assert 'raise ArithmeticError("the pole is broken")' in said, "no traceback"
    assert "killed by SIGKILL" in said
    assert said.splitlines()[-1] == "2 of 3 Sessions failed: 0, 1"
    assert "begins: seeds" not in said, "what it logged is no cause"
    assert "frame 1000/1000" in said
    assert "sessions 1  failed 2" in said
    metrics = json.loads(run.paths.trial_metrics().read_text())
    assert (metrics["sessions"], metrics["failed"]) == (1, 2)
    assert rows(run.paths.session_df(2))[-1]["frame"] == "1000"
    assert run.paths.trial_metrics().is_file()
    assert run.processes() == []


def endless(spec_body: SpecBody) -> dict[str, Any]:
    return spec_body(env={"max_frame": 10**9}, meta={"max_session": 2, "log_frequency": 500, "save_interval": 3600})


def begun(run: Command) -> Callable[[], bool]:
    """Both Sessions have written rows, and no checkpoint yet."""
    return lambda: bool(runs(run.folder / "data", "small")) and run.paths.sessions() == [0, 1]


def test_ctrl_c_saves_draws_and_leaves_no_process(command: Callable[..., Command], spec_body: SpecBody) -> None:
    run = command(endless(spec_body))
    process = run.start()
    until(begun(run), process)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert str(run.paths.root) in said
    for index in (0, 1):
        bundle = checkpoint.load(run.paths.checkpoint(index, "last"))
        assert 0 < bundle["clock"]["frame"] == int(rows(run.paths.session_df(index))[-1]["frame"])
        assert run.paths.checkpoint(index, "best").is_file()
    assert run.paths.trial_graph("mean_returns", "png").is_file()
    assert run.processes() == []


@pytest.mark.parametrize(("number", "sessions"), [(signal.SIGTERM, 1), (signal.SIGHUP, 2)])
def test_sigterm_and_sighup_to_the_whole_group(
    number: signal.Signals, sessions: int, command: Callable[..., Command], spec_body: SpecBody
) -> None:
    """As Ctrl-C; sent twice, as `timeout` does it."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this signal is ignored here (nohup), and so it is by the commands that are started")
    body = endless(spec_body)
    body["meta"]["max_session"] = sessions
    run = command(body)
    process = run.start()
    until(lambda: bool(runs(run.folder / "data", "small")) and run.paths.sessions() == [*range(sessions)], process)
    process.send_signal(number)
    os.killpg(process.pid, number)
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    for index in range(sessions):
        assert checkpoint.load(run.paths.checkpoint(index, "last"))["clock"]["frame"] > 0
    assert run.paths.trial_graph("mean_returns", "png").is_file()


@pytest.mark.parametrize("sessions", [1, 2])
def test_ctrl_c_before_the_first_step(sessions: int, command: Callable[..., Command], spec_body: SpecBody) -> None:
    body = endless(spec_body)
    body["meta"]["max_session"] = sessions
    run = command(body)
    process = run.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "starting small …\n"
    until(lambda: len(run.processes()) >= (1 if sessions == 1 else 3), process)  # children begin to import
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=150)[0] == "stopped before the first step; nothing was written\n"
    assert process.returncode == 130
    assert not (run.folder / "data").exists()
    assert run.processes() == []


def test_a_second_ctrl_c_names_the_folder(command: Callable[..., Command], spec_body: SpecBody) -> None:
    run = command(endless(spec_body))
    process = run.start()
    until(begun(run), process)
    children = [one for one in run.processes() if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]
    assert len(children) == 2
    for child in children:
        os.kill(child, signal.SIGSTOP)  # so that none saves itself in time
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1] == f"stopped at once; what was written so far remains in {run.paths.root}"


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_reader_that_leaves_does_not_end_the_run(sessions: int, command: Callable[..., Command], spec_body: SpecBody) -> None:
    run = command(spec_body(meta={"max_session": sessions}))
    process = run.start()
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=150) == 0
    assert [rows(run.paths.session_df(index))[-1]["frame"] for index in range(sessions)] == ["1000"] * sessions
    assert run.paths.trial_metrics().is_file()


def test_a_disk_that_fills_up(make_spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One line of cause, and only files that hold something are listed."""

    def full(path: Path, bundle: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    trial = Trial(make_spec(), tmp_path)
    with pytest.raises(TrialFailed, match="1 of 1 Sessions failed: 0"):
        trial.run()
    assert trial.paths is not None
    said = capsys.readouterr().out.splitlines()
    assert "session 0 failed: the disk of the data folder is full (No space left on device)" in said
    assert said[-1] == str(trial.paths.root)
    assert len(said) < 9


def test_children_save_themselves_and_end_when_their_parent_is_killed(command: Callable[..., Command], spec_body: SpecBody) -> None:
    run = command(endless(spec_body))
    process = run.start()
    until(begun(run), process)
    process.kill()
    until(lambda: run.processes() == [])
    for index in (0, 1):
        assert checkpoint.load(run.paths.checkpoint(index, "last"))["clock"]["frame"] > 0


def test_one_session_runs_in_process_is_interrupted_and_enjoyed(command: Callable[..., Command], spec_body: SpecBody) -> None:
    body = endless(spec_body)
    body["meta"]["max_session"] = 1
    run = command(body)
    process = run.start()
    until(lambda: bool(runs(run.folder / "data", "small")) and run.paths.sessions() == [0], process)
    assert run.processes() == [process.pid]
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=150)[0]
    assert process.returncode == 130, said
    assert checkpoint.load(run.paths.checkpoint(0, "last"))["clock"]["frame"] > 0
    code = f"from slm_lab.cli import main; raise SystemExit(main([{str(run.spec_file)!r}, 'small', 'enjoy@latest', '--data-dir', 'data']))"
    played = run.python(code)
    said = played.communicate()[0]
    assert played.returncode == 0, said
    assert f"{run.paths.checkpoint(0, 'best').name}" in said
    assert "10 episodes:" in said


def test_an_error_at_build_leaves_nothing(command: Callable[..., Command], spec_body: SpecBody) -> None:
    """What only building shows is still an error of the user, before anything is written."""
    run = command(spec_body(meta={"max_session": 2}, algorithm={"action_pdtype": "Normal"}))
    process = run.start()
    said = process.communicate()[0]
    assert process.returncode == 2, said
    assert "agent.algorithm.action_pdtype" in said
    assert "Traceback" not in said
    assert not (run.folder / "data").exists()
    assert run.processes() == []
