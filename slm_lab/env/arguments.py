"""Inspection of the keyword arguments that env constructors accept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import load_env_creator

from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import nearest_hint


class WrapperError(Exception):
    """Raised if a wrapper or an argument of an env cannot be applied. The exception's `args` contain the invalid key of the spec's env
    section and the message."""


def env_creator(registration: Registration, *, vector: bool = False) -> Callable[..., Any]:
    """Return the constructor of a registered env, or of its vector env if `vector=True`. Raises ImportError if the env's module is
    missing."""
    entry: Any = registration.vector_entry_point if vector else registration.entry_point
    assert entry is not None
    return load_env_creator(entry) if isinstance(entry, str) else entry


def accepted_arguments(creator: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of the keyword arguments of an env constructor, and whether the constructor accepts further arguments (**kwargs).

    If an env constructor has **kwargs, the returned names include the arguments of its base classes, because **kwargs are usually passed on
    to the base classes.
    """
    layers = _constructor_parameters(creator)
    parameters = [parameter for layer in layers for parameter in layer.values()]
    names = {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"}
    return list(names), any(p.kind is p.VAR_KEYWORD for p in parameters)


def _constructor_parameters(creator: Callable[..., Any]) -> list[Mapping[str, inspect.Parameter]]:
    """Return one dict of parameters for each constructor: the constructor of an env class, then those of its base classes, up to the first
    constructor without **kwargs."""
    layers: list[Mapping[str, inspect.Parameter]] = []
    for method in _init_methods(creator):
        layers.append(inspect.signature(method).parameters)
        if not any(p.kind is p.VAR_KEYWORD for p in layers[-1].values()):
            break
    return layers


def boolean_arguments(creator: Callable[..., Any]) -> set[str]:
    """Return the names of those arguments of an env constructor whose default is a bool and whose annotation, if any, is bool."""
    is_boolean: dict[str, bool] = {}
    for parameters in _constructor_parameters(creator):
        for name, p in parameters.items():  # an argument of a class overrides the same argument of its base class
            is_boolean.setdefault(name, isinstance(p.default, bool) and p.annotation in (p.empty, bool, "bool"))
    return {name for name, boolean in is_boolean.items() if boolean}


def _init_methods(creator: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the `__init__` methods of a class and its base classes. If `creator` is not a class, return a list that contains only
    `creator`."""
    if not inspect.isclass(creator):
        return [creator]
    return [vars(base)["__init__"] for base in inspect.getmro(creator) if "__init__" in vars(base) and base is not object]


def unexpected_argument(error: BaseException) -> str | None:
    """Return the name of the argument that a TypeError reports as unexpected, or None for other errors."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if isinstance(error, TypeError) and found else None


def unknown_key_message(key: str, arguments: list[str], owner: str) -> str:
    """Return the error message for an unknown key of the spec's env section. The message names the most similar key and all arguments of
    `owner`, an env or a wrapper."""
    near = nearest_hint(key, [*arguments, *EnvSpec.model_fields])
    return f"unknown key: {owner} has no such argument{near or ';'} its arguments: {', '.join(sorted(arguments)) or 'none'}"
