"""Parse the text of a spec file: JSON with comments and trailing commas, or YAML. Raises SpecError only."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path as FilePath
from typing import Any

from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.report import Path, show_path

MAX_DEPTH = 64
"""Maximum nesting."""
MAX_NODES = 1_000_000
"""Maximum size (YAML anchors can make huge trees from a few lines)."""

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_SKIPPED = re.compile(rf"{_STRING}|//[^\n]*|/\*(?:[^*]|\*(?!/))*(?P<closed>\*/)?|(?P<variable>\$\{{[^${{}}\n]*\}})")
_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_PART = re.compile(rf"(?P<string>{_STRING})|(?P<mark>[{{}}\[\]:,])|(?P<constant>-?(?:NaN|Infinity))")


class _Duplicate(ValueError):
    """A duplicate key in an object."""


class _Constant(ValueError):
    """NaN or Infinity."""


def read(path: FilePath) -> Any:
    """Return the content of a spec file.

    Raises: SpecError for an unreadable file, invalid text (with line and column), a duplicate key, NaN.
    """
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(source, [Problem("", f"cannot be read: {reason}")]) from None
    return parse_yaml(text, source) if path.suffix.lower() in (".yaml", ".yml") else parse_json(text, source)


def parse_json(text: str, source: str = "spec") -> Any:
    """Parse JSON with // and /* */ comments, trailing commas, and ${var} with or without quotes."""
    clean, quoted = _clean(text, source)
    try:
        value = json.loads(clean, object_pairs_hook=_pairs, parse_constant=_constant)
    except (_Duplicate, _Constant) as error:
        position = _find_duplicate(clean) if isinstance(error, _Duplicate) else _find_constant(clean)
        raise _at(text, _original(position, quoted), str(error), source) from None
    except json.JSONDecodeError as error:
        raise _at(text, _original(error.pos, quoted), error.msg[0].lower() + error.msg[1:], source) from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise SpecError(source, [Problem("", reason)]) from None
    return plain(value, source)


def parse_yaml(text: str, source: str = "spec") -> Any:
    """Parse YAML with anchors and merges, scalars as in YAML 1.2 (1e-3 is a number, `no` a string), no duplicate keys."""
    import yaml  # slow to import, and most specs are JSON

    from slm_lab.spec.yaml_loader import load

    try:
        return plain(load(text), source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(source, [Problem("", f"{place}{error.problem or error.context}")]) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise SpecError(source, [Problem("", reason)]) from None


def plain(value: Any, source: str) -> Any:
    """Return a deep copy of `value` as plain JSON values.

    Raises: SpecError for a key that is not a string, a number that is not finite, a tree that is too deep or too large.
    """
    problems: list[Problem] = []
    nodes = 0

    def copy(node: Any, path: Path) -> Any:
        nonlocal nodes
        nodes += 1
        if len(path) > MAX_DEPTH or nodes > MAX_NODES:
            raise SpecError(source, [Problem(show_path(path[:4]), "nested too deeply" if len(path) > MAX_DEPTH else "too large")])
        if isinstance(node, dict):
            problems.extend(Problem(show_path(path), f"keys must be strings, not {key!r}") for key in node if not isinstance(key, str))
            return {key: copy(inner, (*path, str(key))) for key, inner in node.items()}
        if isinstance(node, list):
            return [copy(inner, (*path, index)) for index, inner in enumerate(node)]
        if isinstance(node, float) and not math.isfinite(node):
            problems.append(Problem(show_path(path), "must be a finite number"))
        elif node is not None and not isinstance(node, (str, int, float)):
            problems.append(Problem(show_path(path), f"invalid JSON value of type {type(node).__name__}"))
        return node

    tree = copy(value, ())
    if problems:
        raise SpecError(source, problems)
    return tree


def _clean(text: str, source: str) -> tuple[str, list[int]]:
    """Return strict JSON and the positions of added quotes: comments and trailing commas become spaces, bare ${var} is quoted."""
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
            raise _at(text, match.start(), "unterminated comment", source)
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
    """Map a position in the cleaned text to the user's text: without the quotes added before it."""
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
        raise _Duplicate(f"duplicate key '{twice}'")
    return result


def _constant(name: str) -> Any:
    raise _Constant(f"{name} is not a number in JSON")


def _find_duplicate(text: str) -> int:
    """Return the position of the second of two equal keys, in the first such object to close, as json.loads finds it."""
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
