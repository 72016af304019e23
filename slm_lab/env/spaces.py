"""Conversion of Gymnasium spaces to the spaces of an agent (one array for observations, one array for actions), and conversion of spaces to
plain Python objects and back."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium import spaces

from slm_lab.env.layout import UNBOUNDED, BoxLayout, box_layout, is_stacked, set_stacked
from slm_lab.env.nested_actions import action_leaves, leaf_columns, nested_action_codec
from slm_lab.lib.records import ActionSpace, Channels, InputKind, ObservationPart, ObservationSpace, Use

Codec = Callable[[Any], np.ndarray]
"""Function that converts a batch [N, …] of the env's observations to the agent's arrays, or a batch of the agent's actions to the env's
actions."""


class UnsupportedSpace(ValueError):
    """Raised for a space that agents do not support. The exception's message names the unsupported space and the supported spaces."""


def observation_codec(
    space: spaces.Space[Any],
    input: InputKind | None = None,
    channels: Channels | None = None,
    fresh: bool = False,
    uses: Mapping[str, Use] = MappingProxyType({}),
) -> tuple[ObservationSpace, Codec]:
    """Return the agent's observation space, and a codec: a function that converts a batch of the env's observations to one array.

    An element of a Box becomes an image, uint8 or float32 with channels first, or a flat float32 vector (see the module `layout`). Elements
    of Discrete and MultiDiscrete become one-hot vectors. An element of MultiBinary becomes a vector of 0.0 and 1.0, or an image if the
    space has three axes and `input="image"`. A Dict observation becomes the concatenation of its entries in the space's order. If a Dict
    contains an image, its entries are packed into one byte vector (see ObservationSpace). A Tuple is treated as a Dict with the keys "0",
    "1", …. The codec returns a new array that is not modified later. With `fresh=True`, the backend already returns new arrays, so that the
    codec need not copy observations.

    Args: input, channels: settings for images in the spec (see `layout.box_layout`). uses: use of each entry of a Dict, by default "all".
    The entries of the Dict must be in the order of USES (see `order_entries`). If a batch lacks an entry with the use "critic", the agent's
    observations contain zeros for this entry.

    Raises: UnsupportedSpace for Text, Graph, Sequence and custom spaces.
    """
    space = _bits_as_image(space, input)
    if isinstance(space, spaces.Box):
        return _box_space_and_codec(space, box_layout(space, input, channels), fresh)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = entry_layouts(space, input, channels)
        if any(layout is not None and layout.is_image for _, _, layout in entries):
            return _packed_codec(entries, uses)
        parts = {key: _flat_codec(sub, f"observation[{key!r}]") for key, sub in _entries(space)}
        size, codec = _concatenation_codec(parts, type(space).__name__, {key for key in uses if uses[key] == "critic"})
        text = f"{type(space).__name__} of {len(entries)} entries, concatenated: {size} numbers{_uses_text(uses)}"
        ambiguities = tuple(each for _, _, layout in entries if layout is not None for each in layout.ambiguities)
        end = {use: sum(parts[key][0] for key in parts if USES.index(uses.get(key, "all")) <= index) for index, use in enumerate(USES)}
        critic_begin = end["all"] if "critic" in uses.values() else None
        mask = (end["critic"], end["mask"]) if "mask" in uses.values() else None
        goals = _goal_columns(space, {key: part[0] for key, part in parts.items()})
        return ObservationSpace((size,), critic_begin=critic_begin, mask=mask, goals=goals, ambiguities=ambiguities, text=text), codec
    size, codec = _flat_codec(space, "observation")
    return ObservationSpace((size,), text=_bits_text(space, size)), codec


