"""Conversion between Gymnasium's spaces and an agent's arrays (one for observations, one for actions), or plain Python."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from gymnasium import spaces

from slm_lab.lib.records import ActionSpace, ObservationPart, ObservationSpace

Codec = Callable[[Any], np.ndarray]
"""Maps a batch [N, …] to a batch [N, …]."""

UNBOUNDED = 1e30
"""Bounds beyond this count as infinite: some envs give float32's largest number instead of infinity."""


class UnsupportedSpace(ValueError):
    """A space that agents do not support; the message names it and those that are allowed."""


def observation_codec(space: spaces.Space[Any], fresh: bool = False) -> tuple[ObservationSpace, Codec]:
    """Return the agent's observation space, and the function that converts a batch of the env's observations to it.

    Box becomes float32 and flat. Images get their channels first ([H, W, 3] → [3, H, W], a stack [S, H, W, 3] → [3 S, H, W],
    [H, W] → [1, H, W]): uint8 Boxes of two and more dimensions, which stay uint8, and Boxes of floats of three, as float32. Discrete and
    MultiDiscrete become one-hot, MultiBinary 0.0 and 1.0. A Dict becomes the concatenation of its entries in the space's order; with an
    image inside, its entries are packed (see ObservationSpace). A Tuple is a Dict with keys "0", "1", ….
    The codec returns a new array, which is not written to later; with `fresh` the backend returns such arrays itself, and copies are
    skipped.

    Raises: UnsupportedSpace for Text, Graph, Sequence and custom spaces.
    """
    if is_image(space):
        return _image(space, fresh)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = leaves(space)
        if any(is_image(leaf) for _, leaf in entries):
            return _packed(entries)
    size, codec = _flat(space, "observation")
    if fresh and isinstance(space, spaces.Box) and space.dtype == np.float32 and len(space.shape) == 1:
        codec = _as_is
    return ObservationSpace((size,)), codec


