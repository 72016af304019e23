"""Tests of every space against Gymnasium's flattening and membership."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_lab.env.nested_actions import first_action
from slm_lab.env.spaces import (
    UnsupportedSpace,
    action_codec,
    batch_of_one,
    number_of_choices,
    observation_codec,
    space_from_dict,
    space_to_dict,
)
from slm_lab.lib.random_actions import draw_uniform_actions
from slm_lab.lib.records import ActionSpace
from tests.env.test_step import build
from tests.env.toys import PREFIX

shapes = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
nvecs = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    shape = draw(shapes)
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int32, np.uint8]))
    if dtype == np.uint8:
        return spaces.Box(0, 255, shape[:1], np.uint8)
    kinds = st.sampled_from([(-1, 1), (-2, 6), (0, 0.5), (-np.inf, np.inf), (0, np.inf), (-np.inf, 3)])
    finite = st.sampled_from([(-1, 1), (-2, 6), (0, 10)])
    bounds = [draw(finite if dtype == np.int32 else kinds) for _ in range(int(np.prod(shape)))]
    low, high = (np.array([b[side] for b in bounds], dtype).reshape(shape) for side in (0, 1))
    return spaces.Box(low, high, shape, dtype)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    nvec = np.array(draw(nvecs))
    start = np.array([draw(st.integers(-3, 3)) for _ in nvec])
    if len(nvec) % 2 == 0 and draw(st.booleans()):
        nvec, start = nvec.reshape(2, -1), start.reshape(2, -1)
    return spaces.MultiDiscrete(nvec, start=start)


discretes = st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 6), st.integers(-3, 3))
multi_binaries = st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 2), st.integers(1, 3))).map(spaces.MultiBinary)
leaves: st.SearchStrategy[spaces.Space[Any]] = st.one_of(boxes(), discretes, multi_discretes(), multi_binaries)
names = st.sampled_from(["b", "a", "c/d", "position"])


def is_image(space: spaces.Space[Any]) -> bool:
    return len(space.shape or ()) == 3 and np.issubdtype(space.dtype, np.floating)


observations = st.recursive(
    leaves.filter(lambda leaf: not is_image(leaf)),
    lambda inner: st.one_of(
        st.dictionaries(names, inner, min_size=1, max_size=3).map(spaces.Dict), st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=4,
)
plain_actions = st.one_of(boxes(), discretes, multi_discretes(), multi_binaries)
actions = st.recursive(
    plain_actions,
    lambda inner: st.one_of(
        st.dictionaries(names, inner, min_size=1, max_size=3).map(spaces.Dict), st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=4,
)


@given(observations)
@settings(max_examples=120, deadline=None)
def test_a_description_gives_the_space_back(space: spaces.Space[Any]) -> None:
    """The description is plain Python data that torch reads with weights_only; the rebuilt space has the same codecs."""
    buffer = io.BytesIO()
    torch.save(space_to_dict(space), buffer)
    buffer.seek(0)
    described = torch.load(buffer, weights_only=True)
    assert described == space_to_dict(space) == json.loads(json.dumps(space_to_dict(space)))
    again = space_from_dict(described)
    assert again == space
    assert again.dtype == space.dtype
    space.seed(0)
    sample = space.sample()
    np.testing.assert_array_equal(observation_codec(again)[1](batch_of_one(sample)), observation_codec(space)[1](batch_of_one(sample)))


def test_descriptions_are_short_and_keep_the_order_of_entries() -> None:
    image = spaces.Box(0, 255, (84, 84, 3), np.uint8)
    assert space_to_dict(image) == {"type": "Box", "shape": [84, 84, 3], "dtype": "uint8", "low": 0, "high": 255}
    ordered = spaces.Dict(OrderedDict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))]))
    assert list(space_from_dict(space_to_dict(ordered)).spaces) == ["b", "a"]  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedSpace, match="space Text is not supported"):
        space_to_dict(spaces.Text(3))
    with pytest.raises(ValueError, match="invalid space description"):
        space_from_dict({"type": "Graph"})


@pytest.mark.parametrize(("name", "num_envs"), [("CartPole-v1", 4), ("Pendulum-v1", 1), (PREFIX + "Toy-v0", 2)])
def test_codecs_of_the_info_equal_those_of_the_env(name: str, num_envs: int) -> None:
    """The spaces in env.info are all that an agent needs to encode observations and decode actions without the env."""
    env = build(name, num_envs)
    known, encode = observation_codec(space_from_dict(env.info.spaces["observation"]))
    action, decode = action_codec(space_from_dict(env.info.spaces["action"]))
    assert (known, action) == (env.info.observation, env.info.action)
    env.reset()
    actions = env.sample()
    np.testing.assert_array_equal(decode(actions), env._decode(actions))
    raw = env._backend.step(decode(actions))
    np.testing.assert_array_equal(encode(raw.obs), env._encode(raw.obs))


@given(actions, st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=120, deadline=None)
def test_any_action_of_the_agent_is_one_of_the_env(space: spaces.Space[Any], count: int, seed: int) -> None:
    known, decode = action_codec(space)
    rng = np.random.default_rng(seed)
    action, _ = draw_uniform_actions(known, count, rng)
    assert action.dtype == known.dtype
    assert action.shape == (count, *known.shape)
    if known.kind == "continuous":
        action = 3 * action
    decoded = decode(action)
    assert batch_space(space, count).contains(decoded), (space, decoded)
    if isinstance(space, spaces.Discrete):
        np.testing.assert_array_equal(decoded - space.start, action)


@given(boxes())
@settings(max_examples=60, deadline=None)
def test_the_unit_interval_spans_finite_bounds(space: spaces.Box) -> None:
    known, decode = action_codec(space)
    low, high = space.low.ravel(), space.high.ravel()
    finite = np.isfinite(low.astype(float)) & np.isfinite(high.astype(float))
    assert known.bounded == finite.all()
    assert known.dim == len(low)
    for value, bound in ((-1.0, low), (1.0, high)):
        decoded = decode(np.full((1, known.dim), value, np.float32)).ravel()
        np.testing.assert_allclose(decoded[finite], bound[finite], rtol=1e-6)


def test_unbounded_components_pass_through() -> None:
    _, decode = action_codec(spaces.Box(np.array([-np.inf, 0, -2], np.float32), np.array([np.inf, np.inf, 2], np.float32)))
    np.testing.assert_allclose(decode(np.array([[7.0, -3.0, 0.5]])), [[7.0, 0.0, 1.0]])


def test_the_largest_float_is_no_bound() -> None:
    largest = float(np.finfo(np.float32).max)
    assert not action_codec(spaces.Box(-largest, largest, (1,)))[0].bounded


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 6, 3), (3, 8, 6)), ((8, 6, 1), (1, 8, 6)), ((4, 84, 84), (4, 84, 84)), ((8, 9), (1, 8, 9)), ((4, 8, 6, 3), (12, 8, 6))],
)
def test_images_stay_uint8_with_channels_first(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    known, encode = observation_codec(space)
    batch = np.random.default_rng(0).integers(256, size=(2, *shape), dtype=np.uint8)
    encoded = encode(batch)
    assert (known.dtype, known.shape) == ("uint8", expected)
    assert encoded.dtype == np.uint8
    assert encoded.shape == (2, *expected)
    assert encoded.flags.c_contiguous
    assert not np.shares_memory(encoded, batch)
    if shape == (8, 6, 3):
        np.testing.assert_array_equal(encoded[1, 2], batch[1, :, :, 2])
    if shape == (4, 8, 6, 3):
        np.testing.assert_array_equal(encoded[1, 3 * 3 + 2], batch[1, 3, :, :, 2])


@pytest.mark.parametrize(("dtype", "shape", "expected"), [(np.float32, (8, 7, 3), (3, 8, 7)), (np.float64, (4, 8, 7), (4, 8, 7))])
def test_images_of_floats_keep_their_shape_and_scale(dtype: Any, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    known, encode = observation_codec(spaces.Box(0, 255, shape, dtype))
    batch = np.random.default_rng(0).uniform(0, 255, (2, *shape)).astype(dtype)
    encoded = encode(batch)
    assert (known.dtype, known.shape) == ("float32", expected)
    assert (encoded.dtype, encoded.shape) == (np.float32, (2, *expected))
    channels_first = np.moveaxis(batch, -1, 1) if shape[-1] == 3 else batch
    np.testing.assert_array_equal(encoded, channels_first.astype(np.float32))
    fresh = observation_codec(spaces.Box(0, 255, shape, dtype), fresh=True)[1]
    assert fresh(batch).dtype == np.float32


PACKED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (5, 7, 3), np.uint8),
        "hand": spaces.Tuple((spaces.Box(-1, 1, (2, 2)), spaces.Dict({"map": spaces.Box(0, 255, (9, 8), np.uint8)}))),
        "door": spaces.Discrete(3, start=1),
        "depth": spaces.Box(0, 1, (1, 8, 8), np.float64),
    }
)


def test_entries_are_packed_where_one_is_an_image() -> None:
    PACKED.seed(0)
    samples = [PACKED.sample() for _ in range(3)]
    batch = concatenate(PACKED, samples, create_empty_array(PACKED, 3))
    known, encode = observation_codec(PACKED)
    encoded = encode(batch)
    assert (encoded.dtype, encoded.shape) == (np.uint8, (3, *known.shape))
    assert known.dtype == "uint8"
    assert known.shape[0] % 4 == 0
    got = {part.name: encoded[:, part.begin : part.end].view(part.dtype).reshape(3, *part.shape) for part in known.parts}
    assert list(got) == ["camera", "depth", "door", "hand/0", "hand/1/map"]  # Gymnasium sorts the keys of a dict
    np.testing.assert_array_equal(got["camera"], np.moveaxis(batch["camera"], -1, 1))
    np.testing.assert_array_equal(got["hand/0"], batch["hand"][0].reshape(3, 4))
    np.testing.assert_array_equal(got["hand/1/map"], batch["hand"][1]["map"][:, None])
    np.testing.assert_array_equal(got["door"], np.eye(3, dtype=np.float32)[batch["door"] - 1])
    np.testing.assert_array_equal(got["depth"], batch["depth"].astype(np.float32))
    assert known.packed_float_count == 4 + 3 + 64
    assert max(part.end for part in known.parts if part.dtype == "float32") == 4 * known.packed_float_count
    np.testing.assert_array_equal(encode(batch_of_one(samples[1]))[0], encoded[1])
    again = space_from_dict(json.loads(json.dumps(space_to_dict(PACKED))))
    assert again == PACKED
    assert observation_codec(again)[0] == known


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Dict({"a": spaces.Tuple((spaces.Text(2), spaces.Box(0, 255, (4, 4), np.uint8)))})]
)
def test_other_observations_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpace, match="is not supported; allowed"):
        observation_codec(space)


NESTED = spaces.Dict(
    {
        "aim": spaces.Tuple((spaces.Box(0.0, 4.0, (2,), np.float32), spaces.MultiBinary(1))),
        "move": spaces.Discrete(3, start=1),
        "tools": spaces.MultiDiscrete([2, 5]),
    }
)


def test_a_nested_action_has_discrete_binary_and_continuous_components_in_this_order() -> None:
    known, decode = action_codec(NESTED)
    assert known == ActionSpace("hybrid", (3, 2, 5), 6, bits=1)
    decoded = decode(np.array([[2, 1, 4, 1, -1.0, 0.5], [0, 0, 0, 0, 1.0, 0.0]], np.float32))
    (strength, switch), move, tools = decoded["aim"], decoded["move"], decoded["tools"]
    np.testing.assert_array_equal(strength, np.array([[0.0, 3.0], [4.0, 2.0]], np.float32))
    np.testing.assert_array_equal(switch, [[1], [0]])
    np.testing.assert_array_equal(move, [3, 1])
    np.testing.assert_array_equal(tools, [[1, 4], [0, 0]])
    first = first_action(NESTED, decoded)
    assert NESTED.contains(first)
    assert type(first["move"]) is int
    assert number_of_choices(NESTED) == 10


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([spaces.Discrete(3)], ActionSpace("discrete", (3,))),
        ([spaces.Discrete(3), spaces.MultiDiscrete([2])], ActionSpace("multi_discrete", (3, 2), 2)),
        ([spaces.MultiBinary(2), spaces.MultiBinary(1)], ActionSpace("multi_binary", dim=3)),
        ([spaces.Box(0, 1, (2,)), spaces.Box(-np.inf, 1, (1,))], ActionSpace("continuous", dim=3, bounded=False)),
    ],
    ids=str,
)
def test_parts_of_one_kind_are_an_action_of_that_kind(parts: list[Any], expected: ActionSpace) -> None:
    """Every algorithm for this kind of action can therefore act in such an env."""
    assert action_codec(spaces.Tuple(parts))[0] == expected


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple((spaces.Discrete(2), spaces.Text(3)))], ids=str)
def test_other_actions_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpace, match="is not supported; allowed: Discrete, Box"):
        action_codec(space)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("observation", "action", "size"),
    [
        (
            spaces.Dict({"camera": spaces.Box(0, 1, (2, 2)), "door": spaces.Discrete(3, start=1), "keys": spaces.MultiBinary(2)}),
            spaces.Box(-2, 5, (2, 2)),
            9,
        ),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([[2, 3], [4, 5]]), 5),
        (spaces.Tuple((spaces.Discrete(4), spaces.Box(0, 1, (2,)))), spaces.Discrete(2), 6),
        (spaces.Discrete(4, start=-1), spaces.MultiBinary((2, 2)), 4),
    ],
)
def test_whole_envs_with_such_spaces(backend: str, observation: gym.Space[Any], action: gym.Space[Any], size: int) -> None:
    if backend == "async" and size != 9:
        pytest.skip("one is enough: processes are slow to start")
    env = build(PREFIX + "Spaced-v0", 2, backend=backend, observation=observation, action=action)
    assert env.reset().shape == (2, size)
    ended = 0
    for _ in range(30):
        step = env.step(env.sample())
        ended += len(step.episodes)
        assert step.obs_N.shape == step.last_obs_N.shape == (2, size)
        assert step.obs_N.dtype == np.float32
    assert ended > 3
    env.close()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_packed_observations_of_an_env(backend: str) -> None:
    """Floats are normalised, and images are not changed."""
    env = build(PREFIX + "Spaced-v0", 2, backend=backend, observation=PACKED, normalize_obs=True)
    plain = build(PREFIX + "Spaced-v0", 2, observation=PACKED)
    floats = 4 * env.info.observation.packed_float_count
    seen = [plain.reset()]
    env.reset()
    for _ in range(12):
        action = plain.sample()
        raw, ours = plain.step(action), env.step(action)
        assert ours.obs_N.dtype == ours.last_obs_N.dtype == np.uint8
        np.testing.assert_array_equal(ours.obs_N[:, floats:], raw.obs_N[:, floats:])
        np.testing.assert_array_equal(ours.last_obs_N[:, floats:], raw.last_obs_N[:, floats:])
        seen += [raw.obs_N, raw.last_obs_N[raw.first_N]]
        everything = np.concatenate(seen)[:, :floats].view(np.float32).astype(np.float64)
        expected = (raw.obs_N[:, :floats].view(np.float32) - everything.mean(0)) / np.sqrt(everything.var(0) + 1e-8)
        np.testing.assert_allclose(ours.obs_N[:, :floats].copy().view(np.float32), np.clip(expected, -10, 10), rtol=1e-3, atol=1e-4)
    env.close()
    plain.close()
