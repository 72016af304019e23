"""Problems and notes found while loading a spec, each with its path in the user's file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of a spec."""
_DOT = re.compile(r"(?<!\\)\.")
_INDEXED = re.compile(r"(.*?)((?:\[-?\d+\])*)", re.DOTALL)
"""Matches a key and the list indices that follow it."""


def to_path(text: str) -> KeyPath:
    r"""Parse a dotted path: `a.b[0].c` is ("a", "b", 0, "c"); a dot inside a key is written `\.`."""
    path: list[str | int] = []
    for part in _DOT.split(text):
        key, indices = _INDEXED.fullmatch(part).groups()  # type: ignore[union-attr]  # it matches any text
        if key or not indices:
            path.append(key.replace("\\.", "."))
        path += [int(index) for index in indices[1:-1].split("][") if index]
    return tuple(path)


NET: KeyPath = ("agent", "net")
CRITIC_NET: KeyPath = ("agent", "critic_net")


def without_v4_index(path: KeyPath) -> KeyPath:
    """Return a path without the index of the v4 form, in which agent and env are lists: agent[0].net is agent.net."""
    return (path[0], *path[2:]) if path[:1] in (("agent",), ("env",)) and path[1:2] in ((0,), ("0",)) else path


def with_name(path: KeyPath) -> KeyPath:
    """Return a path in which the `type` of a net is replaced by `name`, the key in the models."""
    return (*path[:-1], "name") if path[:-1] in (NET, CRITIC_NET) and path[-1] == "type" else path


