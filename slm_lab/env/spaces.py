"""Conversion between Gymnasium's spaces and an agent's arrays (one for observations, one for actions), or plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from slm_lab.lib.records import ActionSpace, ObservationSpace

Codec = Callable[[Any], np.ndarray]
"""Maps a batch [N, …] to a batch [N, …]."""

UNBOUNDED = 1e30
"""Bounds beyond this count as infinite: some envs give float32's largest number instead of infinity."""


class UnsupportedSpace(ValueError):
    """A space that agents do not support; the message names it and those that are allowed."""


def observation_codec(space: spaces.Space[Any], fresh: bool = False) -> tuple[ObservationSpace, Codec]:
    """Return the agent's observation space, and the function that converts a batch of the env's observations to it.

    Box becomes float32 and flat; uint8 Boxes of two and more dimensions are images: they stay uint8, channels first
    ([H, W, 3] → [3, H, W], a stack [S, H, W, 3] → [3 S, H, W], [H, W] → [1, H, W]). Discrete and MultiDiscrete become
    one-hot, MultiBinary 0.0 and 1.0, a Dict the concatenation of its entries in the space's order.
    The codec returns a new array, which is not written to later; with `fresh` the backend returns such arrays itself, and copies are
    skipped.

    Raises: UnsupportedSpace for Tuple, Text, Graph, Sequence and custom spaces.
    """
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2:
        return _image(space, fresh)
    size, codec = _flat(space, "observation")
    if fresh and isinstance(space, spaces.Box) and space.dtype == np.float32 and len(space.shape) == 1:
        codec = _as_is
    return ObservationSpace((size,)), codec


def batch_of_one(observation: Any) -> Any:
    """Return one env's observation as a batch [1, …]."""
    if isinstance(observation, dict):
        return {key: batch_of_one(value) for key, value in observation.items()}
    return np.asarray(observation)[None]


def _as_is(batch: Any) -> np.ndarray:
    return np.asarray(batch)


def _image(space: spaces.Box, fresh: bool) -> tuple[ObservationSpace, Codec]:
    shape = space.shape
    channels_last = len(shape) >= 3 and shape[-1] in (1, 3, 4) and (len(shape) == 4 or shape[0] not in (1, 3, 4))
    if len(shape) == 2:
        target: tuple[int, ...] = (1, *shape)
    elif len(shape) == 4:
        if not channels_last:
            raise UnsupportedSpace(f"observation {space}: a stack of images needs its channels last")
        target = (shape[0] * shape[3], shape[1], shape[2])
    else:
        target = (shape[2], shape[0], shape[1]) if channels_last else shape

    def encode(batch: Any) -> np.ndarray:
        array = np.moveaxis(batch, -1, -3) if channels_last else batch
        return np.array(array, order="C").reshape(-1, *target)

    return ObservationSpace(target, "uint8"), _as_is if fresh and target == shape else encode


def _flat(space: spaces.Space[Any], where: str) -> tuple[int, Codec]:
    """Return the size of the flattened space, and the function [N, …] → float32 [N, size], which returns a new array."""
    match space:
        case spaces.Box() | spaces.MultiBinary():
            size = int(np.prod(space.shape))
            return size, lambda batch: np.array(batch, np.float32).reshape(-1, size)
        case spaces.Discrete():
            return _one_hot(np.array([space.n]), np.array([space.start]))
        case spaces.MultiDiscrete():
            return _one_hot(space.nvec.ravel(), space.start.ravel())
        case spaces.Dict():
            return _joined({key: _flat(sub, f"{where}[{key!r}]") for key, sub in space.spaces.items()})
    kind = type(space).__name__
    raise UnsupportedSpace(f"{where} space {kind} is not supported; allowed: Box, Discrete, MultiDiscrete, MultiBinary and Dict of those")


def _one_hot(nvec: np.ndarray, start: np.ndarray) -> tuple[int, Codec]:
    size = int(nvec.sum())
    offset = np.concatenate([[0], np.cumsum(nvec)[:-1]]) - start

    def encode(batch: Any) -> np.ndarray:
        index = np.asarray(batch, np.int64).reshape(-1, len(nvec)) + offset
        encoded = np.zeros((len(index), size), np.float32)
        np.put_along_axis(encoded, index, 1.0, axis=1)
        return encoded

    return size, encode


def _joined(parts: dict[str, tuple[int, Codec]]) -> tuple[int, Codec]:
    if not parts:
        raise UnsupportedSpace("observation space Dict is empty")
    return sum(size for size, _ in parts.values()), lambda batch: np.concatenate(
        [codec(batch[key]) for key, (_, codec) in parts.items()], axis=1
    )