def _goal_columns(space: spaces.Dict | spaces.Tuple[Any], sizes: Mapping[Any, int]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the columns of achieved_goal and desired_goal in the agent's observations, as two pairs (first column, last column + 1).
    Return None if observations lack one of these entries, or if the codec changes the numbers of the goals."""
    begin = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    entries = [(key, inner) for key, inner in _entries(space) if key in ("achieved_goal", "desired_goal")]
    if len(entries) < 2 or len({sizes[key] for key, _ in entries}) > 1 or not all(_is_raw(inner) for _, inner in entries):
        return None
    achieved, desired = ((begin[key], begin[key] + sizes[key]) for key in ("achieved_goal", "desired_goal"))
    return achieved, desired


def _is_raw(space: spaces.Space[Any]) -> bool:
    """Return whether the codec that flattens elements of a space leaves the numbers of the elements unchanged."""
    return isinstance(space, spaces.MultiBinary) or (isinstance(space, spaces.Box) and box_layout(space, "vector").scale is None)


USES: tuple[Use, ...] = ("all", "critic", "mask")
"""Uses of a Dict observation's entries ("all": input of all nets, "critic": input of the critic only, "mask": action mask), in the order in
which the agent's observations contain the entries."""


def order_entries(space: spaces.Dict, uses: Mapping[str, Use]) -> spaces.Dict:
    """Return a Dict space whose entries are sorted in the order of USES, and whose entry for the action mask is a MultiBinary."""
    keys = sorted(space.spaces, key=lambda key: USES.index(uses.get(key, "all")))
    entries = [(key, spaces.MultiBinary(space[key].shape or ()) if uses.get(key) == "mask" else space[key]) for key in keys]
    return spaces.Dict(OrderedDict(entries))


def _uses_text(uses: Mapping[str, Use]) -> str:
    texts = {"critic": "for the critic only", "mask": "the action mask"}
    return "".join(f"; {key}: {texts[use]}" for key, use in uses.items() if use != "all")


def _box_space_and_codec(space: spaces.Box, layout: BoxLayout, fresh: bool) -> tuple[ObservationSpace, Codec]:
    agent_space = ObservationSpace(layout.shape, layout.dtype, high=layout.high, ambiguities=layout.ambiguities, text=layout.text)
    if layout.is_image:
        return agent_space, _image_codec(space, layout, fresh)
    as_is = fresh and space.dtype == np.float32 and len(space.shape) == 1 and layout.scale is None
    return agent_space, _identity_codec if as_is else _vector_codec(space, layout.scale)


def batch_of_one(observation: Any) -> Any:
    """Return the observation of one env as a batch of size 1, [1, …]."""
    if isinstance(observation, dict):
        return {key: batch_of_one(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(batch_of_one(value) for value in observation)
    return np.asarray(observation)[None]


def single_observation_codec(space: spaces.Space[Any], codec: Codec) -> Codec:
    """Return a function that converts one observation of a Box to a batch [1, …] of the agent's observations. For vectors that are not
    scaled, the returned function is faster than `codec`."""
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and box_layout(space).scale is None:
        return lambda obs: np.array(obs, np.float32, ndmin=2)
    return lambda obs: codec(obs[None])


def _identity_codec(batch: Any) -> np.ndarray:
    return np.asarray(batch)


def _image_codec(space: spaces.Box, layout: BoxLayout, fresh: bool) -> Codec:
    target, last, dtype = layout.shape, layout.channels_last, np.dtype(layout.dtype)

    def encode(batch: Any) -> np.ndarray:
        array = np.moveaxis(batch, -1, -3) if last else batch
        return np.array(array, dtype, order="C").reshape(-1, *target)

    return _identity_codec if fresh and target == space.shape and space.dtype == dtype else encode


def _vector_codec(space: spaces.Box, scale: np.ndarray | None) -> Codec:
    size = math.prod(space.shape)

    def encode(batch: Any) -> np.ndarray:
        array = np.array(batch, np.float32).reshape(-1, size)
        if scale is not None:
            array *= scale
        return array

    return (lambda batch: np.array(batch, np.float32)) if scale is None and space.shape == (size,) else encode


Leaf = tuple[tuple[Any, ...], spaces.Space[Any]]
"""A leaf of a nested space, which is not a Dict or Tuple itself: the path of keys to the leaf, and the leaf's space."""


def leaves(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> list[Leaf]:
    """Return a list of the leaves (path of keys, space) of a Dict or Tuple space, in order. For any other space, the list contains only
    this space with an empty path."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(path, space)]
    return [leaf for key, inner in _entries(space) for leaf in leaves(inner, (*path, key))]


def _bits_as_image(space: spaces.Space[Any], input: InputKind | None) -> spaces.Space[Any]:
    """Convert a MultiBinary space with three axes (such as the planes of a board) to a Box of uint8 if `input="image"`.

    Spaces of other types are returned unchanged.
    """
    if input == "image" and isinstance(space, spaces.MultiBinary) and len(space.shape) == 3:
        return spaces.Box(0, 1, space.shape, np.uint8)
    return space


def _bits_text(space: spaces.Space[Any], size: int) -> str:
    kind = "vector" if isinstance(space, spaces.MultiBinary) else "one-hot vector"
    return f"{kind} of {size} numbers ({type(space).__name__})"


def entry_layouts(
    space: spaces.Space[Any], input: InputKind | None = None, channels: Channels | None = None
) -> list[tuple[tuple[Any, ...], spaces.Space[Any], BoxLayout | None]]:
    """Return a list of (path of keys, space, layout) for the leaves of a space. A space that is neither a Dict nor a Tuple is a single
    leaf. The layout is None for spaces that are not a Box.

    In a Dict or Tuple, `input="image"` has an effect only if no leaf is recognised as an image. In this case, all Boxes with three axes
    become images.
    """
    path_leaves = [(path, _bits_as_image(leaf, input)) for path, leaf in leaves(space)]
    if len(path_leaves) == 1 and not path_leaves[0][0]:
        space = path_leaves[0][1]
        return [((), space, box_layout(space, input, channels) if isinstance(space, spaces.Box) else None)]
    names = ["/".join(map(str, path)) for path, _ in path_leaves]
    layouts = [
        box_layout(leaf, "vector" if input == "vector" else None, channels, name) if isinstance(leaf, spaces.Box) else None
        for name, (_, leaf) in zip(names, path_leaves, strict=True)
    ]
    if input == "image" and not any(layout is not None and layout.is_image for layout in layouts):
        layouts = [
            box_layout(leaf, "image", channels, name)
            if isinstance(leaf, spaces.Box) and len(leaf.shape) - is_stacked(leaf) == 3
            else layout
            for name, (_, leaf), layout in zip(names, path_leaves, layouts, strict=True)
        ]
    return [(path, leaf, layout) for (path, leaf), layout in zip(path_leaves, layouts, strict=True)]


def _entries(space: spaces.Dict | spaces.Tuple[Any]) -> list[tuple[Any, spaces.Space[Any]]]:
    return list(space.spaces.items()) if isinstance(space, spaces.Dict) else list(enumerate(space.spaces))


def _packed_codec(
    entries: list[tuple[tuple[Any, ...], spaces.Space[Any], BoxLayout | None]], uses: Mapping[str, Use]
) -> tuple[ObservationSpace, Codec]:
    """Return the packed observation space (see ObservationSpace) for a Dict or Tuple, and the codec that packs each observation into one
    byte vector.

    In a packed observation, float32 entries precede uint8 entries, and the number of bytes is padded to a multiple of 4, so that each entry
    can be read as a view of the batch.
    """
    names = ["/".join(map(str, path)) for path, _, _ in entries]
    use_of = [uses.get(path[0], "all") for path, _, _ in entries]
    spaces_and_codecs = [
        _mask_space_and_codec(leaf)
        if use == "mask"
        else _vector_space_and_codec(leaf, name)
        if layout is None
        else _box_space_and_codec(cast("spaces.Box", leaf), layout, False)
        for name, use, (_, leaf, layout) in zip(names, use_of, entries, strict=True)
    ]
    texts = [part.text + " for the critic only" * (use == "critic") for (part, _), use in zip(spaces_and_codecs, use_of, strict=True)]
    parts, begin = {}, 0
    for index in sorted(range(len(spaces_and_codecs)), key=lambda index: spaces_and_codecs[index][0].dtype == "uint8"):
        entry = spaces_and_codecs[index][0]
        end = begin + math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
        parts[index] = ObservationPart(names[index], entry.shape, entry.dtype, begin, end, entry.high, texts[index], use_of[index])
        begin = end
    size = -(-begin // 4) * 4
    copies = [(parts[index].begin, parts[index].end, codec, entries[index][0]) for index, (_, codec) in enumerate(spaces_and_codecs)]
    ambiguities = tuple(each for space, _ in spaces_and_codecs for each in space.ambiguities)
    text = "; ".join(f"{name}: {part_text}" for name, part_text in zip(names, texts, strict=True))
    every = tuple(parts[index] for index in range(len(spaces_and_codecs)))
    mask = next(((part.begin, part.end) for part in every if part.use == "mask"), None)
    space = ObservationSpace((size,), "uint8", parts=every, mask=mask, ambiguities=ambiguities, text=text)
    return space, _packing_codec(copies, size, {key for key in uses if uses[key] == "critic"})


def _packing_codec(copies: Sequence[tuple[int, int, Codec, tuple[Any, ...]]], size: int, optional: Collection[Any]) -> Codec:
    """Return a codec that packs the entries of each observation of a batch into one byte vector.

    Args: copies: for each entry, the entry's first byte and last byte + 1 in a packed observation, the codec of the entry, and the path of
    keys to the entry. size: number of bytes of a packed observation. optional: keys of entries that a batch may lack. In a packed
    observation, the bytes of a missing entry are 0.
    """

    def encode(batch: Any) -> np.ndarray:
        packed: np.ndarray | None = None
        for begin, end, codec, path in copies:
            entry = batch
            if path and path[0] in optional and path[0] not in entry:
                continue
            for key in path:
                entry = entry[key]
            row_N = codec(entry)
            if packed is None:
                packed = np.zeros((len(row_N), size), np.uint8)
            packed[:, begin:end] = row_N.reshape(len(row_N), -1).view(np.uint8)
        assert packed is not None
        return packed

    return encode


def _mask_space_and_codec(space: spaces.Space[Any]) -> tuple[ObservationSpace, Codec]:
    """Return the space of an action mask, and the codec that converts the mask for a packed observation, in which the mask has one byte per
    action."""
    size, codec = _bits_codec(math.prod(space.shape or ()))
    mask_space = ObservationSpace((size,), "uint8", text=f"action mask of {size} numbers")
    return mask_space, lambda batch: codec(batch).astype(np.uint8)


def _vector_space_and_codec(space: spaces.Space[Any], name: str) -> tuple[ObservationSpace, Codec]:
    size, codec = _flat_codec(space, f"observation[{name!r}]")
    return ObservationSpace((size,), text=_bits_text(space, size)), codec


def _flat_codec(space: spaces.Space[Any], where: str) -> tuple[int, Codec]:
    """Return the number of values of one flattened element of a space, and a codec that converts a batch [N, …] of elements to a new array,
    float32 [N, size]."""
    match space:
        case spaces.Box():
            return math.prod(space.shape), _vector_codec(space, box_layout(space, "vector").scale)
        case spaces.MultiBinary():
            return _bits_codec(int(np.prod(space.shape)))
        case spaces.Discrete():
            return _one_hot_codec(np.array([space.n]), np.array([space.start]))
        case spaces.MultiDiscrete():
            return _one_hot_codec(space.nvec.ravel(), space.start.ravel())
        case spaces.Dict() | spaces.Tuple():
            return _concatenation_codec({key: _flat_codec(sub, f"{where}[{key!r}]") for key, sub in _entries(space)}, type(space).__name__)
    kind = type(space).__name__
    raise UnsupportedSpace(
        f"{where} space {kind} is not supported; allowed: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"
    )


def _bits_codec(size: int) -> tuple[int, Codec]:
    def encode(batch: Any) -> np.ndarray:
        encoded = np.array(batch, np.float32).reshape(-1, size)
        if (encoded * encoded != encoded).any():
            raise ValueError("a number is neither 0 nor 1")
        return encoded

    return size, encode


def _one_hot_codec(nvec: np.ndarray, start: np.ndarray) -> tuple[int, Codec]:
    size, count = int(nvec.sum()), nvec.astype(np.uint64)
    offset = np.concatenate([[0], np.cumsum(nvec)[:-1]])
    shifted, several = bool(start.any()), len(nvec) > 1

    def encode(batch: Any) -> np.ndarray:
        number = np.asarray(batch, np.int64).reshape(-1, len(nvec))
        number = number - start if shifted else number
        if 1 in (number.view(np.uint64) >= count).tobytes():  # also true for negative numbers
            raise ValueError("a number is outside the space")
        encoded = np.zeros((len(number), size), np.float32)
        encoded[np.arange(len(number))[:, None], number + offset if several else number] = 1.0
        return encoded

    return size, encode


def _concatenation_codec(parts: dict[Any, tuple[int, Codec]], kind: str, optional: Collection[Any] = ()) -> tuple[int, Codec]:
    """Return the total size of the flattened entries of a Dict or Tuple, and a codec that concatenates these entries.

    Args: optional: keys of entries that a batch may lack. The numbers of a missing entry are 0.
    """
    if not parts:
        raise UnsupportedSpace(f"observation space {kind} is empty")

    def encode(batch: Any) -> np.ndarray:
        if optional and not batch.keys() >= parts.keys():
            count = len(batch[next(key for key in parts if key not in optional)])
            flat = [codec(batch[key]) if key in batch else np.zeros((count, size), np.float32) for key, (size, codec) in parts.items()]
            return np.concatenate(flat, axis=1)
        return np.concatenate([codec(batch[key]) for key, (_, codec) in parts.items()], axis=1)

    return sum(size for size, _ in parts.values()), encode


def action_codec(space: spaces.Space[Any], joint: bool = False) -> tuple[ActionSpace, Codec]:
    """Return the agent's action space, and the function that converts a batch of the agent's actions (see ActionSpace) to a batch of the
    env's actions.

    Args: joint: whether a multi-discrete action is represented by one discrete action whose values are all combinations of the components.

    Raises: UnsupportedSpace for Text, Graph, Sequence and custom spaces.
    """
    if joint and isinstance(space, spaces.MultiDiscrete):
        return _combination_codec(space)
    match space:
        case spaces.Discrete():
            start = int(space.start)
            return ActionSpace("discrete", (int(space.n),)), (lambda a: np.asarray(a, np.int64) + start) if start else lambda a: np.asarray(
                a, np.int64
            )
        case spaces.MultiDiscrete():
            nvec, first, shape, dtype = space.nvec.ravel(), space.start.ravel(), space.shape, space.dtype
            agent_space = ActionSpace("multi_discrete", tuple(int(n) for n in nvec), len(nvec))
            return agent_space, lambda a: (np.asarray(a) + first).reshape(-1, *shape).astype(dtype)
        case spaces.MultiBinary():
            bits = space.shape
            return ActionSpace("multi_binary", dim=int(np.prod(bits))), lambda a: np.asarray(a, np.int8).reshape(-1, *bits)
        case spaces.Box():
            return _continuous_action_codec(space)
        case spaces.Dict() | spaces.Tuple() if action_leaves(space):
            return nested_action_codec(space, action_codec)
    kind = f"empty {type(space).__name__}" if isinstance(space, spaces.Dict | spaces.Tuple) else type(space).__name__
    allowed = "Discrete, Box, MultiDiscrete, MultiBinary, and Dict and Tuple of those"
    raise UnsupportedSpace(f"action space {kind} is not supported; allowed: {allowed}")


def action_columns(space: spaces.Space[Any]) -> list[slice]:
    """Return one slice for each leaf space of a Dict or Tuple action space: the columns of the leaf space in the agent's actions."""
    return leaf_columns([action_codec(leaf)[0] for leaf in action_leaves(space)])


def number_of_choices(space: spaces.Space[Any]) -> int:
    """Return the total number of choices of all discrete components of an action. This number is the size of an action mask."""
    leaves = [leaf for leaf in action_leaves(space) if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)]
    return sum(int(leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec.sum()) for leaf in leaves)


def _combination_codec(space: spaces.MultiDiscrete) -> tuple[ActionSpace, Codec]:
    nvec, first, shape, dtype = space.nvec.ravel(), space.start.ravel(), space.shape, space.dtype

    def decode(action: Any) -> np.ndarray:
        components = np.stack(np.unravel_index(np.asarray(action, np.int64), tuple(nvec)), axis=-1)
        return (components + first).reshape(-1, *shape).astype(dtype)

    return ActionSpace("discrete", (math.prod(nvec.tolist()),)), decode


class BoxScale(NamedTuple):
    """Scaling of actions to a Box: action × half + center, clipped to [low, high]. All arrays are flat and float64.

    In a dimension with an infinite bound, `half` is 1 and `center` is 0.
    """

    low: np.ndarray
    high: np.ndarray
    half: np.ndarray
    center: np.ndarray


def box_scale(space: spaces.Box) -> BoxScale:
    """Return the scaling of actions in [-1, 1] to the bounds of a Box space. Dimensions in which a bound is infinite are not scaled."""
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    low, high = np.where(low <= -UNBOUNDED, -np.inf, low), np.where(high >= UNBOUNDED, np.inf, high)
    finite = np.isfinite(low) & np.isfinite(high)
    center, half = np.zeros_like(low), np.ones_like(low)
    center[finite], half[finite] = high[finite] / 2 + low[finite] / 2, high[finite] / 2 - low[finite] / 2
    return BoxScale(low, high, half, center)


def _continuous_action_codec(space: spaces.Box) -> tuple[ActionSpace, Codec]:
    low, high, half, center = box_scale(space)
    shape, dtype = space.shape, space.dtype
    plain = bool((half == 1).all() and (center == 0).all())  # bounds are [-1, 1] or infinite: only clip
    whole = np.issubdtype(dtype, np.integer)

    def decode(action: Any) -> np.ndarray:
        scaled = np.asarray(action) if plain else np.asarray(action) * half + center
        clipped = np.minimum(np.maximum(scaled, low), high)
        decoded: np.ndarray = (np.rint(clipped) if whole else clipped).astype(dtype)
        return decoded.reshape(-1, *shape)

    return ActionSpace("continuous", dim=len(low), bounded=bool(np.isfinite([low, high]).all())), decode


def is_compatible_space(
    trained: spaces.Space[Any], other: spaces.Space[Any], input: InputKind | None = None, channels: Channels | None = None
) -> bool:
    """Return whether an agent that was trained with the observation space `trained` can use observations of the space `other`.

    The structure, sizes, keys and encoding of the two spaces must be equal. The bounds of the two spaces may differ, unless observations
    are divided by the bounds.

    Args: input, channels: settings for images in the spec (see `observation_codec`).
    """
    forms = [
        (_space_structure(space), [_comparable_layout(layout) for _, _, layout in entry_layouts(space, input, channels)])
        for space in (trained, other)
    ]
    return bool(forms[0] == forms[1])


def _comparable_layout(layout: BoxLayout | None) -> Any:
    if layout is None:
        return None
    return layout.shape, layout.dtype, layout.channels_last, layout.high, None if layout.scale is None else layout.scale.tolist()


def _space_structure(space: spaces.Space[Any]) -> Any:
    match space:
        case spaces.Dict() | spaces.Tuple():
            return type(space).__name__, [(key, _space_structure(inner)) for key, inner in _entries(space)]
        case spaces.Discrete():
            return "Discrete", int(space.n)
        case spaces.MultiDiscrete():
            return "MultiDiscrete", space.nvec.tolist()
        case spaces.Box():
            return "Box", space.shape
    return type(space).__name__, space.shape


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a dict that describes a space. The dict contains only numbers, strings, lists and dicts, so that JSON and
    torch.load(weights_only=True) can read it.

    Raises: UnsupportedSpace for spaces that agents do not support.
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
            described = {"type": "Box", "shape": shape, "dtype": str(space.dtype), "low": _bound(space.low), "high": _bound(space.high)}
            return described | ({"stacked": True} if is_stacked(space) else {})
        case spaces.Dict():
            return {"type": "Dict", "spaces": [[key, space_to_dict(inner)] for key, inner in space.spaces.items()]}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [space_to_dict(inner) for inner in space.spaces]}
    kind = type(space).__name__
    raise UnsupportedSpace(f"space {kind} is not supported; allowed: Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple")


def _bound(bound: np.ndarray) -> Any:
    """Return the lower or upper bounds of a Box, given as an array: one number if all bounds are equal, else nested lists."""
    first = bound.flat[0].item() if bound.size else 0
    return first if (bound == first).all() else bound.tolist()


def space_from_dict(described: dict[str, Any]) -> spaces.Space[Any]:
    """Return the space that a dict from `space_to_dict` describes. Raises ValueError for other dicts."""
    match described:
        case {"type": "Discrete", "n": n, "start": start, "dtype": dtype}:
            return spaces.Discrete(n, start=start, **({} if dtype == "int64" else {"dtype": np.dtype(dtype).type}))
        case {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": dtype}:
            return spaces.MultiDiscrete(np.array(nvec, dtype), dtype=np.dtype(dtype).type, start=np.array(start, dtype))
        case {"type": "MultiBinary", "shape": shape}:
            return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        case {"type": "Box", "shape": shape, "dtype": dtype, "low": low, "high": high}:
            bounds = [np.broadcast_to(np.array(bound, dtype), shape) for bound in (low, high)]
            box = spaces.Box(bounds[0], bounds[1], dtype=np.dtype(dtype).type)
            return set_stacked(box) if described.get("stacked") else box
        case {"type": "Dict", "spaces": inner}:
            return spaces.Dict(OrderedDict((key, space_from_dict(part)) for key, part in inner))
        case {"type": "Tuple", "spaces": inner}:
            return spaces.Tuple([space_from_dict(part) for part in inner])
    raise ValueError(f"invalid space description: {described!r}")
