"""Corrections of the spaces that EnvPool's suites of envs report, and checks of the options that these envs accept."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL, RTLD_GLOBAL
from ctypes.util import find_library
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from slm_lab.env.arguments import WrapperError, unknown_key_message
from slm_lab.env.mask_from_info import mask_entry, missing_entry_message, not_discrete_message
from slm_lab.env.spaces import number_of_choices
from slm_lab.env.wrappers import EntrySelector
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem

OWN_LIMIT_SUITES = ("highway", "minigrid")
"""Suites whose envs end episodes at their own time limit, regardless of EnvPool's option max_episode_steps. MiniGrid's rewards depend on
the env's own time limit."""
_OWNED = {
    "batch_size": "every step waits for all envs (env.num_envs)",
    "num_threads": "use meta.threads",
    "seed": "use meta.random_seed",
    "env_seed": "use meta.random_seed, from which the seed of each env is derived",
    "max_episode_steps": "use env.max_t",
    "max_num_players": "the number of agents is that of the env",
    "base_path": "the assets of the installed package are used",
    "gym_reset_return_info": "it is always true",
    "render_mode": "use enjoy --video",
    "render_env_id": "use enjoy --video",
}
"""Maps each option of EnvPool that the backend itself sets to text that gives the reason, or says what a spec can use instead."""
_PIXELS = {"from_pixels": False, "render_width": 84, "render_height": 84, "render_camera_id": -1}
"""EnvPool's options for images as observations, with their defaults. EnvPool's `config` does not list the options for images."""
_MAX_CODES = (10, 5, 3)
"""Greatest codes of object, colour and state in a cell of MiniGrid's grid. EnvPool reports the grid as an image with values from 0 to
255."""
_MAX_CHARACTER = 127
"""Largest byte of MiniGrid's mission text, which is an ASCII text padded with zeros."""


def known_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a spec can give for an env of EnvPool, with their defaults.

    Raises ImportError if EnvPool is not installed, and RuntimeError if files that the env needs are missing.

    Args: given: options in the spec. Only options whose names end in `_path` are used.
    """
    config = dict(import_envpool().make_spec(name, **{key: path for key, path in given.items() if key.endswith("_path")}).config._asdict())
    return {key: value for key, value in (config | _PIXELS).items() if key not in (*_OWNED, "num_envs")}


def option_problems(spec: EnvSpec, name: str) -> list[Problem]:
    """Return a problem for each key of the spec's env section that EnvPool's env `name` does not accept as an option, or whose value has a
    wrong type.

    Raises the same errors as `known_options`.
    """
    if not spec.kwargs:
        return []
    defaults = known_options(name, spec.kwargs)
    problems = []
    for key, value in spec.kwargs.items():
        if key in _OWNED:
            problems.append(Problem(f"env.{key}", f"cannot be set here: {_OWNED[key]}"))
        elif key not in defaults:
            problems.append(Problem(f"env.{key}", unknown_key_message(key, list(defaults), name), "unknown"))
        elif _convert_option(value, defaults[key]) is None:
            given = json.dumps(value, ensure_ascii=False)
            problems.append(
                Problem(f"env.{key}", f"invalid value {given}: expected {_KINDS[type(defaults[key])]}, such as {_example(defaults[key])}")
            )
        elif key == "from_pixels" and value and (reason := missing_opengl()):
            problems.append(Problem(f"env.{key}", reason))
    return problems


def _example(default: Any) -> str:
    """Return the JSON text of an option's default value, as an example in a message. If the default value is a dict, the text contains only
    its first entry."""
    return json.dumps(dict(list(default.items())[:1]) if isinstance(default, dict) else default)


@cache
def import_envpool() -> Any:
    """Import the module envpool and return it.

    This function loads OpenGL before envpool, because otherwise EnvPool's MuJoCo does not find OpenGL and ends the process.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            CDLL("libGL.so.1", mode=RTLD_GLOBAL)
    return importlib.import_module("envpool")


def missing_opengl() -> str | None:
    """Return the reason why EnvPool's MuJoCo cannot render on this machine, or None if EnvPool can render."""
    if sys.platform != "linux" or (find_library("GL") and find_library("EGL")):
        return None
    return "needs OpenGL to draw: install EGL and OpenGL (on Debian and Ubuntu: apt-get install libegl1 libgl1)"


