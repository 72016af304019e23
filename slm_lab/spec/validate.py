"""Raw spec → Spec; each problem with its path, the value found, what is allowed and the nearest valid key."""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slm_lab.spec.base import Component, SpecModel
from slm_lab.spec.extension import ERROR as EXTENSION
from slm_lab.spec.extension import ExtensionError, find_model, is_extension, kind_of
from slm_lab.spec.report import Path, Report, nearest, show, show_path
from slm_lab.spec.spec import Spec


def validate(raw: dict[str, Any], report: Report) -> Spec | None:
    """Return the Spec of a migrated raw spec; None, with problems in the report, if it is invalid."""
    try:
        return Spec.model_validate(raw)
    except ValidationError as error:
        found = {_located(item, raw): (item["type"], item["msg"]) for item in _errors(error)}
    for path, (kind, message) in found.items():
        # If a list and an item of it are both invalid, report the item only.
        if not any(len(other) > len(path) and other[: len(path)] == path for other in found):
            _explain(path, kind, message, raw, report)
    return None


def wrong_parts(raw: dict[str, Any]) -> list[Path]:
    """Return the paths of all invalid parts of a raw spec."""
    try:
        Spec.model_validate(raw)
    except ValidationError as error:
        return [_located(item, raw) for item in _errors(error)]
    return []


def _errors(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False, include_input=False)


def with_likely_names(raw: dict[str, Any]) -> tuple[dict[str, Any], set[Path]]:
    """Return a copy with unknown names of components replaced by likely ones, so that their keys can be checked, and the paths replaced.

    A "package.module:Class" that cannot be resolved stays: nothing is known of its keys.
    """
    rest, guessed = copy.deepcopy(raw), set[Path]()
    for path in wrong_parts(raw):
        section: Any = rest
        for key in path[:-1]:
            section = _child(section, key)
        models = models_at(path[:-1], raw)
        if path[-1:] == ("name",) and isinstance(section, dict) and len(_names(models)) > 1 and not is_extension(section.get("name")):
            section["name"] = _likely(section, models)
            guessed.add(path)
    return rest, guessed


def _likely(section: dict[str, Any], models: list[type[BaseModel]]) -> str:
    """Return the nearest of the models' names, else that of the model whose keys fit best."""
    near = difflib.get_close_matches(str(section.get("name"))[:80], _names(models), n=1)

    def fit(model: type[BaseModel]) -> int:
        lacking = [key for key, field in model.model_fields.items() if field.is_required() and key not in section]
        return len(model.model_fields.keys() & section.keys()) - len(lacking)

    return near[0] if near else _names([max(models, key=fit)])[0]


