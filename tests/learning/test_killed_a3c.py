"""A3C learns as without interruption if all its processes are killed five times, as by a power failure."""

from __future__ import annotations

import csv
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from slm_lab.spec.load.loader import dump_spec, load_spec
from tests.experiment.commands import ROOT, Command, frame_of, until

SEEDS = range(5)
WORKERS, FRAMES, EVERY = 4, 128_000, 3_200
KILLS = (16_000, 32_000, 54_000, 76_000, 100_000)
"""Frames of the first worker."""
LEAST = 450.0
"""Mean return of the last 100 episodes; a random policy reaches 22. Seeds 100 to 104 reached 500 without kills. With the learning rate and
the frames of the spec (0.002 and 256,000) some seeds fall back to 286 near the end, with and without kills."""
SETS = ("env.max_frame=512000", "agent.net.lr_scheduler_spec.frame=512000", "agent.net.optim_spec.lr=0.001", "meta.save_interval=2")


def command(folder: Path, seed: int) -> Command:
    folder.mkdir()
    spec = load_spec("a3c_gae_cartpole.json", "a3c_gae_cartpole", [f"meta.random_seed={seed}", *SETS])
    return Command(folder, dump_spec(spec)["a3c_gae_cartpole"])


def final_return(one: Command) -> float:
    metrics = json.loads(one.paths.trial_metrics().read_text())
    assert metrics["status"] == "done"
    return float(metrics["final_return"])


def killed_run(one: Command) -> None:
    """Train a run, and kill all its processes at each of the frames in KILLS."""
    process = one.start()
    for frame in KILLS:
        until(lambda frame=frame: one.has_rows(1)() and frame_of(one.paths, 0) >= frame, process)  # type: ignore[misc]
        for pid in one.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        until(lambda: one.processes() == [])
        process = one._start([str(ROOT / "run_lab.py"), "train@latest", "--data-dir", str(one.data)])
    output = process.communicate()[0]
    assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a3c_killed_five_times_learns_as_without_a_break(tmp_path: Path) -> None:
    straight, killed = [], []
    for seed in SEEDS:
        one = command(tmp_path / f"straight{seed}", seed)
        process = one.start()
        assert process.wait() == 0
        straight.append(final_return(one))
        other = command(tmp_path / f"killed{seed}", seed)
        killed_run(other)
        killed.append(final_return(other))
        for index in range(WORKERS):
            with other.paths.session_df(index).open() as file:
                frames = [int(row["frame"]) for row in csv.DictReader(file)]
            assert frames == list(range(EVERY, FRAMES + 1, EVERY)), "no gap and no repetition"
    print(straight, killed)  # noqa: T201
    assert min(straight) >= LEAST
    assert min(killed) >= LEAST
