"""Checks of the values that an env returns. The values must fit the env's spaces and Gymnasium's interface. Error messages show the invalid
value and what was expected.

Env steps whose values have the usual types are processed by faster code without these checks (see `Env._step_single_env`,
`Sync.finish_step` and the codecs in `spaces`).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Real
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from slm_lab.env.backend import Outcome, RawStep
from slm_lab.lib.log import PlainError

NUMBERS = frozenset({float, int, bool, np.bool_, *(np.dtype(code).type for code in "efdbhilqBHILQ")})
"""Types of rewards that need no conversion to a number."""
FLAGS = frozenset({bool, np.bool_})
SIGNATURES = {
    "step": "step(action), which returns (observation, reward, terminated, truncated, info)",
    "reset": "reset(*, seed=None, options=None), which returns (observation, info)",
}
"""Signatures and return values of the methods of gymnasium.Env, for messages."""
_SHOWN = 100
"""Maximum number of characters with which an error message shows a value."""
_HANDLING = ("gymnasium.", "numpy.", "slm_lab.env.")
"""Packages whose code processes the values that an env returns."""
_MISUSE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, NotImplementedError)
"""Types of the exceptions that invalid values of an env cause in the packages of `_HANDLING`."""


_OF_MAKE = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)
"""Wrapper classes that gymnasium.make adds to an env."""


class InvalidOutcome(PlainError, RuntimeError):
    """Raised if an env returned a value that violates its spaces or Gymnasium's interface. The exception's message shows the value and says
    what was expected."""

    row: int | None = None
    """Index of the env that returned the invalid value, or None if the index is unknown or if all envs are affected."""
    call = ""
    """"step" or "reset" if the exception's message already contains the env and the step, else ""."""


MAX_REWARD = float(np.finfo(np.float32).max)
"""Largest absolute value of a reward, because rewards are stored as float32."""


class InvalidReward(InvalidOutcome):
    """Raised if an env returned a reward that is not a finite number of type float32."""


def raise_invalid_outcome(error: Exception, row: int | None = None) -> NoReturn:
    """Raise InvalidOutcome, with the index `row` of the env, if the env returned invalid values that caused the error `error`. If the env's
    own code raised the error, the error is reraised unchanged."""
    raised = error
    if isinstance(error, _MISUSE) and (message := _misuse_message(error)) is not None:
        raised = InvalidOutcome(message.format(f"{type(error).__name__}: {error}"))
    if isinstance(raised, InvalidOutcome) and raised.row is None:
        raised.row = row
    if raised is error:
        raise error
    raise raised from error


def raise_located_outcome(error: Exception, env: str, call: str, step: int) -> NoReturn:
    """Raise InvalidOutcome, with the env and the step in the message, if the env returned invalid values that caused an error in `Env.step`
    or `Env.reset`.

    If the env's own code raised the error, the error is reraised unchanged.
    """
    try:
        raise_invalid_outcome(error)
    except InvalidOutcome as outcome:
        if outcome.call:
            raise
        row = "" if outcome.row is None else f", env {outcome.row}"
        located = type(outcome)(f"{env}{row}, {f'step {step}' if call == 'step' else call}: {outcome}")
        located.row, located.call = outcome.row, call
        raise located from error


def _misuse_message(error: Exception) -> str | None:
    """Return a message that describes the values that the env should return, and names the wrapper, if any, that could not process its
    values. Return None if the env's own code raised the error.

    The returned message contains a placeholder {} for the text of the error.
    """
    call, wrapper = "step", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        handles = f"{module}.".startswith(_HANDLING) or package in sys.stdlib_module_names
        if not handles or module.startswith("gymnasium.envs."):
            return None
        call = frame.f_code.co_name if frame.f_code.co_name in SIGNATURES else call
        owner = frame.f_locals.get("self")
        if isinstance(owner, gym.Wrapper) and not isinstance(owner, _OF_MAKE):
            wrapper = f" by the wrapper {type(owner).__name__}"
    return f"the env cannot be used{wrapper} ({{}}); expected {SIGNATURES[call]}"


