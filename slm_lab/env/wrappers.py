"""Wrappers of single envs: the wrappers that a spec names, and a wrapper that selects entries of Dict observations."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from slm_lab.env.arguments import WrapperError, accepted_arguments, unexpected_argument, unknown_key_message
from slm_lab.env.mask_from_info import mask_entry
from slm_lab.spec.models.base import ExtensionError, import_class, is_extension
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError, nearest_hint

NAMES = sorted(name for name in gym.wrappers.__all__ if name != "vector")
"""Names of the wrappers in `gymnasium.wrappers`."""


@dataclass(frozen=True)
class ConfiguredWrapper:
    """A wrapper class from the spec, with the arguments for its constructor."""

    key: str
    """Key of the wrapper in the spec's env section, such as "wrappers[0]"."""
    wrapper: type[gym.Wrapper[Any, Any, Any, Any]]
    kwargs: dict[str, Any]

    def __call__(self, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        """Wrap an env and return the wrapped env. Raises WrapperError."""
        try:
            wrapped = self.wrapper(env, **self.kwargs)
            if not all(isinstance(space, spaces.Space) for space in (wrapped.observation_space, wrapped.action_space)):
                raise TypeError("the wrapped env has no observation space or no action space")
            return wrapped
        except WrapperError:
            raise
        except Exception as error:
            key, name = unexpected_argument(error), self.wrapper.__name__
            if key in self.kwargs:
                raise WrapperError(f"{self.key}.{key}", unknown_key_message(str(key), _wrapper_arguments(self.wrapper)[0], name)) from error
            raise WrapperError(self.key, f"{name} cannot wrap {env}: {type(error).__name__}: {error}") from error


class EntrySelector:
    """Function object that selects some entries of a Dict or Tuple observation (see `space_parts`), and always the action mask. If only one
    entry is selected, the result is this entry instead of a dict."""

    def __init__(
        self, space: spaces.Space[Any], action: spaces.Space[Any], keys: list[str], action_mask: str | Literal[False] | None
    ) -> None:
        """Raise WrapperError if the space is not a Dict or Tuple, or if `keys` contains an unknown key.

        Args: keys: the spec's env.obs_keys. action_mask: the spec's env.action_mask.
        """
        parts = space_parts(space)
        if parts is None:
            kind = type(space).__name__
            raise WrapperError("obs_keys", f"the observation space is a {kind}, which has no parts to choose from; expected Dict or Tuple")
        for index, key in enumerate(keys):
            if key not in parts:
                raise WrapperError(f"obs_keys[{index}]", f"no part '{key}'{nearest_hint(key, parts) or ';'} parts: {', '.join(parts)}")
        mask = mask_entry(action_mask, parts, action)
        keys = keys if mask is None or mask in keys else [*keys, mask]
        indices = {key: int(key) if isinstance(space, spaces.Tuple) else key for key in keys}
        self._only = indices[keys[0]] if len(indices) == 1 else None
        self._indices = indices
        self.space = parts[keys[0]] if len(indices) == 1 else spaces.Dict({key: parts[key] for key in indices})

    def __call__(self, observation: Any) -> Any:
        if self._only is not None:
            return observation[self._only]
        return {key: observation[index] for key, index in self._indices.items()}


class KeepParts(gym.ObservationWrapper[Any, Any, Any]):
    """Wrapper that keeps only the selected entries (env.obs_keys) of each Dict or Tuple observation of an env."""

    def __init__(self, env: gym.Env[Any, Any], keys: list[str], action_mask: str | Literal[False] | None = None) -> None:
        super().__init__(env)
        self._parts = EntrySelector(env.observation_space, env.action_space, keys, action_mask)
        self.observation_space = self._parts.space

    def observation(self, observation: Any) -> Any:
        """Return the selected entries of an observation."""
        return self._parts(observation)


def space_parts(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]] | None:
    """Return a dict from the key to the space of each entry of a Dict or Tuple space, or None for other spaces. The entries of a Tuple have
    the keys "0", "1", …."""
    if isinstance(space, spaces.Tuple):
        return {str(index): part for index, part in enumerate(space.spaces)}
    return dict(space.spaces) if isinstance(space, spaces.Dict) else None


