"""Tests of bench.benchmark_hours: the estimated hours of the missing runs of studies."""

from __future__ import annotations

import pytest

from bench.benchmark_hours import Rate, Stopwatch, line, shortened
from slm_lab.experiment.events import Row
from slm_lab.experiment.plan import Stop
from slm_lab.spec.load.loader import load_spec


def test_hours_are_those_of_all_missing_frames() -> None:
    rate = Rate("mujoco", "PPO", "Hopper-v5", 4, 16_000_000, 4000.0)
    assert rate.hours == pytest.approx(16_000_000 / 4000 / 3600)
    assert line(rate) == "| mujoco | Hopper-v5 | PPO | 4 | 16,000,000 | 4,000 | 1.1 |"
    assert line(rate._replace(per_second=None)) == "| mujoco | Hopper-v5 | PPO | 4 | 16,000,000 | failed |  |"


def test_frames_and_seconds_count_from_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, times = Stop(), iter([100.0, 101.0, 104.0])
    monkeypatch.setattr("time.process_time", lambda: next(times))
    watch = Stopwatch(stop, seconds=3.5)
    assert watch.frames_per_second is None
    for frame in (500, 700):
        watch(Row(0, "train", {"frame": frame}))
    watch(Row(0, "eval", {"frame": 900}))
    assert not stop.requested
    assert watch.frames_per_second == 200.0
    watch(Row(0, "train", {"frame": 1300}))
    assert stop.requested
    assert watch.frames_per_second == 200.0


def test_a_shortened_spec_updates_from_the_start_and_does_not_evaluate() -> None:
    sac = shortened(load_spec("mujoco.json", "sac_mujoco_100k", ["env=Hopper-v5", "meta.rigorous_eval=10"]))
    assert sac.agent.training_start == 500
    assert (sac.meta.rigorous_eval, sac.meta.eval_episodes, sac.meta.max_session) == (0, 0, 1)
    ppo = shortened(load_spec("mujoco.json", "ppo_mujoco", ["env=Hopper-v5"]))
    assert ppo.meta.log_frequency == 16 * 128
    assert ppo.agent == load_spec("mujoco.json", "ppo_mujoco", ["env=Hopper-v5"]).agent
