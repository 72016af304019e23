"""Which arguments an env's constructor takes."""

from __future__ import annotations

import inspect
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


def accepted(creator: Callable[..., Any]) -> list[str] | None:
    """Names that the creator takes as keywords, following **kwargs to the base classes; None: anything."""
    names: dict[str, None] = {}
    layers = [base.__init__ for base in inspect.getmro(creator) if "__init__" in vars(base)] if inspect.isclass(creator) else [creator]  # type: ignore[misc]
    for layer in layers:
        if layer is object.__init__:
            return None  # every base passes **kwargs on: some method must use them
        parameters = inspect.signature(layer).parameters.values()
        names.update({p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"})
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return list(names)
    return None


def unknown_key(key: str, known: list[str], what: str) -> str:
    """One line that says what the constructor takes instead, the nearest name first."""
    near = get_close_matches(key, known, 1, 0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    takes = ", ".join(sorted(known)) if known else "no arguments"
    return f"unknown key, and not an argument of {what}; {hint}it takes: {takes}"