def unpack_step(outcome: Any) -> Outcome:
    """Return the five values of an env's step. Raises InvalidOutcome if `outcome` is not a tuple or list of five values."""
    if isinstance(outcome, tuple | list) and len(outcome) == 5:
        return outcome[0], outcome[1], outcome[2], outcome[3], outcome[4]
    raise InvalidOutcome(f"step returned {value_text(outcome)}; expected {SIGNATURES['step']}")


def unpack_reset(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the observation and the info of an env's reset. Raises InvalidOutcome if `result` is not a pair of an observation and a
    dict."""
    if (
        (type(result) is tuple or isinstance(result, tuple | list))
        and len(result) == 2
        and (type(result[1]) is dict or isinstance(result[1], Mapping))
    ):
        return result[0], result[1]
    raise InvalidOutcome(f"reset returned {value_text(result)}; expected {SIGNATURES['reset']}")


def check_step(outcome: Any) -> Outcome:
    """Return the five values of an env's step, with the reward converted to float, the flags `terminated` and `truncated` converted to
    bool, and the observation unchanged. Raises InvalidOutcome."""
    obs, reward, terminated, truncated, info = unpack_step(outcome)
    if not isinstance(info, Mapping):
        raise InvalidOutcome(f"step returned the info {value_text(info)}; expected a dict")
    return obs, reward_to_float(reward), to_bool(terminated, "terminated"), to_bool(truncated, "truncated"), dict(info)


def reward_to_float(reward: Any) -> float:
    """Convert a reward (a number or an array of one number) to a float. Raises InvalidReward for other values."""
    try:
        array = np.asarray(reward)
        if array.size == 1 and (array.dtype.kind in "biuf" or isinstance(reward, Real)):
            return float(array.reshape(()).item())
    except Exception:  # what the conversion of unknown objects raises
        pass
    raise InvalidReward(f"step returned the reward {value_text(reward)}; expected a number")


def to_bool(value: Any, name: str) -> bool:
    """Convert a bool, 0, 1, or an array with one such value to a bool. Raises InvalidOutcome for other values."""
    array = _numeric_array_or_none(value)
    if array is not None and array.size == 1 and array.reshape(()).item() in (0, 1):
        return bool(array.reshape(()).item())
    raise InvalidOutcome(f"step returned {value_text(value)} for {name}; expected true or false")


def fit_to_space(space: spaces.Space[Any], value: Any, name: str = "observation", lead: tuple[int, ...] = ()) -> Any:
    """Convert an element of a space, or a batch of N elements if `lead` is (N,), to arrays of the space's dtype. Numbers outside the bounds
    of a Box are accepted.

    Raises InvalidOutcome if the structure, shape or type of the value does not fit the space, or if a number is not in the space. For a
    Dict or Tuple, the error message names the invalid entry.
    """
    if type(space) is spaces.Discrete and type(value) in (int, np.int64) and not lead and 0 <= int(value) - int(space.start) < int(space.n):
        return value  # fast path for the most frequent case
    match space:
        case spaces.Dict():
            if not isinstance(value, Mapping):
                _raise_misfit(space, value, name, lead)
            if missing := [key for key in space.spaces if key not in value]:
                raise InvalidOutcome(f"{name} has no part {missing[0]!r}; its space is {space_text(space)}")
            return {key: fit_to_space(part, value[key], f"{name}[{key!r}]", lead) for key, part in space.spaces.items()}
        case spaces.Tuple():
            if not (isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim)) or len(value) < len(space.spaces):
                _raise_misfit(space, value, name, lead)
            return tuple(fit_to_space(part, value[i], f"{name}[{i}]", lead) for i, part in enumerate(space.spaces))
    return _fit_array(space, value, name, lead)


def _fit_array(space: spaces.Space[Any], value: Any, name: str, lead: tuple[int, ...]) -> Any:
    assert space.shape is not None
    shape = (*lead, *space.shape)
    if isinstance(space, spaces.Box) and type(value) is np.ndarray and value.dtype == space.dtype and value.shape == shape:
        return value
    array = _numeric_array_or_none(value)
    if array is None or array.shape != shape or (converted := _cast(array, np.dtype(space.dtype))) is None:
        _raise_misfit(space, value, name, lead)
    inside = _in_space_mask(space, converted)
    if not inside.all():
        row = int(np.argmin(inside.reshape(len(inside), -1).all(axis=1))) if lead else None
        error = InvalidOutcome(_misfit_message(space, converted if row is None else converted[row], name, ()))
        error.row = row
        raise error
    return converted


def _numeric_array_or_none(value: Any) -> np.ndarray | None:
    """Return a value as an array of real numbers, or None if the value does not consist of real numbers (a string, None, a ragged list,
    complex numbers)."""
    try:
        array = np.asarray(value)
    except Exception:  # what the conversion of unknown objects raises
        return None
    return array if array.dtype.kind in "biuf" else None


def _cast(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return an array converted to another dtype, or None if the conversion changes numbers by more than rounding."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    return converted if dtype.kind == "f" or (converted == array).all() else None


def _in_space_mask(space: spaces.Space[Any], array: np.ndarray) -> np.ndarray:
    """Return a bool array that says which numbers of an element or batch are in the space. For a Box, all numbers count as in the space."""
    match space:
        case spaces.Discrete():
            return np.asarray((array >= space.start) & (array < space.start + space.n))
        case spaces.MultiDiscrete():
            return np.asarray((array >= space.start) & (array - space.start < space.nvec))
        case spaces.MultiBinary():
            return np.asarray((array == 0) | (array == 1))
    return np.ones(1, bool)


def _raise_misfit(space: spaces.Space[Any], value: Any, name: str, lead: tuple[int, ...]) -> NoReturn:
    raise InvalidOutcome(_misfit_message(space, value, name, lead))


def _misfit_message(space: spaces.Space[Any], value: Any, name: str, lead: tuple[int, ...]) -> str:
    if lead:
        return f"{name}: {value_text(value)} is not a batch of {lead[0]} elements of {space_text(space)}, in arrays [{lead[0]}, …]"
    return f"{name} {value_text(value)} is not in its space {space_text(space)}"


def fit_step(raw: Any, space: spaces.Space[Any], count: int) -> RawStep:
    """Return a RawStep whose values are arrays of the right shapes and dtypes, converted from the values of a user's backend. Raises
    InvalidOutcome."""
    if not isinstance(raw, RawStep):
        raise InvalidOutcome(f"the backend's step returned {value_text(raw)}; expected a slm_lab.env.RawStep")
    obs = fit_to_space(space, raw.obs, lead=(count,))
    reward_N, lives_N = _to_number_array(raw.reward_N, count, "rewards", "f"), raw.lives_N
    terminated_N, truncated_N = (
        _to_number_array(raw.terminated_N, count, "terminated", "b"),
        _to_number_array(raw.truncated_N, count, "truncated", "b"),
    )
    final = None if raw.final is None else [_check_final_entry(entry, space, terminated_N | truncated_N) for entry in raw.final]
    return RawStep(
        obs, reward_N, terminated_N, truncated_N, final, None if lives_N is None else _to_number_array(lives_N, count, "lives", "i")
    )


def _to_number_array(value: Any, count: int, name: str, kind: str) -> np.ndarray:
    """Convert a value to an array [N] of the dtype kind "f", "i" or "b". Raises InvalidOutcome."""
    if type(value) is np.ndarray and value.shape == (count,) and value.dtype.kind == kind:
        return value
    array = _numeric_array_or_none(value)
    if array is not None and array.shape == (count,):
        converted = array if array.dtype.kind == kind else _cast(array, np.dtype({"f": float, "b": bool, "i": np.int64}[kind]))
        if converted is not None:
            return converted
    expected = {"f": "numbers", "b": "bools", "i": "whole numbers"}[kind]
    raise InvalidOutcome(f"step returned {value_text(value)} for {name}; expected an array of {count} {expected}, one for each env")


def _check_final_entry(entry: Any, space: spaces.Space[Any], over_N: np.ndarray) -> tuple[int, Any]:
    """Check an entry of `RawStep.final` that a user's backend returned, and return the index of the env and the last observation of the
    env's episode. Raises InvalidOutcome."""
    if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], int | np.integer) and 0 <= entry[0] < len(over_N)):
        raise InvalidOutcome(f"the backend's step returned {value_text(entry)} in final; expected (index of the env, last observation)")
    if not over_N[entry[0]]:
        raise InvalidOutcome(f"the backend's step returned a last observation in final for env {entry[0]}, whose episode did not end")
    return check_last_obs(int(entry[0]), entry[1], space)