def convert_options(kwargs: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Convert valid options of an env from the types of JSON to the types of the options' defaults: for example, lists to tuples, and the
    keys of dicts to numbers."""
    return {key: _convert_option(value, defaults[key]) if key in defaults else value for key, value in kwargs.items()}


def _convert_option(value: Any, default: Any) -> Any:
    """Convert an option's value to the type of the option's default, and return the converted value, or None if the value cannot be
    converted."""
    match default:
        case bool():
            return value if isinstance(value, bool) else None
        case int():
            return int(value) if _is_number(value) and float(value).is_integer() else None
        case float():
            return float(value) if _is_number(value) else None
        case str():
            return _absolute_file_path(value) if isinstance(value, str) else None
        case tuple():
            fits = isinstance(value, list | tuple) and len(value) == len(default)
            fitted = tuple(_convert_option(item, sample) for item, sample in zip(value, default, strict=True)) if fits else (None,)
            return None if None in fitted else fitted
        case list():
            sample = default[0] if default else None
            return [item if sample is None else _convert_option(item, sample) for item in value] if isinstance(value, list) else None
        case dict():
            return _convert_dict_option(value, default) if isinstance(value, dict) else None
    return value


def _absolute_file_path(value: str) -> str:
    """Return the absolute path of an existing file, because ViZDoom's envs are built in another working directory. Strings that are not
    paths of existing files are returned unchanged."""
    return os.path.abspath(value) if os.sep in value and os.path.isfile(value) else value


def _convert_dict_option(value: dict[Any, Any], default: dict[Any, Any]) -> dict[Any, Any] | None:
    if not default:
        return value
    key, sample = next(iter(default.items()))
    try:
        fitted = {type(key)(name): _convert_option(item, sample) for name, item in value.items()}
    except ValueError:  # a key that is not a number
        return None
    return None if None in fitted.values() else fitted


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_vizdoom_folder() -> TemporaryDirectory[str]:
    """Create a temporary folder for the files of ViZDoom's envs and return the folder.

    This function also creates the subfolder "_vizdoom", because ViZDoom crashes if several envs create this subfolder at the same time.
    """
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    os.mkdir(os.path.join(folder.name, "_vizdoom"))
    return folder


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list with as many numbers as the default",
    list: "a list",
    dict: "an object",
}
"""Maps the type of an option's default to a description, for messages, of the values that the option accepts."""


def correct_observation_space(space: spaces.Space[Any], key: str = "") -> spaces.Space[Any]:
    """Return the corrected form of an observation space that EnvPool reports. The function corrects bounds that stand for ±∞, arrays of
    codes that EnvPool reports as images, and step counters."""
    match space:
        case spaces.Dict():
            grid = {"image", "mission", "direction"} <= space.spaces.keys()
            fit = _correct_minigrid_entry if grid else correct_observation_space
            return spaces.Dict(OrderedDict((name, fit(part, name)) for name, part in space.items()))
        case spaces.Discrete() if key in _COUNTERS:
            return spaces.Box(0.0, 1.0, (1,), np.float32)
        case spaces.Box():
            return _without_false_bounds(space)
    return space


_COUNTERS = ("step_count", "step")
"""Entries of observations that count the steps of an episode. Step counters are divided by their greatest value, because a one-hot encoding
would have up to 4,000 numbers."""


def _correct_minigrid_entry(part: spaces.Space[Any], name: str) -> spaces.Space[Any]:
    """Return the corrected space of the entry `name` of MiniGrid's Dict observation."""
    if not isinstance(part, spaces.Box):
        return part
    high = np.broadcast_to(np.array(_MAX_CODES if name == "image" else _MAX_CHARACTER, np.uint8), part.shape)
    return spaces.Box(np.zeros(part.shape, np.uint8), high, dtype=np.uint8)


def _without_false_bounds(space: spaces.Box) -> spaces.Box:
    """Return a Box whose bounds are infinite where EnvPool reports the smallest positive or the greatest floating-point number as a
    bound."""
    if space.dtype.kind != "f":
        return space
    limits = [np.finfo(dtype) for dtype in (np.float32, np.float64)]
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    low = np.where(np.isin(low, [float(limit.tiny) for limit in limits]), -np.inf, low)
    high = np.where(np.isin(high, [float(limit.max) for limit in limits]), np.inf, high)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), space.shape, space.dtype.type)


