"""Tests of SIGKILL at any moment: no run is lost, and a resume that reports to be exact gives the same run as an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slm_lab.experiment.files import bundle as state
from tests.resume.kills import CASES, QUICK, Killed
from tests.resume.launcher import Launcher

SEED = int(os.environ.get("KILL_SEED", "0"))
"""Seed of the moments of the kills; a failing test prints its kills."""


# ---- runs


@pytest.mark.parametrize("name", QUICK)
def test_a_killed_run_goes_on(name: str, launcher: Launcher, tmp_path: Path) -> None:
    Killed(CASES[name], launcher, tmp_path / "runs", SEED).chain(0, 2)


@pytest.mark.slow
def test_rollout_workers_draw_the_same_numbers_in_each_run(launcher: Launcher, tmp_path: Path) -> None:
    """This includes numbers from torch's global generator, which the system seeds in each process."""
    Killed(replace(CASES["sampler in turns"], frames=640), launcher, tmp_path / "runs", SEED).chain(0, 0)


KILLS = int(os.environ.get("KILLS", "9"))
"""Kills of each case: 117 in all."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_no_run_is_lost(name: str, launcher: Launcher, tmp_path: Path) -> None:
    if CASES[name].env.startswith("pettingzoo:"):
        pytest.importorskip("pettingzoo")
    killed = Killed(CASES[name], launcher, tmp_path / "runs", SEED)
    kills, chains = 0, 0
    while kills < KILLS:
        kills += killed.chain(chains, min(3, KILLS - kills))
        chains += 1
        assert chains < 4 * KILLS, "runs end before they are killed"
    print(f"{name}: {kills} kills in {chains} runs")  # noqa: T201


# ---- bundles


def _numbered(number: int, size: int) -> dict[str, Any]:
    return {"version": state.VERSION, "number": number, "values": torch.full((size,), number), "spec": {"name": "x" * (number % 300)}}


def _check(path: Path, at_least: int) -> int:
    """Check that a bundle is complete and has at least the number `at_least`; return its number."""
    found = state.load(path)
    number = int(found["number"])
    assert number >= at_least, f"bundle {number} after {at_least}"
    assert found["values"].unique().tolist() == [number]
    assert len(found["spec"]["name"]) == number % 300
    return number


class Writer:
    """Process that only writes bundles with increasing numbers.

    Args: stops_before: function of os before which the process stops (SIGSTOP) as it saves the bundle after `first`; None: no stop.
    """

    def __init__(self, path: Path, first: int, size: int, stops_before: str | None = None) -> None:
        reader, writer = os.pipe()
        self.pid, self.reader = os.fork(), reader
        if self.pid == 0:
            try:
                torch.set_num_threads(1)  # a forked process does not have its parent's threads
                if stops_before is not None:
                    _stop_before(stops_before)
                for number in range(first + 1, first + 100_000):
                    state.save(path, _numbered(number, size))
                    os.write(writer, number.to_bytes(8, "little"))
            finally:
                os._exit(1)
        os.close(writer)

    def end(self) -> int:
        """Kill the process; return the last number that it reported as saved, or -1 if it reported none."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        with os.fdopen(self.reader, "rb") as file:
            told = file.read()
        return int.from_bytes(told[-8:], "little") if told else -1


def _stop_before(call: str) -> None:
    real = getattr(os, call)

    def stop(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments, **options)

    setattr(os, call, stop)


def kill_writers(path: Path, kills: int, moments: random.Random) -> int:
    """Kill writers of one file at random moments, while the file is read and checked; return the number of the last bundle."""
    number = 0
    state.save(path, _numbered(0, 10))
    for kill in range(kills):
        stops_before = moments.choice(("fsync", "replace", "replace")) if kill % 4 == 0 else None
        writer = Writer(path, number, moments.choice((10, 3_000, 300_000)), stops_before)
        if stops_before is not None:
            os.waitpid(writer.pid, os.WUNTRACED)
            assert _check(path, number) == number, "nothing has been replaced yet"
            if moments.random() < 0.5:
                os.kill(writer.pid, signal.SIGCONT)
        end = time.monotonic() + moments.uniform(0.0, 0.06)
        while time.monotonic() < end:
            number = _check(path, number)
        told = writer.end()
        number = _check(path, max(number, told))
        assert [name for name in os.listdir(path.parent) if not name.startswith(".")] == [path.name]
        assert len(os.listdir(path.parent)) <= 2, "what killed writers leave does not add up"
    return number


@pytest.mark.slow
def test_a_reader_finds_a_complete_bundle(tmp_path: Path) -> None:
    assert kill_writers(tmp_path / "small_t0_s0_ckpt-last.pt", 24, random.Random(SEED)) > 0  # the number depends on the machine's load


@pytest.mark.slow
def test_no_bundle_is_lost(tmp_path: Path) -> None:
    kill_writers(tmp_path / "small_t0_s0_ckpt-last.pt", 200, random.Random(SEED + 1))
