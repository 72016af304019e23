"""Suggestions for a --set argument that fills no variable."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

from slm_lab.spec.compat.migrate import migrate
from slm_lab.spec.compat.other_names import OTHER_NAMES
from slm_lab.spec.models.sections import models_at
from slm_lab.spec.report import Path, Report, closest, show_path


def suggest_argument(name: str, value: Any, unfilled: Iterable[str], entries: Iterable[Any]) -> str:
    """Return a hint for `--set name=value`: an unfilled variable, or paths in raw specs that end in that key or a near one, if any."""
    text = value if isinstance(value, str) else json.dumps(value)
    variable = closest(name, unfilled)
    if variable is not None:
        return f"; did you mean {variable}={text}?"
    found = dict.fromkeys(path for raw in entries if isinstance(raw, dict) for path in _paths(raw))
    keys = {str(path[-1]) for path, _, _ in found}
    if name in OTHER_NAMES and name not in keys:
        return f"; slm_lab calls it {OTHER_NAMES[name]}"
    key = closest(name, keys, cutoff=0.75)
    ends = [path for path in found if path[0][-1] == key]
    ends = [path for path in ends if path[1]] or ends  # prefer keys that are in the file
    words = []
    for path, _, is_section in ends:
        if is_section and isinstance(value, str):
            words.append(f"{show_path(path)}.name={text}")
        elif len(path) > 1:  # a single word is always the name of a variable
            words.append(f"{show_path(path)}={text}")
    if not words:
        return "; a name without a dot is a variable of the spec, a key is named by its path (env.max_frame)"
    return f"; did you mean {' or '.join(words[:3])}?"


def _paths(raw: dict[str, Any]) -> Iterator[tuple[Path, bool, bool]]:
    """Yield every path to a key of a raw spec, breadth first: path, whether it is present, whether it is a section with a name."""
    raw = copy.deepcopy(raw)
    migrate(raw, Report())
    places: list[tuple[Path, Any]] = [((), raw)]
    for place, section in places:
        there = section if isinstance(section, dict) else {}
        fields = [key for model in models_at(place, raw) for key in model.model_fields if (*place, key) != ("name",)]
        for key in dict.fromkeys([*there, *fields]):
            below = models_at((*place, key), raw)
            yield (*place, key), key in there, any("name" in model.model_fields for model in below)
            if below:
                places.append(((*place, key), there.get(key)))
