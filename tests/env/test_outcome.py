"""Tests of return values that do not fit the env's space or Gymnasium's interface: they work as intended or raise one clear error."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from slm_lab.env import Env, InvalidOutcome, make_env
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.strange import FITTING, FITTING_STEPS, OBSERVATIONS, PREFIX, SPACES, STEPS

WAYS: dict[str, dict[str, Any]] = {
    "lone": {"backend": "sync", "num_envs": 1},
    "sync": {"backend": "sync", "num_envs": 3},
    "async": {"backend": "async", "num_envs": 2},
}


def build(name: str = "Strange-v0", way: str = "sync", **keys: Any) -> Env:
    return make_env(EnvSpec(name=PREFIX + name, max_frame=100, **{**WAYS[way], **keys}), 5)


def spread(names: Any) -> list[tuple[str, str]]:
    """Combine each name with "lone" and "sync", and only every tenth with "async", because processes are slow to start."""
    return [(name, way) for index, name in enumerate(names) for way in ("lone", "sync", *(("async",) * (index % 10 == 0)))]


def play(env: Env, steps: int) -> None:
    env.reset()
    for _ in range(steps):
        env.step(env.sample())


def failure(env: Env, steps: int = 6) -> InvalidOutcome:
    """Return the InvalidOutcome that the env raises, after checks of its text; no other exception may be raised."""
    with pytest.raises(InvalidOutcome) as raised:
        play(env, steps)
    env.close()
    text = str(raised.value)
    assert text.startswith(PREFIX), text
    assert "\n" not in text
    assert str(pickle.loads(pickle.dumps(raised.value))) == text
    return raised.value


@pytest.mark.sampled(26)
@pytest.mark.parametrize(("name", "way"), spread(OBSERVATIONS))
@pytest.mark.parametrize("at", [0, 3])
def test_an_observation_that_is_not_in_its_space(name: str, way: str, at: int) -> None:
    if way == "async" and at == 0 and name != "another shape":
        pytest.skip("one is enough")
    error = failure(build(way=way, obs=name, at=at))
    assert (error.row, error.call) == (0 if way != "async" else error.row, "step" if at else "reset")
    assert not at or f"step {at}:" in str(error)
    space, value = OBSERVATIONS[name]
    assert "observation" in str(error)
    for key in ("a", "b") if isinstance(value, dict) and space == "dict" else ():
        part_fits = key in value and np.shape(value[key]) == SPACES["dict"][key].shape and (key != "b" or value[key] < 3)  # type: ignore[index]
        assert part_fits or repr(key) in str(error)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "way"), spread(FITTING))
def test_an_observation_that_fits_after_conversion(name: str, way: str) -> None:
    env = build(way=way, obs=name, at=2)
    env.reset()
    env.step(env.sample())
    obs_N = env.step(env.sample()).obs_N
    env.close()
    space, value = FITTING[name]
    if space in ("box", "bytes"):
        divisor = 255 if space == "bytes" else 1
        assert np.allclose(obs_N, np.broadcast_to(np.asarray(value, np.float32) / divisor, obs_N.shape))
    assert (obs_N == obs_N[0]).all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "way"), spread(STEPS))
def test_a_step_that_returns_something_else(name: str, way: str) -> None:
    assert failure(build(way=way, step=name)).call == "step"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "way"), [*spread(FITTING_STEPS), ("info that cannot be pickled", "async")])
def test_a_step_that_works_as_meant(name: str, way: str) -> None:
    env = build(way=way, step=name, at=2)
    env.reset()
    rewards = [env.step(env.sample()).reward_N.tolist() for _ in range(11)]  # an episode ends after nine steps
    env.close()
    assert rewards[1:] == [[2.0] * env.info.num_envs] * 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["only the observation", "nothing", "no info"])
def test_a_reset_that_returns_something_else(kind: str, way: str) -> None:
    assert failure(build(way=way, reset=kind)).call == "step"
    if way != "async":
        assert failure(build(way=way, reset=kind, at=0)).call == "reset"


@pytest.mark.parametrize("way", WAYS)
def test_a_reset_without_arguments(way: str) -> None:
    assert "seed" in str(failure(build("NoSeed-v0", way)))


@pytest.mark.parametrize(
    "kind", ["reset", "width", "length", "one reward", "column of rewards", "short flags", "no last observation", "four", "part"]
)
def test_a_vector_env(kind: str) -> None:
    error = failure(build("Vector-v0", backend="native", fault=kind))
    assert kind != "part" or ("'b'" in str(error) and error.row == 0)


@pytest.mark.parametrize("kind", ["reset", "tuple", "shape", "rewards", "final", "final shape", "going", "lives"])
def test_a_backend_of_the_users(kind: str) -> None:
    failure(build(backend=PREFIX + "StrangeBackend", kind=kind))


def test_a_backend_that_returns_lists() -> None:
    env = build(backend=PREFIX + "StrangeBackend", kind="lists")
    env.reset()
    step = env.step(env.sample())
    assert (step.obs_N.dtype, step.reward_N.dtype, step.obs_N.shape) == (np.float32, np.float32, (3, 3))


def test_the_error_of_the_env_itself_stays_its_own() -> None:
    with pytest.raises(ValueError, match="fell over"):
        play(build(fault="step"), 3)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_close_is_a_notice(way: str, caplog: pytest.LogCaptureFixture) -> None:
    if way == "async":
        with pytest.raises(SpecError, match="it cannot be closed"):  # raised by the env in this process that provides the spaces
            build(way=way, fault="close")
        return
    build(way=way, fault="close").close()
    assert "it cannot be closed" in caplog.text


@pytest.mark.parametrize(
    "keys",
    [{"name": "tests.env.toys:Spaced-v0", "observation": space} for space in ("box", "dict", "tuple", "bits")],
    ids=lambda keys: keys["observation"],
)
def test_a_space_without_numbers(keys: dict[str, Any]) -> None:
    from gymnasium import spaces

    empty = spaces.Box(0.0, 1.0, (0,))
    space = {"box": empty, "dict": spaces.Dict({"a": empty}), "tuple": spaces.Tuple(()), "bits": spaces.Box(0, 255, (0, 4, 3), np.uint8)}
    with pytest.raises(SpecError, match=r"env\.name"):
        make_env(EnvSpec(max_frame=1, **{**keys, "observation": space[keys["observation"]]}), 0)


def test_draws_of_worker_processes_are_seeded() -> None:
    rewards = []
    for _ in range(2):
        env = build("Drawing-v0", "async")
        env.reset()
        rewards.append(np.stack([env.step(env.sample()).reward_N for _ in range(3)]))
        env.close()
    assert np.array_equal(*rewards)
    assert not np.array_equal(rewards[0][:, 0], rewards[0][:, 1])
