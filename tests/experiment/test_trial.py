"""Tests of whole trials, most of them in separate processes: failures, interruptions and repeated runs."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import slm_lab
from slm_lab.agent.torch_settings import resolve_matmul_library
from slm_lab.cli import main
from slm_lab.experiment.execute.local import fork_server as server
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, TrialFailed
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from tests.experiment.commands import Command, rows, session_processes, until

SpecBody = Callable[..., dict[str, Any]]

TROUBLE = '''
"""The first two CartPoles that come to step 50, whichever Sessions they are in, fail there: one raises, one is killed."""
import os, signal
from pathlib import Path
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Trouble(CartPoleEnv):
    def __init__(self, marks=".", **kwargs):
        super().__init__(**kwargs)
        self.count, self.marks = 0, Path(marks)

    def step(self, action):
        self.count += 1
        fate = self.draw() if self.count == 50 else "lives"
        if fate == "raises":
            raise ArithmeticError("the pole is broken")
        if fate == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def draw(self):
        for fate in ("raises", "is killed"):
            try:
                os.close(os.open(self.marks / fate, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return fate
        return "lives"

gym.register("Trouble-v0", entry_point=Trouble, max_episode_steps=500)
'''


@pytest.mark.parametrize("method", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
def test_two_runs_give_equal_tables_whatever_jobs_and_start_method(
    method: str, command: Callable[..., Command], spec_body: SpecBody
) -> None:
    """The second run uses the spec saved by the first, in a script without a main guard whose stdout is not UTF-8."""
    run = command(spec_body(meta={"max_session": 2, "rigorous_eval": 1, "eval_frequency": 500}))
    first = run.start("--jobs", "2")
    output = first.communicate()[0]
    assert first.returncode == 0, output
    before = run.paths
    assert "random_seed 5" in output
    at = next(index for index, line in enumerate(output.splitlines()) if line.startswith("return "))
    ending = output.splitlines()[at:]
    assert re.fullmatch(r"return [\d.]+( ± [\d.]+)? \(evaluation, mean of 2 sessions\) after 1,000 frames, \d+:\d\d", ending[0])
    assert ending[-4:] == [
        f"open {before.report}",
        f"all files: {before.root}",
        f"play it:   slm-lab enjoy@{before.root}",
        f"train on:  slm-lab train@{before.root} --set env.max_frame=2000",
    ]
    assert all(line.startswith("  ") and len(line) <= 80 for line in ending[1:-4])
    assert before.trial_log().read_text() == output
    run.environment |= {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    second = run.script(f"""
