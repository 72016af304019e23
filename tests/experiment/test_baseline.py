from __future__ import annotations

import json
import logging
import multiprocessing
import time
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from slm_lab.experiment.analysis import baseline
from slm_lab.experiment.analysis.baseline import SHIPPED, baseline_key, cache_folder, measure, random_baseline
from slm_lab.spec.env import EnvSpec


def env(name: str, **keys: Any) -> EnvSpec:
    return EnvSpec.model_validate({"name": name, "max_frame": 100, **keys})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def never(spec: EnvSpec) -> float:
    raise AssertionError("measured again")


def test_shipped_ones_are_plausible() -> None:
    shipped = json.loads(SHIPPED.read_text())
    assert 18 < shipped["CartPole-v1"] < 27
    assert shipped["MountainCar-v0"] == -200
    assert -1400 < shipped["Pendulum-v1"] < -1000
    assert -21 <= shipped["ALE/Pong-v5"] < -19.5
    assert shipped["LunarLander-v3"] != shipped['LunarLander-v3 {"continuous": true}']


def test_shipped_one_is_used_and_is_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = env("CartPole-v1", num_envs=3, normalize_reward=True, clip_reward=0.1, backend="sync")
    measured = measure(spec)
    monkeypatch.setattr(baseline, "measure", never)
    assert measured == pytest.approx(random_baseline(spec), abs=5)
    assert not cache_folder().exists()


def test_key_holds_what_a_random_return_depends_on() -> None:
    assert baseline_key(env("CartPole-v1", num_envs=7, normalize_obs=True)) == "CartPole-v1"
    assert baseline_key(env("CartPole-v1", max_t=9)) == 'CartPole-v1 {"max_t": 9}'
    assert baseline_key(env("LunarLander-v3", continuous=True)) == 'LunarLander-v3 {"continuous": true}'
    assert baseline_key(env("ALE/Pong-v5", life_loss_info=True, repeat_action_probability=0.25, grayscale=False)) == "ALE/Pong-v5"
    assert baseline_key(env("ALE/Pong-v5", repeat_action_probability=0.0)) == 'ALE/Pong-v5 {"repeat_action_probability": 0.0}'


def test_another_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = env("CartPole-v1", max_t=5)  # no pole falls that soon
    assert random_baseline(spec) == 5
    monkeypatch.setattr(baseline, "measure", never)
    assert random_baseline(spec) == 5
    (file,) = cache_folder().glob("*.json")
    assert json.loads(file.read_text()) == {"env": 'CartPole-v1 {"max_t": 5}', "episodes": 100, "mean_return": 5}
    assert not list(cache_folder().glob(".*"))  # no temporary file is left


def test_short_and_long_episodes_count_alike() -> None:
    gym.register("Uneven-v0", Uneven)
    try:
        assert measure(env("Uneven-v0", backend="sync")) == pytest.approx(13)
    finally:
        del gym.registry["Uneven-v0"]


class Uneven(gym.Env[Any, Any]):
    """Of 2 or of 24 steps, every other env; a reward of 1 each. The first hundred episodes to end would be the short ones."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    made = count()

    def __init__(self, **_: Any) -> None:
        self.length, self.left = (2, 24)[next(self.made) % 2], 0

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        self.left = self.length
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return 0, 1.0, self.left == 0, False, {}


def test_broken_cache_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = env("CartPole-v1", max_t=5)
    random_baseline(spec)
    (file,) = cache_folder().glob("*.json")
    file.write_text('{"mean_')
    assert random_baseline(spec) == 5
    assert json.loads(file.read_text())["mean_return"] == 5


def test_edited_env_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "baseline_lab.py"
    body = "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\nclass E(CartPoleEnv): pass\n"
    source.write_text(body + "gym.register('Lab-v0', 'baseline_lab:E', max_episode_steps=5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = env("baseline_lab:Lab-v0")
    assert random_baseline(spec) == 5
    source.write_text(source.read_text() + "# other rewards\n")
    monkeypatch.setattr(baseline, "measure", lambda spec: 7.0)
    assert random_baseline(spec) == 7


def test_no_cache_folder_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert random_baseline(env("CartPole-v1", max_t=5)) == 5


@pytest.mark.parametrize("error", [RuntimeError("the env broke"), KeyboardInterrupt()])
def test_none_and_a_notice_where_it_cannot_be_measured(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(spec: EnvSpec) -> float:
        raise error

    monkeypatch.setattr(baseline, "measure", fail)
    with caplog.at_level(logging.WARNING):
        assert random_baseline(env("CartPole-v1", max_t=5)) is None
    assert "random baseline of CartPole-v1" in caplog.messages[-1]
    assert not list(cache_folder().glob("*.json"))


def test_env_whose_episodes_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_MAX_STEPS", 4)
    assert measure(env("Pendulum-v1")) is None


def slow_measure(spec: EnvSpec) -> float:
    time.sleep(0.5)
    return time.time()


def ask(results: Any) -> None:
    baseline.measure = slow_measure
    results.put(random_baseline(env("CartPole-v1", max_t=6)))


def test_of_two_runs_at_once_one_measures() -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    runs = [context.Process(target=ask, args=(results,)) for _ in range(2)]
    for run in runs:
        run.start()
    values = {results.get(timeout=30) for _ in runs}
    for run in runs:
        run.join()
    assert len(values) == 1