def correct_action_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the corrected form of an action space that EnvPool reports: a bounded Box of integers becomes MultiDiscrete."""
    if not isinstance(space, spaces.Box):
        return space
    if space.dtype.kind not in "iu":
        return _without_false_bounds(space)
    low, high = space.low.astype(np.int64), space.high.astype(np.int64)
    return spaces.MultiDiscrete(high - low + 1, dtype=space.dtype.type, start=low)


class ObservationReader:
    """Function object that extracts a batch of observations from the arrays that an EnvPool pool returns. The attribute `space` is the
    space of one observation."""

    def __init__(self, space: spaces.Space[Any], keys: Sequence[str], fills_masks: bool = False) -> None:
        """Build the reader for the arrays that an EnvPool pool returns.

        Args: space: observation space that EnvPool reports. keys: names of the pool's arrays, such as "obs", "obs:position",
        "obs:items.x_len". fills_masks: whether to make every action valid if an action mask has no valid action (Jumanji's Maze may begin
        between four walls).
        """
        self.space = correct_observation_space(space)
        slots = [slot for slot, key in enumerate(keys) if key.partition(":")[0] == "obs"]
        self._plain = None if isinstance(space, spaces.Dict) else slots[0]
        parts = dict(_leaves(space))
        paths = {slot: tuple(re.split(r"[.:]", keys[slot])[1:]) for slot in slots}
        self._parts = [(slot, path, _greatest_step_count(path, parts.get(path))) for slot, path in paths.items()]
        self._selected: EntrySelector | None = None
        self._infos = {key.removeprefix("info:"): slot for slot, key in enumerate(keys) if key.startswith("info:")}
        self._mask: tuple[str, int] | None = None
        self._fills_masks = fills_masks

    def add_mask(self, wanted: str | Literal[False] | None, action: spaces.Space[Any]) -> None:
        """Add the action mask from the infos of EnvPool's pool to the observations, unless the observations already contain an action mask.

        Args: wanted: the spec's env.action_mask, or None to use any entry of the infos whose name is in MASK_KEYS. Raises WrapperError if
        neither the observations nor the infos have an entry `wanted`.
        """
        entries = self.space.spaces if isinstance(self.space, spaces.Dict) else {}
        if mask_entry(wanted, entries, action) is not None:
            return
        name = mask_entry(wanted, self._infos, action)
        if wanted and name is None:
            raise WrapperError("action_mask", missing_entry_message(wanted, entries, self._infos))
        if name is None:
            return
        if not isinstance(action, spaces.Discrete | spaces.MultiDiscrete):
            raise WrapperError("action_mask", not_discrete_message(action))
        self._mask = name, self._infos[name]
        self.space = spaces.Dict({**(entries or {"observation": self.space}), name: spaces.MultiBinary(number_of_choices(action))})

    @property
    def mask_index(self) -> int | None:
        """Index of the pool's array that contains the action mask, or None if no info is used as action mask."""
        return None if self._mask is None else self._mask[1]

    def restrict_entries(self, keys: list[str], action_mask: str | Literal[False] | None, action: spaces.Space[Any]) -> None:
        """Restrict observations to the entries `keys` and the action mask. Raises WrapperError for a key that is not an entry of the
        observations."""
        self._selected = EntrySelector(self.space, action, keys, action_mask)
        self.space = self._selected.space

    def __call__(self, state: Sequence[np.ndarray]) -> Any:
        obs = self._observation(state)
        if self._fills_masks and "action_mask" in obs:
            obs["action_mask"] = _fill_empty_masks(obs["action_mask"])
        if self._mask is None:
            return obs
        key, slot = self._mask
        return {**(obs if isinstance(obs, dict) else {"observation": obs}), key: state[slot].reshape(len(state[slot]), -1)}

    def _observation(self, state: Sequence[np.ndarray]) -> Any:
        if self._plain is not None:
            return state[self._plain]
        found: dict[str, Any] = {}
        for slot, path, last in self._parts:
            inner = found
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = state[slot] if last is None else (state[slot] / np.float32(last)).astype(np.float32).reshape(-1, 1)
        return found if self._selected is None else self._selected(found)


