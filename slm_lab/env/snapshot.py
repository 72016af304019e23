"""Saving and loading the state of a single env with its wrappers as plain Python objects, so that a run can continue in the middle of an
episode.

A layer is the env or one of its wrappers. The state of a layer consists of its attributes: numbers, strings, arrays, random generators
(including the generators of spaces), other envs, MuJoCo's simulation data, and containers or objects of such values. If two attributes
refer to the same object, they also do so after loading. If an env or wrapper has methods `state_dict()` and `load_state_dict(state)`, these
methods are used instead of the attributes. An env with attributes of other types, such as a C++ object or an open file, cannot be saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from slm_lab.lib.rng import generator_state, set_generator_state

_STATELESS = (EnvSpec, PurePath, FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
"""Types of attributes that contain no state of an episode and are not saved."""
_STATELESS_CLASSES = ("MujocoRenderer",)
_OF_THE_BACKEND = ("_np_random", "_np_random_seed")
"""Attributes of the innermost env that this module does not save, because `Backend.rng_states` saves these attributes."""
_TABLES = ("gymnasium.envs.toy_text", "P")
"""A package of envs, and the attribute of these envs that contains the table of transition probabilities. The transition table is not
saved, because it never changes and because saving the transition table of Taxi takes 0.2 s."""


_IN_PLACE = ("object", "mujoco", "space", "env")
"""Kinds of encoded values whose state is loaded into the existing objects of the env. For all other kinds, new objects are created."""
_PLAIN = (type(None), bool, int, float, str)


class _PlainClass:
    """A class without a C base class and without slots, for comparison with the classes of env attributes."""


class NotSavable(Exception):
    """Raised if an env contains a value that cannot be saved, or if a saved state does not fit the env. The exception's message describes
    the cause."""


def env_state(env: gym.Env[Any, Any]) -> list[Any]:
    """Return a list of the states of an env's wrappers, outermost wrapper first, and of the env itself. Raises NotSavable."""
    return _Encoder().encode_layers(env)


def load_env_state(env: gym.Env[Any, Any], state: list[Any]) -> None:
    """Load a state that `env_state` returned into an env that was built in the same way and has been reset. Raises NotSavable if the state
    does not fit the env."""
    _Decoder().restore_layers(env, state)


def seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed the spaces of an env, its wrappers and nested envs, because some envs sample from their spaces.

    Each space receives its own random stream. A space that is a class attribute of an env is first copied to the instance, so that other
    envs do not share the space's random stream.
    """
    spaces: dict[int, gym.Space[Any]] = {}
    seen: list[Any] = []
    waiting = [env]
    while waiting:
        for layer in _layers(waiting.pop()):
            if any(layer is other for other in seen):
                continue
            seen.append(layer)
            _copy_class_spaces(layer)
            values = [*vars(layer).values()]
            spaces |= {id(value): value for value in values if isinstance(value, gym.Space)}
            waiting += [value for value in values if isinstance(value, gym.Env)]
    for space, word in zip(spaces.values(), np.random.SeedSequence([seed, 1]).generate_state(len(spaces)), strict=True):
        space.seed(int(word))


def _copy_class_spaces(layer: Any) -> None:
    """Copy each space that is a class attribute of an env or wrapper to the instance. Instance attributes that refer to the original space
    are changed to refer to the copy."""
    shared = {name: value for base in reversed(type(layer).__mro__) for name, value in vars(base).items() if isinstance(value, gym.Space)}
    copies = {id(value): deepcopy(value) for value in shared.values()}
    for name, value in {**shared, **vars(layer)}.items():
        if id(value) in copies:
            vars(layer)[name] = copies[id(value)]


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(env, gym.Wrapper):
        env = env.env
        layers.append(env)
    return layers


def _spaces(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """Return a list of the space `space` and all its nested spaces."""
    found = [space]
    for value in vars(space).values():
        parts = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else (value,)
        found += [inner for part in parts if isinstance(part, gym.Space) for inner in _spaces(part)]
    return found


class _Encoder:
    """Encoder that represents each value of an env's state as (kind, number, content). The number identifies an object to which several
    attributes can refer, and is −1 for values such as numbers and strings."""

    def __init__(self) -> None:
        self.numbered: dict[int, tuple[int, Any]] = {}
        """Maps the id() of each encoded value to the pair (number of the value, value). As long as the value is stored, Python does not use
        its id for another object."""
        self.owners: dict[int, int] = {}
        """Maps the id() of the object that owns an array's memory to the id() of the array."""

        self.stateless: tuple[str, ...] = _STATELESS_CLASSES
        self.saved: list[Any] = []
        """Envs and wrappers whose states were saved or are being saved."""

    def encode_layers(self, env: gym.Env[Any, Any]) -> list[Any]:
        if all(type(layer).__module__.startswith("gymnasium.") for layer in _layers(env)):
            self.stateless = (*_STATELESS_CLASSES, "MjModel")  # Gymnasium's own envs never change the model
        return self._encode_env(env, _OF_THE_BACKEND)

    def _encode_env(self, env: gym.Env[Any, Any], left_out: Sequence[str]) -> list[Any]:
        """Return a list of the states of an env's wrappers and of the env itself.

        Args: left_out: attributes of the innermost env that are not saved.
        """
        layers = _layers(env)
        self.saved += layers
        return [self._encode_layer(layer, () if isinstance(layer, gym.Wrapper) else left_out) for layer in layers]

    def _encode_layer(self, layer: Any, left_out: Sequence[str]) -> dict[str, Any]:
        layer_type = type(layer)
        if not _is_pure_python(layer):
            raise NotSavable(f"{layer_type.__name__} is not written in Python alone")
        if callable(getattr(layer_type, "state_dict", None)) and callable(getattr(layer_type, "load_state_dict", None)):
            return {"class": _class_name(layer), "own": layer.state_dict()}
        return {"class": _class_name(layer), "attributes": self._encode_attributes(layer, left_out)}

    def _encode_attributes(self, owner: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
        saved = {}
        if type(owner).__module__.startswith(_TABLES[0]):
            left_out = (*left_out, _TABLES[1])
        for name, value in vars(owner).items():
            if name not in left_out and not self._is_stateless(value):
                try:
                    saved[name] = self._encode(value, attribute=True)
                except NotSavable as error:
                    raise NotSavable(f"{type(owner).__name__}.{name}: {error}") from None
        return saved

    def _is_stateless(self, value: Any) -> bool:
        if isinstance(value, gym.Space):
            return all(space._np_random is None for space in _spaces(value))
        return isinstance(value, _STATELESS) or type(value).__name__ in self.stateless or any(value is layer for layer in self.saved)

    def _encode(self, value: Any, *, attribute: bool = False) -> tuple[str, int, Any]:
        match value:
            case np.generic():  # before float: np.float64 is a subclass
                return "scalar", -1, _array(np.asarray(value))
            case None | bool() | int() | float() | str() if type(value) in _PLAIN:
                return "plain", -1, value
            case bytes() if type(value) is bytes:
                return "bytes", -1, value.decode("latin-1")
        if type(value) is tuple:
            return "tuple", -1, [self._encode(item) for item in value]
        if id(value) in self.numbered:
            return "same", self.numbered[id(value)][0], None
        number = len(self.numbered)
        self.numbered[id(value)] = number, value
        kind, content = self._encode_content(value)
        if kind in _IN_PLACE and not attribute:
            raise NotSavable(f"a {type(value).__name__} in a container")
        return kind, number, content

    def _encode_content(self, value: Any) -> tuple[str, Any]:
        match value:
            case gym.Space():
                rngs = [space._np_random for space in _spaces(value)]
                return "space", [None if rng is None else generator_state(rng) for rng in rngs]
            case gym.Env():
                return "env", self._encode_env(value, ())
            case np.ndarray() if type(value) is np.ndarray and value.dtype.kind in "biufcSU":
                if _owner(value).base is not None:
                    raise NotSavable("an array in memory of another object")
                if self.owners.setdefault(id(_owner(value)), id(value)) != id(value):
                    raise NotSavable("an array that shares its memory with another one")
                return "array", _array(value)
            case np.random.Generator():
                return "generator", generator_state(value)
            case np.random.RandomState():
                name, key, *rest = value.get_state(legacy=True)
                return "random_state", (name, _array(np.asarray(key)), rest)
            case list() | set() | deque() if type(value) in (list, set, deque):
                length = value.maxlen if isinstance(value, deque) else None
                return type(value).__name__, (length, [self._encode(item) for item in value])
            case dict() if type(value) is dict:
                return "dict", [(self._encode(key), self._encode(item)) for key, item in value.items()]
        if type(value).__name__ in ("MjData", "MjModel"):
            arrays = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
            saved = {name: _array(array) for name, array in arrays.items() if isinstance(array, np.ndarray)}
            return "mujoco", (getattr(value, "time", None), saved)
        if _is_pure_python(value) and not isinstance(value, Enum | BaseException):
            return "object", (_class_name(value), self._encode_attributes(value))
        raise NotSavable(f"a {type(value).__name__}")


class _Decoder:
    def __init__(self) -> None:
        self.decoded: dict[int, Any] = {}

    def restore_layers(self, env: gym.Env[Any, Any], state: list[Any]) -> None:
        layers = _layers(env)
        if len(layers) != len(state):
            raise NotSavable(f"{len(state)} layers were saved; the env has {len(layers)}")
        for layer, saved in zip(layers, state, strict=True):
            if _class_name(layer) != saved.get("class", _class_name(layer)):
                raise NotSavable(f"a {saved['class']} was saved; the env has a {_class_name(layer)}")
            if "own" in saved:
                layer.load_state_dict(saved["own"])
            else:
                self._load_attributes(layer, saved["attributes"])

    def _load_attributes(self, owner: Any, attributes: dict[str, Any]) -> None:
        """Set the attributes of `owner` to the values that `_Encoder` encoded."""
        for name, (kind, number, content) in attributes.items():
            if kind in _IN_PLACE:
                present = self.decoded[number] = getattr(owner, name, None)
                if kind == "mujoco":
                    _load_mujoco(present, *content)
                elif kind == "space":
                    _load_space(present, content)
                elif kind == "env":
                    self.restore_layers(cast("gym.Env[Any, Any]", present), content)
                elif _class_name(present) == content[0]:
                    self._load_attributes(present, content[1])
                else:
                    raise NotSavable(f"{type(owner).__name__}.{name} is a {_class_name(present)}; a {content[0]} was saved")
            else:
                vars(owner)[name] = self._decode((kind, number, content))

    def _decode(self, encoded: Any) -> Any:
        kind, number, content = encoded
        match kind:
            case "plain":
                return content
            case "bytes":
                return content.encode("latin-1")
            case "scalar":
                return _decode_array(content)[()]
            case "tuple":
                return tuple(map(self._decode, content))
            case "same":
                return self.decoded[number]
        self.decoded[number] = value = self._decode_object(kind, content)
        return value

    def _decode_object(self, kind: str, content: Any) -> Any:
        match kind:
            case "array":
                return _decode_array(content)
            case "generator":
                rng = np.random.default_rng()
                set_generator_state(rng, content)
                return rng
            case "random_state":
                legacy, (name, key, rest) = np.random.RandomState(), content
                legacy.set_state((name, _decode_array(key), *rest))
                return legacy
            case "dict":
                return {self._decode(key): self._decode(item) for key, item in content}
            case "deque":
                return deque(map(self._decode, content[1]), maxlen=content[0])
        return {"list": list, "set": set}[kind](map(self._decode, content[1]))


def _load_space(space: Any, states: list[Any]) -> None:
    """Load the states of the random generators of a space and of all its nested spaces."""
    spaces = _spaces(space) if isinstance(space, gym.Space) else []
    if len(spaces) != len(states):
        raise NotSavable(f"a space of {len(states)} parts was saved; the env has {len(spaces)}")
    for part, state in zip(spaces, states, strict=True):
        if state is not None:
            part._np_random = np.random.default_rng()
            set_generator_state(part._np_random, state)


def _load_mujoco(data: Any, time: float | None, arrays: dict[str, Any]) -> None:
    """Copy saved arrays into an MjData or MjModel object, and set the time of an MjData object.

    The arrays include values that MuJoCo derives from positions and velocities, because an env may read these values before its next step.
    """
    if time is not None:
        data.time = time
    for name, saved in arrays.items():
        present, array = getattr(data, name), _decode_array(saved)
        if present.shape == array.shape and present.flags.writeable:  # contact arrays differ in size and are recomputed in each step
            present[...] = array


def _array(array: np.ndarray) -> tuple[str, tuple[int, ...], str]:
    return array.dtype.str, array.shape, array.tobytes().decode("latin-1")  # torch refuses to load an empty bytes object


def _decode_array(saved: Any) -> np.ndarray:
    dtype, shape, content = saved
    return np.frombuffer(content.encode("latin-1"), dtype).reshape(shape).copy()


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_pure_python(value: Any) -> bool:
    """Return whether the class of an object has no C base class and no slots, so that the attributes of the object are its complete
    state."""
    return type(value).__basicsize__ == _PlainClass.__basicsize__ and hasattr(value, "__dict__")


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