def batch_of_one(observation: Any) -> Any:
    """Return one env's observation as a batch [1, …]."""
    if isinstance(observation, dict):
        return {key: batch_of_one(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(batch_of_one(value) for value in observation)
    return np.asarray(observation)[None]


def lone_codec(space: spaces.Space[Any], codec: Codec) -> Codec:
    """Return the function that converts one array of a Box to a batch [1, …] as `codec` does; if it is flat, in one operation."""
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return lambda obs: np.array(obs, np.float32, ndmin=2)
    return lambda obs: codec(obs[None])


def _as_is(batch: Any) -> np.ndarray:
    return np.asarray(batch)


def is_image(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """Return whether agents see a space as an image."""
    if not isinstance(space, spaces.Box):
        return False
    return len(space.shape) >= 2 if space.dtype == np.uint8 else len(space.shape) == 3 and np.issubdtype(space.dtype, np.floating)


def image_layout(space: spaces.Box) -> tuple[tuple[int, ...], bool]:
    """Return the shape [C, H, W] of an image as agents see it, and whether its channels are last in the env's form."""
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
    return target, channels_last


def _image(space: spaces.Box, fresh: bool) -> tuple[ObservationSpace, Codec]:
    target, channels_last = image_layout(space)
    dtype = np.dtype("uint8" if space.dtype == np.uint8 else "float32")

    def encode(batch: Any) -> np.ndarray:
        array = np.moveaxis(batch, -1, -3) if channels_last else batch
        return np.array(array, dtype, order="C").reshape(-1, *target)

    as_is = fresh and target == space.shape and space.dtype == dtype
    return ObservationSpace(target, "uint8" if dtype == np.uint8 else "float32"), _as_is if as_is else encode


Leaf = tuple[tuple[Any, ...], spaces.Space[Any]]
"""An entry that is not a Dict or Tuple: the keys that lead to it, and its space."""


def leaves(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> list[Leaf]:
    """Return the entries of a Dict or Tuple in its order, or the space itself with an empty path."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(path, space)]
    return [leaf for key, inner in _entries(space) for leaf in leaves(inner, (*path, key))]


def _entries(space: spaces.Dict | spaces.Tuple[Any]) -> list[tuple[Any, spaces.Space[Any]]]:
    return list(space.spaces.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))


def _packed(entries: list[Leaf]) -> tuple[ObservationSpace, Codec]:
    """Lay out float32 entries before uint8 ones and pad to whole float32, so that each entry of a batch is a view of it."""
    names = ["/".join(map(str, path)) for path, _ in entries]
    known = [_image(leaf, False) if is_image(leaf) else _vector(leaf, name) for name, (_, leaf) in zip(names, entries, strict=True)]
    parts, begin = {}, 0
    for index in sorted(range(len(known)), key=lambda index: known[index][0].dtype == "uint8"):
        entry = known[index][0]
        end = begin + math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
        parts[index] = ObservationPart(names[index], entry.shape, entry.dtype, begin, end)
        begin = end
    size = -(-begin // 4) * 4
    copies = [(parts[index].begin, parts[index].end, codec, entries[index][0]) for index, (_, codec) in enumerate(known)]

    def encode(batch: Any) -> np.ndarray:
        packed: np.ndarray | None = None
        for begin, end, codec, path in copies:
            entry = batch
            for key in path:
                entry = entry[key]
            row_N = codec(entry)
            if packed is None:
                packed = np.zeros((len(row_N), size), np.uint8)
            packed[:, begin:end] = row_N.reshape(len(row_N), -1).view(np.uint8)
        assert packed is not None
        return packed

    return ObservationSpace((size,), "uint8", parts=tuple(parts[index] for index in range(len(known)))), encode


def _vector(space: spaces.Space[Any], name: str) -> tuple[ObservationSpace, Codec]:
    size, codec = _flat(space, f"observation[{name!r}]")
    return ObservationSpace((size,)), codec


def _flat(space: spaces.Space[Any], where: str) -> tuple[int, Codec]:
    """Return the size of the flattened space, and the function [N, …] → float32 [N, size], which returns a new array."""
    match space:
        case spaces.MultiBinary():
            return _bits(int(np.prod(space.shape)))
        case spaces.Box():
            size = int(np.prod(space.shape))
            if space.shape == (size,):
                return size, lambda batch: np.array(batch, np.float32)
            return size, lambda batch: np.array(batch, np.float32).reshape(-1, size)
        case spaces.Discrete():
            return _one_hot(np.array([space.n]), np.array([space.start]))
        case spaces.MultiDiscrete():
            return _one_hot(space.nvec.ravel(), space.start.ravel())
        case spaces.Dict() | spaces.Tuple():
            return _joined({key: _flat(sub, f"{where}[{key!r}]") for key, sub in _entries(space)}, type(space).__name__)
    kind = type(space).__name__
    raise UnsupportedSpace(
        f"{where} space {kind} is not supported; allowed: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"
    )


def _bits(size: int) -> tuple[int, Codec]:
    def encode(batch: Any) -> np.ndarray:
        encoded = np.array(batch, np.float32).reshape(-1, size)
        if (encoded * encoded != encoded).any():
            raise ValueError("a number is neither 0 nor 1")
        return encoded

    return size, encode


def _one_hot(nvec: np.ndarray, start: np.ndarray) -> tuple[int, Codec]:
    size, count = int(nvec.sum()), nvec.astype(np.uint64)
    offset = np.concatenate([[0], np.cumsum(nvec)[:-1]])
    shifted, several = bool(start.any()), len(nvec) > 1

    def encode(batch: Any) -> np.ndarray:
        number = np.asarray(batch, np.int64).reshape(-1, len(nvec))
        number = number - start if shifted else number
        if 1 in (number.view(np.uint64) >= count).tobytes():  # a negative one too
            raise ValueError("a number is outside the space")
        encoded = np.zeros((len(number), size), np.float32)
        encoded[np.arange(len(number))[:, None], number + offset if several else number] = 1.0
        return encoded

    return size, encode


def _joined(parts: dict[Any, tuple[int, Codec]], kind: str) -> tuple[int, Codec]:
    if not parts:
        raise UnsupportedSpace(f"observation space {kind} is empty")
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


class BoxScale(NamedTuple):
    """How actions map onto a Box: action × half + center, clipped to [low, high]; float64, flat. Half is 1 where a bound is infinite."""

    low: np.ndarray
    high: np.ndarray
    half: np.ndarray
    center: np.ndarray


def box_scale(space: spaces.Box) -> BoxScale:
    """Return how actions in [-1, 1] are mapped to the bounds of a Box space; dimensions without bounds are not scaled."""
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    low, high = np.where(low <= -UNBOUNDED, -np.inf, low), np.where(high >= UNBOUNDED, np.inf, high)
    finite = np.isfinite(low) & np.isfinite(high)
    center, half = np.zeros_like(low), np.ones_like(low)
    center[finite], half[finite] = high[finite] / 2 + low[finite] / 2, high[finite] / 2 - low[finite] / 2
    return BoxScale(low, high, half, center)


def _continuous(space: spaces.Box) -> tuple[ActionSpace, Codec]:
    low, high, half, center = box_scale(space)
    shape, dtype = space.shape, space.dtype
    plain = bool((half == 1).all() and (center == 0).all())  # already [-1, 1], or unbounded: only clip
    whole = np.issubdtype(dtype, np.integer)

    def decode(action: Any) -> np.ndarray:
        scaled = np.asarray(action) if plain else np.asarray(action) * half + center
        clipped = np.minimum(np.maximum(scaled, low), high)
        decoded: np.ndarray = (np.rint(clipped) if whole else clipped).astype(dtype)
        return decoded.reshape(-1, *shape)

    return ActionSpace("continuous", dim=len(low), bounded=bool(np.isfinite([low, high]).all())), decode


def same_form(one: spaces.Space[Any], other: spaces.Space[Any]) -> bool:
    """Return whether observations of one space fit an agent of the other: structure, sizes and keys are equal; bounds may differ."""
    return bool(_form(one) == _form(other))


def _form(space: spaces.Space[Any]) -> Any:
    match space:
        case spaces.Dict() | spaces.Tuple():
            return type(space).__name__, [(key, _form(inner)) for key, inner in _entries(space)]
        case spaces.Discrete():
            return "Discrete", int(space.n)
        case spaces.MultiDiscrete():
            return "MultiDiscrete", space.nvec.tolist()
        case spaces.Box():
            return "Box", space.shape, space.dtype == np.uint8
    return type(space).__name__, space.shape


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
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [space_to_dict(inner) for inner in space.spaces]}
    kind = type(space).__name__
    raise UnsupportedSpace(f"space {kind} is not supported; allowed: Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple")


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
        case {"type": "Tuple", "spaces": inner}:
            return spaces.Tuple([space_from_dict(one) for one in inner])
    raise ValueError(f"invalid space description: {described!r}")
