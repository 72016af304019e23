"""Conversion of Box observations to images or vectors for agents. Envs, nets, memories, exported files and `slm_lab check` use the same
rules.

- The function `channels_axis` determines whether the channels of an image are its first or its last axis.
- A Box with three axes, including the channels, is an image if it contains bools, integers from 0 to 255, or floats from 0 to 1, from -1 to
  1 or from 0 to 255. A Box with two axes that contains integers from 0 to 255 is an image without channels. Every other Box is a vector.
  `agent.net.input` in the spec (or a net with convolutions) overrides this classification of a Box as image or vector.
- Nets divide an image by its upper bound. In a vector of integers whose bounds lie between 0 and 255, each number is divided by its own
  upper bound. Vectors of other numbers are not changed.
- A wrapper that stacks the last observations adds a first axis to observations (see `mark_stack`). Stacked images are concatenated along
  their channels, and stacked vectors are concatenated to one vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from slm_lab.lib.records import Ambiguity, Channels, Dtype, InputKind

UNBOUNDED = 1e30
"""Bounds whose absolute value exceeds this number count as infinite, because some envs use the greatest float32 number instead of
infinity."""
BYTE = 255.0
_PICTURES = ((0.0, 1.0), (-1.0, 1.0), (0.0, BYTE))
"""Pairs of lower and upper bounds that images of floats can have. Images of bools have the bounds of the first pair."""
_SMALLEST_SIDE = 7
"""Minimum height and width of an image that contains floats or bools, or that has no channel axis. Smaller arrays are more often tables of
numbers than images."""
_LARGE_SIDE = 32
"""Minimum height and width for which a Box with three axes, but without the bounds of an image, may still be an image and is therefore
ambiguous."""
_USUAL_CHANNELS = (1, 3, 4)
_MIN_ASPECT_RATIO = 1.25
"""If the aspect ratios of the two possible images (channels first or channels last) differ by at least this factor, the image whose height
and width are more similar is taken as certain."""


class BoxLayout(NamedTuple):
    """Description of how a batch of Box observations, [N, *shape], is converted to the images or vectors that agents use."""

    shape: tuple[int, ...]
    """Shape of one converted observation: [C, H, W] for an image, [n] for a vector."""
    dtype: Dtype
    channels_last: bool = False
    """Whether the last axis of the env's observation contains the channels and must be moved before height and width."""
    high: float | None = None
    """Number by which nets divide an image, or None for a vector."""
    scale: np.ndarray | None = None
    """float32 [n]: factors by which a vector is multiplied, or None if the observation is not scaled."""
    ambiguities: tuple[Ambiguity, ...] = ()
    """Properties of the observation that its space does not determine, each with the spec key that sets the property."""
    text: str = ""
    """Description of the observation, such as "image 24 × 20, 6 channels last, 0 to 255"."""

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3


def box_layout(space: spaces.Box, input: InputKind | None = None, channels: Channels | None = None, where: str = "") -> BoxLayout:
    """Return a BoxLayout, which says whether a Box observation is an image or a vector, and how the observation is converted.

    Args:
        input: "image" or "vector" if the spec gives the kind of observations, else None. Arrays that cannot be images, such as arrays with
            one axis, are vectors regardless of `input`.
        channels: axis of an image's channels ("first" or "last") if the spec gives this axis, else None.
        where: name of the Box's entry in a Dict or Tuple, for messages.
    """
    shape = space.shape
    inner = shape[1:] if is_stacked(space) else shape
    if len(inner) == 4:  # images stacked by the env itself
        inner = inner[1:]
    last, clear = channels_axis(inner, channels)
    plain = len(inner) not in (2, 3) or not math.prod(shape)
    kind, sure = ("vector", True) if plain else _box_kind(space, inner, last) if input is None else (input, True)
    if kind == "vector":
        ambiguities = () if sure else (_unclear_kind(space, where),)
        return _vector_layout(space, ambiguities)
    ambiguities = () if clear else (_unclear_channels(space, inner, where),)
    return _image_layout(space, inner, math.prod(shape[: len(shape) - len(inner)]), last, ambiguities)


def channels_axis(shape: Sequence[int], given: Channels | None = None) -> tuple[bool, bool]:
    """Return two bools: whether the channels of an image are its last axis, and whether this result is certain.

    If exactly one of the first and the last axis has size 1, 3 or 4, this axis contains the channels. Otherwise, of these two axes,
    the axis whose removal makes height and width more similar contains the channels.
    """
    if len(shape) != 3:
        return False, True
    if given is not None:
        return given == "last", True
    first_usual, last_usual = shape[0] in _USUAL_CHANNELS, shape[-1] in _USUAL_CHANNELS
    if first_usual != last_usual:
        return last_usual, True
    first, last = _aspect(*shape[1:]), _aspect(*shape[:-1])
    return last < first, max(first, last) >= _MIN_ASPECT_RATIO * min(first, last) or (first != last and min(first, last) == 1.0)


def _aspect(height: int, width: int) -> float:
    return max(height, width) / max(1, min(height, width))


