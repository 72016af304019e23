"""Numbers of an env's `info`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np


def picked_numbers(info: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Return the finite numbers that the names (keys, or dotted paths) find; True is 1.0. Names that find none are left out."""
    found = {}
    for name in names:
        value = info[name] if name in info else _at(info, name)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        if isinstance(value, bool | int | float | np.bool_ | np.number) and isfinite(number := float(value)):
            found[name] = number
    return found


def row_info(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one env's entries of a vector env's infos: {key: values [N], "_key": bool [N], which envs have it}."""
    found = {}
    for key, values in infos.items():
        present = infos.get(f"_{key}")
        if key[:1] == "_" and key[1:] in infos:
            continue
        if isinstance(values, Mapping):
            found[key] = row_info(values, row)
        elif isinstance(values, np.ndarray | list | tuple) and len(values) > row and (present is None or present[row]):
            found[key] = values[row]
    return found


def _at(info: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(info, Mapping) or key not in info:
            return None
        info = info[key]
    return info