def show_path(path: KeyPath) -> str:
    """Format a path: `agent.net.hid_layers[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def value_at(raw: Any, path: KeyPath) -> Any:
    """Return the value at `path`; None if the path does not exist."""
    for key in path:
        try:
            raw = raw[key]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def flat(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of each leaf of nested dicts; an empty dict counts as a value."""
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries that differ: key → (before, after), first the keys of `before`; None stands for an absent key."""
    pairs = {key: (before.get(key), after.get(key)) for key in (*before, *after)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def show(value: Any) -> str:
    """Format a value as JSON, truncated to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def nearest_hint(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the nearest of `words`; "" if no word is similar."""
    known = closest(word, words, cutoff)
    return "" if known is None else f"; did you mean '{known}'?"


def closest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the nearest of `words`, ignoring case; None if no word is similar."""
    lower = {known.lower(): known for known in sorted(words)}
    match = difflib.get_close_matches(word.lower()[:80], lower, n=1, cutoff=cutoff)
    return lower[match[0]] if match else None


ProblemCode = Literal["unknown", "missing", "invalid"]
"""Kind of error: an unknown key, a missing required key, a value that is not allowed."""


@dataclass(frozen=True)
class Problem:
    """One error in a spec."""

    path: str
    """JSON path in the user's file ("agent.algorithm.gama"); "" for the complete file."""
    message: str
    """The given value, the allowed values, and the nearest allowed value."""
    code: ProblemCode = "invalid"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(ValueError):
    """Raised if a spec is invalid. `problems` contains every error found, with its path."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        lines = [f"{source}: {len(problems)} problem{'s' * (len(problems) > 1)}", *(f"  {p}" for p in problems)]
        # A lone surrogate (from "\ud800") cannot be encoded, and an error must be printable.
        super().__init__("\n".join(lines).encode("utf-8", "backslashreplace").decode())

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, list[Problem]]]:
        """Pickle the problems too."""
        return SpecError, (self.source, self.problems)


class Report:
    """Problems and notes of one spec, and the original paths of keys that were moved."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.for_slm_lab = False
        """Whether the spec was written for SLM Lab (see differences.py)."""
        self.differences: list[str] = []
        """Differences from SLM Lab, a few words each, if the spec was written for it."""
        self.replaced: dict[KeyPath, str] = {}
        """Path → outdated value in the file, which migrate.py has replaced by its current form."""
        self._origin: dict[KeyPath, KeyPath] = {}
        self._set: list[KeyPath] = []

    def comes_from_set(self, path: KeyPath) -> None:
        """Record that the current value at `path`, and everything below it, was given by --set."""
        self._set.append(self.origin(path))

    def moved(self, now: KeyPath, was: KeyPath) -> None:
        """Record that the value at `now` was moved there from `was` (a current path)."""
        self._origin[now] = self.origin(was)

    def origin(self, path: KeyPath) -> KeyPath:
        """Return the path in the user's file that corresponds to a current path."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._origin:
                return self._origin[path[:end]] + path[end:]
        return path

    def child(self) -> Report:
        """Return an empty report on the same file, to be merged later."""
        child = Report()
        child._origin, child._set, child.for_slm_lab = self._origin, self._set, self.for_slm_lab
        return child

    def merge(self, found: Report) -> None:
        """Merge another report, without problems at, above or below the path of an existing problem, which are consequences of it."""
        known = [problem.path for problem in self.problems]
        self.problems += [p for p in found.problems if p not in self.problems and not any(_related(p.path, path) for path in known)]
        self.notes += [note for note in found.notes if note not in self.notes]
        self.differences += [topic for topic in found.differences if topic not in self.differences]

    def fail(self, path: KeyPath, message: str, code: ProblemCode = "invalid") -> None:
        """Add a problem, unless it is already in the report."""
        location = self.origin(path)
        problem = Problem(show_path(location), mark_if_set(message, location, self._set), code)
        if problem not in self.problems:
            self.problems.append(problem)

    def ineffective(self, path: KeyPath, message: str) -> None:
        """Add a note on a key without effect (SLM Lab ignores such keys too); add a problem instead if the key was given by --set."""
        if self.is_set(path):
            self.fail(path, message.replace("; ignored", ""))
        else:
            self.note(path, message)

    def is_set(self, path: KeyPath) -> bool:
        """Return whether the value at `path` was given by --set."""
        location = self.origin(path)
        return any(_at_or_below(location, given) for given in self._set)

    def differs(self, path: KeyPath, topic: str, message: str) -> None:
        """If the spec was written for SLM Lab, add a note on the different meaning of a key. Args: topic: the difference in a few words."""
        if self.for_slm_lab:
            self.note(path, message)
            if topic not in self.differences:
                self.differences.append(topic)

    def note(self, path: KeyPath, message: str) -> None:
        """Add a note, unless it is already in the report."""
        text = f"{show_path(self.origin(path))}: {message}"
        if text not in self.notes:
            self.notes.append(text)


def mark_if_set(message: str, location: KeyPath, sets: Iterable[KeyPath]) -> str:
    """Return the message of a problem; "(from --set)" is appended if the problem is at or below a path given by --set."""
    is_set = any(_at_or_below(location, given) for given in sets)
    return f"{message} (from --set)" if is_set and "--set" not in message else message


def _at_or_below(location: KeyPath, given: KeyPath) -> bool:
    return _as_text(location[: len(given)]) == _as_text(given)


def _as_text(path: KeyPath) -> KeyPath:
    """Return the path with indices as text, so that `[0]` and `.0` are equal."""
    return tuple(map(str, path))


def _related(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and (len(long) == len(short) or long[len(short)] in ".[")


def override(raw: dict[str, Any], path: KeyPath, value: Any, report: Report, source: str = "--set ") -> None:
    """Set the key at `path`, and create missing sections (validation checks them). Args: source: origin of the key, for problems."""
    path = without_v4_index(path)
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
                if path[:2] in (NET, CRITIC_NET) and key in ("name", "type"):
                    node.pop("type" if key == "name" else "name", None)  # two names of one key
                node[key] = value
            elif node.get(key) is None:
                node[key] = {}
            node = node[key]
        else:
            report.fail(path[:depth], f"is {show(node)}, which has no keys ({source}{show_path(path)})")
            return
