"""Generate the tables of docs/from_slm_lab.md: every key of SLM Lab v5.3, its default, and its equivalent in this program.

The content comes from tools/slm_lab_keys.py and the models. Each table is between the markers `<!-- keys: SECTION -->` and `<!-- end -->`;
the text around the tables is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slm_lab.spec.compat.migrate import DROPPED, RENAMED
from slm_lab.spec.report import show_path
from tools.slm_lab_keys import KEYS, NEEDED, NOTES, OLD, DefaultText
from tools.spec_reference import SECTIONS, default_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from_slm_lab.md"
MODELS: dict[str, dict[str, type[BaseModel]]] = {section.path: section.models for section in SECTIONS}
_TABLE = re.compile(r"(<!-- keys: (?P<section>[\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def text() -> str:
    """Return the page with up-to-date tables."""
    return _TABLE.sub(lambda match: f"{match[1]}{table(match['section'])}\n{match[3]}", PAGE.read_text(encoding="utf-8"))


def table(section: str) -> str:
    """Return the table of a section, or the table of old keys."""
    if section == "old":
        return "\n".join(["| key | in slm_lab |", "|---|---|", *_old()])
    head = "| key | default in SLM Lab | in slm_lab |" if "" in KEYS[section] else "| key | component | default in SLM Lab | in slm_lab |"
    return "\n".join([head, "|".join(["", *["---"] * (head.count("|") - 1), ""]), *_rows(section)])


def _old() -> Iterator[str]:
    for key, here in OLD.items():
        yield f"| `{key}` | {here} |"
    for old, new in RENAMED.items():
        yield f"| `{show_path(old)}` | `{show_path(new)}` |"
    for path, reason in DROPPED.items():
        yield f"| `{show_path(path)}` | no longer used: {reason} |"


def _rows(section: str) -> Iterator[str]:
    """Yield a row for each key, or several rows for a key whose default differs between components."""
    components = KEYS[section]
    for key in dict.fromkeys(key for keys in components.values() for key in keys):
        owners = [name for name, keys in components.items() if key in keys]
        groups: dict[tuple[str, str], list[str]] = {}
        for name in owners:
            groups.setdefault(_facts(section, name, key), []).append(name)
        for number, ((there, here), names) in enumerate(groups.items()):
            cells = [f"`{key}`", there, _cell(here, "" if number else NOTES.get((section, key), ""))]
            if "" not in components:
                cells.insert(1, "all" if len(names) == len(components) else ", ".join(names))
            yield f"| {' | '.join(cells)} |"


def _facts(section: str, name: str, key: str) -> tuple[str, str]:
    """Return (default of a key in SLM Lab, default of the key in this program, or "" if both defaults are equal)."""
    model, there = MODELS[section][name], KEYS[section][name][key]
    if there == NEEDED:
        here = default_of(model, key)
        return "required", "" if here == "required" else here
    if isinstance(there, DefaultText):
        return there.there, there.here
    if there is None:
        return "absent", "" if model.model_fields[key].default is None else default_of(model, key)
    return _literal(there), "" if model.model_fields[key].default == there else default_of(model, key)


def _literal(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(default: str, note: str) -> str:
    """Return a cell with the differences between this program and SLM Lab: first the default, then the other differences."""
    if not default and not note:
        return "same"
    words = {"": "", "absent by default": "may be absent"}.get(default, default)
    return f"{words[:1].upper() + words[1:]}{'. ' if words and note else '.' if words else ''}{note}"