def action_codec(space: spaces.Space[Any]) -> tuple[ActionSpace, Codec]:
    """Return the agent's action space, and the function that converts its action_N (see ActionSpace) to the env's.

    Raises: UnsupportedSpace for Dict, Tuple and others.
    """
    match space:
        case spaces.Discrete():
            start = int(space.start)
            return ActionSpace("discrete", (int(space.n),)), (lambda a: np.asarray(a, np.int64) + start) if start else lambda a: np.asarray(
                a, np.int64
            )
        case spaces.MultiDiscrete():
            nvec, first, shape, dtype = space.nvec.ravel(), space.start.ravel(), space.shape, space.dtype
            known = ActionSpace("multi_discrete", tuple(int(n) for n in nvec), len(nvec))
            return known, lambda a: (np.asarray(a) + first).reshape(-1, *shape).astype(dtype)
        case spaces.MultiBinary():
            bits = space.shape
            return ActionSpace("multi_binary", dim=int(np.prod(bits))), lambda a: np.asarray(a, np.int8).reshape(-1, *bits)
        case spaces.Box():
            return _continuous(space)
    kind = type(space).__name__
    raise UnsupportedSpace(f"action space {kind} is not supported; allowed: Discrete, Box, MultiDiscrete, MultiBinary")


def _continuous(space: spaces.Box) -> tuple[ActionSpace, Codec]:
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    low, high = np.where(low <= -UNBOUNDED, -np.inf, low), np.where(high >= UNBOUNDED, np.inf, high)
    finite = np.isfinite(low) & np.isfinite(high)
    center, half = np.zeros_like(low), np.ones_like(low)
    center[finite], half[finite] = high[finite] / 2 + low[finite] / 2, high[finite] / 2 - low[finite] / 2
    shape, dtype = space.shape, space.dtype
    plain = bool((half == 1).all() and (center == 0).all())  # already [-1, 1], or unbounded: only clip
    whole = np.issubdtype(dtype, np.integer)

    def decode(action: Any) -> np.ndarray:
        scaled = np.asarray(action) if plain else np.asarray(action) * half + center
        clipped = np.minimum(np.maximum(scaled, low), high)
        decoded: np.ndarray = (np.rint(clipped) if whole else clipped).astype(dtype)
        return decoded.reshape(-1, *shape)

    return ActionSpace("continuous", dim=len(low), bounded=bool(finite.all())), decode


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """Describe a space in plain Python: numbers, strings, lists and dicts, which JSON and torch.load(weights_only=True) can read.

    Raises: UnsupportedSpace for spaces without a codec.
    """
    match space:
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "shape": [int(size) for size in space.shape]}
        case spaces.Box():
            shape = [int(size) for size in space.shape]
            return {"type": "Box", "shape": shape, "dtype": str(space.dtype), "low": _bound(space.low), "high": _bound(space.high)}
        case spaces.Dict():
            return {"type": "Dict", "spaces": [[key, space_to_dict(inner)] for key, inner in space.spaces.items()]}
    raise UnsupportedSpace(f"space {type(space).__name__} is not supported; allowed: Box, Discrete, MultiDiscrete, MultiBinary, Dict")


def _bound(bound: np.ndarray) -> Any:
    """Return the bounds of a Box: one number if all are equal, otherwise nested lists."""
    first = bound.flat[0].item() if bound.size else 0
    return first if (bound == first).all() else bound.tolist()


def space_from_dict(described: dict[str, Any]) -> spaces.Space[Any]:
    """Return the space that `space_to_dict` described. Raises ValueError for other dicts."""
    match described:
        case {"type": "Discrete", "n": n, "start": start, "dtype": dtype}:
            return spaces.Discrete(n, start=start, **({} if dtype == "int64" else {"dtype": np.dtype(dtype).type}))
        case {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": dtype}:
            return spaces.MultiDiscrete(np.array(nvec, dtype), dtype=np.dtype(dtype).type, start=np.array(start, dtype))
        case {"type": "MultiBinary", "shape": shape}:
            return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        case {"type": "Box", "shape": shape, "dtype": dtype, "low": low, "high": high}:
            bounds = [np.broadcast_to(np.array(bound, dtype), shape) for bound in (low, high)]
            return spaces.Box(bounds[0], bounds[1], dtype=np.dtype(dtype).type)
        case {"type": "Dict", "spaces": inner}:
            return spaces.Dict(OrderedDict((key, space_from_dict(one)) for key, one in inner))
    raise ValueError(f"invalid space description: {described!r}")