def check_last_obs(row: int, obs: Any, space: spaces.Space[Any]) -> tuple[int, Any]:
    """Return the index `row` of an env and the last observation of the env's episode, converted to the dtype of the space. Raises
    InvalidOutcome."""
    try:
        return row, fit_to_space(space, obs, "last observation")
    except InvalidOutcome as error:
        raise_invalid_outcome(error, row)


def batch_row(batch: Any, row: int) -> Any:
    """Return the element of one env from a batch, which is an array or nested dicts of arrays."""
    return {key: batch_row(value, row) for key, value in batch.items()} if isinstance(batch, Mapping) else batch[row]


def value_text(value: Any) -> str:
    """Return a short description of a value for an error message: the type, the shape and, if the value is short, the value itself."""
    kind = type(value).__name__
    match value:
        case np.generic():
            return _text(value.item())
        case np.ndarray() if value.ndim == 0:
            return f"{_text(value.item())} (array of shape (), {value.dtype})"
        case np.ndarray():
            form = f"array of shape {value.shape}, {value.dtype}"
            few = value.size <= 10 and value.dtype.kind in "biuf"
            return f"{' '.join(np.array2string(value, precision=4, separator=', ').split())} ({form})" if few else f"an {form}"
        case tuple() | list():
            return f"a {kind} of {len(value)} values ({', '.join(type(item).__name__ for item in value[:6])}{', …' * (len(value) > 6)})"
        case Mapping():
            return f"a {kind} with the keys {_text(list(value))}"
        case None | bool() | str() | int() | float():
            return _text(value)
    return f"{_text(value)} ({kind})"