def _box_kind(space: spaces.Box, shape: Sequence[int], last: bool) -> tuple[InputKind, bool]:
    """Return "image" or "vector" for a Box [H, W], [H, W, C] or [C, H, W], and whether this result is certain.

    Args: last: whether the last axis contains the channels.
    """
    height, width = (shape[:2] if last else shape[-2:]) if len(shape) == 3 else shape
    side, bounds = min(height, width), _overall_bounds(space)
    if _is_integer_or_bool(space) and space.dtype.kind != "b":
        if bounds == (0.0, BYTE):
            return ("image", True) if len(shape) == 3 or side >= _SMALLEST_SIDE else ("vector", True)
    elif bounds in _PICTURES and side >= _SMALLEST_SIDE:
        return ("image", True) if len(shape) == 3 else ("vector", side < _LARGE_SIDE)
    return "vector", len(shape) == 2 or side < _LARGE_SIDE


def _image_layout(space: spaces.Box, inner: Sequence[int], frames: int, last: bool, ambiguities: tuple[Ambiguity, ...]) -> BoxLayout:
    if len(inner) == 2:
        (height, width), channels, where = inner, 1, ""
    else:
        height, width, channels = inner if last else (inner[1], inner[2], inner[0])
        where = " last" if last else " first"
    low, high = _overall_bounds(space)
    byte = _is_integer_or_bool(space) and low >= 0.0 and high <= BYTE
    count = f"{frames} × {channels}" if frames > 1 else str(channels)
    text = f"image {height} × {width}, {count} channel{'s' * (frames * channels > 1)}{where}, {_bounds_text(low, high)}"
    divisor = high if 1.0 < high < math.inf else 1.0
    return BoxLayout((frames * channels, height, width), "uint8" if byte else "float32", last, divisor, None, ambiguities, text)


def _vector_layout(space: spaces.Box, ambiguities: tuple[Ambiguity, ...]) -> BoxLayout:
    size, scale = math.prod(space.shape), None
    low, high = _overall_bounds(space)
    if size and _is_integer_or_bool(space) and low >= 0.0 and 1.0 < high <= BYTE:
        scale = (1.0 / np.maximum(space.high.astype(np.float64), 1.0)).astype(np.float32).ravel()
    text = f"vector of {size} number{'s' * (size != 1)}" + (f" ({_shape_text(space.shape)})" if len(space.shape) > 1 else "")
    return BoxLayout(
        (size,), "float32", False, None, scale, ambiguities, text if scale is None else f"{text}, {_bounds_text(low, high)} → 0 to 1"
    )


def _is_integer_or_bool(space: spaces.Box) -> bool:
    return space.dtype.kind in "biu"


def _overall_bounds(space: spaces.Box) -> tuple[float, float]:
    """Return the smallest lower bound and the greatest upper bound of a Box. Bounds below −UNBOUNDED or above UNBOUNDED are returned as −∞
    or ∞."""
    if not math.prod(space.shape):
        return 0.0, 0.0
    low, high = float(space.low.min()), float(space.high.max())
    return -math.inf if low < -UNBOUNDED else low, math.inf if high > UNBOUNDED else high


def _bounds_text(low: float, high: float) -> str:
    return f"{low:g} to {high:g}" if math.isfinite(low) or math.isfinite(high) else "without bounds"


def _shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _unclear_channels(space: spaces.Box, inner: Sequence[int], where: str) -> Ambiguity:
    what = (
        f"the observation{where and f' {where!r}'} {_shape_text(space.shape)} is an image whose channels may be its first axis or its last"
    )
    return Ambiguity("env.channels", f'{what}; set "first" ({inner[0]} channels) or "last" ({inner[-1]} channels)')


def _unclear_kind(space: spaces.Box, where: str) -> Ambiguity:
    bounds = _bounds_text(*_overall_bounds(space))
    what = f"the observation{where and f' {where!r}'} {_shape_text(space.shape)} {bounds} may be an image or a vector"
    return Ambiguity("agent.net.input", f'{what}; set "image" or "vector", or name a net (ConvNet, MLPNet)')


_MARK = "is_stacked"


def mark_stack(env: gym.Env[Any, Any]) -> None:
    """Mark the observation spaces whose first axis was added by a wrapper that stacks observations, so that `box_layout` can recognise
    stacked observations.

    If a wrapper outside the stacking wrapper changes observations, this wrapper has a new space, which is not marked.
    """
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.FrameStackObservation):
            for box in _boxes(layer.observation_space):
                setattr(box, _MARK, True)
        layer = layer.env


def _boxes(space: spaces.Space[Any]) -> list[spaces.Box]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [box for one in inner for box in _boxes(one)]
    return [space] if isinstance(space, spaces.Box) else []


def is_stacked(space: spaces.Space[Any]) -> bool:
    """Return whether the first axis of a space was added by a wrapper that stacks observations."""
    return getattr(space, _MARK, False)


def set_stacked(space: spaces.Box) -> spaces.Box:
    """Mark a space as one whose first axis was added by a wrapper that stacks observations (see `mark_stack`). Return the space."""
    setattr(space, _MARK, True)
    return space