from slm_lab import Trial, load_spec
from slm_lab.experiment.plan import Plan
from pathlib import Path
spec = load_spec({str(before.spec)!r}, "small", ["meta.start_method={method}"])
print("metrics", Trial(spec, plan=Plan(data_dir=Path("data"), jobs=1)).run())
""")
    output = second.communicate()[0]
    assert second.returncode == 0, output
    assert output.count("metrics TrialResult in ") == 1
    assert "small: 2 sessions ? 1,000 frames" in output
    after = run.paths
    assert after.root != before.root
    assert after.table_numbers() == [0, 1]
    for index in (0, 1):
        assert rows(before.session_df(index)) == rows(after.session_df(index))
        assert rows(before.session_df(index, "eval")) == rows(after.session_df(index, "eval"))
        assert len(rows(after.session_df(index))) == 4
    assert rows(after.session_df(0)) != rows(after.session_df(1))
    assert json.loads(before.trial_metrics().read_text()).keys()
    assert load_spec(before.spec, "small").meta.max_session == 2
    (start,) = json.loads(before.spec.read_text())["small"]["meta"]["run"]
    assert (start["backend"], start["matmul"], start["start_method"]) == ("native", resolve_matmul_library("auto"), server.start_method())
    assert json.loads(after.spec.read_text())["small"]["meta"]["run"][-1]["start_method"] == (
        "spawn" if method == "spawn" else server.start_method()
    )
    run.leaves_nothing()


@pytest.mark.parametrize(
    ("sessions", "mode", "searched", "expected"),
    [
        (1, "train", False, ["enjoy@", "--set env.max_frame=2000", "one seed", "--set meta.max_session=4"]),
        (2, "train", False, ["enjoy@", "--set env.max_frame=2000"]),
        (1, "train", True, []),
        (1, "dev", False, []),
    ],
)
def test_commands_after_a_run(sessions: int, mode: Any, searched: bool, expected: list[str], make_spec: Callable[..., Spec]) -> None:
    """A run with one session says that one session shows little, unless it is a trial of a search or a run of a study."""
    console = Console(file=io.StringIO()) if searched else None
    trial = Trial(make_spec(meta={"max_session": sessions}), plan=Plan(mode=mode), console=console)
    lines = trial._next_commands({"status": "done", "sessions": sessions})
    assert len(lines) == len(expected)
    assert all(word in line for word, line in zip(expected, lines, strict=True))
    failed = trial._next_commands({"status": "failed", "sessions": 0})
    assert ["train@" in line for line in failed] == [True] * (mode != "dev")


@pytest.mark.usefixtures("no_baseline")
def test_a_session_that_fails_and_one_that_is_killed(
    spec_body: SpecBody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third Session continues; all are drawn, the metrics files of the failed ones say so, and the exit code is 1."""
    (tmp_path / "trouble.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(tmp_path)
    env = {"name": "trouble:Trouble-v0", "num_envs": 1, "backend": "sync", "marks": str(tmp_path)}
    (file := tmp_path / "spec.json").write_text(json.dumps({"small": spec_body(env=env, meta={"max_session": 3, "log_frequency": 20})}))
    assert main([str(file), "small", "train", "--jobs", "2", "--data-dir", str(tmp_path / "data")]) == 1
    output = "".join(capsys.readouterr())
    assert 'raise ArithmeticError("the pole is broken")' in output, "no traceback"
    assert "killed by SIGKILL" in output
    assert output.splitlines()[-1] == "2 of 3 sessions failed: 0, 1"
    assert "begins: index" not in output, "what it logged is no cause"
    assert re.search(r"frame +1000/1000", output)
    (root,) = (tmp_path / "data").iterdir()
    paths = RunPaths(root, "small")
    metrics = json.loads(paths.trial_metrics().read_text())
    assert (metrics["sessions"], metrics["failed"], metrics["status"]) == (1, 2, "failed")
    assert sorted(metrics["failures"]) == ["0", "1"]
    assert paths.trial_graph("mean_returns", "png").is_file()
    assert rows(paths.session_df(2))[-1]["frame"] == "1000"
    causes = []
    for index in (0, 1):
        assert rows(paths.session_df(index))[-1]["frame"] == "40"
        session = json.loads(paths.session_metrics(index).read_text())
        assert session["status"] == "failed"
        causes.append(session["failed"])
        assert list(paths.graph_dir.glob(f"*_s{index}_session_graph_train_mean_returns*.png")), "no graph of a failed Session"
    assert sorted("broken" in cause for cause in causes) == [False, True]
    assert json.loads(paths.session_metrics(2).read_text())["status"] == "done"
    assert session_processes(paths) == {}


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_trial_of_which_every_session_fails(sessions: int, make_spec: Callable[..., Spec], tmp_path: Path, monkeypatch: Any) -> None:
    """Graphs of the existing rows are drawn, and the metrics file has the status "failed"."""
    (tmp_path / "wreck.py").write_text(TROUBLE.replace('"raises", "is killed"', '"raises",' if sessions == 1 else '"raises", "is killed",'))
    monkeypatch.syspath_prepend(tmp_path)
    env = {"name": "wreck:Trouble-v0", "num_envs": 1, "backend": "sync", "marks": str(tmp_path)}
    trial = Trial(make_spec(env=env, meta={"max_session": sessions, "log_frequency": 20}), tmp_path)
    with pytest.raises(TrialFailed, match="session 0 failed: " if sessions == 1 else "2 of 2 sessions failed: 0, 1") as failed:
        trial.run()
    metrics = json.loads(trial.paths.trial_metrics().read_text())
    assert metrics == json.loads(json.dumps(failed.value.metrics))
    assert (metrics["status"], metrics["failed"], metrics["sessions"]) == ("failed", sessions, 0)
    assert trial.paths.trial_graph("mean_returns", "png").is_file()
    for index in range(sessions):
        assert json.loads(trial.paths.session_metrics(index).read_text())["status"] == "failed"


def test_the_result_of_a_trial(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    """The result gives access to metrics by key, tables, files and agents of the run."""
    result = slm_lab.Trial(make_spec(meta={"max_session": 2, "rigorous_eval": 1, "eval_frequency": 500}), tmp_path).run()
    assert dict(result) == result.metrics == json.loads(result.paths.trial_metrics().read_text())
    assert (result["sessions"], result.get("nothing"), len(result)) == (2, None, len(result.metrics))
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(result.metrics))
    assert result.train.groupby("session").frame.last().tolist() == [1000, 1000]
    assert result.eval.groupby("session").frame.last().tolist() == [1000, 1000]
    action, state = result.agent(session=1).act(np.zeros(4, np.float32))
    assert (action in (0, 1), state, result.agent(1).path.name) == (True, None, "small_t0_s1_ckpt-best.pt")
    assert repr(result).splitlines()[0] == f"TrialResult in {result.paths.root}"
    assert any(line.split() == ["sessions", "2"] for line in repr(result).splitlines())


@pytest.mark.parametrize(("sessions", "starts"), [(1, False), (2, True)])
def test_a_run_in_one_process_starts_no_fork_server(
    sessions: int, starts: bool, make_spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ensure_server() -> None:
        asked.append("started")
        server.ensure_server()

    for module in ("run.trial", "execute.local.local_executor"):
        monkeypatch.setattr(f"slm_lab.experiment.{module}.ensure_server", ensure_server)
    slm_lab.Trial(make_spec(meta={"max_session": sessions}), tmp_path).run()
    assert bool(asked) == starts


def endless(spec_body: SpecBody, sessions: int = 2) -> dict[str, Any]:
    return spec_body(env={"max_frame": 10**9}, meta={"max_session": sessions, "log_frequency": 500, "save_interval": 3600})


def check_saved(paths: RunPaths, sessions: int) -> None:
    """Check that checkpoint and table of each Session end at the same frame, and that the graphs are drawn."""
    for index in range(sessions):
        (policy,) = state.load(paths.checkpoint(index, "last"))["policies"]
        assert 0 < policy["clock"]["frame"] == int(rows(paths.session_df(index))[-1]["frame"])
        assert paths.checkpoint(index, "best").is_file()
        assert json.loads(paths.session_metrics(index).read_text())["status"] == "stopped"
    assert paths.trial_graph("mean_returns", "png").is_file()
    assert json.loads(paths.trial_metrics().read_text())["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "sessions"), [(signal.SIGTERM, 1), (signal.SIGHUP, 2)])
def test_signals_to_the_whole_group(number: signal.Signals, sessions: int, command: Callable[..., Command], spec_body: SpecBody) -> None:
    """Every Session saves its state, graphs are drawn and no process is left.

    The signal is sent twice, as `timeout` does, and counts as one request. A single Session runs in the process of the command. For Ctrl-C
    see test_faults and test_hogwild.
    """
    if signal.getsignal(number) is signal.SIG_IGN:
        number = signal.SIGINT  # the signal is ignored in this process (nohup), and commands inherit this
    run = command(endless(spec_body, sessions))
    process = run.start()
    until(run.has_rows(sessions), process)
    if sessions == 1:
        assert run.processes() == [process.pid]
    process.send_signal(number)
    os.killpg(process.pid, number)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == f"continue:  slm-lab train@{run.paths.root}"
    check_saved(run.paths, sessions)
    run.leaves_nothing()


def test_what_is_not_a_spec(spec_body: SpecBody, tmp_path: Path) -> None:
    for kind in (Trial, slm_lab.Session):
        with pytest.raises(TypeError, match="load_spec"):
            kind({"small": spec_body()})  # type: ignore[operator]


def test_a_run_is_enjoyed(make_spec: Callable[..., Spec], spec_body: SpecBody, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """enjoy plays the best checkpoint of the Sessions, although that of one Session is damaged."""
    trial = Trial(make_spec(meta={"max_session": 2}), tmp_path)
    trial.run()
    trial.paths.checkpoint(0, "best").write_bytes(b"PK half")
    (tmp_path / "spec.json").write_text(json.dumps({"small": spec_body(env={"num_envs": "${envs}"})}))
    words = ["enjoy@latest", "--data-dir", str(tmp_path)]
    for refused in (["smal", *words], ["small_2", *words], ["small", *words, "-s", "envs=8"], ["small", *words, "--jobs", "3"]):
        assert main([str(tmp_path / "spec.json"), *refused]) == 2
    capsys.readouterr()
    assert main([str(tmp_path / "spec.json"), "small", *words]) == 0
    output = capsys.readouterr()
    assert str(trial.paths.checkpoint(1, "best")) in output.out
    assert "10 episodes:" in output.out


@pytest.mark.parametrize("sessions", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_before_the_first_step(sessions: int, command: Callable[..., Command], spec_body: SpecBody, tmp_path: Path) -> None:
    body = endless(spec_body, sessions)
    if sessions == 2:
        body["env"] |= {
            "name": "tests.experiment.faulty_env:Flawed-v0",
            "backend": "sync",
            "folder": str(tmp_path),
            "blocks": "constructor",
            "copies": 2,
        }
    run = command(body)
    process = run.start()
    assert process.stdout.readline() == "starting small …\n"
    until(lambda: sessions == 1 or (tmp_path / "blocks").exists(), process)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=150)[0].splitlines()
    assert [line for line in output if "no progress" not in line] == ["stopped before the first step; nothing was written"]
    assert process.returncode == 130
    assert not run.data.exists()
    run.leaves_nothing()


@pytest.mark.slow
def test_a_second_ctrl_c_names_the_folder(command: Callable[..., Command], spec_body: SpecBody) -> None:
    run = command(endless(spec_body))
    process = run.start()
    until(run.has_rows(2), process)
    sessions = session_processes(run.paths)
    assert sorted(sessions) == [0, 1]
    for session in sessions.values():
        os.kill(session, signal.SIGSTOP)  # no Session can save its state in time
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 130
    assert "Traceback" not in output
    assert output.splitlines()[-1] == f"interrupted; continue it with slm-lab train@{run.paths.root}"
    assert run.paths.trial_log().read_text().splitlines()[-1] == output.splitlines()[-1]
    run.leaves_nothing()


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_run(command: Callable[..., Command], spec_body: SpecBody) -> None:
    run = command(spec_body(meta={"max_session": 2}))
    process = run.start()
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=150) == 0
    assert [rows(run.paths.session_df(index))[-1]["frame"] for index in (0, 1)] == ["1000", "1000"]
    assert run.paths.trial_metrics().is_file()


def test_a_disk_that_fills_up(make_spec: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The cause is one line, and only files with content are listed."""

    def full(path: Path, bundle: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "save", full)
    trial = Trial(make_spec(), tmp_path)
    with pytest.raises(TrialFailed, match="session 0 failed: "):
        trial.run()
    output = capsys.readouterr().out.splitlines()
    assert "session 0 failed: the disk of the data folder is full (No space left on device)" in output
    assert output[-2:] == [f"all files: {trial.paths.root}", f"try again: slm-lab train@{trial.paths.root}"]
    assert len(output) < 15


def test_an_error_at_build_leaves_nothing(tmp_path: Path, spec_body: SpecBody, capfd: pytest.CaptureFixture[str]) -> None:
    """A problem that appears only at build is still a user error before anything is written, also in a child process."""
    for sessions in (1, 2):
        (tmp_path / "spec.json").write_text(
            json.dumps({"small": spec_body(meta={"max_session": sessions}, algorithm={"action_pdtype": "Normal"})})
        )
        assert main([str(tmp_path / "spec.json"), "small", "--data-dir", str(tmp_path / "data")]) == 2
        output = "".join(capfd.readouterr())
        assert "agent.algorithm.action_pdtype" in output
        assert "Traceback" not in output
        assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("case", ["unreadable parent", "long name", "long path", "a file"])
def test_a_data_folder_that_cannot_be_made(case: str, tmp_path: Path, spec_body: SpecBody) -> None:
    """The command must exit with code 2 and one line, and write nothing."""
    (tmp_path / "spec.json").write_text(json.dumps({"small": spec_body()}))
    folder = {
        "unreadable parent": tmp_path / "closed" / "in" / "data",
        "long name": tmp_path / ("x" * 300),
        "long path": tmp_path.joinpath(*["x" * 200] * 30),
        "a file": tmp_path / "spec.json" / "data",
    }[case]
    if case == "unreadable parent":
        (tmp_path / "closed").mkdir(mode=0)
    code = as_nobody(lambda: main([str(tmp_path / "spec.json"), "small", "--data-dir", str(folder)]), tmp_path)
    assert code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) in (["closed", "spec.json"], ["spec.json"])


def as_nobody(call: Callable[[], int], folder: Path) -> int:
    """Return the result of `call` in a forked process without the rights of root, who may read every folder."""
    errors = folder.parent / f"{folder.name}.stderr"
    child = os.fork()
    if child == 0:
        code = 99
        with suppress(BaseException):
            fd = os.open(errors, os.O_CREAT | os.O_WRONLY)
            os.dup2(fd, 2)
            if os.getuid() == 0:
                os.chmod(folder, 0o755)
                os.setuid(65534)
            code = call()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = errors.read_text()
    errors.unlink()
    assert text.count("\n") <= 1, text
    return code
