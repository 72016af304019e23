"""A study that is killed repeatedly ends with the same results as an uninterrupted one."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slm_lab.experiment.files.paths import StudyPaths, find_study
from tests.experiment.commands import PATIENCE, ROOT
from tests.experiment.study.toys import results, run, write, written

SCRIPT = """
import sys
from pathlib import Path
from slm_lab.experiment.files.paths import find_study
from tests.experiment.study.toys import run
folder, frames, seeds = Path(sys.argv[1]), int(sys.argv[2]), list(range(int(sys.argv[3])))
try:
    paths = find_study("latest", "small", folder / "data")
except Exception:
    paths = None
run(folder, paths, random_seed=seeds, set={"env.max_frame": frames})
"""


def start(folder: Path, frames: int, seeds: int) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(folder / "script.py"), str(folder), str(frames), str(seeds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        words, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def kill_and_continue(folder: Path, frames: int, seeds: int, moments: list[float]) -> StudyPaths:
    """Kill a study after each number of seconds in `moments`, start it again, and let the last start finish."""
    for seconds in moments:
        process = start(folder, frames, seeds)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start(folder, frames, seeds)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return find_study("latest", "small", folder / "data")


def table(paths: StudyPaths) -> list[dict[str, str]]:
    """Return the table without its time columns."""
    with paths.table("csv").open() as file:
        return [
            {key: value for key, value in row.items() if key not in ("updates_per_second", "solve_seconds")} for row in csv.DictReader(file)
        ]


def check(paths: StudyPaths, straight: StudyPaths, runs: int) -> None:
    assert len(results(paths)) == len(written(paths)) == runs
    assert all(len(list(folder.glob("a2c_*/*_spec.json"))) == 2 for folder in paths.runs.iterdir()), "a run began twice"
    assert table(paths) == table(straight)
    for key, one in results(paths).items():
        other = results(straight)[key]
        for name in ("frame", "total_reward", "grad_norm"):
            assert one.tables("train")[0][name].tolist() == other.tables("train")[0][name].tolist()


@pytest.mark.slow
def test_a_killed_study_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    killed = kill_and_continue(tmp_path / "killed", 3000, 1, [6.0])
    check(killed, run(tmp_path / "straight", random_seed=[0], set={"env.max_frame": 3000}), 2)


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    """The kills are at random moments; the first ones happen during the start."""
    (tmp_path / "killed").mkdir()
    rng = random.Random(0)
    killed = kill_and_continue(tmp_path / "killed", 6000, 6, [rng.uniform(1.0, 9.0) for _ in range(10)])
    check(killed, run(tmp_path / "straight", random_seed=list(range(6)), set={"env.max_frame": 6000}), 12)


def test_ctrl_c_saves_and_continues(tmp_path: Path) -> None:
    process = start(tmp_path, 200_000, 1)
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("data/*/runs/*/a2c_*/model/*last.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "study@" in output
    paths = find_study("latest", "small", tmp_path / "data")
    assert not results(paths)
    assert list(paths.runs.glob("*/a2c_*/model/*last.pt"))


@pytest.mark.slow
def test_a_study_takes_no_longer_than_a_shell_loop(tmp_path: Path) -> None:
    """A study of 12 runs of a few seconds takes no longer than the same runs by `train`, two at a time."""
    file, command = write(tmp_path, random_seed=list(range(6)), set={"env.max_frame": 30_000}), [sys.executable, str(ROOT / "run_lab.py")]
    begin = time.perf_counter()
    subprocess.run([*command, str(file), "small", "study", "--jobs", "2"], cwd=tmp_path, check=True, capture_output=True)
    of_study = time.perf_counter() - begin
    assert len(results(find_study("latest", "small", tmp_path / "data"))) == 12
    each = [
        [*command, str(file), "a2c", "train", "--set", f"agent.net.optim_spec.lr={lr}", "--set", f"meta.random_seed={seed}"]
        for lr in (0.001, 0.01)
        for seed in range(6)
    ]
    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        loop = [
            *pool.map(
                lambda words: subprocess.run([*words, "-s", "env.max_frame=30000"], cwd=tmp_path, check=True, capture_output=True), each
            )
        ]
    of_loop = time.perf_counter() - begin
    assert len(loop) == 12
    assert of_study <= 1.05 * of_loop, (of_study, of_loop)
