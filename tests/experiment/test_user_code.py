"""Tests of envs that end, copy or change the process in which they run, or whose constructor or close() blocks before a run begins."""

from __future__ import annotations

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
import torch

from slm_lab.experiment.execute.heartbeat import STEPPING, Heartbeat
from slm_lab.experiment.execute.local import user_code
from slm_lab.experiment.execute.local.user_code import describe_failure
from slm_lab.experiment.files.lock import RunLock, unfinished_notice
from slm_lab.experiment.plan import Interrupted, TrialFailed
from slm_lab.experiment.report.retro_analyze import retro_analyze
from slm_lab.experiment.run import engine
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.commands import frame_of, rows, run_while, until

MakeSpec = Callable[..., Spec]
FATAL = "tests.experiment.fatal_env:Fatal-v0"
FLAWED = "tests.experiment.faulty_env:Flawed-v0"
EXITS = ["sys.exit", "os._exit", "KeyboardInterrupt", "GeneratorExit"]


pytestmark = pytest.mark.usefixtures("no_baseline")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def fatal(does: str, where: str = "step", **others: Any) -> dict[str, Any]:
    return {"name": FATAL, "num_envs": 1, "max_frame": 200, "does": does, "where": where, **others}


def short(env: dict[str, Any], **meta: Any) -> Spec:
    """Return a spec without a net, for which an env is built and closed before the run begins."""
    algorithm = {"name": "PPO", "time_horizon": 32, "minibatch_size": 32}
    meta = {"max_session": 1, "log_frequency": 50, "random_seed": 5, **meta}
    return Spec.model_validate({"name": "small", "agent": {"algorithm": algorithm}, "env": env, "meta": meta})


# ---- envs that end the process


