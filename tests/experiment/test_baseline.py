from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from slm_lab.experiment.plan import Stop
from slm_lab.experiment.report import baseline
from slm_lab.experiment.report.baseline import (
    SHIPPED,
    Baseline,
    baseline_key,
    cache_folder,
    known_baseline,
    measure_baseline,
    measure_mean_return,
)
from slm_lab.spec.models.env import EnvSpec


def env(name: str, **keys: Any) -> EnvSpec:
    return EnvSpec.model_validate({"name": name, "max_frame": 100, **keys})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_shipped_ones_are_plausible() -> None:
    shipped = json.loads(SHIPPED.read_text())
    assert 18 < shipped["CartPole-v1"] < 27
    assert shipped["MountainCar-v0"] == -200
    assert -1400 < shipped["Pendulum-v1"] < -1000
    assert -21 <= shipped["ALE/Pong-v5"] < -19.5
    assert shipped["LunarLander-v3"] != shipped['LunarLander-v3 {"continuous": true}']


def test_shipped_one_is_used_and_is_what_is_measured() -> None:
    spec = env("CartPole-v1", num_envs=3, normalize_reward=True, clip_reward=0.1, backend="sync")
    known, measured = known_baseline(spec), measure_mean_return(spec)
    assert measured.episodes == 100
    assert measured.mean_return == pytest.approx(known.mean_return, abs=5)
    assert not cache_folder().exists()
    assert measure_mean_return(spec, ended=lambda: True).episodes == 0
    assert 20 <= measure_mean_return(spec, ended=lambda: True, fewest=20).episodes < 100


def test_key_holds_what_a_random_return_depends_on() -> None:
    assert baseline_key(env("CartPole-v1", num_envs=7, normalize_obs=True)) == "CartPole-v1"
    assert baseline_key(env("CartPole-v1", max_t=9)) == 'CartPole-v1 {"max_t": 9}'
    scaled = env("CartPole-v1", wrappers=[{"name": "TransformReward", "scale": 2}])
    assert baseline_key(scaled) == 'CartPole-v1 {"wrappers": [{"name": "TransformReward", "scale": 2}]}', "its rewards are others"
    assert baseline_key(env("LunarLander-v3", continuous=True)) == 'LunarLander-v3 {"continuous": true}'
    assert baseline_key(env("ALE/Pong-v5", life_loss_info=True, repeat_action_probability=0.25, grayscale=False)) == "ALE/Pong-v5"
    assert baseline_key(env("ALE/Pong-v5", repeat_action_probability=0.0)) == 'ALE/Pong-v5 {"repeat_action_probability": 0.0}'


def test_another_is_measured_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    spec = env("CartPole-v1", max_t=5)  # no pole falls within so few steps
    assert known_baseline(spec) is None
    assert measure_baseline(spec) == 5
    assert known_baseline(spec) == (5, 100)
    (file,) = cache_folder().iterdir()  # no temporary file, no lock
    assert json.loads(file.read_text()) == {"env": 'CartPole-v1 {"max_t": 5}', "episodes": 100, "mean_return": 5}
    assert caplog.messages == ["measuring the random baseline of CartPole-v1: 100 episodes, at most 30 s (Ctrl-C skips it)"]
    whole = file.read_text()
    file.write_text('{"mean_')
    assert known_baseline(spec) is None
    assert measure_baseline(spec) == 5
    assert file.read_text() == whole


def test_short_and_long_episodes_count_alike() -> None:
    gym.register("Uneven-v0", Uneven)
    try:
        assert measure_mean_return(env("Uneven-v0", backend="sync")) == (pytest.approx(13), 100)
    finally:
        del gym.registry["Uneven-v0"]


class Uneven(gym.Env[Any, Any]):
    """Every other env has episodes of 2 steps, the rest of 24 steps; each step is rewarded with 1.

    The first hundred episodes to end would all be short ones.
    """

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


