"""Conversion of the agent's actions, which are flat arrays, to the nested actions of Dict and Tuple spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from slm_lab.lib.records import ActionKind, ActionSpace

Codec = Callable[[Any], Any]
"""Function that converts a batch of the agent's actions to a batch of the env's actions."""
_KINDS: tuple[ActionKind, ...] = ("multi_discrete", "multi_binary", "continuous")
"""Kinds of action components, in the order in which the agent's action contains them."""


def nested_action_codec(
    space: spaces.Dict | spaces.Tuple[Any], codec: Callable[[Any], tuple[ActionSpace, Codec]]
) -> tuple[ActionSpace, Codec]:
    """Return the agent's action space for a Dict or Tuple action space, and the function that converts the agent's actions to actions of
    the env.

    The agent's action contains the components of all leaf spaces: first the discrete components, then the binary components, then the
    continuous components, each in the order of the leaves. If all leaf spaces have the same kind, the agent's action space also has this
    kind, else the kind "hybrid".

    Args: codec: function that returns the agent's action space and the conversion function of one leaf space, such as
    `spaces.action_codec`.
    """
    leaf_spaces, decoders = zip(*map(codec, action_leaves(space)), strict=True)
    columns = leaf_columns(leaf_spaces)

    def decode(action_N: Any) -> Any:
        action_ND = np.asarray(action_N).reshape(len(action_N), -1)
        parts = [
            leaf_decode(action_ND[:, at.start] if leaf.kind == "discrete" else action_ND[:, at])
            for at, leaf, leaf_decode in zip(columns, leaf_spaces, decoders, strict=True)
        ]
        return assemble_action(space, iter(parts))

    return _join_action_spaces(leaf_spaces), decode


def _action_kind(action: ActionSpace) -> ActionKind:
    return "multi_discrete" if action.kind == "discrete" else action.kind


def _join_action_spaces(leaf_spaces: Sequence[ActionSpace]) -> ActionSpace:
    nvec, bounded = tuple(n for action in leaf_spaces for n in action.nvec), all(action.bounded for action in leaf_spaces)
    size, kinds = sum(action.dim for action in leaf_spaces), {_action_kind(action) for action in leaf_spaces}
    if len(kinds) == 1:
        return ActionSpace("discrete" if len(nvec) == size == 1 else kinds.pop(), nvec, size, bounded)
    return ActionSpace("hybrid", nvec, size, bounded, sum(action.dim for action in leaf_spaces if action.kind == "multi_binary"))


def leaf_columns(leaf_spaces: Sequence[ActionSpace]) -> list[slice]:
    """Return one slice for each leaf space of a nested action space: the columns of the leaf space in the agent's actions.

    Args: leaf_spaces: the agent's action space for each leaf space.
    """
    columns, begin = [slice(0)] * len(leaf_spaces), 0
    for index in sorted(range(len(leaf_spaces)), key=lambda index: _KINDS.index(_action_kind(leaf_spaces[index]))):
        columns[index] = slice(begin, begin + leaf_spaces[index].dim)
        begin += leaf_spaces[index].dim
    return columns


def action_leaves(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    """Return a list of the leaf spaces of nested Dict and Tuple spaces, in order. For any other space, the list contains only this
    space."""
    match space:
        case spaces.Dict():
            return [leaf for inner in space.spaces.values() for leaf in action_leaves(inner)]
        case spaces.Tuple():
            return [leaf for inner in space.spaces for leaf in action_leaves(inner)]
    return [space]


def assemble_action(space: spaces.Space[Any], leaves: Iterator[Any]) -> Any:
    """Return an element of a Dict or Tuple space whose leaves have the values `leaves`, in order."""
    match space:
        case spaces.Dict():
            return {key: assemble_action(inner, leaves) for key, inner in space.spaces.items()}
        case spaces.Tuple():
            return tuple(assemble_action(inner, leaves) for inner in space.spaces)
    return next(leaves)


def leaf_values(space: spaces.Space[Any], action: Any) -> list[Any]:
    """Return the values of the leaves of a nested action, or of a batch of nested actions, in the order of `action_leaves`."""
    match space:
        case spaces.Dict():
            return [value for key, inner in space.spaces.items() for value in leaf_values(inner, action[key])]
        case spaces.Tuple():
            return [value for inner, part in zip(space.spaces, action, strict=True) for value in leaf_values(inner, part)]
    return [action]


def first_action(space: spaces.Space[Any], action_N: Any) -> Any:
    """Return the first action of a batch of nested actions. Discrete leaves become int."""
    values = zip(action_leaves(space), leaf_values(space, action_N), strict=True)
    return assemble_action(space, iter([int(value[0]) if isinstance(leaf, spaces.Discrete) else value[0] for leaf, value in values]))
