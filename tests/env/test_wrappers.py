"""Tests of env.wrappers and env.obs_keys: effects, supported backends, and error messages."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env import make_env
from slm_lab.env.make import choose_backend, make_env_request
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError
from tests.env.test_step import build
from tests.env.toys import PREFIX

RESCALE = {"name": "RescaleAction", "min_action": -0.5, "max_action": 0.5}
MIXED = spaces.Dict({"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "mission": spaces.Text(5), "way": spaces.Discrete(4)})


class Plus(gym.ObservationWrapper[Any, Any, Any]):
    """Multiplies observations by `scale` and adds `amount`; other arguments are an error."""

    def __init__(self, env: gym.Env[Any, Any], amount: float, scale: float = 1.0, **others: Any) -> None:
        super().__init__(env)
        assert not others, others
        self.amount, self.scale = amount, scale

    def observation(self, observation: Any) -> Any:
        return observation * self.scale + self.amount


class WithoutInit(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any]) -> None:
        pass


class ReturnsNone(gym.Wrapper[Any, Any, Any, Any]):
    def __new__(cls, env: gym.Env[Any, Any]) -> Any:
        return None


class FailsInStep(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        raise ValueError("the wrapper fails")


def spec(**keys: Any) -> EnvSpec:
    return EnvSpec.model_validate({"name": "CartPole-v1", "max_frame": 1000, "num_envs": 2, **keys})


def plus(amount: float, **others: Any) -> dict[str, Any]:
    return {"name": f"{__name__}:Plus", "amount": amount, **others}


def test_applied_in_order_to_each_env() -> None:
    plain = make_env(spec(backend="sync"), 3).reset()
    env = make_env(spec(wrappers=[plus(1.0), "TimeAwareObservation", plus(0.0, scale=2.0)]), 3)
    assert (env.backend, env.info.observation.shape) == ("sync", (5,))
    np.testing.assert_allclose(env.reset(), np.column_stack([2 * (plain + 1), np.zeros(2)]), rtol=1e-6)
    assert env.step(np.zeros(2, np.int64)).obs_N[:, 4].tolist() == [2, 2]  # one step, times two


def test_async_processes_apply_them_too() -> None:
    keys: dict[str, Any] = {"name": "Pendulum-v1", "wrappers": [RESCALE, plus(1.0)]}
    steps = []
    for backend in ("sync", "async"):
        env = make_env(pickle.loads(pickle.dumps(spec(backend=backend, **keys))), 3)
        env.reset()
        assert env.info.spaces["action"]["high"] == 0.5
        steps.append(env.step(np.ones((2, 1), np.float32)))
        env.close()
    np.testing.assert_array_equal(steps[0].obs_N, steps[1].obs_N)


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_backends_that_cannot_wrap(backend: str) -> None:
    found = spec(num_envs=8, wrappers=["ClipReward"], backend=backend)
    with pytest.raises(SpecError, match=r"env\.backend.*env\.wrappers"):
        choose_backend(found, make_env_request(found, 8))
    auto = found.model_copy(update={"backend": "auto"})
    assert choose_backend(auto, make_env_request(auto, 8)).name == "sync"


def test_atari_wrapped_is_not_a_stack_of_frames_any_more() -> None:
    """Replay may keep one frame of each stack only if the observation is still a stack."""
    pytest.importorskip("ale_py")
    env = make_env(spec(name="ALE/Pong-v5", num_envs=1, wrappers=[{"name": "ClipReward", "max_reward": 1}]), 0)
    assert (env.backend, env.info.observation.stack) == ("sync", 1)
    assert make_env(spec(name="ALE/Pong-v5", num_envs=1), 0).info.observation.stack == 4


def test_a_list_is_a_tuple_for_gymnasiums_wrappers() -> None:
    env = make_env(spec(name="ALE/Pong-v5", obs_type="rgb", wrappers=[{"name": "ResizeObservation", "shape": [20, 30]}]), 0)
    assert env.info.observation.shape == (3, 20, 30)


def test_bounds_per_dimension() -> None:
    env = make_env(spec(name="Pendulum-v1", wrappers=[{"name": "RescaleAction", "min_action": [-0.5], "max_action": [0.5]}]), 0)
    assert env.reset().shape == (env.info.num_envs, 3)


def problems(**keys: Any) -> list[Problem]:
    with pytest.raises(SpecError) as error:
        make_env(spec(**keys), 0)
    return error.value.problems


@pytest.mark.parametrize(
    ("keys", "path", "code", "words"),
    [
        ({"wrappers": ["ClipReward", "RescaleActon"]}, "env.wrappers[1]", "invalid", "did you mean 'RescaleAction'"),
        ({"wrappers": ["FrameStack"]}, "env.wrappers[0]", "invalid", "'FrameStackObservation'"),
        ({"wrappers": [{"name": "TransformReward", "func": "abs"}]}, "env.wrappers[0]", "invalid", "function"),
        ({"wrappers": ["vector"]}, "env.wrappers[0]", "invalid", "unknown wrapper"),
        ({"wrappers": [{**RESCALE, "min_acton": 1}]}, "env.wrappers[0].min_acton", "unknown", "did you mean 'min_action'"),
        ({"wrappers": [{"name": "RescaleAction", "max_action": 1}]}, "env.wrappers[0].min_action", "missing", "requires"),
        ({"wrappers": [RESCALE]}, "env.wrappers[0]", "invalid", "RescaleAction cannot wrap"),
        ({"wrappers": [f"{__name__}:WithoutInit"]}, "env.wrappers[0]", "invalid", "WithoutInit cannot wrap"),
        ({"wrappers": ["TimeAwareObservation", f"{__name__}:ReturnsNone"]}, "env.wrappers[1]", "invalid", "ReturnsNone cannot wrap"),
        ({"wrappers": [plus(1.0, env=3)]}, "env.wrappers[0]", "invalid", "env"),
        ({"wrappers": ["no_such_module:Plus"]}, "env.wrappers[0]", "invalid", "no_such_module"),
        ({"wrappers": [f"{__name__}:Plsu"]}, "env.wrappers[0]", "invalid", "did you mean 'Plus'"),
        ({"wrappers": ["tests.env.toys:Toy"]}, "env.wrappers[0]", "invalid", "not a subclass of gymnasium"),
        ({"wrappers": ["gymnasium.wrappers.vector:ClipReward"]}, "env.wrappers[0]", "invalid", "not a subclass of gymnasium"),
        ({"obs_keys": ["image"]}, "env.obs_keys", "invalid", "Box"),
        ({"name": "ALE/Pong-v5", "wrappers": ["AtariPreprocessing"]}, "env.wrappers[0]", "invalid", "preprocessed already"),
    ],
)
def test_user_errors(keys: dict[str, Any], path: str, code: str, words: str) -> None:
    (problem,) = problems(**keys)
    assert (problem.path, problem.code) == (path, code)
    assert words in problem.message


def test_all_at_once() -> None:
    assert [problem.path for problem in problems(wrappers=["Nothing", {**RESCALE, "x": 1}])] == ["env.wrappers[0]", "env.wrappers[1].x"]


def test_parts_of_a_dict() -> None:
    mixed = {"name": PREFIX + "Spaced-v0", "observation": MIXED}
    image = build(**mixed, obs_keys=["image"])
    assert (image.info.observation.shape, image.info.observation.dtype) == ((3, 7, 7), "uint8")
    assert image.step(np.zeros(3, np.int64)).obs_N.shape == (3, 3, 7, 7) if image.reset() is not None else False
    two = build(**mixed, obs_keys=["way", "image"])
    assert {key for key, _ in two.info.spaces["observation"]["spaces"]} == {"image", "way"}
    two.reset()
    two.step(np.zeros(3, np.int64))
    (unknown,) = problems(**mixed, obs_keys=["image", "wy"])
    assert unknown.path == "env.obs_keys[1]"
    assert "did you mean 'way'" in unknown.message
    assert "mission" in unknown.message
    (twice,) = problems(**mixed, obs_keys=["way", "way"])
    assert twice.path == "env.obs_keys[1]"
    (unsupported,) = problems(**mixed)
    assert '"obs_keys": ["image", "way"]' in unsupported.message


def test_parts_of_a_tuple() -> None:
    env = build(PREFIX + "Spaced-v0", observation=spaces.Tuple([spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,))]), obs_keys=["1"])
    assert env.reset().shape == (3, 2)


@pytest.mark.parametrize("backend", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_minigrid(backend: str) -> None:
    env = build("minigrid:MiniGrid-Empty-5x5-v0", obs_keys=["image"], backend=backend)
    assert env.info.observation.shape == (3, 7, 7)
    env.reset()
    assert env.step(np.zeros(3, np.int64)).obs_N.dtype == np.uint8
    env.close()
    (problem,) = problems(name="minigrid:MiniGrid-Empty-5x5-v0", backend=backend)
    assert problem.path == "env.name"
    assert '"obs_keys": ["direction", "image"]' in problem.message


def test_taxi() -> None:
    name = max(id_ for id_ in gym.registry if id_.startswith("Taxi-v"))
    env = build(name)
    assert env.reset().sum(1).tolist() == [1, 1, 1]  # one-hot