def space_text(space: spaces.Space[Any]) -> str:
    """Return a description of a space in one line, without the bounds of a Box."""
    match space:
        case spaces.Box():
            return f"Box of shape {space.shape}, {space.dtype}"
        case spaces.Discrete():
            return f"Discrete({space.n}), {space.start} to {space.start + space.n - 1}"
        case spaces.Dict():
            return f"Dict with the parts {_text(list(space.spaces))}"
        case spaces.Tuple():
            return f"Tuple of {len(space.spaces)} parts"
    return _text(space)


def _text(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # raised by the object's own code
        return "an object"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def close_error_message(error: Exception) -> str:
    """Return the message for an error that the method `close` of an env raised."""
    return f"the env's close() raised {type(error).__name__}: {error}"


def select_numbers(info: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Return a dict of the finite numbers in `info` whose names are in `names`. A name is a key or a dotted path of nested keys. The bool
    True becomes 1.0. Names without a finite number are omitted."""
    numbers = {}
    for name in names:
        value = info[name] if name in info else _nested_entry(info, name)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        if isinstance(value, bool | int | float | np.bool_ | np.number) and isfinite(number := float(value)):
            numbers[name] = number
    return numbers


def row_info(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the info of one env from the infos of a vector env. Gymnasium's vector infos contain an array [N] of values for each key
    "key", and a bool array [N] "_key", which says which envs have this key."""
    info = {}
    for key, values in infos.items():
        present = infos.get(f"_{key}")
        if key[:1] == "_" and key[1:] in infos:
            continue
        if isinstance(values, Mapping):
            info[key] = row_info(values, row)
        elif isinstance(values, np.ndarray | list | tuple) and len(values) > row and (present is None or present[row]):
            info[key] = values[row]
    return info


def _nested_entry(info: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(info, Mapping) or key not in info:
            return None
        info = info[key]
    return info