@pytest.mark.sampled(2)
@pytest.mark.parametrize("does", EXITS)
def test_an_env_that_ends_the_process(does: str, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a step ends the process, the Session fails with a one-sentence cause, and has rows, metrics and graphs."""
    trial = Trial(make_spec(env=fatal(does), meta={"log_frequency": 20}), tmp_path)
    with pytest.raises(TrialFailed, match=f"{does}.*fatal_env.py.*at frame 69"):
        trial.run()
    assert "Traceback" not in capsys.readouterr().out
    assert [row["frame"] for row in rows(trial.paths.session_df(0))] == ["20", "40", "60"]
    assert json.loads(trial.paths.session_metrics(0).read_text())["status"] == "failed"
    assert trial.paths.trial_graph("mean_returns", "png").is_file()


def test_one_of_two_sessions_calls_exit(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(make_spec(env=fatal("sys.exit", folder=str(tmp_path), copy=3), meta={"max_session": 2}), tmp_path)
    with pytest.raises(TrialFailed, match="1 of 2 sessions failed"):
        trial.run()
    assert "failed: sys.exit(0) was called in" in capsys.readouterr().out


@pytest.mark.parametrize("does", EXITS)
@pytest.mark.parametrize("complete", [True, False])
def test_a_constructor_that_ends_the_process(complete: bool, does: str, make_spec: MakeSpec, tmp_path: Path) -> None:
    env = fatal(does, "constructor")
    trial = Trial(make_spec(env=env) if complete else short(env), tmp_path)
    with pytest.raises(SpecError, match=f"env.name: {FATAL} cannot be built: .*{does}.*fatal_env.py"):
        trial.run()
    assert list(tmp_path.iterdir()) == []


def test_os_exit_ends_a_copy_of_the_process() -> None:
    before = os._exit
    with user_code.os_exit_raises():
        with pytest.raises(user_code.UserCodeExited, match=r"os\._exit\(4\)"):
            os._exit(4)
        if (pid := os.fork()) == 0:
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert os._exit is before


def test_a_copy_of_the_process_ends_with_its_next_beat() -> None:
    """If an env calls os.fork, two processes return from it; only the original one may continue."""
    heartbeat = Heartbeat()
    if (pid := os.fork()) == 0:
        try:
            heartbeat.beat(STEPPING)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    before = heartbeat.beat_counter
    heartbeat.beat(STEPPING)
    assert heartbeat.beat_counter != before


def test_a_run_whose_process_was_ended(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Commands that read the run report that it is unfinished, until it is continued."""
    trial = Trial(make_spec(env={"max_frame": 200}, meta={"log_frequency": 50}), tmp_path)
    trial.run()
    root, file = trial.paths.root, trial.paths.lock
    assert unfinished_notice(root, file) is None
    lock = RunLock(file)
    assert unfinished_notice(root, file) is None, "it runs"
    lock.close()
    said = unfinished_notice(root, file)
    assert said is not None
    assert f"process {os.getpid()} on" in said
    assert said in retro_analyze(root)
    Trial.resume(root, ["env.max_frame=240"]).run()
    assert unfinished_notice(root, file) is None


def test_a_lock_whose_descriptor_was_closed(tmp_path: Path) -> None:
    """The lock is released, and another file that has reused the descriptor is not touched."""
    lock = RunLock(tmp_path / "lock")
    os.close(lock.fd)
    (tmp_path / "other").write_text("content")
    with (tmp_path / "other").open("r+") as other:
        assert other.fileno() == lock.fd
        lock.release()
        assert other.read() == "content"
    assert unfinished_notice(tmp_path, tmp_path / "lock") is None


# ---- close()


@pytest.mark.parametrize("does", ["ValueError", "KeyboardInterrupt", "os._exit"])
def test_a_close_that_fails(does: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """close() fails at the start, where a short spec is completed, and at the end; a notice is shown, and the run is done."""
    assert Trial(short(fatal(does, "close")), tmp_path).run()["status"] == "done"
    output = capsys.readouterr().out
    assert "the env's close() " in output
    assert does in output
    assert "Traceback" not in output


def test_a_close_that_fails_in_two_sessions(make_spec: MakeSpec, tmp_path: Path) -> None:
    assert Trial(make_spec(env=fatal("ValueError", "close"), meta={"max_session": 2}), tmp_path).run()["status"] == "done"


def test_a_close_that_blocks_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(user_code, "CLOSE_SECONDS", 1.0)
    env = {"name": FLAWED, "num_envs": 1, "max_frame": 100, "folder": str(tmp_path), "blocks": "close"}
    assert Trial(short(env, stall_notice=0.3), tmp_path).run()["status"] == "done"
    output = capsys.readouterr().out
    assert "no progress for 0 s (closing)" in output
    assert "the env's close() did not return within 1 seconds" in output


# ---- signals


@pytest.mark.parametrize("blocks", ["constructor", "close"])
def test_a_signal_while_an_env_blocks_before_the_run(
    blocks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One signal must be enough, and nothing is written."""
    monkeypatch.setattr(engine, "STOP_GRACE", 0.3)
    (tmp_path / "env").mkdir()
    env = {"name": FLAWED, "num_envs": 1, "max_frame": 100, "folder": str(tmp_path / "env"), "blocks": blocks}
    trial = Trial(short(env, stall_notice=0.2), tmp_path / "data")

    def end(trial: Trial) -> None:
        until((tmp_path / "env" / "blocks").exists)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as raised:
        run_while(trial, end)
    assert raised.value.code == 143
    assert f" s ({'building' if blocks == 'constructor' else 'closing'})" in capsys.readouterr().out
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("handlers")
def test_an_env_that_ignores_signals(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Ctrl-C must work although the env's constructor has set signals to be ignored."""
    trial = Trial(
        make_spec(env=fatal("ignores signals", "constructor", max_frame=10**9), meta={"log_frequency": 50, "max_seconds": 20}), tmp_path
    )

    def end(trial: Trial) -> None:
        until(lambda: frame_of(trial.paths, 0) > 0)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_while(trial, end)
    assert json.loads(trial.paths.trial_metrics().read_text())["status"] == "stopped"


# ---- settings of the process


@pytest.mark.parametrize("where", ["constructor", "step"])
def test_an_env_that_changes_torchs_settings(where: str, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notice is shown, and the rows equal those of an env that does not change the settings."""
    tables = []
    try:
        for does in ("nothing", "sets torch"):
            trial = Trial(make_spec(env=fatal(does, where), meta={"log_frequency": 20}), tmp_path / does.replace(" ", "_"))
            trial.run()
            tables.append(rows(trial.paths.session_df(0)))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert tables[0] == tables[1]
    output = capsys.readouterr().out
    for setting in ("default dtype", "gradient mode", "number of threads"):
        assert output.count(f"changed torch's {setting}") == 1


# ---- descriptors and threads


def script(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_an_env_that_closes_stdout() -> None:
    """Output printed after the env has closed stdout must arrive: stdout is opened again."""
    code = "import os, sys\nfrom slm_lab.cli.output import *\nprepare_streams()\nprint_result('before')\n"
    for close in ("os.close(1)", "sys.stdout.close()", "os.close(1); os.closerange(3, 256)"):
        done = script(f"{code}{close}\nprint_result('after')\nprint('end')\nflush()")
        assert (done.stdout, done.stderr, done.returncode) == ("before\nafter\nend\n", "", 0), close


def test_a_closed_descriptor_is_explained() -> None:
    with pytest.raises(OSError, match="Bad") as raised:
        os.close(10**6)
    assert "descriptor of the process is closed" in describe_failure(raised.value)
    assert "Traceback" not in describe_failure(raised.value)
    assert "another one" in describe_failure(OSError(errno.EIO, "another one"))


def test_threads_that_an_env_leaves() -> None:
    """The command must end with its exit code although threads are left, and name them."""
    code = "import threading, time\nfrom slm_lab.cli import entry\nentry._END_SECONDS = 0.3\n"
    start = "threading.Thread(target=time.sleep, args=(1000,), name='left').start()"
    done = script(f"{code}entry.main = lambda: ({start}, 3)[1]\nentry.console()")
    assert done.returncode == 3
    assert "left" in done.stderr
    quiet = script(f"{code}entry.main = lambda: 3\nentry.console()")
    assert (quiet.returncode, quiet.stderr) == (3, "")
