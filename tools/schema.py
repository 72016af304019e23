"""Generate the JSON Schema of spec files for editors, which tools/generate.py writes to spec.schema.json."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
from functools import cache
from typing import Any

from pydantic import BaseModel

from slm_lab.spec.models.base import PATTERN, SpecModel
from slm_lab.spec.models.search import DISTRIBUTIONS
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.models.study import StudySpec
from slm_lab.spec.rules import torch_check
from slm_lab.spec.rules.torch_check import INIT_FUNCTIONS, OPTIMIZERS, SCHEDULERS

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"

_ABSENT = {
    "description": "null: the same as absent; ${var}: filled in by --set var=value.",
    "anyOf": [{"type": "null"}, {"type": "string", "pattern": r"\$\{.+\}"}],
}

_STUDY = {
    "description": "A study: specs × envs × seeds that are run and compared together.",
    "type": "object",
    "properties": {"study": {"description": "What is run and how it is compared.", "$ref": "#/$defs/StudySpec"}},
    "required": ["study"],
    "additionalProperties": False,
}
_PATH = {"type": "string", "pattern": f"^{PATTERN}$"}
_EXTENSION = {
    "description": "Your own class by import path; its pydantic model checks the other keys.",
    "type": "object",
    "anyOf": [{"properties": {key: _PATH}, "required": [key]} for key in ("name", "type")],
}

_NAMES = {"OptimSpec": [*OPTIMIZERS, "Lookahead"], "LRSchedulerSpec": SCHEDULERS, "LossSpec": torch_check.LOSSES}
"""Model → allowed names."""
_WORDS = {"init_fn": INIT_FUNCTIONS}
"""Key → allowed values."""


def json_schema() -> dict[str, Any]:
    """Return the schema of a spec file, which is an object of named specs.

    The schema is less strict than the loader: it allows null, ${var} and the keys of user classes.
    """
    root = Spec.model_json_schema()
    definitions: dict[str, Any] = root.pop("$defs")
    del root["properties"]["name"]
    root["required"].remove("name")
    definitions["Spec"] = root
    study = StudySpec.model_json_schema()
    definitions |= {**study.pop("$defs"), "StudySpec": study}
    definitions["StudyEnvs"] = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/StudyEnv"}]}}
    study["properties"]["envs"] = {"$ref": "#/$defs/StudyEnvs"}
    models = {model.__name__: model for model in _models(SpecModel)}
    for name, definition in definitions.items():
        if name not in models:
            continue
        _finish(name, definition, models[name])
    root["properties"]["spec_params"] = {
        "type": "object",
        "description": "{var: [values]}: one spec for each combination.",
        "additionalProperties": {"type": "array"},
    }
    for key in ("algorithm", "memory", "net", "critic_net"):
        next(kind for kind in definitions["AgentSpec"]["properties"][key]["anyOf"] if "oneOf" in kind)["oneOf"].append(
            {"$ref": "#/$defs/Extension"}
        )
    root["properties"]["search"]["description"] += f" Distributions: {', '.join(DISTRIBUTIONS)}."
    return {
        "$schema": SCHEMA_ID,
        "title": "SLM Lab spec file",
        "description": "Named specs. Names that begin with _ or $ are not specs.",
        "type": "object",
        "properties": {"$schema": {"type": "string"}},
        "patternProperties": {"^[^_$]": {"anyOf": [{"$ref": "#/$defs/Spec"}, {"$ref": "#/$defs/Study"}]}},
        "$defs": {**dict(sorted(definitions.items())), "Study": _STUDY, "Absent": _ABSENT, "Extension": _EXTENSION},
    }


def text() -> str:
    """Return the text of the shipped file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [model, *(below for sub in model.__subclasses__() for below in _models(sub))]


def _finish(name: str, definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Complete the schema of a model: add descriptions of keys, null and ${var}, names in torch, and `type` for nets."""
    descriptions = key_descriptions(model)
    if docstring := inspect.getdoc(model):
        definition["description"] = docstring
    for key, schema in definition.get("properties", {}).items():
        extra = {word: schema.pop(word) for word in ("default", "title") if word in schema}
        choices = _NAMES.get(name) if key == "name" else _WORDS.get(key)
        if choices is not None:
            schema = {"enum": sorted(choices)}
        if "const" not in schema:
            kinds = [inner for inner in schema.get("anyOf", [schema]) if inner != {"type": "null"}]
            schema = {"anyOf": [*kinds, {"$ref": "#/$defs/Absent"}]}
        extra = {word: value for word, value in extra.items() if word == "default" and value is not None}
        definition["properties"][key] = {"description": descriptions.get(key, ""), **schema, **extra}
        if not descriptions.get(key):
            del definition["properties"][key]["description"]
    if name.endswith("NetSpec"):
        definition["properties"]["type"] = {**definition["properties"]["name"], "description": "Network class; the same as `name`."}
        definition["required"].remove("name")
        definition["anyOf"] = [{"required": ["type"]}, {"required": ["name"]}]
    if not definition.get("required", True):
        del definition["required"]


def key_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return {key: docstring} for a model and its bases.

    The docstrings are parsed from the source code. Parsing takes 0.3 s, which would be too long at import.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings(base)
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return {name: syntax tree} of the classes of a module.

    The module is parsed only once; inspect.getsource would parse the module for each class.
    """
    return {node.name: node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)}


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    found = {}
    for key, after in itertools.pairwise(_classes(model.__module__)[model.__name__].body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(text, str):
            found[key.target.id] = inspect.cleandoc(text)
    return found
