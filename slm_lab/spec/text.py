"""Text of a spec file → plain JSON values: JSON with comments and trailing commas, or YAML. Raises SpecError only."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path as FilePath
from typing import Any

from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.report import Path, show_path

MAX_DEPTH = 64
"""Deeper nesting is no spec (and would overflow the stack)."""
MAX_NODES = 1_000_000
"""A larger tree is no spec (YAML anchors can make one from a few lines)."""

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_SKIPPED = re.compile(rf"{_STRING}|//[^\n]*|/\*(?:[^*]|\*(?!/))*(?P<closed>\*/)?|(?P<variable>\$\{{[^${{}}\n]*\}})")
_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_PART = re.compile(rf"(?P<string>{_STRING})|(?P<mark>[{{}}\[\]:,])|(?P<constant>-?(?:NaN|Infinity))")


class _Duplicate(ValueError):
    """A key stands twice in one object."""


class _Constant(ValueError):
    """NaN or Infinity."""


def read(path: FilePath) -> Any:
    """The value that a spec file holds.

    Raises: SpecError for a file that cannot be read, broken text (line and column), a duplicate key, NaN.
    """
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(source, [Problem("", f"cannot be read: {reason}")]) from None
    return parse_yaml(text, source) if path.suffix.lower() in (".yaml", ".yml") else parse_json(text, source)


def parse_json(text: str, source: str = "spec") -> Any:
    """JSON with // and /* */ comments, trailing commas, and ${var} with or without quotes around it."""
    clean, quoted = _clean(text, source)
    try:
        value = json.loads(clean, object_pairs_hook=_pairs, parse_constant=_constant)
    except (_Duplicate, _Constant) as error:
        position = _find_duplicate(clean) if isinstance(error, _Duplicate) else _find_constant(clean)
        raise _at(text, _original(position, quoted), str(error), source) from None
    except json.JSONDecodeError as error:
        raise _at(text, _original(error.pos, quoted), error.msg[0].lower() + error.msg[1:], source) from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else "a number is too long"
        raise SpecError(source, [Problem("", reason)]) from None
    return plain(value, source)


def parse_yaml(text: str, source: str = "spec") -> Any:
    """YAML with anchors and merges; scalars as in YAML 1.2 (1e-3 is a number, `no` a string); duplicate keys refused."""
    import yaml  # only who writes YAML pays for it

    from slm_lab.spec.yaml_loader import load

    try:
        return plain(load(text), source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(source, [Problem("", f"{place}{error.problem or error.context}")]) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise SpecError(source, [Problem("", reason)]) from None


def plain(value: Any, source: str) -> Any:
    """A copy of `value` as a tree of plain JSON values of its own.

    Raises: SpecError for a key that is no string, a number that is not finite, a tree too deep or too large.
    """
    problems: list[Problem] = []
    nodes = 0

    def copy(node: Any, path: Path) -> Any:
        nonlocal nodes
        nodes += 1
        if len(path) > MAX_DEPTH or nodes > MAX_NODES:
            raise SpecError(source, [Problem(show_path(path[:4]), "nested too deep" if len(path) > MAX_DEPTH else "too large")])
        if isinstance(node, dict):
            problems.extend(Problem(show_path(path), f"keys must be strings, not {key!r}") for key in node if not isinstance(key, str))
            return {key: copy(inner, (*path, str(key))) for key, inner in node.items()}
        if isinstance(node, list):
            return [copy(inner, (*path, index)) for index, inner in enumerate(node)]
        if isinstance(node, float) and not math.isfinite(node):
            problems.append(Problem(show_path(path), "must be a finite number"))
        elif node is not None and not isinstance(node, (str, int, float)):
            problems.append(Problem(show_path(path), f"a {type(node).__name__} is no JSON value"))
        return node

    tree = copy(value, ())
    if problems:
        raise SpecError(source, problems)
    return tree


def _clean(text: str, source: str) -> tuple[str, list[int]]:
    """Text as strict JSON: comments and trailing commas blanked, so that positions stay; bare ${var} in quotes, whose places come along."""
    quoted: list[int] = []

    def skip(match: re.Match[str]) -> str:
        part = match.group()
        if part[0] == '"':
            return part
        if part[0] == "$":
            quoted.append(match.start())
            quoted.append(match.end())
            return f'"{part}"'
        if part.startswith("/*") and not match["closed"]:
            raise _at(text, match.start(), "a comment that does not end", source)
        return re.sub(r"[^\n]", " ", part)

    def comma(match: re.Match[str]) -> str:
        if match.group() != ",":
            return match.group()
        before = match.start() - 1
        while before >= 0 and stripped[before].isspace():
            before -= 1
        return "," if before < 0 or stripped[before] in "[{,:" else " "

    stripped = _SKIPPED.sub(skip, text)
    return _COMMA.sub(comma, stripped), quoted


def _original(position: int, quoted: list[int]) -> int:
    """A position in the cleaned text as one in the user's: without the quotes that were put in before it."""
    for count, place in enumerate(quoted):
        if position <= place + count:
            return max(position - count, 0)
    return position - len(quoted)


def _at(text: str, position: int, message: str, source: str) -> SpecError:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return SpecError(source, [Problem("", f"line {line}, column {column}: {message}")])


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add gives None
        raise _Duplicate(f"the key '{twice}' stands twice in one object")
    return result


def _constant(name: str) -> Any:
    raise _Constant(f"{name} is no number in JSON")


def _find_duplicate(text: str) -> int:
    """Where the second of two equal keys stands: the first such object to close, as json.loads finds it."""
    stack: list[dict[str, int]] = []
    twice: list[int] = []
    string: tuple[str, int] = ("", 0)
    for match in _PART.finditer(text):
        mark = match["mark"]
        if match["string"]:
            string = (json.loads(match["string"]), match.start())
        elif mark in ("{", "["):
            stack.append({})
            twice.append(-1)
        elif mark in ("}", "]") and stack:
            stack.pop()
            if (found := twice.pop()) >= 0:
                return found
        elif mark == ":" and stack:
            if string[0] in stack[-1] and twice[-1] < 0:
                twice[-1] = string[1]
            stack[-1][string[0]] = string[1]
    return 0


def _find_constant(text: str) -> int:
    return next((match.start() for match in _PART.finditer(text) if match["constant"]), 0)
