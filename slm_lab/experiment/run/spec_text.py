"""The text of a spec file with a comment on each key."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from slm_lab.spec.load.files import SPEC_FOLDER
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import Spec

_COMMENT_LETTERS = 110
"""Maximum length of a comment."""


def spec_text(spec: Spec, command: str) -> str:
    """Return a spec file's content: the keys that are given or recommended, each with a comment, and the command that runs it."""
    agent = spec.agent
    first = {key: value for key in ("gamma", "lam") if (value := getattr(agent.algorithm, key, None)) is not None}
    sections: dict[str, tuple[BaseModel, dict[str, Any]]] = {"algorithm": (agent.algorithm, _given(agent.algorithm, first))}
    if agent.algorithm.learns:
        sections["memory"] = (agent.memory, _given(agent.memory))
    sections |= {key: (net, _given(net)) for key in ("net", "critic_net") if (net := getattr(agent, key)) is not None}
    lines = [
        f"// {spec.name}: {agent.algorithm.name} on {spec.env.name}. Keys that are absent have their defaults.",
        "{",
        f"  {_json(spec.name)}: {{",
        '    "agent": {',
        *_entry(agent, "name", agent.name, 6),
    ]
    for key, (model, values) in sections.items():
        lines += [f"      // {_description(type(agent), key)}", f'      "{key}": {{', *_entries(model, values, 8), "      },"]
    lines += ["    },", f"    // {_description(Spec, 'env')}", '    "env": {', *_entries(spec.env, _given(spec.env), 6), "    },"]
    lines += [f"    // {_description(Spec, 'meta')}", '    "meta": {', *_entries(spec.meta, _given(spec.meta), 6), "    }", "  }", "}"]
    return "\n".join([*_without_last_commas(lines), f"// Run it: {command}"]) + "\n"


def _given(model: BaseModel, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keys that are given, the name and `more` first."""
    given = model.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    head = {key: given[key] for key in ("name",) if key in given}
    return {**head, **{key: given.get(key, value) for key, value in (more or {}).items()}, **given}


def _entries(model: BaseModel, values: Mapping[str, Any], indent: int) -> Iterator[str]:
    for key, value in values.items():
        yield from _entry(model, key, value, indent)


def _entry(model: BaseModel, key: str, value: Any, indent: int) -> Iterator[str]:
    """Yield the comment and the line of a key."""
    space = " " * indent
    if text := _description(type(model), key):
        yield f"{space}// {text}"
    yield f"{space}{_json(key)}: {_json(value)},"


def _without_last_commas(lines: list[str]) -> list[str]:
    """Return the lines without the comma of the last entry of each object, for readers of strict JSON beside the comments."""
    closing = [*(line.strip() for line in lines[1:]), ""]
    return [line.removesuffix(",") if after.startswith("}") else line for line, after in zip(lines, closing, strict=True)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _description(model: type[BaseModel], key: str) -> str:
    """Return one line on a key of a model: the first sentence of its description, for the name of a component that of its model."""
    if key == "name" and "algorithm" not in model.model_fields and model is not EnvSpec:
        text = inspect.getdoc(model) or ""
    else:
        properties = _schema().get(model.__name__, {}).get("properties", {})
        field = model.model_fields.get(key)
        text = properties.get(key, {}).get("description") or (field.description if field else None) or ""
    text = " ".join(str(text).split())
    sentence = re.split(r"(?<![A-Z])\. |; ", text)[0].rstrip(".")
    if sentence.count("(") > sentence.count(")"):
        sentence = sentence[: sentence.rindex("(")].rstrip()
    return textwrap.shorten(sentence, _COMMENT_LETTERS, placeholder=" …")


@cache
def _schema() -> dict[str, Any]:
    """Return model → JSON Schema, whose descriptions are those of the reference."""
    schema: dict[str, Any] = json.loads((SPEC_FOLDER / "spec.schema.json").read_text(encoding="utf-8"))["$defs"]
    return schema