def test_edited_env_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "baseline_lab.py"
    body = "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\nclass E(CartPoleEnv): pass\n"
    source.write_text(body + "gym.register('Lab-v0', 'baseline_lab:E', max_episode_steps=5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = env("baseline_lab:Lab-v0")
    assert measure_baseline(spec) == 5
    assert known_baseline(spec) == (5, 100)
    source.write_text(source.read_text() + "# other rewards\n")
    assert known_baseline(spec) is None


def test_no_cache_folder_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    spec = env("CartPole-v1", max_t=5)
    assert known_baseline(spec) is None
    assert measure_baseline(spec) == 5
    assert caplog.messages[-1].startswith("cannot cache the random baseline: ")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("the env broke"),
            "cannot measure the random baseline of CartPole-v1; strength metrics are omitted: RuntimeError: the env",
        ),
        (KeyboardInterrupt(), "random baseline of CartPole-v1: interrupted; strength metrics are omitted"),
    ],
)
def test_none_and_a_notice_where_it_cannot_be_measured(
    error: BaseException, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(baseline, "measure_mean_return" if isinstance(error, Exception) else "_measure_in_thread", fail)
    assert measure_baseline(env("CartPole-v1", max_t=5)) is None
    assert caplog.messages[-1].startswith(says)
    assert not cache_folder().exists()


class Slow(gym.Env[Any, Any]):
    """Episodes of 10 steps that take 1 ms each; from step `blocks` on, a step blocks until `released` is set."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    blocks, released, steps = 10**9, threading.Event(), 0

    def __init__(self, **_: Any) -> None:
        self.t = 0

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        self.t = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.t += 1
        Slow.steps += 1
        time.sleep(0.001)
        if Slow.steps > Slow.blocks:
            Slow.released.wait()
        return 0, 1.0, self.t == 10, False, {}


@pytest.fixture
def slow() -> Iterator[EnvSpec]:
    gym.register("Slow-v0", Slow)
    Slow.blocks, Slow.steps = 10**9, 0
    Slow.released.clear()
    yield env("Slow-v0", backend="sync")
    Slow.released.set()
    del gym.registry["Slow-v0"]


def test_a_slow_env_counts_the_episodes_there_are(slow: EnvSpec, caplog: pytest.LogCaptureFixture) -> None:
    """The baseline is the mean of the completed episodes, and it is saved so that later runs use the same baseline."""
    assert measure_baseline(slow, limit=0.6) == 10
    assert 10 <= (known_baseline(slow) or Baseline(None, 0)).episodes < 100
    assert "time limit of 0.6 s reached; using the mean of" in caplog.messages[-1]


def test_an_env_that_blocks_is_left_behind(slow: EnvSpec, caplog: pytest.LogCaptureFixture) -> None:
    Slow.blocks = 5
    begin = time.monotonic()
    assert measure_baseline(slow, limit=0.5) is None
    assert time.monotonic() - begin < 2
    assert caplog.messages[-1] == "random baseline of Slow-v0: the env did not respond within 0.5 s; strength metrics are omitted"


@pytest.mark.parametrize("blocks", [10**9, 5])
def test_the_first_ctrl_c_skips_it(slow: EnvSpec, blocks: int, caplog: pytest.LogCaptureFixture) -> None:
    Slow.blocks = blocks
    stop, begin = Stop(), time.monotonic()
    threading.Timer(0.2, lambda: setattr(stop, "requested", True)).start()
    assert measure_baseline(slow, stop, limit=20) is None
    assert time.monotonic() - begin < 2
    assert caplog.messages[-1] == "random baseline of Slow-v0: interrupted; strength metrics are omitted"
    assert known_baseline(slow) is None


def test_env_whose_episodes_do_not_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(baseline, "_MAX_STEPS", 4)
    spec = env("Pendulum-v1", max_t=100)
    assert measure_baseline(spec) is None
    assert "no episode ended" in caplog.messages[-1]
    assert known_baseline(spec) == (None, 0)  # saved, so that it is not measured after every run
