"""Tests of whole searches: their files and state, kills and continuation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import SearchState
from slm_lab.experiment.report.progress import format_number
from tests.experiment.commands import ROOT, Command, until
from tests.packages import needs

packages = needs("optuna")
MakeCommand = Callable[..., Command]


def start(command: Command, *words: str) -> subprocess.Popen[str]:
    words = words or (str(command.spec_file), "small", "search")
    return command._start([str(ROOT / "run_lab.py"), *words, "--data-dir", str(data(command))])


def data(command: Command) -> Path:
    return command.folder / "a data folder"


def state_of(command: Command) -> SearchState | None:
    found = sorted(data(command).glob("small_*/small_search_state.json"))
    return SearchState.load(found[-1]) if found else None


def ended(command: Command, count: int) -> Callable[[], bool]:
    """Return a function that tests whether `count` trials have ended and a running one has a checkpoint."""

    def check() -> bool:
        state = state_of(command)
        if state is None or sum(trial.has_ended for trial in state.trials) < count:
            return False
        paths = paths_of(command)
        running = [trial.trial for trial in state.trials if trial.status == "running"]
        return any(paths.checkpoint(0, "last", trial).exists() for trial in running)

    return check


def priority(pid: int) -> int | None:
    """Return the nice value of a process; None if it has ended."""
    with suppress(ProcessLookupError):
        return os.getpriority(os.PRIO_PROCESS, pid)
    return None


def paths_of(command: Command) -> RunPaths:
    return RunPaths(sorted(data(command).glob("small_*"))[-1], "small")


def ranking(output: str) -> list[list[str]]:
    """Return the cells of the table of the best trials in the output of a search, with its header first."""
    lines = [line.split() for line in output.splitlines()]
    begin = next(at for at, cells in enumerate(lines) if cells[:2] == ["trial", "current_return"])
    end = next(at for at in range(begin + 1, len(lines)) if not lines[at] or not lines[at][0].isdecimal())
    return lines[begin:end]


@pytest.mark.slow
def test_a_search_writes_the_files_of_its_trials_and_its_own(command: MakeCommand, search_body: Callable[..., dict[str, Any]]) -> None:
    made = command(search_body(meta={"max_trial": 3, "search_keep": 1, "max_session": 2}))
    process = start(made)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    state, paths = state_of(made), paths_of(made)
    assert [trial.status for trial in state.trials] == ["finished"] * 3
    assert paths.trials() == [0, 1, 2]
    assert "search" in json.loads(paths.spec.read_text())["small"]
    assert (paths.root / "small_experiment_df.csv").is_file()
    best = max(state.trials, key=lambda trial: trial.metric or 0.0)
    assert [bool(paths.checkpoints(trial)) for trial in range(3)] == [trial == best.trial for trial in range(3)]
    assert "3 trials (optuna)" in output
    assert "3 finished" in output
    head, first, *others = ranking(output)
    assert head == ["trial", "current_return", "gamma"]
    assert first == [str(best.trial), format_number(best.metric), format_number(best.values["agent.algorithm.gamma"])]
    assert len(others) == 2
    assert "(raylet)" not in output
    assert len(output.splitlines()) < 30
    made.leaves_nothing()
    assert [file.name for file in paths.root.glob(".*")] == [".lock"]


@pytest.mark.slow
def test_a_killed_search_continues_with_the_trials_that_are_missing(
    command: MakeCommand, search_body: Callable[..., dict[str, Any]]
) -> None:
    body = search_body(env={"max_frame": 20_000}, meta={"max_trial": 5, "save_interval": 0, "log_frequency": 1000})
    made = command(body)
    process = start(made)
    until(ended(made, 2), process)
    process.kill()
    process.communicate()
    before = state_of(made)
    kept = {trial.trial: trial for trial in before.trials if trial.has_ended}
    stamps = {trial: paths_of(made).trial_metrics(trial).stat().st_mtime_ns for trial in kept}
    made.leaves_nothing(40.0)
    process = start(made, "search@latest")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    after, paths = state_of(made), paths_of(made)
    assert [trial.status for trial in after.trials] == ["finished"] * 5
    assert [trial.values for trial in after.trials[: len(before.trials)]] == [trial.values for trial in before.trials]
    assert {trial: paths.trial_metrics(trial).stat().st_mtime_ns for trial in kept} == stamps  # they did not run again
    assert len(list(data(made).glob("small_*"))) == 1
    continued = [trial for trial in range(5) if "continues at frame" in paths.trial_log(trial).read_text()]
    assert continued
    assert not set(continued) & set(kept)
    for trial in range(5):  # no trial has a repeated row
        frames = [line.split(",")[0] for line in paths.session_df(0, t=trial).read_text().splitlines()[1:]]
        assert len(frames) == len(set(frames)) == 20
    process = start(made, "search@latest", "--set", "meta.max_trial=6", "--confirm", "1")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    extended = state_of(made)
    assert [trial.status for trial in extended.trials] == ["finished"] * 6
    (confirmed,) = extended.confirmations
    assert (confirmed.status, confirmed.metrics["sessions"]) == ("finished", 4)
    head, first, *_ = ranking(output)
    assert head == ["trial", "current_return", "confirmed", "gamma"]
    assert (first[0], first[2]) == (str(confirmed.trial), format_number(confirmed.metric))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_there_is(command: MakeCommand, search_body: Callable[..., dict[str, Any]], number: signal.Signals) -> None:
    made = command(search_body(env={"max_frame": 200_000}, meta={"max_trial": 4, "log_frequency": 1000, "save_interval": 1}))
    process = start(made)
    until(ended(made, 0), process)
    assert {priority(pid) for pid in made.processes()} - {None} == {priority(os.getpid())}  # Ray's default priority is low
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + number, output
    state, paths = state_of(made), paths_of(made)
    running = [trial.trial for trial in state.trials if trial.status == "running"]
    assert running
    assert f"{len(running)} interrupted; " in output
    assert "continue it with slm-lab search@" in output
    assert "Traceback" not in output
    for trial in running:
        assert paths.checkpoint(0, "last", trial).is_file()
        assert paths.trial_metrics(trial).is_file()
    assert (paths.root / "small_experiment_df.csv").is_file()
    made.leaves_nothing()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(command: MakeCommand, search_body: Callable[..., dict[str, Any]]) -> None:
    """The second Ctrl-C ends the search without waiting for Sessions; no process is left, and existing checkpoints are continued."""
    made = command(search_body(env={"max_frame": 200_000}, meta={"max_trial": 4, "log_frequency": 1000, "save_interval": 1}))
    process = start(made)
    until(ended(made, 0), process)
    for seconds in (0.5, 0.0):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(seconds)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "continue it with slm-lab search@" in output
    assert "Traceback" not in output
    made.leaves_nothing(30.0)
    assert time.monotonic() - begin < 40
    state = state_of(made)
    assert {trial.status for trial in state.trials} <= {"running", "waiting"}


@pytest.mark.slow
def test_a_value_that_cannot_be_built_ends_the_search_before_it_starts(
    command: MakeCommand, search_body: Callable[..., dict[str, Any]]
) -> None:
    made = command(search_body({"env": {"no_such_argument__choice": [1, 2]}}))
    process = start(made)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2, output
    assert "search.env.no_such_argument" in output
    assert "Traceback" not in output
    assert not list(data(made).glob("small_*"))
    made.leaves_nothing()


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_search_takes_little_longer_than_a_shell_loop(command: MakeCommand, search_body: Callable[..., dict[str, Any]]) -> None:
    """16 trials of about 3 s, against 16 runs of `train`, two at a time. Both run simultaneously, under the same load."""
    made = command(search_body(env={"max_frame": 50_000}, meta={"max_trial": 16, "search_keep": 0}))
    body = json.loads(made.spec_file.read_text())["small"]
    (train_file := made.folder / "train.json").write_text(json.dumps({"small": {key: body[key] for key in body if key != "search"}}))

    def run(*words: str) -> float:
        """Return the seconds that a command takes."""
        begin = time.perf_counter()
        process = start(made, *words)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
        return time.perf_counter() - begin

    def train(seed: int) -> float:
        return run(str(train_file), "small", "train", "--set", f"meta.random_seed={seed}")

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        search, begin = one.submit(run, str(made.spec_file), "small", "search", "--jobs", "2"), time.perf_counter()
        list(two.map(train, range(16)))
        of_loop = time.perf_counter() - begin
        of_search = search.result()
    assert len(list(data(made).glob("small_*"))) == 17
    assert of_search <= 1.5 * of_loop, (of_search, of_loop)


def test_errors_of_the_user_come_first(command: MakeCommand, search_body: Callable[..., dict[str, Any]]) -> None:
    made = command(search_body())
    code = "import sys, importlib.util as u; find = u.find_spec\n"
    code += "u.find_spec = lambda name, *rest: None if name == 'optuna' else find(name, *rest)\n"
    code += f"from slm_lab.cli import main; sys.exit(main([{str(made.spec_file)!r}, 'small', 'search']))\n"
    process = made.script(code)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "pip install 'slm-lab[search]'" in output
    body = search_body()
    del body["search"]
    other = command(body)
    for words, expected in (
        ([str(other.spec_file), "small", "search"], "search"),
        ([str(other.spec_file), "small", "train", "--confirm", "2"], "--confirm has no effect with train"),
        (["search@latest"], "no search in"),
        (["search@nowhere"], "'nowhere' is not a run folder"),
        ([str(other.spec_file), "small", "search", "--confirm", "0"], "invalid number of trials '0'"),
    ):
        process = start(other, *words)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2, output
        assert expected in output
        assert "Traceback" not in output
    assert not list(other.folder.glob("*/small_*"))
