"""The sections of a spec: which models, keys and components each can have."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slm_lab.spec.models.base import Component, SpecModel
from slm_lab.spec.models.extension import ExtensionError, find_model, is_extension, kind_of
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Path, value_at

_LATER = frozenset({"device"})
"""Keys of env in published specs that this version does not support."""


def members(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or the annotation itself; each without Annotated."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in members(member)]
    return [] if annotation is type(None) else [annotation]


def models_at(path: Path, raw: Any, root: type[BaseModel] = Spec) -> list[type[BaseModel]]:
    """Return the models allowed at `path`; only one if the data name it."""
    annotations: list[Any] = [root]
    for key in (None, *path):
        if key is not None:
            annotations = [inner for annotation in annotations for inner in below(annotation, key)]
            raw = value_at(raw, (key,))
        annotations = chosen_models(annotations, raw)
    return [a for a in annotations if is_model(a)]


def chosen_models(annotations: list[Any], raw: Any) -> list[Any]:
    """Return the model that the data name, else all alternatives."""
    name = raw.get("name") if isinstance(raw, dict) else None
    kinds = [kind_of(a) for a in annotations if is_model(a) and issubclass(a, Component)] if is_extension(name) else []
    if kinds:
        try:
            return [find_model(str(name), kinds[0])]
        except ExtensionError:
            return annotations
    named = [a for a in annotations if is_model(a) and isinstance(name, str) and name in names_of([a])]
    return named or annotations


def names_of(annotations: list[Any]) -> list[str]:
    """Return the values of `name` that identify the models of a union."""
    fields = [a.model_fields["name"].annotation for a in annotations if is_model(a) and "name" in a.model_fields]
    return [value for field in fields if get_origin(field) is Literal for value in get_args(field)]


def below(annotation: Any, key: str | int) -> list[Any]:
    if is_model(annotation) and isinstance(key, str) and key in annotation.model_fields:
        return members(annotation.model_fields[key])
    if get_origin(annotation) is list and isinstance(key, int):
        return members(get_args(annotation)[0])
    return []


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _section_keys() -> dict[Path, frozenset[str]]:
    """Return the keys of each section, of all its components."""
    agent = Spec.model_fields["agent"].annotation
    assert isinstance(agent, type)
    assert issubclass(agent, SpecModel)
    sections: dict[Path, Any] = {("agent", key): agent.model_fields[key] for key in ("algorithm", "memory", "net", "critic_net")}
    sections |= {(key,): Spec.model_fields[key] for key in ("agent", "env", "meta")}
    return {place: frozenset(name for model in members(field) for name in model.model_fields) for place, field in sections.items()}


SECTION_KEYS = _section_keys()
"""Section → keys of all its components."""


def is_ineffective(path: Path, raw: dict[str, Any]) -> bool:
    """Return whether `path` is a key of another component of its section than the one the spec names."""
    return path[-1] in foreign_keys(path[:-1], raw)


def foreign_keys(place: Path, raw: dict[str, Any]) -> frozenset[str]:
    """Return the keys of a section that have no effect with the component that the spec names."""
    models = models_at(place, raw)
    known = SECTION_KEYS.get(place, frozenset()) | (_LATER if place == ("env",) else frozenset())
    return known - models[0].model_fields.keys() if len(models) == 1 else frozenset()
