"""Tests of the window of episodes, alone and in shared memory."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from slm_lab.lib.episodes import EPISODES, CurrentReturn, EpisodeWindow
from slm_lab.lib.store import SharedArrays, create_shared_file

WRITER = """
import sys
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.store import SharedArrays
window = EpisodeWindow()
SharedArrays(int(sys.argv[1]), 1, 2).attach({"episodes": window})
print("begins", flush=True)
for count in range(1, 20_001):
    window.record([float(count)], count)
"""


@pytest.fixture
def fd() -> Iterator[int]:
    file = create_shared_file()
    yield file
    os.close(file)


def shared(fd: int, index: int, workers: int, *, fresh: bool = True) -> tuple[EpisodeWindow, SharedArrays]:
    window, store = EpisodeWindow(), SharedArrays(fd, index, workers, fresh=fresh)
    store.attach({"clock": EpisodeWindow(), "episodes": window} if index else {"episodes": window, "clock": EpisodeWindow()})
    return window, store


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_last_episodes_of_all_workers_in_order_of_global_frames(fd: int, workers: int) -> None:
    """All workers see the same window and the same new episodes, whichever worker played or wrote them, in any order."""
    windows = [shared(fd, index, workers)[0] for index in range(workers)]
    rng, played = random.Random(workers), 0
    for frame in range(1, 500):
        windows[rng.randrange(workers)].record([float(frame)], frame)
        played += 1
        if rng.random() < 0.02:
            for one in windows:
                assert one.returns == [float(value) for value in range(max(frame - EPISODES, 0) + 1, frame + 1)]
                new, mean = one.take_new_episodes()
                assert (new, mean) == (played, pytest.approx(frame - (played - 1) / 2))
                assert one.take_new_episodes() == (0, None)
            played = 0


def test_more_episodes_since_the_last_row_than_the_window_holds(fd: int) -> None:
    one, other = (shared(fd, index, 2)[0] for index in (0, 1))
    one.record([1.0] * 3, 1)
    assert one.take_new_episodes() == (3, 1.0)
    other.record([2.0] * 5000, 2)
    one.record([8.0] * 5000, 3)
    assert one.take_new_episodes(count_again=True) == one.take_new_episodes() == (10_000, 5.0)
    assert other.take_new_episodes() == (10_003, pytest.approx((3 + 50_000) / 10_003))
    assert one.returns == one.own_returns == [8.0] * 100
    assert other.own_returns == [2.0] * 100


def test_a_process_that_takes_over_and_a_snapshot_lose_nothing(fd: int) -> None:
    one, store = shared(fd, 0, 2)
    other, _ = shared(fd, 1, 2)
    for frame in range(300):
        (one, other)[frame % 2].record([frame / 7], frame)
    assert other.take_new_episodes()[0] == 300
    other.record([5.0], 300)
    successor, _ = shared(fd, 1, 2, fresh=False)
    saved = {name: array.copy() for name, array in store.snapshot().items()}
    for again in (False, True):
        assert successor.returns == one.returns == [*(frame / 7 for frame in range(201, 300)), 5.0]
        successor.record([7.0], 301)
        assert successor.take_new_episodes() == (2, 6.0)
        assert one.returns[-2:] == [5.0, 7.0]
        if not again:
            store.restore(saved)


def test_a_reader_meets_no_entry_that_is_half_written(fd: int) -> None:
    window, _ = shared(fd, 0, 2)
    code = WRITER.replace('{"episodes": window}', '{"episodes": window, "clock": EpisodeWindow()}')
    with subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begins\n"
        new, total = 0, 0.0
        while writer.poll() is None:
            returns = window.returns
            assert returns == [returns[0] + step for step in range(len(returns))] if returns else True
            count, mean = window.take_new_episodes()
            new, total = new + count, total + count * (mean or 0.0)
    count, mean = window.take_new_episodes()
    assert new + count == 20_000
    assert total + count * (mean or 0.0) == pytest.approx(20_000 * 20_001 / 2)


def test_state_round_trip() -> None:
    for played in (0, 30, 430):
        window, other = EpisodeWindow(), EpisodeWindow()
        window.record([value / 3 for value in range(played)], 1)
        window.take_new_episodes()
        window.record([0.1], 2)
        other.load_state_dict(window.state_dict())
        for one in (window, other):
            one.record([0.2], 3)
        assert other.returns == window.returns
        assert other.take_new_episodes() == window.take_new_episodes() == (2, pytest.approx(0.15))
        assert other.state_dict() == window.state_dict()


@pytest.mark.parametrize(
    ("returns", "error"),
    [
        # two groups with means 1 and 3: the variance within is 0, that between is 2, so √(2 / 2 + 2)
        ([1.0, 1.0, 3.0, 3.0], math.sqrt(3.0)),
        # two groups with equal means: the error of independent returns, √(4 / 3 / 4)
        ([1.0, 3.0, 1.0, 3.0], math.sqrt(1.0 / 3.0)),
        # groups of 2 and 3 with means 1 and 4: variance between 4.5, within (0 + 6) / 3 · 2 / 5 = 0.8, so √(4.5 / 2 + 3.7)
        ([1.0, 1.0, 3.0, 3.0, 6.0], math.sqrt(2.25 + 3.7)),
        ([5.0, 5.0, 5.0, 5.0], 0.0),
        # too few returns for two groups
        ([1.0, 3.0, 5.0], 2.0 / math.sqrt(3.0)),
        ([4.0], None),
    ],
)
def test_the_standard_error_includes_changes_of_the_policy(returns: list[float], error: float | None) -> None:
    found = CurrentReturn.from_training_returns(np.array(returns))
    assert found is not None
    assert found.mean == pytest.approx(np.mean(returns))
    assert found.error == (None if error is None else pytest.approx(error))
    assert found.episodes == len(returns)