def find_wraps(spec: EnvSpec) -> tuple[ConfiguredWrapper, ...]:
    """Return the wrappers that a spec names, and `KeepParts` if the spec gives env.obs_keys. Raises SpecError with a problem for each
    unknown wrapper or invalid argument."""
    wraps, problems = list[ConfiguredWrapper](), list[Problem]()
    for index, entry in enumerate(spec.wrappers):
        key = f"wrappers[{index}]"
        try:
            wrapper = _wrapper_class(entry.name)
        except (ExtensionError, ImportError, gym.error.Error) as error:
            problems.append(Problem(f"env.{key}", str(error)))
            continue
        if spec.name.startswith("ALE/") and wrapper is gym.wrappers.AtariPreprocessing:
            problems.append(Problem(f"env.{key}", "ALE envs are preprocessed already (env.grayscale, img_height, frameskip, …); remove it"))
            continue
        known, open_ended, required = _wrapper_arguments(wrapper)
        kwargs = entry.kwargs
        if wrapper.__module__.startswith("gymnasium."):
            kwargs = _convert_arguments(entry.name, kwargs)
            if "func" in required:
                problems.append(Problem(f"env.{key}", f"{entry.name} needs a Python function; name a wrapper of your own instead"))
                continue
        wraps.append(ConfiguredWrapper(key, wrapper, kwargs))
        unknown = [] if open_ended else [name for name in entry.kwargs if name not in known]
        problems += [Problem(f"env.{key}.{name}", unknown_key_message(name, known, entry.name), "unknown") for name in unknown]
        missing = [name for name in required if name not in entry.kwargs]
        problems += [Problem(f"env.{key}.{name}", f"missing; {entry.name} requires it", "missing") for name in missing]
    parts = spec.obs_keys or []
    problems += [Problem(f"env.obs_keys[{i}]", f"duplicate '{key}'; remove it") for i, key in enumerate(parts) if key in parts[:i]]
    if problems:
        raise SpecError(spec.name, problems)
    if spec.obs_keys is not None:
        wraps.append(ConfiguredWrapper("obs_keys", KeepParts, {"keys": spec.obs_keys, "action_mask": spec.action_mask}))
    return tuple(wraps)


def _wrapper_class(name: str) -> type[gym.Wrapper[Any, Any, Any, Any]]:
    """Return the wrapper class with the name `name`. Raises ExtensionError for an unknown name, or the error that the import of a user's
    module raises."""
    if is_extension(name):
        found: type[gym.Wrapper[Any, Any, Any, Any]] = import_class(name, gym.Wrapper)
        return found
    if name not in NAMES:
        others = 'the name of a class of gymnasium.wrappers, or "package.module:Class"'
        raise ExtensionError(f"unknown wrapper '{name}'{nearest_hint(name, NAMES) or f'; expected {others}'}")
    found = getattr(gym.wrappers, name)
    return found


def _convert_arguments(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Convert the lists in a wrapper's arguments to the types that Gymnasium's wrappers require: bounds to arrays, other lists to
    tuples."""
    convert = partial(np.asarray, dtype=np.float32) if name in ("RescaleAction", "RescaleObservation") else tuple
    return {key: convert(value) if isinstance(value, list) else value for key, value in kwargs.items()}


def _wrapper_arguments(wrapper: type[gym.Wrapper[Any, Any, Any, Any]]) -> tuple[list[str], bool, list[str]]:
    """Return the names of a wrapper's arguments except the env, whether the wrapper accepts other arguments (**kwargs), and the names of
    the wrapper's required arguments."""
    parameters = list(inspect.signature(wrapper).parameters.values())
    names, open_ended = accepted_arguments(wrapper)
    required = [p.name for p in parameters[1:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [name for name in names if name not in [p.name for p in parameters[:1]]], open_ended, required
