"""Arguments of env constructors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.envs.registration import load_env_creator

from slm_lab.spec.env import EnvSpec
from slm_lab.spec.report import nearest


def env_creator(registration: Registration, *, vector: bool = False) -> Callable[..., Any]:
    """Return the constructor of one env, or of the id's own vector env. Raises ImportError if its module is missing."""
    entry: Any = registration.vector_entry_point if vector else registration.entry_point
    assert entry is not None
    return load_env_creator(entry) if isinstance(entry, str) else entry


def accepted_arguments(creator: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the keyword arguments of the creator, and whether it accepts others too (**kwargs).

    With **kwargs those of the base classes are included, which such arguments are usually passed to.
    """
    names: dict[str, None] = {}
    layers = _constructors(creator)
    for index, layer in enumerate(layers):
        parameters = inspect.signature(layer).parameters.values()
        names.update({p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"})
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return list(names), index > 0
    return list(names), bool(layers)


def truth_values(creator: Callable[..., Any]) -> set[str]:
    """Return the keyword arguments of the creator, and of its base classes, whose default is true or false."""
    defaults: dict[str, Any] = {}
    for layer in reversed(_constructors(creator)):  # a class's own argument replaces that of a base class
        defaults |= {name: one.default for name, one in inspect.signature(layer).parameters.items()}
    return {name for name, default in defaults.items() if isinstance(default, bool)}


def _constructors(creator: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the `__init__` of a class and of its base classes; of another creator, the creator."""
    if not inspect.isclass(creator):
        return [creator]
    return [vars(base)["__init__"] for base in inspect.getmro(creator) if "__init__" in vars(base) and base is not object]


def unexpected_argument(error: BaseException) -> str | None:
    """Return the argument that a TypeError reports as unexpected."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if isinstance(error, TypeError) and found else None


def unknown_key_message(key: str, known: list[str], what: str) -> str:
    """Return the message for an unknown key: the closest argument or key of env, and all arguments of the constructor."""
    near = nearest(key, [*known, *EnvSpec.model_fields])
    return f"unknown key, and not an argument of {what}{near or ';'} arguments: {', '.join(sorted(known)) or 'none'}"
