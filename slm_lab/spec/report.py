"""Problems and notes of a spec, which are collected while the spec is loaded, with the path of each affected key in the user's file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

KeyPath = tuple[str | int, ...]
"""Path of a value in a spec, which consists of the keys and list indices from the root of the spec to the value."""
_DOT = re.compile(r"(?<!\\)\.")
_INDEXED = re.compile(r"(.*?)((?:\[-?\d+\])*)", re.DOTALL)
"""Regular expression for a key that may be followed by list indices."""


def to_path(text: str) -> KeyPath:
    r"""Parse a dotted path into keys and list indices, such as `a.b[0].c` into ("a", "b", 0, "c"). A dot inside a key is written `\.`."""
    path: list[str | int] = []
    for part in _DOT.split(text):
        key, indices = _INDEXED.fullmatch(part).groups()  # type: ignore[union-attr]  # it matches any text
        if key or not indices:
            path.append(key.replace("\\.", "."))
        path += [int(index) for index in indices[1:-1].split("][") if index]
    return tuple(path)


NET: KeyPath = ("agent", "net")
CRITIC_NET: KeyPath = ("agent", "critic_net")


def remove_v4_index(path: KeyPath) -> KeyPath:
    """Return a path without the list index after `agent` or `env`, which are lists in SLM Lab v4. For example, agent[0].net becomes
    agent.net."""
    return (path[0], *path[2:]) if path[:1] in (("agent",), ("env",)) and path[1:2] in ((0,), ("0",)) else path


def type_to_name_key(path: KeyPath) -> KeyPath:
    """Return a path in which the current key `name` replaces the old key `type` of a net. For example, agent.net.type becomes
    agent.net.name."""
    return (*path[:-1], "name") if path[:-1] in (NET, CRITIC_NET) and path[-1] == "type" else path


def show_path(path: KeyPath) -> str:
    """Format a path as text, such as `agent.net.hid_layers[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def value_at(raw: Any, path: KeyPath) -> Any:
    """Return the value at `path` in nested dicts and lists, or None if the path does not exist."""
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def flatten_leaves(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each leaf of nested dicts. An empty dict counts as a leaf."""
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from flatten_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries in which two dicts differ, as {key: (value before, value after)}. For a key that is absent in one of the two
    dicts, the value in this dict counts as None.

    In the returned dict, keys of `before` precede keys that only `after` contains.
    """
    pairs = {key: (before.get(key), after.get(key)) for key in (*before, *after)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def format_json(value: Any) -> str:
    """Format a value as JSON, truncated to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def nearest_hint(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the hint "; did you mean 'x'?", where x is the word of `words` that is most similar to `word`, or "" if no word is similar."""
    match = closest_word(word, words, cutoff)
    return "" if match is None else f"; did you mean '{match}'?"


def closest_word(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the word of `words` that is most similar to `word`, or None if no word is similar. Upper and lower case are equivalent."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(words)}
    matches = difflib.get_close_matches(word.lower()[:80], by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


ProblemCode = Literal["unknown", "missing", "invalid"]
"""Kind of a problem: an unknown key, a missing required key, or a value that is not allowed."""


@dataclass(frozen=True)
class Problem:
    """One error in a spec."""

    path: str
    """JSON path of the key in the user's file ("agent.algorithm.gama"), or "" if the problem concerns the complete file."""
    message: str
    """Error message, which names the given value, the allowed values, and the most similar allowed value."""
    code: ProblemCode = "invalid"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(ValueError):
    """Raised if a spec is invalid. The attribute `problems` contains all problems of the spec."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        lines = [f"{source}: {len(problems)} problem{'s' * (len(problems) > 1)}", *(f"  {p}" for p in problems)]
        # A lone surrogate (from "\ud800") cannot be encoded, and an error must be printable.
        super().__init__("\n".join(lines).encode("utf-8", "backslashreplace").decode())

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, list[Problem]]]:
        """Return the class and its arguments for pickle, so that an unpickled SpecError keeps its attribute `problems`."""
        return SpecError, (self.source, self.problems)


class Report:
    """Problems and notes of one spec that is being loaded, and the original path of each key that loading has moved or renamed."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.for_slm_lab = False
        """Whether the spec was written for SLM Lab (see differences.py)."""
        self.differences: list[str] = []
        """If the spec was written for SLM Lab, short descriptions of those differences from SLM Lab that affect the spec."""
        self.replaced: dict[KeyPath, str] = {}
        """Maps the path of a value to the outdated value in the file, which migrate.py has replaced by a current value."""
        self._origin: dict[KeyPath, KeyPath] = {}
        self._set: list[KeyPath] = []

    def mark_set_argument(self, path: KeyPath) -> None:
        """Record that a --set argument gave the current value at `path` and all values below this path."""
        self._set.append(self.original_path(path))

    def record_move(self, now: KeyPath, was: KeyPath) -> None:
        """Record that the value at the path `now` was moved from the path `was`, which may be the result of an earlier move."""
        self._origin[now] = self.original_path(was)

    def original_path(self, path: KeyPath) -> KeyPath:
        """Return the path of a value in the user's file.

        Args: path: path of the value after the changes of the loader.
        """
        for end in range(len(path), 0, -1):
            if path[:end] in self._origin:
                return self._origin[path[:end]] + path[end:]
        return path

    def empty_copy(self) -> Report:
        """Return a new report on the same file, without problems and notes, which can later be merged into this report."""
        child = Report()
        child._origin, child._set, child.for_slm_lab = self._origin, self._set, self.for_slm_lab
        return child

    def merge(self, other: Report) -> None:
        """Add the problems, notes and differences of another report to this report.

        A problem of the other report is omitted if this report already contains a problem at the same path, or at a path above or below
        this path, because the second problem is then a consequence of the first problem.
        """
        known = [problem.path for problem in self.problems]
        self.problems += [
            p for p in other.problems if p not in self.problems and not any(is_same_or_nested(p.path, path) for path in known)
        ]
        self.notes += [note for note in other.notes if note not in self.notes]
        self.differences += [topic for topic in other.differences if topic not in self.differences]

    def add_problem(self, path: KeyPath, message: str, code: ProblemCode = "invalid") -> None:
        """Add a problem with the key at `path`, unless the report already contains the same problem."""
        location = self.original_path(path)
        problem = Problem(show_path(location), append_set_marker(message, location, self._set), code)
        if problem not in self.problems:
            self.problems.append(problem)

    def note_ineffective_key(self, path: KeyPath, message: str) -> None:
        """Add a note that the key at `path` has no effect.

        If a --set argument gave the key without effect, add a problem instead of the note.
        """
        if self.is_from_set_argument(path):
            self.add_problem(path, message.replace("; ignored", ""))
        else:
            self.note(path, message)

    def is_from_set_argument(self, path: KeyPath) -> bool:
        """Return whether a --set argument gave the value at `path`."""
        location = self.original_path(path)
        return any(_at_or_below(location, given) for given in self._set)

    def note_difference(self, path: KeyPath, topic: str, message: str) -> None:
        """If the spec was written for SLM Lab, add a note that the key at `path` has another meaning in SLM Lab.

        Args: topic: short description of the difference.
        """
        if self.for_slm_lab:
            self.note(path, message)
            if topic not in self.differences:
                self.differences.append(topic)

    def note(self, path: KeyPath, message: str) -> None:
        """Add a note on the key at `path`, unless the report already contains the same note."""
        text = f"{show_path(self.original_path(path))}: {message}"
        if text not in self.notes:
            self.notes.append(text)


def append_set_marker(message: str, location: KeyPath, sets: Iterable[KeyPath]) -> str:
    """Return `message`, with "(from --set)" appended if a --set argument gave the value at the path `location`.

    Args: sets: paths of the keys that --set arguments give.
    """
    is_set = any(_at_or_below(location, given) for given in sets)
    return f"{message} (from --set)" if is_set and "--set" not in message else message


def _at_or_below(location: KeyPath, given: KeyPath) -> bool:
    return indices_to_text(location[: len(given)]) == indices_to_text(given)


def indices_to_text(path: KeyPath) -> KeyPath:
    """Return a path whose list indices are converted to strings, so that the paths `a[0]` and `a.0` compare equal."""
    return tuple(map(str, path))


def is_same_or_nested(first: str, second: str) -> bool:
    """Return whether two dotted paths are equal, or whether one of them is inside the other."""
    short, long = sorted((first, second), key=len)
    return long.startswith(short) and (len(long) == len(short) or long[len(short)] in ".[")


def set_value_at(raw: dict[str, Any], path: KeyPath, value: Any, report: Report, source: str = "--set ") -> None:
    """Set the key at `path` of a raw spec to `value`, in place. Missing sections are created, and are validated later.

    Args: source: text that precedes the path in the messages of problems.
    """
    path = remove_v4_index(path)
    new = next((path[:depth] for depth in range(1, len(path)) if value_at(raw, path[:depth]) is None), path)
    report.mark_set_argument(new)
    report.replaced.pop(path, None)
    node: Any = raw
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            index = int(key) if str(key).isdecimal() and len(str(key)) < 10 else -1
            if not 0 <= index < len(node):
                report.add_problem(path[: depth + 1], f"index out of range: the list has {len(node)} items ({source}{show_path(path)})")
                return
            node[index], node = (value if last else node[index]), node[index]
        elif isinstance(node, dict):
            key = str(key)
            if last:
                if path[:2] in (NET, CRITIC_NET) and key in ("name", "type"):
                    node.pop("type" if key == "name" else "name", None)  # `type` and `name` are two names of the same key
                node[key] = value
            elif node.get(key) is None:
                node[key] = {}
            node = node[key]
        else:
            report.add_problem(path[:depth], f"is {format_json(node)}, which has no keys ({source}{show_path(path)})")
            return
