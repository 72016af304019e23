"""Saving and loading the state of a single env with its wrappers as plain Python objects, so that a run can continue in the middle of an
episode.

A layer is the env or one of its wrappers. The state of a layer consists of its attributes: numbers, strings, paths, arrays, random
generators (including the generators of spaces), other envs, MuJoCo's simulation data, and containers or objects of such values. Methods of
layers and objects, and functions, classes and members of enumerations of the env's package are saved by name. If two attributes refer to
the same object, they also do so after loading. If an env or wrapper has methods `state_dict()` and `load_state_dict(state)`, these methods
are used instead of the attributes. An env with attributes of other types, such as a C++ object, an open file or a set, cannot be saved. The
order of a set depends on all earlier insertions and removals, which are not saved.
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

_STATELESS = (EnvSpec, BuiltinFunctionType, ModuleType)
"""Types of attributes that contain no state of an episode and are not saved. (Functions and classes of other packages are not saved
either.)"""
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
    _Decoder().decode_layers(env, state)


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
        self.rng: Any = None
        """Random generator of the innermost env, which `Backend.rng_states` saves."""
        self.methods: list[tuple[Any, dict[str, Any], str, MethodType]] = []
        """(object, encoded attributes of the object, name of an attribute, method) for each attribute whose value is a method. Methods are
        encoded last, after the objects to which they belong."""

    def encode_layers(self, env: gym.Env[Any, Any]) -> list[Any]:
        layers = _layers(env)
        if all(type(layer).__module__.startswith("gymnasium.") for layer in layers):
            self.stateless = (*_STATELESS_CLASSES, "MjModel")  # Gymnasium's own envs never change the model
        self.rng = getattr(layers[-1], "_np_random", None)
        state = self._encode_env(env, _OF_THE_BACKEND)
        for owner, attributes, name, method in self.methods:
            reference = self._encode_method(method)
            if reference is not None:
                attributes[name] = reference
            elif any(owner is layer for layer in self.saved):
                del attributes[name]  # a method of an object outside the env's state
            else:
                raise NotSavable(f"{type(owner).__name__}.{name}: a method of a {type(method.__self__).__name__}")
        return state

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
            return {"class": _name(layer_type), "own": layer.state_dict()}
        return {"class": _name(layer_type), "attributes": self._encode_attributes(layer, left_out)}

    def _encode_attributes(self, owner: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        if type(owner).__module__.startswith(_TABLES[0]):
            left_out = (*left_out, _TABLES[1])
        for name, value in vars(owner).items():
            if name in left_out or self._is_stateless(value):
                continue
            if isinstance(value, MethodType):
                saved[name] = None  # replaced in `encode_layers`
                self.methods.append((owner, saved, name, value))
                continue
            try:
                saved[name] = self._encode(value, attribute=True)
            except NotSavable as error:
                raise NotSavable(f"{type(owner).__name__}.{name}: {error}") from None
        return saved

    def _is_stateless(self, value: Any) -> bool:
        match value:
            case gym.Space():
                return all(space._np_random is None for space in _spaces(value))
            case FunctionType() | type():
                return not self._has_name(value)
        return isinstance(value, _STATELESS) or type(value).__name__ in self.stateless

    def _has_name(self, value: Any) -> bool:
        """Return whether a function, a class or a member of an enumeration can be found by its name in the packages of the env."""
        return _find_by_name(_name(value), self.packages) is value

    def _encode(self, value: Any, *, attribute: bool = False) -> tuple[str, int, Any]:
        """Encode a value. Raises NotSavable.

        Args: attribute: whether the value is an attribute, and not an item of a container.
        """
        if type(value) in _PLAIN:  # first, since lists can have many such items
            return "plain", -1, value
        if (encoded := self._encode_reference(value)) is not None:
            return encoded
        match value:
            case np.generic():
                return "scalar", -1, _array(np.asarray(value))
            case bytes() if type(value) is bytes:
                return "bytes", -1, value.decode("latin-1")
            case PurePath() if type(value) in (type(Path()), type(PurePath())):
                return "path", -1, (str(value), isinstance(value, Path))
        if id(value) in self.numbered:
            return "same", self.numbered[id(value)][0], None
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotSavable(f"values that are nested more than {_MAX_DEPTH} levels deep")
        if type(value) is tuple:
            number, kind, content = -1, "tuple", [self._encode(item) for item in value]
        else:
            number = len(self.numbered)
            self.numbered[id(value)] = number, value
            kind, content = self._encode_content(value)
        self.depth -= 1
        if kind in _IN_PLACE and not attribute and not (kind == "object" and content[2]):
            raise NotSavable(f"a {type(value).__name__} in a container")
        return kind, number, content

    def _encode_reference(self, value: Any) -> tuple[str, int, Any] | None:
        """Encode a value that is saved by its number or name: an env or wrapper, the random generator of the innermost env, a method, a
        function, a class, or a member of an enumeration. Return None for all other values."""
        for number, layer in enumerate(self.saved):
            if value is layer:
                return "layer", -1, number
        match value:
            case np.random.Generator() if value is self.rng:
                return "rng", -1, None
            case MethodType():
                return self._encode_method(value)
            case FunctionType() | type() | Enum() if self._has_name(value):
                return "named", -1, _name(value)
        return None

    def _encode_method(self, method: MethodType) -> tuple[str, int, Any] | None:
        """Encode a method of an env, of a wrapper or of an encoded object. Return None for a method of another object, and for a function
        that is not in the object's class."""
        owner = method.__self__
        names = (name for base in type(owner).__mro__ for name, function in vars(base).items() if function is method.__func__)
        if (name := next(names, None)) is None:
            return None
        if id(owner) in self.numbered or any(owner is layer for layer in self.saved):
            return "method", -1, (self._encode(owner), name)
        return None

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
        if _is_pure_python(value) and not isinstance(value, Enum):
            attributes = self._encode_attributes(value)
            return "object", (_name(type(value)), attributes, self._can_be_created(value, attributes))
        raise NotSavable(f"a {type(value).__name__}")

    def _can_be_created(self, value: Any, attributes: dict[str, Any]) -> bool:
        """Return whether the saved attributes of an object are sufficient to create the object. If not, the object can only be loaded into
        an existing object of its class."""
        if not self._has_name(type(value)) or len(attributes) < len(vars(value)):
            return False
        inner = [encoded for encoded in attributes.values() if encoded is not None]  # None stands for a method
        return all(kind not in _IN_PLACE or (kind == "object" and content[2]) for kind, _, content in inner)


