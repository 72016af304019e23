"""Validate a raw spec with the pydantic model Spec, and describe each problem.

A problem contains the path of the key, the given value, the allowed values, and the most similar valid key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import ErrorDetails

from slm_lab.spec.compat.migrate import OTHER_ALGORITHMS, OTHER_NAMES
from slm_lab.spec.models.base import ERROR as EXTENSION
from slm_lab.spec.models.base import OUT_OF_RANGE, Component, is_extension
from slm_lab.spec.models.spec import SECTION_KEYS, Spec, annotations_below, chosen_models, component_names, is_model, models_at
from slm_lab.spec.report import KeyPath, Report, format_json, nearest_hint, show_path, value_at


def validate(raw: dict[str, Any], report: Report) -> Spec | None:
    """Return the Spec of a raw spec in the current format. If the raw spec is invalid, add the problems to `report` and return None."""
    try:
        return Spec.model_validate(raw)
    except ValidationError as error:
        add_validation_problems(error, raw, report)
    return None


def add_validation_problems(error: ValidationError, raw: Any, report: Report, root: type[BaseModel] = Spec) -> None:
    """Add a problem to `report` for each error in a pydantic ValidationError.

    Args: root: the pydantic model that has validated `raw`.
    """
    found: dict[KeyPath, tuple[str, str]] = {}
    for item in _relevant_errors(error):
        path = _error_path(item, raw, root)
        if found.get(path, ("", ""))[0] != OUT_OF_RANGE:  # the other errors of a union do not apply to a number
            found[path] = item["type"], item["msg"]
    for path, (kind, message) in found.items():
        # If both a list and one of its items are invalid, report only the item.
        if not any(len(other) > len(path) and other[: len(path)] == path for other in found):
            _add_validation_problem(path, kind, message, raw, report, root)


def invalid_paths(raw: dict[str, Any]) -> list[KeyPath]:
    """Return the paths of all invalid or missing keys of a raw spec."""
    try:
        Spec.model_validate(raw)
    except ValidationError as error:
        return [_error_path(item, raw) for item in _relevant_errors(error)]
    return []


def _relevant_errors(error: ValidationError) -> list[ErrorDetails]:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [item for item in found if item["type"] != "default_factory_not_called"]  # this error is a consequence of another error


def likely_names(raw: dict[str, Any], wrong: list[KeyPath]) -> dict[KeyPath, str]:
    """Return a dict that maps the path of each unknown name (such as the name of a net) to the most similar valid name.

    With a likely name, the other keys of the component can be checked. For a name "package.module:Class" that cannot be imported, the dict
    contains no likely name, because the keys of the class are unknown.

    Args: wrong: paths of the invalid and missing keys of `raw` (see `invalid_paths`).
    """
    likely = {}
    for path in wrong:
        section, models = value_at(raw, path[:-1]), models_at(path[:-1], raw)
        if (
            path[-1:] == ("name",)
            and isinstance(section, dict)
            and len(component_names(models)) > 1
            and not is_extension(section.get("name"))
        ):
            likely[path] = _likely_name(section, models)
    return likely


def _likely_name(section: dict[str, Any], models: list[type[BaseModel]]) -> str:
    """Return the name in `models` that is most similar to the name in `section`. If no name is similar, return the name of the model whose
    keys fit the section best."""
    near = difflib.get_close_matches(str(section.get("name"))[:80], component_names(models), n=1)

    def fit(model: type[BaseModel]) -> int:
        lacking = [key for key, field in model.model_fields.items() if field.is_required() and key not in section]
        return len(model.model_fields.keys() & section.keys()) - len(lacking)

    return near[0] if near else component_names([max(models, key=fit)])[0]


def _error_path(item: Any, raw: Any, root: type[BaseModel] = Spec) -> KeyPath:
    """Return the path of a pydantic error's key in `raw`, which is the error's `loc` without the names of union members."""
    return tuple(_path_without_tags(item["loc"], item["type"], raw, root))


def _path_without_tags(loc: KeyPath, kind: str, raw: Any, root: type[BaseModel]) -> Iterator[str | int]:
    annotations: list[Any] = [root]
    for key in loc:
        chosen = chosen_models(annotations, raw)
        scalars = len(annotations) > 1 and not any(is_model(a) for a in annotations)
        is_tag = isinstance(key, str) and (scalars or (len(component_names(annotations)) > 1 and all(a in annotations for a in chosen)))
        if is_tag:
            annotations = (
                chosen if any(is_model(a) for a in chosen) else [a for a in annotations if get_origin(a) is list] or annotations[:1]
            )
            continue
        yield key
        annotations, raw = [inner for a in chosen for inner in annotations_below(a, key)], value_at(raw, (key,))
    if kind.startswith("union_tag") or kind == EXTENSION:
        yield "name"


def _add_validation_problem(path: KeyPath, kind: str, message: str, raw: Any, report: Report, root: type[BaseModel]) -> None:
    """Add a problem with the key at `path` to `report`.

    Args: kind, message: type and message of the pydantic error.
    """
    parents, value = models_at(path[:-1], raw, root), value_at(raw, path)
    last = path[-1] if path else ""
    if kind == "extra_forbidden":
        report.add_problem(path, "unknown key" + _unknown_key_hint(str(last), path[:-1], parents), "unknown")
        return
    if kind in (EXTENSION, OUT_OF_RANGE, "value_error", "assertion_error"):  # assertion errors come from validators of the user's models
        report.add_problem(path, message)
        return
    allowed = describe_at(path, raw, root)
    if kind in ("missing", "union_tag_not_found"):
        report.add_problem(path, f"missing; must be {allowed}", "missing")
    else:
        hint = nearest_hint(value, _allowed_strings(path, parents)) if isinstance(value, str) else ""
        if path == ("agent", "algorithm", "name") and (other := OTHER_ALGORITHMS.get(str(value).upper().replace("-", ""))):
            hint = f"; slm_lab calls it {other}"
        report.add_problem(path, f"must be {allowed}, not {format_json(value)}{hint}")


def _allowed_strings(path: KeyPath, parents: list[Any]) -> list[str]:
    """Return the strings that the pydantic models `parents` allow as values of the key at `path`."""
    annotations = [inner for parent in parents for inner in annotations_below(parent, path[-1])] if path else []
    return [word for a in annotations if get_origin(a) is Literal for word in get_args(a) if isinstance(word, str)]


def _unknown_key_hint(key: str, section: KeyPath, parents: list[type[BaseModel]]) -> str:
    """Return a hint for an unknown key of a section.

    If the key belongs to another library, the hint is the name of the key in this package. Otherwise, the hint is the most similar key of
    the section or, if no key is similar, the section to which the key belongs. If there is no such section, the hint lists the keys of the
    section.
    """
    if key in OTHER_NAMES:
        return f"; slm_lab calls it {OTHER_NAMES[key]}"
    names = dict.fromkeys(name for parent in parents for name in parent.model_fields)
    allowed = [name for name in names if (*section, name) != ("meta", "run")]  # only slm_lab writes meta.run
    others = (location for location, words in SECTION_KEYS.items() if location != section and key in words)
    listed = f"; allowed: {', '.join(allowed)}" if len(parents) == 1 else ""
    return nearest_hint(key, allowed) or next((f"; it belongs in {show_path(location)}" for location in others), listed)


def describe_at(path: KeyPath, raw: Any, root: type[BaseModel] = Spec) -> str:
    """Return a description of the values that the key at `path` may have."""
    parents = models_at(path[:-1], raw, root)
    if path and path[-1] == "name" and len(names := component_names(parents)) > 1:
        return _one_of(names) + (', or "package.module:Class"' if issubclass(parents[0], Component) else "")
    end = next((n for n in range(len(path), 0, -1) if isinstance(path[n - 1], str)), 0)
    """Length of the path up to the path's last key, which list indices may follow."""
    key = path[end - 1] if end else ""
    models = models_at(path[: end - 1], raw, root) if end else []
    schema: dict[str, Any] = next((_schema(model)[key] for model in models if key in model.model_fields), {})
    for _ in path[end:]:
        schema = next((kind["items"] for kind in schema.get("anyOf", [schema]) if "items" in kind), {})
    return describe_schema(schema)


