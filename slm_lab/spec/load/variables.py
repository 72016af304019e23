"""`${var}` and --set: fill variables of a spec and override its keys."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slm_lab.spec.load.text import plain
from slm_lab.spec.report import Path, Problem, Report, SpecError, mark, show, show_path, to_path, value_at

_VARIABLE = re.compile(r"\$\{([^${}]*)\}")
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Sets:
    """The parsed --set arguments."""

    variables: dict[str, Any] = field(default_factory=dict)
    """Values of ${var}, by name."""
    overrides: dict[Path, Any] = field(default_factory=dict)
    """Values of keys, by path."""


def parse_sets(sets: Sequence[str]) -> Sets:
    """Parse --set arguments into variables (var=value) and overrides (path.to.key=value).

    Raises: SpecError for an argument of another form.
    """
    parsed, problems = Sets(), []
    for text in sets:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not to_path(name):
            problems.append(Problem("", f"must be name=value or path.to.key=value, not {show(text)}"))
        elif "." in name or "[" in name:
            parsed.overrides[to_path(name)] = read_value(value)
        else:
            parsed.variables[name] = read_value(value)
    if problems:
        raise SpecError("--set", problems)
    return parsed


def mark_sets(error: SpecError, source: str, sets: Sequence[str]) -> SpecError:
    """Return an error of building a spec in the form of load errors: with `source`, and "(from --set)" on keys of `sets`."""
    given = parse_sets(sets).overrides
    problems = []
    for problem in error.problems:
        place = to_path(problem.path)
        named = mark(problem.message, place[1:], given)  # with several specs, paths begin with the name of the spec
        problems.append(replace(problem, message=mark(named, place, given)))
    return SpecError(source, problems)


def read_value(text: str) -> Any:
    """Parse a value of the command line: JSON, True, False or None, else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return plain(value, f"--set {text[:40]}")


def combinations(params: Any, given: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return the variables of each combination of `spec_params: {var: [values]}`; --set takes precedence."""
    if not isinstance(params, dict) or not all(isinstance(values, list) and values for values in params.values()):
        report.fail(("spec_params",), f"must be an object of lists (not empty), not {show(params)}")
        return []
    lists = {name: values for name, values in params.items() if name not in given}
    count = 1
    for values in lists.values():
        count *= len(values)
    if count > 10_000:
        report.fail(("spec_params",), f"expands to {count} specs; at most 10000 are allowed")
        return []
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def fill(node: Any, variables: Mapping[str, Any], used: dict[str, list[Path]], report: Report, path: Path = ()) -> Any:
    """Return `node` with each ${var} replaced: by the value itself if it is the whole string, else by its text.

    Add the variables found to `used`, with their paths; a variable without a value is a problem at each path.
    """
    if isinstance(node, dict):
        filled = {}
        for key, inner in node.items():
            name = str(fill(key, variables, used, report, (*path, key))) if "${" in key else key
            if name in filled:
                report.fail((*path, key), f"duplicate key '{name}' after filling variables")
            filled[name] = fill(inner, variables, used, report, (*path, key))
        return filled
    if isinstance(node, list):
        return [fill(inner, variables, used, report, (*path, index)) for index, inner in enumerate(node)]
    return _fill_text(node, variables, used, report, path) if isinstance(node, str) and "${" in node else node


def _fill_text(text: str, variables: Mapping[str, Any], used: dict[str, list[Path]], report: Report, path: Path) -> Any:
    names = _VARIABLE.findall(text)
    for name in names:
        used.setdefault(name, []).append(path)
        if name not in variables:
            report.fail(path, f"${{{name}}} has no value; use --set {name}=…", "missing")
    if any(name not in variables for name in names):
        return text
    whole = _VARIABLE.fullmatch(text)
    if whole:
        return variables[whole[1]]
    return _VARIABLE.sub(lambda match: _as_text(variables[match[1]]), text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def override(raw: dict[str, Any], path: Path, value: Any, report: Report, source: str = "--set ") -> None:
    """Set the key at `path`; create missing sections on the way (validation checks them). `source` names the key's origin in problems."""
    if len(path) > 1 and path[0] in ("agent", "env") and path[1] in (0, "0"):
        path = (path[0], *path[2:])  # the v4 form had a list here
    new = next((path[:depth] for depth in range(1, len(path)) if value_at(raw, path[:depth]) is None), path)
    report.comes_from_set(new)
    report.replaced.pop(path, None)
    node: Any = raw
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            index = int(key) if str(key).isdecimal() and len(str(key)) < 10 else -1
            if not 0 <= index < len(node):
                report.fail(path[: depth + 1], f"index out of range: the list has {len(node)} items ({source}{show_path(path)})")
                return
            node[index], node = (value if last else node[index]), node[index]
        elif isinstance(node, dict):
            key = str(key)
            if last:
                if path[:2] in (("agent", "net"), ("agent", "critic_net")) and key in ("name", "type"):
                    node.pop("type" if key == "name" else "name", None)  # two names of one key
                node[key] = value
            elif node.get(key) is None:
                node[key] = {}
            node = node[key]
        else:
            report.fail(path[:depth], f"is {show(node)}, which has no keys ({source}{show_path(path)})")
            return