def members(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or the annotation itself; each without Annotated."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in members(member)]
    return [] if annotation is type(None) else [annotation]


def models_at(path: Path, raw: Any) -> list[type[BaseModel]]:
    """Return the models allowed at `path`; only one if the data name it."""
    annotations: list[Any] = [Spec]
    for key in (None, *path):
        if key is not None:
            annotations = [inner for annotation in annotations for inner in _below(annotation, key)]
            raw = _child(raw, key)
        annotations = _chosen(annotations, raw)
    return [a for a in annotations if _is_model(a)]


def _chosen(annotations: list[Any], raw: Any) -> list[Any]:
    """Return the model that the data name, else all alternatives."""
    name = raw.get("name") if isinstance(raw, dict) else None
    kinds = [kind_of(a) for a in annotations if _is_model(a) and issubclass(a, Component)] if is_extension(name) else []
    if kinds:
        try:
            return [find_model(str(name), kinds[0])]
        except ExtensionError:
            return annotations
    named = [a for a in annotations if _is_model(a) and isinstance(name, str) and name in _names([a])]
    return named or annotations


def _names(annotations: list[Any]) -> list[str]:
    """Return the values of `name` that identify the models of a union."""
    fields = [a.model_fields["name"].annotation for a in annotations if _is_model(a) and "name" in a.model_fields]
    return [value for field in fields if get_origin(field) is Literal for value in get_args(field)]


def _below(annotation: Any, key: str | int) -> list[Any]:
    if _is_model(annotation) and isinstance(key, str) and key in annotation.model_fields:
        return members(annotation.model_fields[key])
    if get_origin(annotation) is list and isinstance(key, int):
        return members(get_args(annotation)[0])
    return []


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _child(raw: Any, key: str | int) -> Any:
    try:
        return raw[key]
    except (KeyError, IndexError, TypeError):
        return None


def _located(item: Any, raw: Any) -> Path:
    """Return an error's path in the data: its loc without the names of union members."""
    return tuple(_without_tags(item["loc"], item["type"], raw))


def _without_tags(loc: Path, kind: str, raw: Any) -> Iterator[str | int]:
    annotations: list[Any] = [Spec]
    for key in loc:
        chosen = _chosen(annotations, raw)
        scalars = len(annotations) > 1 and not any(_is_model(a) for a in annotations)
        is_tag = isinstance(key, str) and (scalars or (len(_names(annotations)) > 1 and all(a in annotations for a in chosen)))
        if is_tag:
            annotations = (
                chosen if any(_is_model(a) for a in chosen) else [a for a in annotations if get_origin(a) is list] or annotations[:1]
            )
            continue
        yield key
        annotations, raw = [inner for a in chosen for inner in _below(a, key)], _child(raw, key)
    if kind.startswith("union_tag") or kind == EXTENSION:
        yield "name"


def _explain(path: Path, kind: str, message: str, raw: Any, report: Report) -> None:
    """Add the problem at `path`; `kind` and `message` are pydantic's."""
    parents, value = models_at(path[:-1], raw), raw
    for key in path:
        value = _child(value, key)
    last = path[-1] if path else ""
    if kind == "extra_forbidden":
        report.fail(path, "unknown key" + _elsewhere(str(last), path[:-1], parents), "unknown")
        return
    if kind in (EXTENSION, "value_error", "assertion_error"):  # the latter from validators of the user's models
        report.fail(path, message)
        return
    allowed = describe_at(path, raw)
    if kind in ("missing", "union_tag_not_found"):
        report.fail(path, f"missing; must be {allowed}", "missing")
    else:
        hint = nearest(value, _choices(path, parents)) if isinstance(value, str) else ""
        report.fail(path, f"must be {allowed}, not {show(value)}{hint}")


def _choices(path: Path, parents: list[Any]) -> list[str]:
    """Return the strings allowed at a path."""
    annotations = [inner for parent in parents for inner in _below(parent, path[-1])] if path else []
    return [word for a in annotations if get_origin(a) is Literal for word in get_args(a) if isinstance(word, str)]


def _elsewhere(key: str, section: Path, parents: list[type[BaseModel]]) -> str:
    """Return a hint for an unknown key: the nearest key here, or the section that has it."""
    near = nearest(key, [name for parent in parents for name in parent.model_fields])
    others = (place for place, words in SECTION_KEYS.items() if place != section and key in words)
    return near or next((f"; it belongs in {show_path(place)}" for place in others), "")


def describe_at(path: Path, raw: Any) -> str:
    """Describe what is allowed at `path`."""
    parents = models_at(path[:-1], raw)
    if path and path[-1] == "name" and len(names := _names(parents)) > 1:
        return _one_of(names) + (', or "package.module:Class"' if issubclass(parents[0], Component) else "")
    if path and isinstance(path[-1], str):
        fields = [parent.model_fields[path[-1]] for parent in parents if path[-1] in parent.model_fields]
        return describe(fields[0].annotation, fields[0].metadata) if fields else "an object"
    if path and (parent := describe_item(path, raw)):
        return parent
    return "an object"


def describe_item(path: Path, raw: Any) -> str:
    """Describe what is allowed as an item of the list at `path` without its last indices."""
    depth = next((n for n in range(1, len(path) + 1) if not isinstance(path[-n], int)), 0)
    key = path[-depth] if depth else None
    annotations: list[Any] = []
    if isinstance(key, str):
        annotations = [parent.model_fields[key].annotation for parent in models_at(path[:-depth], raw) if key in parent.model_fields]
    for _ in range(depth - 1):
        lists = [a for outer in annotations for a in members(outer) if get_origin(a) is list]
        annotations = [get_args(a)[0] for a in lists]
    return describe(annotations[0]) if annotations else ""


def describe(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """Describe an annotation: "a number from 0 to 1"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0], [part for extra in args[1:] for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])])
    if origin in (Union, types.UnionType):
        kinds = list(dict.fromkeys(describe(arg) for arg in args if arg is not type(None)))
        return " or ".join(kinds)
    if origin is Literal:
        return _one_of(list(args))
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    if annotation is str:
        return '"package.module:Class"' if any(getattr(m, "pattern", None) for m in metadata) else "a string"
    if origin is list:
        return f"a list of {_length(metadata)}" + (f", each {describe(args[0])}" if args and args[0] is not Any else "")
    return "an object"


def _one_of(values: list[Any]) -> str:
    words = [f"'{v}'" if isinstance(v, str) else show(v) for v in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> str:
    low = next((m.ge for m in metadata if isinstance(m, Ge)), None)
    high = next((m.le for m in metadata if isinstance(m, Le)), None)
    if low is not None and high is not None:
        return f" from {low} to {high}"
    above = next((m.gt for m in metadata if isinstance(m, Gt)), None)
    below = next((m.lt for m in metadata if isinstance(m, Lt)), None)
    bounds = (("≥", low), (">", above), ("≤", high), ("<", below))
    words = [f"{sign} {bound}" for sign, bound in bounds if bound is not None and bound != 2**63]
    return " " + " and ".join(words) if words else ""


def _length(metadata: list[Any] | tuple[Any, ...]) -> str:
    least = next((m.min_length for m in metadata if isinstance(m, MinLen)), None)
    most = next((m.max_length for m in metadata if isinstance(m, MaxLen)), None)
    if least and most:
        return f"{least} to {most} items" if least != most else f"{least} items"
    return "items (not empty)" if least else "items"


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
