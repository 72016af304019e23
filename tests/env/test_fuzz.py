"""Fuzz tests of spaces and faulty envs: agents see what the space describes, or the run ends with a message that names env and step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.report import SpecError
from tests.env.test_step import build

ROUNDS, QUICK = 300, 60
STEPS = 4
"""Steps of an episode."""


class Fuzzed(gym.Env[Any, Any]):
    """Env of a scenario: it returns the given observations, and the scenario's fault from step `at` on."""

    def __init__(self, number: int) -> None:
        one = scenario(number)
        self.observation_space, self.action_space = one.space, spaces.Discrete(2)
        self.samples, self.fault, self.at, self.total = one.samples, one.fault, one.at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        obs = copy.deepcopy(self.samples[self.total % len(self.samples)])
        return obs if self.fault == "reset_alone" and self.total >= self.at else (obs, {})

    def step(self, action: Any) -> Any:
        self.t, self.total = self.t + 1, self.total + 1
        obs = copy.deepcopy(self.samples[self.total % len(self.samples)])
        outcome = [obs, 1.0, self.t >= STEPS, False, {}]
        if self.total >= self.at and self.fault:
            FAULTS.get(self.fault, lambda outcome, space: None)(outcome, self.observation_space)
        return tuple(outcome)


gym.register("Fuzzed-v0", entry_point=Fuzzed)


def _put(index: int, value: Any) -> Callable[[list[Any], Any], None]:
    def change(outcome: list[Any], space: Any) -> None:
        outcome[index] = value

    return change


def _outside(outcome: list[Any], space: spaces.Space[Any]) -> None:
    outcome[0] = changed(space, outcome[0], lambda leaf, value: None if not is_choice(leaf) else value - value + leaf.start - 1)


def _longer(outcome: list[Any], space: spaces.Space[Any]) -> None:
    """Append one number too many to one entry."""
    outcome[0] = changed(space, outcome[0], lambda leaf, value: np.concatenate([np.ravel(value), np.ravel(value)[:1]]))


def _four(outcome: list[Any], space: Any) -> None:
    del outcome[3]


FAULTS: dict[str, Callable[[list[Any], Any], None]] = {
    "none": _put(0, None),
    "text": _put(0, "observation"),
    "outside": _outside,
    "longer": _longer,
    "reward_vector": _put(1, np.ones(2)),
    "reward_text": _put(1, "1.0"),
    "reward_none": _put(1, None),
    "reward_nan": _put(1, float("nan")),
    "terminated_text": _put(2, "yes"),
    "truncated_vector": _put(3, np.array([True, False])),
    "four": _four,
    "info": _put(4, None),
}
TOLERATED = {"reward_list": _put(1, [1.0]), "reward_array": _put(1, np.array([[1.0]])), "truncated_whole": _put(3, 0)}
FAULTS |= TOLERATED


