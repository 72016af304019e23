"""Tests of the layout of Box observations: images and vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from slm_lab.env.layout import box_layout, channels_axis, is_stacked
from slm_lab.env.spaces import entry_layouts, is_compatible_space, observation_codec, space_from_dict, space_to_dict
from tests.env.test_step import build

STACK = [{"name": "FrameStackObservation", "stack_size": 4}]
CUE = "tests.env.cues:Cue-v0"


def box(low: float, high: float, shape: tuple[int, ...], dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "high"),
    [
        (box(0, 255, (84, 84, 3)), (3, 84, 84), "uint8", 255),
        (box(0, 255, (84, 84, 3), np.int64), (3, 84, 84), "uint8", 255),  # bounds decide, not the dtype
        (box(0, 255, (4, 84, 84)), (4, 84, 84), "uint8", 255),
        (box(0, 255, (84, 84)), (1, 84, 84), "uint8", 255),
        (box(0, 255, (20, 24, 2)), (2, 20, 24), "uint8", 255),
        (box(0, 255, (6, 20, 24)), (6, 20, 24), "uint8", 255),
        (box(0, 255, (20, 24, 12)), (12, 20, 24), "uint8", 255),
        (box(0, 255, (19, 19, 17)), (17, 19, 19), "uint8", 255),
        (box(0, 255, (4, 20, 24, 2)), (8, 20, 24), "uint8", 255),
        (box(0, 255, (4, 3, 20, 24)), (12, 20, 24), "uint8", 255),
        (box(0, 1, (24, 24, 3), np.float32), (3, 24, 24), "float32", 1),
        (box(-1, 1, (24, 24, 3), np.float64), (3, 24, 24), "float32", 1),
        (box(0, 255, (24, 24, 3), np.float32), (3, 24, 24), "float32", 255),
        (box(0, 255, (3, 3)), (9,), "float32", None),
        (box(0, 255, (4, 128)), (512,), "float32", None),
        (box(0, 2, (3, 3)), (9,), "float32", None),
        (box(0, 1, (8, 8, 12)), (768,), "float32", None),
        (box(0, 1, (10, 10, 4), np.bool_), (4, 10, 10), "uint8", 1),
        (box(0, 1, (10, 10, 7), np.bool_), (7, 10, 10), "uint8", 1),
        (box(0, 1, (10, 10), np.bool_), (100,), "float32", None),
        (box(0, 1, (3, 3, 2), np.bool_), (18,), "float32", None),
        (box(0, 10, (7, 7, 3)), (147,), "float32", None),
        (box(-5, 5, (4, 5, 6), np.float32), (120,), "float32", None),
        (box(0, 1, (2, 5, 3), np.float32), (30,), "float32", None),
        (box(-np.inf, np.inf, (5, 3), np.float32), (15,), "float32", None),
        (box(0, 255, (2, 2, 2, 2, 2)), (32,), "float32", None),
        (box(0, 255, ()), (1,), "float32", None),
    ],
)
def test_bounds_and_shape_decide(space: spaces.Box, shape: tuple[int, ...], dtype: str, high: float | None) -> None:
    layout = box_layout(space)
    assert (layout.shape, layout.dtype, layout.high, layout.ambiguities) == (shape, dtype, high, ())
    space.seed(0)
    assert observation_codec(space)[1](space.sample()[None]).shape == (1, *shape)


@pytest.mark.parametrize(
    ("space", "keys"),
    [
        (box(0, 255, (8, 8, 8)), ["env.channels"]),
        (box(0, 1, (10, 10, 10), np.bool_), ["env.channels"]),
        (box(0, 255, (64, 48, 64)), ["env.channels"]),
        (box(-np.inf, np.inf, (64, 64, 3), np.float32), ["agent.net.input"]),
        (box(0, 3, (64, 64, 3)), ["agent.net.input"]),
        (box(0, 1, (84, 84), np.float32), ["agent.net.input"]),
        (spaces.Dict({"a": box(0, 255, (8, 8, 8)), "b": spaces.Discrete(2)}), ["env.channels"]),
    ],
)
def test_what_a_space_leaves_open_names_the_key(space: spaces.Space[Any], keys: list[str]) -> None:
    assert [one.key for one in observation_codec(space)[0].ambiguities] == keys
    assert not observation_codec(space, "image", "last")[0].ambiguities
    assert not observation_codec(space, "vector")[0].ambiguities


def test_the_spec_decides_before_the_space() -> None:
    planes = box(0, 1, (8, 8, 12))
    known, encode = observation_codec(planes, "image")
    assert (known.shape, known.dtype, known.divisor) == ((12, 8, 8), "uint8", 1.0)
    planes.seed(1)
    sample = planes.sample()
    np.testing.assert_array_equal(encode(sample[None])[0], np.moveaxis(sample, -1, 0))
    assert observation_codec(planes, "image", "first")[0].shape == (8, 8, 12)
    codes, _ = observation_codec(box(0, 10, (7, 7, 3)), "image")
    assert (codes.dtype, codes.divisor) == ("uint8", 10.0)
    deep, _ = observation_codec(box(0, 60_000, (9, 9), np.uint16), "image")
    assert (deep.shape, deep.dtype, deep.divisor) == ((1, 9, 9), "float32", 60_000.0)
    assert observation_codec(box(0, 255, (84, 84, 3)), "vector")[0].shape == (84 * 84 * 3,)
    assert observation_codec(box(0, 1, (5,)), "image")[0].shape == (5,)


def test_a_dict_has_the_images_that_the_spec_asks_for() -> None:
    mixed = spaces.Dict({"board": box(0, 2, (7, 7, 2)), "pair": box(0, 1, (5, 3), np.float32)})
    assert observation_codec(mixed)[0].shape == (98 + 15,)
    parts = observation_codec(mixed, "image")[0].parts
    assert [(part.name, part.shape, part.divisor) for part in parts] == [("board", (2, 7, 7), 2.0), ("pair", (15,), 1.0)]
    camera = spaces.Dict({"board": box(0, 2, (7, 7, 2)), "camera": box(0, 255, (9, 9, 3))})
    assert [part.shape for part in observation_codec(camera, "image")[0].parts] == [(98,), (3, 9, 9)]
    assert [layout is not None and layout.is_image for _, _, layout in entry_layouts(camera, "vector")] == [False, False]


def test_vectors_of_small_integers_are_divided_by_their_own_bounds() -> None:
    space = spaces.Box(np.zeros(3, np.uint8), np.array([1, 4, 0], np.uint8), dtype=np.uint8)
    known, encode = observation_codec(space)
    np.testing.assert_allclose(encode(np.array([[1, 3, 0]], np.uint8)), [[1.0, 0.75, 0.0]])
    assert known.text == "vector of 3 numbers, 0 to 4 → 0 to 1"
    signed, encode_signed = observation_codec(box(-1, 1, (3,), np.int8))
    np.testing.assert_array_equal(encode_signed(np.array([[-1, 0, 1]], np.int8)), [[-1.0, 0.0, 1.0]])
    assert signed.text == "vector of 3 numbers"


@pytest.mark.parametrize(
    ("shape", "last", "clear"),
    [((3, 64, 3), False, False), ((1, 9, 9), False, True), ((9, 9, 1), True, True), ((6, 7, 2), True, True), ((2, 6, 7), False, True)],
)
def test_channels_leave_the_squarer_image(shape: tuple[int, ...], last: bool, clear: bool) -> None:
    assert channels_axis(shape) == (last, clear)
    assert channels_axis(shape, "last") == (True, True)


@pytest.mark.parametrize(
    ("form", "shape", "text"),
    [
        ("floats", (12, 24, 24), "image 24 × 24, 4 × 3 channels last, 0 to 1"),
        ("ram", (512,), "vector of 512 numbers (4 × 128), 0 to 255 → 0 to 1"),
        ("board", (36,), "vector of 36 numbers (4 × 3 × 3), 0 to 2 → 0 to 1"),
        ("grey", (4, 24, 20), "image 24 × 20, 4 × 1 channels, 0 to 255"),
        ("channels_2", (8, 20, 24), "image 20 × 24, 4 × 2 channels last, 0 to 255"),
    ],
)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_stacked_observations_are_what_single_ones_are(form: str, shape: tuple[int, ...], text: str, backend: str) -> None:
    if backend == "async" and form != "ram":
        pytest.skip("one is enough: processes are slow to start")
    env = build(CUE, 2, backend=backend, form=form, wrappers=STACK)
    assert (env.info.observation.shape, env.info.observation.text) == (shape, text)
    assert env.reset().shape == (2, *shape)
    described = env.info.spaces
    space = space_from_dict(described["observation"])
    assert is_stacked(space)
    assert observation_codec(space)[0] == env.info.observation
    assert space_to_dict(space) == described["observation"]
    env.close()


@pytest.mark.parametrize("form", ["ram", "board", "codes", "vector", "floats_255"])
def test_a_single_env_is_encoded_as_several(form: str) -> None:
    """The encodings are equal within an episode, at its end and after it."""
    one, several = build(CUE, 1, form=form), build(CUE, 2, form=form)
    obs_N, obs_M = one.reset(), several.reset()
    for _ in range(20):
        np.testing.assert_array_equal(obs_N[0], obs_M[0])
        step, other = (env.step(np.zeros(env.info.num_envs, np.int64)) for env in (one, several))
        np.testing.assert_array_equal(step.last_obs_N[0], other.last_obs_N[0])
        obs_N, obs_M = step.obs_N, other.obs_N


def test_a_wrapper_that_changes_stacked_observations_ends_the_stack() -> None:
    env = build(CUE, 1, form="ram", wrappers=[*STACK, "FlattenObservation"])
    assert env.info.observation.text == "vector of 512 numbers, 0 to 255 → 0 to 1"
    env.close()


def test_spaces_that_are_divided_differently_have_another_form() -> None:
    assert is_compatible_space(box(0, 1, (5,), np.float32), box(0, 2, (5,), np.float32))
    assert not is_compatible_space(box(0, 4, (5,)), box(0, 2, (5,)))
    assert not is_compatible_space(box(0, 255, (9, 9, 3)), box(0, 2, (9, 9, 3)))
    assert not is_compatible_space(box(0, 4, (9, 9, 3)), box(0, 2, (9, 9, 3)), "image")
    assert not is_compatible_space(box(0, 255, (8, 8, 9)), box(0, 255, (8, 9, 8)), None, "last")
    assert is_compatible_space(box(-1, 9, (9, 9), np.float32), box(-1, 7, (9, 9), np.float32))
