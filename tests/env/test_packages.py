"""Tests of envs that other packages provide, by their id: MinAtar, gymnasium-robotics, MiniGrid."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from slm_lab.env import make_env
from slm_lab.env.render import with_rendering
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.test_step import build


@pytest.mark.parametrize(
    ("name", "channels", "actions"),
    [
        ("MinAtar/Breakout-v1", 4, 3),
        ("MinAtar/Breakout-v0", 4, 6),
        ("minatar:MinAtar/Freeway-v1", 7, 3),
        ("MinAtar/Seaquest-v1", 10, 6),  # 10 × 10 × 10: the space does not show which axis is the channels
    ],
)
def test_minatar_is_an_image_with_channels_last(name: str, channels: int, actions: int) -> None:
    pytest.importorskip("minatar")
    env = build(name, 2, sticky_action_prob=0.0)
    observation = env.info.observation
    assert (observation.shape, observation.dtype, observation.high, observation.ambiguities) == ((channels, 10, 10), "uint8", 1, ())
    assert env.info.action.nvec == (actions,)
    obs_N = env.reset()
    own = env._backend._envs[1].unwrapped.game.state()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(obs_N[1], np.moveaxis(own, -1, 0))
    env.close()


def test_minatar_resumes_in_the_middle_of_an_episode() -> None:
    """MinAtar's random stream is a numpy RandomState that two objects share."""
    pytest.importorskip("minatar")
    env, other = build("MinAtar/SpaceInvaders-v1", 2), build("MinAtar/SpaceInvaders-v1", 2, seed=7)
    env.reset()
    for _ in range(30):
        env.step(env.sample())
    other.load_state_dict(env.state_dict())
    assert other.resume()
    for _ in range(200):
        action_N = env.sample()
        one, two = env.step(action_N), other.step(action_N)
        np.testing.assert_array_equal(one.obs_N, two.obs_N)
        np.testing.assert_array_equal(one.reward_N, two.reward_N)
    env.close()
    other.close()


def test_a_picture_of_minatar() -> None:
    pytest.importorskip("minatar")
    env = make_env(with_rendering(EnvSpec(name="MinAtar/Breakout-v1", max_frame=1), "rgb_array"), 0)
    state_HWC = np.moveaxis(env.reset()[0], 0, -1)
    picture: Any = env._backend._envs[0].render()  # type: ignore[attr-defined]
    assert (picture.shape, picture.dtype) == ((240, 240, 3), np.uint8)
    np.testing.assert_array_equal(picture[::24, ::24].any(axis=-1), state_HWC.any(axis=-1))  # empty cells are black
    top_HW = (state_HWC * np.arange(1, 5)).max(axis=-1)  # the last channel that is set in each cell
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == len(np.unique(top_HW))
    env.close()


@pytest.mark.slow
def test_minatar_in_worker_processes() -> None:
    """Each worker process registers MinAtar's ids."""
    pytest.importorskip("minatar")
    env = build("MinAtar/Breakout-v1", 2, backend="async")
    assert env.reset().shape == (2, 4, 10, 10)
    env.close()


def test_goals_of_robotics_stand_beside_the_observation(capfd: pytest.CaptureFixture[str]) -> None:
    if find_spec("gymnasium_robotics") is None:
        pytest.skip("gymnasium-robotics is not installed")
    env = build("gymnasium_robotics:PointMaze_UMaze-v3", 2)
    assert env.info.spaces is not None
    assert [name for name, _ in env.info.spaces["observation"]["spaces"]] == ["achieved_goal", "desired_goal", "observation"]
    assert env.reset().shape == (2, 8)
    assert capfd.readouterr().err == ""  # the package prints news at its first import
    env.close()


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"wrappers": ["TimeAwareObservation"]}, "env.wrappers", ["runs in EnvPool", '"minigrid:MiniGrid-DoorKey-5x5-v0"']),
        ({"backend": "sync"}, "env.backend", ["an env of EnvPool", '"minigrid:MiniGrid-DoorKey-5x5-v0"']),
        ({"name": "minigrid:MiniGrid-DoorKey-5x5-v0"}, "env.name", ["'mission'", '"obs_keys": ["direction", "image"]']),
    ],
)
def test_an_id_of_envpool_and_of_a_package(keys: dict[str, Any], path: str, words: list[str]) -> None:
    """An id without a prefix selects EnvPool's env. If only the package's env supports a request, the message says how to select it."""
    pytest.importorskip("envpool")
    pytest.importorskip("minigrid")
    with pytest.raises(SpecError) as error:
        build(**({"name": "MiniGrid-DoorKey-5x5-v0"} | keys))
    (problem,) = error.value.problems
    assert problem.path == path
    for word in words:
        assert word in problem.message, problem.message


def test_minigrid_of_its_package() -> None:
    pytest.importorskip("minigrid")
    for name in ("minigrid:MiniGrid-DoorKey-5x5-v0", "MiniGrid-MultiRoom-N4-S5-v1"):  # EnvPool does not have the second
        env = build(name, 2, obs_keys=["image", "direction"])
        assert env.backend == "sync"
        assert [part.name for part in env.info.observation.parts] == ["direction", "image"]
        env.close()


@pytest.mark.parametrize("name", ["FetchReach-v4", "FetchReach-v1"])
def test_a_robot_that_fails_with_this_mujoco_is_in_envpool(name: str) -> None:
    """The message names EnvPool's env. Version 1 needs mujoco_py."""
    pytest.importorskip("gymnasium_robotics")
    with pytest.raises(SpecError) as error:
        make_env(EnvSpec(name=f"gymnasium_robotics:{name}", max_frame=1), 0)
    (problem,) = error.value.problems
    assert (problem.path, problem.message.rpartition("; ")[2]) == ("env.name", f'EnvPool has the same env: "envpool:{name}"')
