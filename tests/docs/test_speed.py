"""Tests of bench.speed: the measured time in EnvPool, and the lines of the table."""

from __future__ import annotations

import numpy as np
import pytest

from bench.envpool_clock import EnvPoolClock
from bench.speed import rows

ENVS = 3


def test_the_clock_counts_transitions_but_no_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    envpool = pytest.importorskip("envpool")
    registry = pytest.importorskip("envpool.registration").registry
    monkeypatch.setattr(registry, "make", registry.make)  # restores the function that the clock replaces
    clock = EnvPoolClock()
    clock.start()
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=ENVS, batch_size=ENVS, seed=0)
    pool.reset()
    assert clock.frames == [0]
    resets, done, steps = 0, np.zeros(ENVS, bool), 40
    for _ in range(steps):
        resets += int(done.sum())
        _, _, terminated, truncated, _ = pool.step(np.ones(ENVS, np.int32))
        done = terminated | truncated
    assert resets > 0
    assert clock.frames[-1] == steps * ENVS
    assert clock.transitions[-1] == steps * ENVS - resets
    transitions, microseconds = clock.between(10 * ENVS, steps * ENVS)
    assert transitions == clock.transitions[-1] - clock.transitions[10]
    assert microseconds * transitions == pytest.approx(1e6 * (clock.seconds_at[-1] - clock.seconds_at[10]))
    assert 0.0 < clock.seconds_at[10] < clock.seconds_at[-1] == clock.seconds
    pool.close()


def test_the_table_shows_the_time_outside_of_envpool() -> None:
    result = {
        "case": "ppo_go1",
        "fps": {"slm_lab": [10_000.0, 12_500.0, 10_000.0], "rl_games": [8_000.0, 8_000.0, 8_000.0]},
        "env_us": {"slm_lab": [90.0, 70.0, 95.0], "rl_games": [105.0, 100.0, 100.0]},
    }
    ratio, outside = rows(result)
    assert "1.25 × (1.25 to 1.56)" in ratio
    # slm_lab 10, 10 and 5 µs; rl_games 20, 25 and 25 µs
    assert "10.0 µs, rl_games 25.0 µs: 0.40 × (0.20 to 0.50)" in outside


@pytest.mark.parametrize("env_us", [{}, {"rl_games": [105.0]}])
def test_without_times_in_envpool_the_table_has_one_line_per_peer(env_us: dict[str, list[float]]) -> None:
    result = {"case": "ppo_go1", "fps": {"slm_lab": [10_000.0], "rl_games": [8_000.0], "env alone": [13_000.0]}, "env_us": env_us}
    (line,) = rows(result)
    assert "rl_games" in line