def is_choice(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def changed(space: spaces.Space[Any], value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return an observation in which the first entry for which `change` does not return None is replaced by the value that it returns."""
    done = False

    def visit(inner: spaces.Space[Any], one: Any) -> Any:
        nonlocal done
        if isinstance(inner, spaces.Dict):
            return {key: visit(part, one[key]) for key, part in inner.spaces.items()}
        if isinstance(inner, spaces.Tuple):
            return tuple(visit(part, own) for part, own in zip(inner.spaces, one, strict=True))
        new = None if done else change(inner, one)
        done = done or new is not None
        return one if new is None else new

    return visit(space, value)


def random_space(rng: np.random.Generator, depth: int = 0) -> spaces.Space[Any]:
    kind = rng.choice(["box", "box", "box", "image", "discrete", "multi", "bits"] + ["dict", "tuple"] * (depth < 2))
    if kind in ("dict", "tuple"):
        inner = [random_space(rng, depth + 1) for _ in range(int(rng.integers(1, 4)))]
        return spaces.Tuple(inner) if kind == "tuple" else spaces.Dict({f"k{index}": one for index, one in enumerate(inner)})
    if kind == "discrete":
        return spaces.Discrete(int(rng.integers(1, 6)), start=int(rng.integers(-3, 4)))
    if kind == "multi":
        nvec = rng.integers(1, 5, int(rng.integers(1, 4)))
        return spaces.MultiDiscrete(nvec, start=rng.integers(-2, 3, len(nvec)))
    if kind == "bits":
        return spaces.MultiBinary(int(rng.integers(1, 5)))
    axes = 3 if kind == "image" else int(rng.integers(0, 5))
    shape = tuple(int(size) for size in (rng.integers(7, 13, axes) if kind == "image" else rng.integers(1, 5, axes)))
    if kind == "image":
        place, channels = rng.choice([0, 2]), int(rng.choice([1, 2, 3, 4, 6]))
        shape = (channels, *shape[1:]) if place == 0 else (*shape[:2], channels)
    dtype = np.dtype(str(rng.choice(["float32", "float64", "uint8", "int8", "int64", "uint16", "bool"])))
    ranges = {"f": [(0, 1), (-1, 1), (0, 255), (-np.inf, np.inf), (-4, 9)], "b": [(0, 1)], "u": [(0, 1), (0, 2), (0, 10), (0, 255)]}
    signed = [(-3, 3), (0, 7), (-1, 1)] + [(0, 255), (-500, 900)] * (dtype.itemsize > 1)
    choices = ranges.get(dtype.kind, signed)
    low, high = choices[int(rng.integers(len(choices)))]
    return spaces.Box(low, high, shape, dtype.type)


def twin(space: spaces.Space[Any], value: Any, stacked: bool) -> Iterator[np.ndarray]:
    """Yield each entry as agents must see it: an independent implementation of the table in docs/extend.md."""
    match space:
        case spaces.Dict():
            for key, inner in space.spaces.items():
                yield from twin(inner, value[key], stacked)
        case spaces.Tuple():
            for inner, one in zip(space.spaces, value, strict=True):
                yield from twin(inner, one, stacked)
        case spaces.Discrete():
            yield np.eye(space.n)[int(value) - int(space.start)]
        case spaces.MultiDiscrete():
            numbers = zip(np.ravel(space.nvec), np.ravel(space.start), np.ravel(value), strict=True)
            yield np.concatenate([np.eye(n)[int(number - start)] for n, start, number in numbers])
        case spaces.MultiBinary():
            yield np.ravel(value).astype(float)
        case spaces.Box():
            yield twin_box(space, np.asarray(value), stacked)


def twin_box(space: spaces.Box, value: np.ndarray, stacked: bool) -> np.ndarray:
    inner = value.shape[1:] if stacked else value.shape
    if len(inner) == 4:
        inner = inner[1:]
    low, high, whole, bools = float(np.min(space.low)), float(np.max(space.high)), space.dtype.kind in "biu", space.dtype.kind == "b"
    if len(inner) in (2, 3):
        last = len(inner) == 3 and channels_are_last(inner)
        sides = inner if len(inner) == 2 else inner[:2] if last else inner[1:]
        is_image = (low, high) == (0, 255) if whole else (low, high) in ((0, 1), (-1, 1), (0, 255)) and len(inner) == 3
        is_image = is_image or (bools and len(inner) == 3)
        if bools or not (whole and len(inner) == 3):
            is_image = is_image and min(sides) >= 7
        if is_image:
            frames = [*value.reshape(-1, *inner)]
            planes = [np.moveaxis(frame, -1, 0) if last else frame if frame.ndim == 3 else frame[None] for frame in frames]
            return np.concatenate(planes)
    flat = np.ravel(value).astype(float)
    return flat / np.maximum(np.ravel(space.high).astype(float), 1.0) if whole and low >= 0 and high <= 255 else flat


def channels_are_last(shape: tuple[int, ...]) -> bool:
    usual = [shape[end] in (1, 3, 4) for end in (0, -1)]
    if usual[0] != usual[1]:
        return usual[1]
    first, last = (max(sides) / min(sides) for sides in (shape[1:], shape[:2]))
    return last < first


def entries(known: ObservationSpace, obs: np.ndarray) -> list[np.ndarray]:
    """Return the entries of an encoded observation: its parts if it is packed, else the observation itself."""
    if not known.parts:
        return [obs]
    return [obs[part.begin : part.end].view(part.dtype).reshape(part.shape) for part in known.parts]


class Scenario(NamedTuple):
    space: spaces.Space[Any]
    samples: list[Any]
    """Observations, in the order in which they are returned."""
    frames: int
    """Number of observations that a wrapper stacks; 0: no wrapper."""
    fault: str
    at: int
    """First step with the fault."""
    keys: dict[str, Any]
    """Env section."""


def scenario(number: int) -> Scenario:
    rng = np.random.default_rng(number)
    space = random_space(rng)
    space.seed(number)
    samples = [space.sample() for _ in range(5)]
    frames = int(rng.choice([0, 0, 2, 3]))
    fault = str(rng.choice([*sorted(FAULTS), "reset_alone"])) if number % 2 else ""
    if fault == "outside" and all(not is_choice(leaf) for leaf in flat_leaves(space)):
        fault = "none"
    wrappers = [{"name": "FrameStackObservation", "stack_size": frames, "padding_type": "zero"}] if frames else []
    keys = {"name": "Fuzzed-v0", "number": number, "num_envs": int(rng.integers(1, 4)), "wrappers": wrappers}
    return Scenario(space, samples, frames, fault, int(rng.integers(1, 8)), keys)


def flat_leaves(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces if isinstance(space, spaces.Tuple) else None
    return [space] if inner is None else [leaf for one in inner for leaf in flat_leaves(one)]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("number", range(0, ROUNDS, 2))
def test_agents_see_what_the_space_says(number: int) -> None:
    one = scenario(number)
    raw: gym.Env[Any, Any] = Fuzzed(number)
    if one.frames:
        raw = gym.wrappers.FrameStackObservation(raw, one.frames, padding_type="zero")
    env = build(**one.keys)
    expected, obs_N = raw.reset(seed=0)[0], env.reset()
    for _ in range(STEPS - 1):
        for obs in obs_N:
            found, wanted = entries(env.info.observation, obs), list(twin(raw.observation_space, expected, bool(one.frames)))
            if len(found) == 1:
                wanted = [wanted[0] if len(wanted) == 1 else np.concatenate([np.ravel(entry) for entry in wanted])]
            for seen, entry in zip(found, wanted, strict=True):
                np.testing.assert_allclose(seen, entry, rtol=1e-6)
        expected, obs_N = raw.step(0)[0], env.step(np.zeros(len(obs_N), np.int64)).obs_N
    env.close()


@pytest.mark.sampled(30)
@pytest.mark.parametrize("number", range(1, ROUNDS, 2))
def test_a_fault_ends_with_a_message_that_names_env_and_step(number: int) -> None:
    fault = scenario(number).fault
    env = build(**scenario(number).keys)
    error = failure(env, 3 * STEPS)
    env.close()
    if fault in TOLERATED:
        assert error is None
        return
    assert error is not None
    message = str(error)
    assert "Fuzzed-v0" in message
    assert "step" in message or "reset" in message
    assert "expected" in message or "space" in message or fault == "reward_nan"


def failure(env: Env, steps: int) -> InvalidOutcome | None:
    """Step an env `steps` times; return the InvalidOutcome that it raises, or None."""
    try:
        env.reset()
        for _ in range(steps):
            env.step(np.zeros(env.info.num_envs, np.int64))
    except InvalidOutcome as error:
        return error
    return None


NET = {"name": "MLPNet", "hid_layers": [4]}
PPO = {"name": "PPO", "time_horizon": 4, "minibatch_size": 4, "training_epoch": 1}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", [*range(QUICK), *(pytest.param(number, marks=pytest.mark.slow) for number in range(QUICK, ROUNDS))])
def test_a_run_trains_or_ends_with_a_message(number: int) -> None:
    fault, keys = scenario(number).fault, scenario(number).keys
    agent = {"algorithm": PPO, "net": NET}
    spec = load_spec({"s": {"agent": agent, "env": {**keys, "max_frame": 48}, "meta": {"random_seed": 0, "log_frequency": 24}}}, "s")
    if fault in TOLERATED or not fault:
        returns = [row["total_reward"] for row in Session(spec).run().rows]
        assert returns[-1] == STEPS
    else:
        with pytest.raises((InvalidOutcome, SpecError), match="Fuzzed-v0"):  # SpecError: the trial step has the fault
            Session(spec).run()
