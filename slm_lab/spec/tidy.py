"""Remove nulls and keys of other components from a raw spec."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.report import Path, Report
from slm_lab.spec.validate import SECTION_KEYS, models_at

_FREE = frozenset({"arc", "actor_arc", "critic_arc", "run", "search"})
"""Keys with free-form values, in which null is a value."""

_LATER: dict[Path, frozenset[str]] = {
    ("env",): frozenset({"device"}),
}
"""Keys of published specs that this version does not support."""


def drop_nulls(node: dict[str, Any], path: Path = ()) -> None:
    """Remove keys whose value is null, in place. Of an env's constructor arguments only the first level is searched."""
    for key in [key for key, value in node.items() if value is None]:
        del node[key]
    for key, value in node.items():
        if isinstance(value, dict) and key not in _FREE and path != ("env",):
            drop_nulls(value, (*path, key))


def drop_ineffective(raw: dict[str, Any], report: Report) -> None:
    """Remove, in place and with a note, each key that belongs to another component of its section."""
    for place, keys in SECTION_KEYS.items():
        later = _LATER.get(place, frozenset())
        section: Any = raw
        for key in place:
            section = section.get(str(key)) if isinstance(section, dict) else None
        models = models_at(place, raw)
        if not isinstance(section, dict) or len(models) != 1:
            continue
        for key in [key for key in section if key not in models[0].model_fields and key in later | keys]:
            del section[key]
            report.note((*place, key), f"has no effect {_where(place, section)}; ignored")


def _where(place: Path, section: dict[str, Any]) -> str:
    name = section.get("name")
    return f"in {name}" if len(place) > 1 and isinstance(name, str) else "in this version"


def is_ineffective(path: Path, raw: dict[str, Any]) -> bool:
    """Return whether `path` is a key of another component of its section than the one the spec names."""
    models = models_at(path[:-1], raw)
    known = _LATER.get(path[:-1], frozenset()) | SECTION_KEYS.get(path[:-1], frozenset())
    return len(models) == 1 and path[-1] not in models[0].model_fields and path[-1] in known
