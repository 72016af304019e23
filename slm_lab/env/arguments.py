"""Which arguments an env's constructor takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import load_env_creator


def vector_creator(registration: Registration) -> Callable[..., Any]:
    """What makes the id's own vector env. Raises ImportError where its module is missing."""
    entry = registration.vector_entry_point
    assert entry is not None
    return load_env_creator(entry) if isinstance(entry, str) else entry


def env_creator(registration: Registration) -> Callable[..., Any]:
    """What makes one env. Raises ImportError where its module is missing."""
    entry = registration.entry_point
    assert entry is not None
    return load_env_creator(entry) if isinstance(entry, str) else entry


def accepted(creator: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names that the creator takes as keywords, and whether it may take others too (**kwargs).

    Names behind **kwargs are those of the base classes, where such arguments usually go.
    """
    names: dict[str, None] = {}
    layers = [creator]
    if inspect.isclass(creator):
        layers = [vars(base)["__init__"] for base in inspect.getmro(creator) if "__init__" in vars(base) and base is not object]
    for index, layer in enumerate(layers):
        parameters = inspect.signature(layer).parameters.values()
        names.update({p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"})
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return list(names), index > 0
    return list(names), bool(layers)


def rejected(error: BaseException) -> str | None:
    """The argument that a TypeError complains about."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if isinstance(error, TypeError) and found else None


def unknown_key(key: str, known: list[str], what: str) -> str:
    """One line that says what the constructor takes instead, the nearest name first."""
    near = get_close_matches(key, known, 1, 0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    takes = ", ".join(sorted(known)) if known else "no arguments"
    return f"unknown key, and not an argument of {what}; {hint}it takes: {takes}"
