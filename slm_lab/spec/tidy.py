"""Remove nulls and keys of other components from a raw spec."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.report import Path, Report, value_at
from slm_lab.spec.validate import SECTION_KEYS, models_at

_FREE = frozenset({"arc", "actor_arc", "critic_arc", "run", "search"})
"""Keys with free-form values, in which null is a value."""

_LATER = frozenset({"device"})
"""Keys of env in published specs that this version does not support."""


def drop_nulls(node: dict[str, Any], path: Path = ()) -> None:
    """Remove keys whose value is null, in place. Of an env's constructor arguments only the first level is searched."""
    for key in [key for key, value in node.items() if value is None]:
        del node[key]
    for key, value in node.items():
        if isinstance(value, dict) and key not in _FREE and path != ("env",):
            drop_nulls(value, (*path, key))


def drop_ineffective(raw: dict[str, Any], report: Report) -> None:
    """Remove, in place and with a note, each key that belongs to another component of its section; one given by --set is a problem."""
    for place in SECTION_KEYS:
        section = value_at(raw, place)
        if not isinstance(section, dict):
            continue
        foreign = _foreign_keys(place, raw)
        for key in [key for key in section if key in foreign]:
            del section[key]
            where = f"in {section['name']}" if len(place) > 1 and isinstance(section.get("name"), str) else "in this version"
            report.ineffective((*place, key), f"has no effect {where}; ignored")


def is_ineffective(path: Path, raw: dict[str, Any]) -> bool:
    """Return whether `path` is a key of another component of its section than the one the spec names."""
    return path[-1] in _foreign_keys(path[:-1], raw)


def _foreign_keys(place: Path, raw: dict[str, Any]) -> frozenset[str]:
    """Return the keys of a section that have no effect with the component that the spec names."""
    models = models_at(place, raw)
    known = SECTION_KEYS.get(place, frozenset()) | (_LATER if place == ("env",) else frozenset())
    return known - models[0].model_fields.keys() if len(models) == 1 else frozenset()
