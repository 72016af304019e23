"""Reading of action masks from the info that an env returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from slm_lab.env.arguments import WrapperError
from slm_lab.env.outcome import InvalidOutcome, value_text
from slm_lab.env.spaces import number_of_choices
from slm_lab.spec.report import nearest_hint

MASK_KEYS = ("action_mask", "legal_action_mask")
"""Names of entries of observations and infos that are recognised as action masks if the spec does not give env.action_mask."""


def mask_entry(wanted: str | Literal[False] | None, entries: Collection[str], action: spaces.Space[Any]) -> str | None:
    """Return the name of the entry that contains the action mask, or None if no entry contains it.

    Args: wanted: the spec's env.action_mask. entries: names of the entries of observations or infos. action: the env's action space.
    """
    if wanted is None:
        names = MASK_KEYS if number_of_choices(action) else ()
        return next((name for name in names if name in entries), None)
    return wanted if wanted and wanted in entries else None


def missing_entry_message(wanted: str, entries: Collection[str], infos: Collection[str]) -> str:
    """Return the error message for an env.action_mask that names neither an entry of the observation nor an entry of info."""
    entry_lists = [f"{place}: {', '.join(map(str, names)) or 'none'}" for place, names in (("the observation", entries), ("info", infos))]
    near = nearest_hint(wanted, map(str, [*entries, *infos])) or ";"
    return f"no entry {wanted!r} in the observation or info{near} entries of {'; of '.join(entry_lists)}"


def not_discrete_message(action: spaces.Space[Any]) -> str:
    """Return the error message for an env.action_mask in an env whose actions are not discrete."""
    return f"masks Discrete and MultiDiscrete actions, and the actions of this env are {action}; remove it, or set it to false"


class MaskFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds an action mask from the env's info to its observations.

    A Dict observation receives the mask as an additional entry. Any other observation becomes the entry "observation" of a new Dict, which
    also contains the mask. The mask in the env's info has one bool or number for each choice of each component of the action, where True or
    a nonzero number means that the choice is valid. The mask in the observation is float32, so that vector envs, which stack observations,
    need not check the mask for overflow.
    """

    def __init__(self, env: gym.Env[Any, Any], key: str) -> None:
        super().__init__(env)
        action, space = env.action_space, env.observation_space
        self._key, self._is_dict, self._size = key, isinstance(space, spaces.Dict), number_of_choices(action)
        if not self._size:
            raise WrapperError("action_mask", not_discrete_message(action))
        entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        self._entries = list(entries) if self._is_dict else []
        self.observation_space = spaces.Dict({**entries, key: spaces.Box(0.0, 1.0, (self._size,))})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._add_mask(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if (terminated or truncated) and self._key not in info:  # the mask is not needed: no action follows
            info = {**info, self._key: np.ones(self._size, np.bool_)}
        return self._add_mask(obs, info), reward, terminated, truncated, info

    def _add_mask(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        if self._key not in info:
            raise InvalidOutcome(f"env.action_mask: {missing_entry_message(self._key, self._entries, info)}")
        mask = info[self._key]
        if type(mask) is not np.ndarray or mask.shape != (self._size,):
            mask = np.asarray(mask).ravel()
        if len(mask) != self._size or mask.dtype.kind not in "biuf":
            raise InvalidOutcome(
                f"the action mask info[{self._key!r}] is {value_text(info[self._key])}; expected {self._size} numbers, one per choice"
            )
        return {**(obs if self._is_dict else {"observation": obs}), self._key: (mask != 0).astype(np.float32)}


def with_mask(env: gym.Env[Any, Any], key: str | Literal[False] | None) -> gym.Env[Any, Any]:
    """Return the env wrapped in `MaskFromInfo` if `key` names an action mask in the env's info. Return the env unchanged if `key` is None
    or False, or if the observation already has the entry `key`."""
    space = env.observation_space
    if not key or (isinstance(space, spaces.Dict) and key in space.spaces):
        return env
    return MaskFromInfo(env, key)


def reject_undeclared_mask(env: gym.Env[Any, Any], key: str | Literal[False] | None, info: Mapping[str, Any]) -> None:
    """Raise InvalidOutcome if the info of an env's reset contains an action mask, but the spec does not give env.action_mask and the
    observation contains no mask.

    Gymnasium's own envs are not checked, because Taxi, which has an action mask, is usually benchmarked without the mask.
    """
    if key is not None or info.keys().isdisjoint(MASK_KEYS):
        return
    space, entry = env.observation_space, getattr(env.spec, "entry_point", None)
    in_observation = isinstance(space, spaces.Dict) and not space.spaces.keys().isdisjoint(MASK_KEYS)
    if not in_observation and not (isinstance(entry, str) and entry.startswith("gymnasium.envs.")):
        raise InvalidOutcome(undeclared_mask_message(next(name for name in MASK_KEYS if name in info)))


def undeclared_mask_message(name: str) -> str:
    """Return the error message for the action mask `name` in an env's info if the spec does not give env.action_mask."""
    return f"info has an action mask, {name!r}; set env.action_mask to {name!r} to use it, or to false to ignore it"


def reject_vector_info_mask(space: spaces.Space[Any], key: str | Literal[False] | None, info: Mapping[str, Any]) -> None:
    """Raise InvalidOutcome if the info of a vector env's reset contains an action mask, but the spec does not give env.action_mask and the
    observation contains no mask. The backends of vector envs read masks only from observations."""
    in_observation = isinstance(space, spaces.Dict) and not space.spaces.keys().isdisjoint(MASK_KEYS)
    if key is None and not in_observation and (mask := next((name for name in MASK_KEYS if name in info), None)):
        raise InvalidOutcome(
            f"info of the vector env has an action mask, {mask!r}, but masks are read from the info of single envs only; "
            "make the mask an entry of the observation, or set env.action_mask to false to ignore the mask"
        )
