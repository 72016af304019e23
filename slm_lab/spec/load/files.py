"""Spec files: where they are, and the entries in them as they stand there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from slm_lab.spec.compat.migrate import migrate
from slm_lab.spec.load.text import plain, read
from slm_lab.spec.report import Problem, Report, SpecError, nearest, show, value_at

SPEC_FOLDER = FilePath(__file__).parent.parent
_NO_SPECS = ("spec.schema.json", "known_envs.json", "torch_names.json")
"""Files there that hold no specs."""
Source = str | FilePath | Mapping[str, Any]
"""A spec file, its content, or one spec."""


def spec_names(path: Source) -> list[str]:
    """Return the names of the specs and studies in a file, without names that begin with _ or $. Raises: SpecError."""
    return [*raw_entries(path)[1]]


def shipped_spec_files() -> list[FilePath]:
    """Return the spec files that ship, relative to SPEC_FOLDER."""
    found = [file for file in SPEC_FOLDER.rglob("*.*") if file.suffix in (".json", ".yaml", ".yml") and file.name not in _NO_SPECS]
    return sorted((file.relative_to(SPEC_FOLDER) for file in found), key=lambda file: (len(file.parts), file))


def spec_summaries() -> Iterator[tuple[FilePath, str, str, str, Any]]:
    """Yield file, name, algorithm, env and max_frame of each spec that ships, with variables as they stand in the files."""
    for file in shipped_spec_files():
        for name, raw in raw_specs(SPEC_FOLDER / file).items():
            algorithm, env, frames = (
                value_at(raw, path) for path in (("agent", "algorithm", "name"), ("env", "name"), ("env", "max_frame"))
            )
            yield file, name, str(algorithm), str(env), frames


def is_study(raw: Any) -> bool:
    """Return whether an entry of a spec file is a study instead of a spec."""
    return isinstance(raw, dict) and "study" in raw


def raw_specs(path: Source) -> dict[str, Any]:
    """Return name → spec of a file in the current form, not validated, with variables as they stand there. Raises: SpecError."""
    entries = {name: raw for name, raw in raw_entries(path)[1].items() if not is_study(raw)}
    for raw in entries.values():
        if isinstance(raw, dict):
            migrate(raw, Report())
    return entries


def find_spec_file(path: str | FilePath) -> FilePath:
    """Find a spec file: as given, else under slm_lab/spec/ (which may be part of the path), else in one of its folders.

    Raises: SpecError, with the nearest file's name.
    """
    given = FilePath(path).expanduser()
    try:
        if given.is_file():
            return given
        inside = FilePath(*given.parts[2:]) if given.parts[:2] == ("slm_lab", "spec") else given
        folders = [] if given.is_absolute() else [SPEC_FOLDER, *sorted(path for path in SPEC_FOLDER.rglob("*") if path.is_dir())]
        for folder in folders:
            if (folder / inside).is_file():
                return folder / inside
    except (OSError, ValueError) as error:  # a path too long, or with a null character
        raise SpecError(str(path), [Problem("", f"no such file: {getattr(error, 'strerror', None) or error}")]) from None
    reason = "is a folder, not a spec file" if given.is_dir() else "no such file here or under slm_lab/spec/"
    known = [*_files_beside(given), *(file.name for file in shipped_spec_files())]
    raise SpecError(str(path), [Problem("", reason + nearest(given.name, known))])


def _files_beside(path: FilePath) -> list[str]:
    """Return the names of the spec files in the folder of a path."""
    try:
        return [file.name for file in path.parent.iterdir() if file.suffix in (".json", ".yaml", ".yml")]
    except (OSError, ValueError):
        return []


def raw_entries(path: Source, name: str | None = None, repeated: dict[str, list[str]] | None = None) -> tuple[str, dict[str, Any]]:
    """Return a file's path, and the entries in it as they stand there: name → spec or study. Raises: SpecError.

    Args:
        name: of the spec, if `path` is one without a name.
        repeated: see `text.read`.
    """
    if isinstance(path, Mapping):
        source, content = "spec", plain(dict(path), "spec")
        if content.keys() & {"agent", "env"}:
            content = {name or "spec": content}
    else:
        file = find_spec_file(path)
        source, content = str(file), read(file, repeated)
        if is_flat(content):
            content = {content["name"]: {key: value for key, value in content.items() if key != "name"}}
    if not isinstance(content, dict):
        raise SpecError(source, [Problem("", f"must be an object of named specs, not {show(content)}")])
    entries = {name: raw for name, raw in content.items() if not name.startswith(("_", "$"))}
    if not entries:
        raise SpecError(source, [Problem("", "contains no spec (names that begin with _ or $ are ignored)")])
    return source, entries


def is_flat(content: Any) -> bool:
    """Return whether the content of a file is one spec, with its name inside, as SLM Lab saves it with a run."""
    return isinstance(content, dict) and content.keys() >= {"agent", "env", "meta"} and isinstance(content.get("name"), str)