class _Decoder:
    def __init__(self) -> None:
        self.decoded: dict[int, Any] = {}
        """Maps the number of each decoded value to the value."""
        self.in_place: set[int] = set()
        """The id() of each existing object into which a state was loaded."""
        self.layers: list[Any] = []
        """Envs and wrappers in the order of `_Encoder.saved`."""
        self.rng: Any = None
        """Random generator of the innermost env."""
        self.methods: list[tuple[Any, str, Any]] = []
        """(object, name of an attribute, content) for each attribute whose value is a method. Methods are set last."""

    def decode_layers(self, env: gym.Env[Any, Any], state: list[Any]) -> None:
        self.rng = getattr(_layers(env)[-1], "_np_random", None)
        self._restore_layers(env, state)
        for owner, name, content in self.methods:
            vars(owner)[name] = self._decode_method(*content)

    def _restore_layers(self, env: gym.Env[Any, Any], state: list[Any]) -> None:
        layers = _layers(env)
        self.layers += layers
        if len(layers) != len(state):
            raise NotSavable(f"the saved state is of an env with {len(state) - 1} wrappers; this env has {len(layers) - 1}")
        for layer, saved in zip(layers, state, strict=True):
            if _name(type(layer)) != saved.get("class", _name(type(layer))):
                raise NotSavable(f"the saved state is of a {saved['class']}; this env has a {_name(type(layer))} instead")
            if "own" in saved:
                layer.load_state_dict(saved["own"])
            else:
                self._load_attributes(layer, saved["attributes"])

    def _load_attributes(self, owner: Any, attributes: dict[str, Any]) -> None:
        """Set the attributes of `owner` to the values that `_Encoder` encoded."""
        for name, (kind, number, content) in attributes.items():
            if kind == "method":
                self.methods.append((owner, name, content))
            elif kind in _IN_PLACE:
                self._load_in_place(owner, name, kind, number, content)
            else:
                vars(owner)[name] = self._decode((kind, number, content))

    def _load_in_place(self, owner: Any, name: str, kind: str, number: int, content: Any) -> None:
        """Load the state of an attribute into the object to which the attribute refers. If that object is of another class or belongs to
        another attribute, create a new object."""
        present, path = vars(owner).get(name), f"{type(owner).__name__}.{name}"
        if kind == "object" and (_name(type(present)) != content[0] or id(present) in self.in_place or isinstance(present, Enum)):
            if not any(content[2:]):  # version 0.2.0 saved two items
                raise NotSavable(f"{path} is a {_name(type(present))}; its saved value is a {content[0]}, which cannot be created")
            vars(owner)[name] = self._create_object(number, content)
            return
        self.decoded[number] = present
        self.in_place.add(id(present))
        match kind:
            case "mujoco":
                if type(present).__name__ not in _MUJOCO:
                    raise NotSavable(f"{path} is a {_name(type(present))}; its saved value is a simulation of MuJoCo")
                _load_mujoco(present, *content)
            case "space":
                _load_space(present, content)
            case "env":
                self._restore_layers(cast("gym.Env[Any, Any]", present), content)
            case _:
                self._load_attributes(present, content[1])

    def _create_object(self, number: int, content: Any) -> Any:
        """Create an object from its saved attributes, without a call of its constructor."""
        cls = self._find(content[0])
        if not isinstance(cls, type):
            raise NotSavable(f"the saved state contains an object whose class is {content[0]}, but {content[0]} is not a class")
        value: Any = object.__new__(cls)
        self.decoded[number] = value
        self._load_attributes(value, content[1])
        return value

    def _find(self, name: str) -> Any:
        found = _find_by_name(name, _packages(self.layers))
        if found is None:
            raise NotSavable(f"the saved state contains {name}, which does not exist in the packages of the env and its wrappers")
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
            case "rng":
                return self.rng
            case "named":
                return self._find(content)
            case "method":
                return self._decode_method(*content)
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

    def _decode_method(self, owner: Any, name: str) -> MethodType:
        value = self._decode(owner)
        function = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)
        if not isinstance(function, FunctionType):
            raise NotSavable(f"the saved state contains the method {name}, which {_name(type(value))} does not have")
        return MethodType(function, value)

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


def _name(value: Any) -> str:
    """Return the full name of a function, of a class or of a member of an enumeration."""
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    return f"{value.__module__}.{value.__qualname__}"


def _packages(layers: Iterable[Any]) -> set[str]:
    """Return the names of the top-level packages that define the classes of envs and wrappers."""
    return {type(layer).__module__.partition(".")[0] for layer in layers}


def _find_by_name(name: str, packages: Container[str]) -> Any:
    """Return the function, class or member of an enumeration with a full name, or None if it does not exist or is in another package.

    Args: packages: top-level packages that can be imported. A checkpoint must not give access to any other package.
    """
    try:
        found = pkgutil.resolve_name(name) if name.partition(".")[0] in packages else None
    except (ImportError, AttributeError, ValueError):
        return None
    # a module of the package can also contain other modules and their functions, whose full names differ
    return found if isinstance(found, FunctionType | type | Enum) and _name(found) == name else None