@cache
def _schema(model: type[BaseModel]) -> dict[str | int, Any]:
    """Return a dict from the keys of a pydantic model to the JSON Schemas of their values."""
    try:
        return dict(model.model_json_schema()["properties"])
    except PydanticInvalidForJsonSchema:  # a user's model can have types without JSON Schema
        return {key: {} for key in model.model_fields}


def describe_schema(schema: dict[str, Any]) -> str:
    """Return a description of the values that a JSON Schema allows, such as "a number from 0 to 1"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(describe_schema(kind) for kind in schema["anyOf"] if kind != {"type": "null"}))
    if "enum" in schema or "const" in schema:
        return _one_of(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return "a whole number" + _describe_bounds(schema)
        case "number":
            return "a number" + _describe_bounds(schema)
        case "string":
            return '"package.module:Class"' if "pattern" in schema else "a string"
        case "array":
            return f"a list of {_describe_length(schema)}" + (f", each {describe_schema(schema['items'])}" if schema.get("items") else "")
    return "an object" + (" (not empty)" if schema.get("minProperties") else "")


def _one_of(values: list[Any]) -> str:
    words = [f"'{v}'" if isinstance(v, str) else format_json(v) for v in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _describe_bounds(schema: dict[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    words = [f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema and schema[key] != 2**63]
    return " " + " and ".join(words) if words else ""


def _describe_length(schema: dict[str, Any]) -> str:
    least, most = schema.get("minItems"), schema.get("maxItems")
    if least and most:
        return f"{least} to {most} items" if least != most else f"{least} items"
    return "items (not empty)" if least else "items"