def _fill_empty_masks(mask: np.ndarray) -> np.ndarray:
    """Return action masks [N, …] in which every row without a valid action is replaced by a row in which all actions are valid."""
    empty_N = ~mask.reshape(len(mask), -1).any(axis=1)
    if not empty_N.any():
        return mask
    mask = mask.copy()
    mask[empty_N] = 1
    return mask


def _leaves(space: spaces.Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _leaves(part, (*path, key))
    else:
        yield path, space


def _greatest_step_count(path: tuple[str, ...], space: spaces.Space[Any] | None) -> int | None:
    """Return the greatest value of an observation's entry that counts steps, or None for other entries."""
    return max(1, int(space.n) - 1) if path and path[-1] in _COUNTERS and isinstance(space, spaces.Discrete) else None


class TruncationReader:
    """Function object that determines which episodes were truncated by the env's own time limit, for the suites in OWN_LIMIT_SUITES.

    EnvPool reports every episode that ends in the step of the time limit as truncated. If an array of the pool shows another reason for the
    end (a crash or success in highway, a reward in MiniGrid), this class treats the episode as terminated. Episodes that end in this step
    for a reason that the arrays do not show (lava, a wrong answer, leaving the road) remain truncated.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """Args: keys: names of the pool's arrays."""
        self._late = list(keys).index("trunc")
        shown = [slot for slot, key in enumerate(keys) if key in ("info:crashed", "info:is_success")]
        self._reasons = shown or [list(keys).index("reward")]

    def __call__(self, state: Sequence[np.ndarray]) -> np.ndarray:
        """Return whether each env's episode was truncated, bool [N].

        Args: state: arrays that EnvPool's pool returned for a step.
        """
        truncated_N = state[self._late].copy()
        for slot in self._reasons:
            truncated_N &= state[slot] == 0
        return truncated_N


REDUCTIONS = {"max": np.maximum, "min": np.minimum, "sum": np.add, "mean": np.add}
"""Maps the suffix of an entry of meta.track_info (such as "max" in "success:max") to the function that combines the values of an episode's
steps."""


class InfoTracker:
    """Combines entries of `info` over the steps of each env's episode, for meta.track_info."""

    def __init__(self, entries: Sequence[str], keys: Sequence[str]) -> None:
        """Args: entries: the spec's meta.track_info. Entries without a suffix and entries for which the pool has no array are ignored.
        keys: names of the pool's arrays."""
        split = {entry: entry.rpartition(":") for entry in entries}
        self._entries = {
            entry: (list(keys).index(f"info:{key}"), kind)
            for entry, (key, _, kind) in split.items()
            if kind in REDUCTIONS and f"info:{key}" in keys
        }
        self._totals: dict[str, np.ndarray] = {}
        self._elapsed: np.ndarray | None = None

    @property
    def array_indices(self) -> list[int]:
        """Indices of those arrays of EnvPool's pool whose values are combined over the steps of an episode."""
        return [slot for slot, _ in self._entries.values()]

    def add(self, state: Sequence[np.ndarray], elapsed_N: np.ndarray) -> None:
        """Add the infos of one step to the combined entries of each episode.

        Args: state: arrays that EnvPool's pool returned for the step. elapsed_N: number of steps of each env's current episode, which is 1
        in the first step of an episode.
        """
        self._elapsed = elapsed_N
        for entry, (slot, kind) in self._entries.items():
            value = state[slot].astype(np.float64)
            before = self._totals.get(entry, value)
            self._totals[entry] = np.where(elapsed_N > 1, REDUCTIONS[kind](before, value), value)

    def combined_entries(self, row: int) -> dict[str, float]:
        """Return the combined entries of meta.track_info for the current episode of the env with index `row`."""
        if self._elapsed is None:
            return {}
        steps = {entry: self._elapsed[row] if kind == "mean" else 1 for entry, (_, kind) in self._entries.items()}
        return {entry: float(total[row] / steps[entry]) for entry, total in self._totals.items()}
