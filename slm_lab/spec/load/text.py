"""Parse the text of a spec file: JSON with comments and trailing commas, or YAML. Raises SpecError only."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path as FilePath
from typing import Any

from slm_lab.spec.report import Path, Problem, SpecError, show_path

MAX_DEPTH = 64
"""Maximum nesting."""
MAX_NODES = 1_000_000
"""Maximum size (YAML anchors can make huge trees from a few lines)."""

_TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<comment>//[^\n]*|/\*(?:[^*]|\*(?!/))*(?P<closed>\*/)?)|(?P<variable>\$\{[^${}\n]*\})'
    r'|[{}\[\]:,]|\s+|[^\s"{}\[\]:,/$]+|["/$]'
)


def read(path: FilePath, repeated: dict[str, list[str]] | None = None) -> Any:
    """Return the content of a spec file.

    Args: repeated: receives, by name of the spec, a line for each duplicate key in specs of the v4 form, whose last value counts.

    Raises: SpecError for an unreadable file, invalid text (with line and column), a duplicate key, NaN.
    """
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(source, [Problem("", f"cannot be read: {reason}")]) from None
    return parse_yaml(text, source) if path.suffix.lower() in (".yaml", ".yml") else parse_json(text, source, repeated)


def parse_json(text: str, source: str = "spec", repeated: dict[str, list[str]] | None = None) -> Any:
    """Parse JSON with // and /* */ comments, trailing commas, and ${var} with or without quotes. `repeated`: see `read`."""
    clean, quoted, duplicates = _strict(text, source)
    try:
        value = json.loads(clean)
    except json.JSONDecodeError as error:
        added = sum(error.pos > place + count for count, place in enumerate(quoted))
        raise _at(text, error.pos - added, error.msg[0].lower() + error.msg[1:], source) from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise SpecError(source, [Problem("", reason)]) from None
    for name, key, position in duplicates:
        entry = value.get(name) if isinstance(value, dict) else None
        found = _at(text, position, f"duplicate key '{key}'", source)
        if not isinstance(entry, dict) or not isinstance(entry.get("agent"), list):
            raise found
        if repeated is not None:
            repeated.setdefault(name, []).append(f"{found.problems[0]}; the last one is used (v4 form)")
    return plain(value, source)


def parse_yaml(text: str, source: str = "spec") -> Any:
    """Parse YAML 1.2 with anchors and merges (1e-3 is a number, `no` a string), no duplicate keys."""
    from ruamel.yaml import YAML  # slow to import, and most specs are JSON
    from ruamel.yaml.error import YAMLError

    try:
        return plain(YAML(typ="safe", pure=True).load(text), source)
    except (YAMLError, RecursionError, ValueError, TypeError) as error:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(getattr(error, "problem", error)).split())
        raise SpecError(source, [Problem("", f"{place}{reason}")]) from None


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


def _strict(text: str, source: str) -> tuple[str, list[int], list[tuple[str, str, int]]]:
    """Return strict JSON, the positions of added quotes, and duplicate keys: (key of the outermost object, key, position).

    Comments and trailing commas become spaces, bare ${var} is quoted. Raises: SpecError for an unterminated comment, NaN.
    """
    clean, quoted = list[str](), list[int]()
    duplicates, outermost = list[tuple[str, str, int]](), ""
    keys: list[set[str]] = []
    """Keys of the objects (or lists) around the current position."""
    before, start, comma = "", 0, 0
    """The last token, its position, and the index in `clean` of a comma after a value if it is one."""
    for match in _TOKEN.finditer(text):
        part = match.group()
        if match["comment"]:
            if part.startswith("/*") and not match["closed"]:
                raise _at(text, match.start(), "unterminated comment", source)
            part = re.sub(r"[^\n]", " ", part)
        elif match["variable"]:
            quoted += match.span()
            part = f'"{part}"'
        elif part in ("NaN", "Infinity", "-Infinity"):
            raise _at(text, match.start(), f"{part} is not a number in JSON", source)
        if not part.isspace():
            if part in "[{":
                keys.append(set())
            elif part in "]}" and keys:
                keys.pop()
                if comma:
                    clean[comma] = " "
            elif part == ":" and keys:
                key = _decoded(before)
                if len(keys) == 1:
                    outermost = key
                if key in keys[-1]:
                    duplicates.append(("" if len(keys) == 1 else outermost, key, start))
                keys[-1].add(key)
            comma = len(clean) if part == "," and before not in ("", *"[{,:") else 0
            before, start = part, match.start()
        clean.append(part)
    return "".join(clean), quoted, duplicates


def _decoded(string: str) -> str:
    """Return the text of a JSON string; an invalid one as it is."""
    try:
        return str(json.loads(string))
    except ValueError:
        return string


def _at(text: str, position: int, message: str, source: str) -> SpecError:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return SpecError(source, [Problem("", f"line {line}, column {column}: {message}")])
