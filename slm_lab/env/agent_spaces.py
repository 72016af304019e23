"""Conversion of an env's spaces to the agent's spaces. An entry of a Dict observation can be an action mask, or an input of the critic but
not of the actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from slm_lab.env.mask_from_info import mask_entry, not_discrete_message
from slm_lab.env.normalize import normalizes_obs
from slm_lab.env.spaces import Codec, action_codec, number_of_choices, observation_codec, order_entries
from slm_lab.lib.records import ActionSpace, Channels, InputKind, ObservationSpace, Use
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError, nearest_hint


class AgentSpaces(NamedTuple):
    """The agent's observation and action spaces, and the functions that convert observations and actions between the form that the env uses
    and the form that the agent uses."""

    observation: ObservationSpace
    encode: Codec
    """Function that converts a batch of the env's observations to the arrays that the agent uses."""
    action: ActionSpace
    decode: Codec
    """Function that converts a batch of the agent's actions (see ActionSpace) to a batch of the env's actions."""
    space: spaces.Space[Any]
    """The env's observation space. If the observation space is a Dict, its entries are in the order of their columns in the agent's
    observations."""
    uses: dict[str, Use]
    """Use, "mask" or "critic", of each entry of a Dict observation that is not an input of all nets, by key."""
    joint: bool
    """Whether the agent represents a multi-discrete action as one discrete choice among all combinations of its components, because the
    action mask has one number per combination."""


def agent_spaces(
    spec: EnvSpec, observation: spaces.Space[Any], action: spaces.Space[Any], input: InputKind | None = None, fresh: bool = False
) -> AgentSpaces:
    """Return the agent's spaces, and the functions that convert observations and actions, for an env with the spaces `observation` and
    `action`.

    Args: input: kind of observations that the spec's nets require. fresh: whether the env backend returns new arrays in each step (see
    `observation_codec`).

    Raises: UnsupportedSpace for spaces that agents do not support, and SpecError for an invalid env.action_mask or env.critic_keys.
    """
    uses = _find_entry_uses(spec, observation, action)
    if uses:
        assert isinstance(observation, spaces.Dict)
        observation = order_entries(observation, uses)
    agent_observation, encode = observation_codec(observation, input, image_channels(spec), fresh, uses)
    if normalizes_obs(spec):  # normalised floats are not divided by their bounds again
        parts = tuple(replace(part, high=None) if part.dtype == "float32" else part for part in agent_observation.parts)
        high = agent_observation.high if agent_observation.dtype == "uint8" else None
        agent_observation = replace(agent_observation, high=high, parts=parts)
    mask = next((key for key in uses if uses[key] == "mask"), None)
    joint = isinstance(observation, spaces.Dict) and mask is not None and has_mask_per_combination(observation[mask], action)
    return AgentSpaces(agent_observation, encode, *action_codec(action, joint), observation, uses, joint)


def image_channels(spec: EnvSpec) -> Channels | None:
    """Return env.channels of the spec, or "last" for a MinAtar env without env.channels, because the shape of Seaquest (10 × 10 × 10) is
    ambiguous."""
    return "last" if spec.channels is None and "MinAtar/" in spec.name else spec.channels


def _find_entry_uses(spec: EnvSpec, observation: spaces.Space[Any], action: spaces.Space[Any]) -> dict[str, Use]:
    """Return a dict with the use, "mask" or "critic", of each entry of a Dict observation that is not an input of all nets. Raises
    SpecError."""
    keys = list(observation.spaces) if isinstance(observation, spaces.Dict) else []
    problems = _unknown_key_problems(spec.critic_keys or (), keys, "critic_keys")
    mask = mask_entry(spec.action_mask, keys, action)
    if spec.action_mask and mask is None:
        (unknown,) = _unknown_key_problems([spec.action_mask], keys, "action_mask")
        problems.append(replace(unknown, message=f"{unknown.message}; this backend reads no masks from info"))
    if mask is not None and (message := _mask_misfit_reason(mask, observation[mask], action)):  # type: ignore[index]  # a Dict
        problems.append(Problem("env.action_mask", message))
    uses: dict[str, Use] = {}
    uses |= dict.fromkeys(spec.critic_keys or (), "critic")
    uses |= {} if mask is None else {mask: "mask"}
    if keys and not problems and not set(keys) - set(uses):
        problems.append(Problem("env.critic_keys" if spec.critic_keys else "env.action_mask", "leaves no entry for the actor"))
    if problems:
        raise SpecError(spec.name, problems)
    return uses


def _unknown_key_problems(given: Sequence[str], keys: Sequence[str], name: str) -> list[Problem]:
    """Return a problem for each key in `given` that is not in `keys`, the entries of the observation. `name` is the spec key that contains
    `given`."""
    entries = f"entries: {', '.join(keys)}" if keys else "the observation is not a Dict"
    paths = [f"env.{name}" if name == "action_mask" else f"env.{name}[{index}]" for index in range(len(given))]
    return [
        Problem(path, f"no entry {key!r} in the observation{nearest_hint(key, keys) or ';'} {entries}")
        for path, key in zip(paths, given, strict=True)
        if key not in keys
    ]


def has_mask_per_combination(mask: spaces.Space[Any], action: spaces.Space[Any]) -> bool:
    """Return whether an action mask has one number for each combination of the choices of a multi-discrete action's components."""
    return isinstance(action, spaces.MultiDiscrete) and mask.shape == tuple(action.nvec.ravel()) and not _has_mask_per_choice(mask, action)


def _has_mask_per_choice(mask: spaces.Space[Any], action: spaces.MultiDiscrete) -> bool:
    """Return whether an action mask has one number for each choice of each component of a multi-discrete action, either as a vector or as a
    matrix with one row per component."""
    nvec, shape = action.nvec.ravel(), tuple(mask.shape or ())
    return shape in ((int(nvec.sum()),), (len(nvec), int(nvec[0]))) and (len(shape) == 1 or bool((nvec == nvec[0]).all()))


def _mask_misfit_reason(key: str, mask: spaces.Space[Any], action: spaces.Space[Any]) -> str | None:
    """Return the reason why the space of an action mask does not fit the action space, or None if the mask fits."""
    remedy = f"or set env.action_mask to false to use {key!r} as an ordinary entry"
    kinds = isinstance(mask, spaces.MultiBinary) or (isinstance(mask, spaces.Box) and mask.shape)
    match action:
        case spaces.Discrete():
            fits, wanted = kinds and np.prod(mask.shape or ()) == action.n, f"[{action.n}], one number per action"
        case spaces.MultiDiscrete():
            nvec = action.nvec.ravel().tolist()
            fits, wanted = (
                kinds and (_has_mask_per_choice(mask, action) or has_mask_per_combination(mask, action)),
                f"[{sum(nvec)}] or {nvec}",
            )
        case spaces.Dict() | spaces.Tuple() if size := number_of_choices(action):
            fits, wanted = kinds and mask.shape == (size,), f"[{size}], one number per choice of the discrete parts of the action"
        case _:
            return not_discrete_message(action)
    return None if fits else f"the mask {key!r} is {mask}; expected the shape {wanted}; correct the env, {remedy}"
