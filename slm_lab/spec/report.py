"""What loading a spec finds: problems and notes, each at its path in the user's file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from slm_lab.spec.base import Problem

Path = tuple[str | int, ...]
"""Keys and list indices from the root of a spec."""


def to_path(text: str) -> Path:
    r"""The keys of a dotted path, as pydash reads it: `a.b[0].c`; a dot inside a key is written `\.`."""
    import pydash  # 70 ms that only those pay who write a path

    return tuple(key if isinstance(key, int) else str(key) for key in pydash.to_path(text))


def show_path(path: Path) -> str:
    """A path as people write it: `agent.net.hid_layers[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def show(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the nearest of `words`, or nothing where none is near."""
    known = closest(word, words, cutoff)
    return "" if known is None else f"; did you mean '{known}'?"


def closest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The nearest of `words` in any case of letters, where one is near."""
    lower = {known.lower(): known for known in sorted(words)}
    match = difflib.get_close_matches(word.lower()[:80], lower, n=1, cutoff=cutoff)
    return lower[match[0]] if match else None


class Report:
    """Collects problems and notes of one spec, and remembers which key moved from where."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._origin: dict[Path, Path] = {}
        self._set: list[Path] = []

    def comes_from_set(self, path: Path) -> None:
        """What stands at `path` (as of this moment) and below it was given by --set."""
        self._set.append(self.origin(path))

    def moved(self, now: Path, was: Path) -> None:
        """What stands at `now` stood at `was` (a path as of this moment) in the user's file."""
        self._origin[now] = self.origin(was)

    def origin(self, path: Path) -> Path:
        """Where a path stands in the user's file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._origin:
                return self._origin[path[:end]] + path[end:]
        return path

    def child(self) -> Report:
        """An empty report on the same file, to be taken over."""
        child = Report()
        child._origin, child._set = self._origin, self._set
        return child

    def take(self, found: Report) -> None:
        """Take over what another report has found, save problems that only follow from one told here (above, at or below its key)."""
        told = [problem.path for problem in self.problems]
        self.problems += [p for p in found.problems if p not in self.problems and not any(_related(p.path, path) for path in told)]
        self.notes += [note for note in found.notes if note not in self.notes]

    def fail(self, path: Path, message: str) -> None:
        """Add a problem, once."""
        place = self.origin(path)
        problem = Problem(show_path(place), mark(message, place, self._set))
        if problem not in self.problems:
            self.problems.append(problem)

    def note(self, path: Path, message: str) -> None:
        """Add a note, once."""
        text = f"{show_path(self.origin(path))}: {message}"
        if text not in self.notes:
            self.notes.append(text)


def mark(message: str, place: Path, sets: Iterable[Path]) -> str:
    """The message of a problem at `place`, with a word on it where that is a key that --set gave, or stands inside one."""
    is_set = any(_as_text(place[: len(given)]) == _as_text(given) for given in sets)
    return f"{message} (from --set)" if is_set and "--set" not in message else message


def _as_text(path: Path) -> Path:
    """An index may be written `[0]` or `.0`."""
    return tuple(map(str, path))


def _related(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and (len(long) == len(short) or long[len(short)] in ".[")
