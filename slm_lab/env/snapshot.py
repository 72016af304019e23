"""Saving and loading the state of a single env with its wrappers as plain Python objects, so that a run can continue in the middle of an
episode.

A layer is the env or one of its wrappers. The state of a layer consists of its attributes: numbers, strings, arrays, random generators
(including the generators of spaces), other envs, MuJoCo's simulation data, members of enumerations, and containers or objects of such
values. Methods of the layer, and functions and classes of the env's package are saved by name. If two attributes refer to the same object,
they also do so after loading. If an env or wrapper has methods `state_dict()` and `load_state_dict(state)`, these methods are used instead
of the attributes. An env with attributes of other types, such as a C++ object, an open file or a set, cannot be saved. The order of a set
depends on all earlier insertions and removals, which a copy does not repeat.
"""

from __future__ import annotations

import pkgutil
from collections import deque
from collections.abc import Container, Iterable, Sequence
from copy import deepcopy
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from slm_lab.lib.rng import generator_state, set_generator_state

_STATELESS = (EnvSpec, PurePath, FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
"""Types of attributes that are not saved, unless they can be saved by name, because they contain no state of an episode."""
_STATELESS_CLASSES = ("MujocoRenderer",)
_OF_THE_BACKEND = ("_np_random", "_np_random_seed")
"""Attributes of the innermost env that this module does not save, because `Backend.rng_states` saves these attributes."""
_TABLES = ("gymnasium.envs.toy_text", "P")
"""A package of envs, and the attribute of these envs that contains the table of transition probabilities. The transition table is not
saved, because it never changes and because saving the transition table of Taxi takes 0.2 s."""

_IN_PLACE = ("object", "mujoco", "space", "env")
"""Kinds of encoded values whose state is loaded into the existing objects of the env. For all other kinds, new objects are created."""
_MAX_DEPTH = 100
"""Maximum nesting depth of a saved value. Python cannot write or read files of much deeper values."""
_MUJOCO = ("MjData", "MjModel")
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

        self.depth = 0
        """Nesting depth of the value that is being encoded."""
        self.stateless: tuple[str, ...] = _STATELESS_CLASSES
        self.saved: list[Any] = []
        """Envs and wrappers whose states were saved or are being saved."""
        self.packages: set[str] = set()
        """Top-level packages of these envs and wrappers."""

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
        self.packages |= _packages(layers)
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
            if name in left_out:
                continue
            if (reference := self._encode_reference(owner, value)) is not None:
                saved[name] = reference
            elif not self._is_stateless(value):
                try:
                    saved[name] = self._encode(value, attribute=True)
                except NotSavable as error:
                    raise NotSavable(f"{type(owner).__name__}.{name}: {error}") from None
        return saved

    def _is_stateless(self, value: Any) -> bool:
        if isinstance(value, gym.Space):
            return all(space._np_random is None for space in _spaces(value))
        return isinstance(value, _STATELESS) or type(value).__name__ in self.stateless

    def _encode_reference(self, owner: Any, value: Any) -> tuple[str, int, Any] | None:
        """Encode an attribute value that is saved by name or by number: an env or wrapper that was saved before, a method of `owner`, or
        a function or class of the env's package. Return None for all other values."""
        for number, layer in enumerate(self.saved):
            if value is layer:
                return "layer", -1, number
        match value:
            case MethodType() if value.__self__ is owner and getattr(type(owner), value.__name__, None) is value.__func__:
                return "method", -1, value.__name__
            case FunctionType() | type() if _find_by_name(_name(value), self.packages) is value:
                return "named", -1, _name(value)
        return None

    def _encode(self, value: Any, *, attribute: bool = False) -> tuple[str, int, Any]:
        match value:
            case np.generic():  # before float: np.float64 is a subclass
                return "scalar", -1, _array(np.asarray(value))
            case None | bool() | int() | float() | str() if type(value) in _PLAIN:
                return "plain", -1, value
            case bytes() if type(value) is bytes:
                return "bytes", -1, value.decode("latin-1")
            case PurePath() if type(value) in (type(Path()), type(PurePath())):
                return "path", -1, (str(value), isinstance(value, Path))
            case Enum() if _find_by_name(f"{_class_name(value)}.{value.name}", self.packages) is value:
                return "named", -1, f"{_class_name(value)}.{value.name}"
        if type(value) is tuple:
            return "tuple", -1, [self._encode(item) for item in value]
        if id(value) in self.numbered:
            return "same", self.numbered[id(value)][0], None
        number = len(self.numbered)
        self.numbered[id(value)] = number, value
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotSavable(f"values that are nested more than {_MAX_DEPTH} levels deep")
        kind, content = self._encode_content(value)
        self.depth -= 1
        if kind in _IN_PLACE and not attribute and not (kind == "object" and content[2]):
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
            case list() | deque() if type(value) in (list, deque):
                length = value.maxlen if isinstance(value, deque) else None
                return type(value).__name__, (length, [self._encode(item) for item in value])
            case dict() if type(value) is dict:
                return "dict", [(self._encode(key), self._encode(item)) for key, item in value.items()]
        if type(value).__name__ in _MUJOCO:
            arrays = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
            saved = {name: _array(array) for name, array in arrays.items() if isinstance(array, np.ndarray)}
            return "mujoco", (getattr(value, "time", None), saved)
        if _is_pure_python(value) and not isinstance(value, Enum | BaseException):
            attributes = self._encode_attributes(value)
            return "object", (_class_name(value), attributes, self._can_be_created(value, attributes))
        raise NotSavable(f"a {type(value).__name__}")

    def _can_be_created(self, value: Any, attributes: dict[str, Any]) -> bool:
        """Return whether the saved attributes of an object are sufficient to create the object. If not, the object can only be loaded into
        an existing object of its class."""
        if _find_by_name(_class_name(value), self.packages) is not type(value) or len(attributes) < len(vars(value)):
            return False
        return all(kind not in _IN_PLACE or (kind == "object" and content[2]) for kind, _, content in attributes.values())


class _Decoder:
    def __init__(self) -> None:
        self.decoded: dict[int, Any] = {}
        """Maps the number of each decoded value to the value."""
        self.in_place: set[int] = set()
        """The id() of each existing object into which a state was loaded."""
        self.layers: list[Any] = []
        """Envs and wrappers in the order of `_Encoder.saved`."""

    def restore_layers(self, env: gym.Env[Any, Any], state: list[Any]) -> None:
        layers = _layers(env)
        self.layers += layers
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
            if kind == "method":
                vars(owner)[name] = getattr(owner, content)
            elif kind in _IN_PLACE:
                self._load_in_place(owner, name, kind, number, content)
            else:
                vars(owner)[name] = self._decode((kind, number, content))

    def _load_in_place(self, owner: Any, name: str, kind: str, number: int, content: Any) -> None:
        """Load the state of an attribute into the object to which the attribute refers. If that object is of another class or belongs to
        another attribute, create a new object."""
        present = getattr(owner, name, None)
        if kind == "object" and (_class_name(present) != content[0] or id(present) in self.in_place):
            if not content[2:] or not content[2]:
                raise NotSavable(f"{type(owner).__name__}.{name} is a {_class_name(present)}; a {content[0]} was saved")
            vars(owner)[name] = self._create_object(number, content)
            return
        self.decoded[number] = present
        self.in_place.add(id(present))
        match kind:
            case "mujoco":
                if type(present).__name__ not in _MUJOCO:
                    raise NotSavable(f"{type(owner).__name__}.{name} is a {_class_name(present)}; a simulation of MuJoCo was saved")
                _load_mujoco(present, *content)
            case "space":
                _load_space(present, content)
            case "env":
                self.restore_layers(cast("gym.Env[Any, Any]", present), content)
            case _:
                self._load_attributes(present, content[1])

    def _create_object(self, number: int, content: Any) -> Any:
        """Create an object from its saved attributes, without a call of its constructor."""
        cls = self._find(content[0])
        value = self.decoded[number] = object.__new__(cls)
        self._load_attributes(value, content[1])
        return value

    def _find(self, name: str) -> Any:
        found = _find_by_name(name, _packages(self.layers))
        if found is None:
            raise NotSavable(f"{name} was saved; the env's package does not contain it")
        return found

    def _decode(self, encoded: Any) -> Any:
        kind, number, content = encoded
        match kind:
            case "plain":
                return content
            case "bytes":
                return content.encode("latin-1")
            case "scalar":
                return _decode_array(content)[()]
            case "path":
                return (Path if content[1] else PurePath)(content[0])
            case "layer":
                return self.layers[content]
            case "named":
                return self._find(content)
            case "object":
                return self._create_object(number, content)
            case "tuple":
                return tuple(map(self._decode, content))
            case "same":
                return self.decoded[number]
        if kind in ("list", "set", "deque", "dict"):
            return self._decode_container(kind, number, content)
        self.decoded[number] = value = _DECODERS[kind](content)
        return value

    def _decode_container(self, kind: str, number: int, content: Any) -> Any:
        """Decode a list, set, deque or dict. The container is created before its items, because an item can refer to the container."""
        if kind == "dict":
            entries = self.decoded[number] = {}
            for key, item in content:
                entries[self._decode(key)] = self._decode(item)
            return entries
        length, items = content
        container = self.decoded[number] = deque(maxlen=length) if kind == "deque" else [] if kind == "list" else set()
        add = container.add if isinstance(container, set) else container.append  # version 0.2.0 saved sets
        for item in items:
            add(self._decode(item))
        return container


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


def _decode_generator(state: Any) -> np.random.Generator:
    rng = np.random.default_rng()
    set_generator_state(rng, state)
    return rng


def _decode_random_state(state: Any) -> np.random.RandomState:
    legacy, (name, key, rest) = np.random.RandomState(), state
    legacy.set_state((name, _decode_array(key), *rest))
    return legacy


_DECODERS = {"array": _decode_array, "generator": _decode_generator, "random_state": _decode_random_state}


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_pure_python(value: Any) -> bool:
    """Return whether the class of an object has no C base class and no slots, so that the attributes of the object are its complete
    state."""
    return type(value).__basicsize__ == _PlainClass.__basicsize__ and hasattr(value, "__dict__")


def _class_name(value: Any) -> str:
    return _name(type(value))


def _name(value: Any) -> str:
    """Return the full name of a function or class."""
    return f"{value.__module__}.{value.__qualname__}"


def _packages(layers: Iterable[Any]) -> set[str]:
    """Return the top-level packages of the classes of envs and wrappers."""
    return {type(layer).__module__.partition(".")[0] for layer in layers}


def _find_by_name(name: str, packages: Container[str]) -> Any:
    """Return the function, class or enumeration member with a full name, or None if it does not exist or is in another package.

    Args: packages: top-level packages that can be imported. A checkpoint must not cause the import of any other package.
    """
    try:
        return pkgutil.resolve_name(name) if name.partition(".")[0] in packages else None
    except (ImportError, AttributeError, ValueError):
        return None
