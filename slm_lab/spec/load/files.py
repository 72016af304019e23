"""Find and parse spec files (JSON with comments and trailing commas, or YAML), and files that contain net architectures (`arc_file`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slm_lab.spec.compat.migrate import migrate_spec
from slm_lab.spec.report import CRITIC_NET, NET, KeyPath, Problem, Report, SpecError, closest_word, format_json, show_path, value_at

SPEC_FOLDER = Path(__file__).parent.parent
_NO_SPECS = ("spec.schema.json", "known_envs.json", "envpool_envs.json", "torch_names.json")
"""Files in SPEC_FOLDER that contain no specs."""
Source = str | Path | Mapping[str, Any]
"""Source of specs: the path of a spec file, the content of a spec file as a dict, or one spec as a dict."""


def spec_names(path: Source) -> list[str]:
    """Return the names of the specs and studies in a spec file, except names that begin with _ or $. Raises SpecError for an invalid
    file."""
    return [*raw_entries(path)[1]]


def shipped_spec_files() -> list[Path]:
    """Return the paths, relative to SPEC_FOLDER, of the spec files that are part of the package."""
    found = [file for file in SPEC_FOLDER.rglob("*.*") if file.suffix in (".json", ".yaml", ".yml") and file.name not in _NO_SPECS]
    return sorted((file.relative_to(SPEC_FOLDER) for file in found), key=lambda file: (len(file.parts), file))


def spec_summaries() -> Iterator[tuple[Path, str, str, str, Any]]:
    """Yield a tuple (file, name, algorithm, env, max_frame) for each spec that is part of the package. Variables such as ${env} are not
    replaced by values."""
    for file in shipped_spec_files():
        for name, raw in raw_specs(SPEC_FOLDER / file).items():
            algorithm, env, frames = (
                value_at(raw, path) for path in (("agent", "algorithm", "name"), ("env", "name"), ("env", "max_frame"))
            )
            yield file, name, str(algorithm), str(env), frames


def is_study(raw: Any) -> bool:
    """Return whether an entry of a spec file is a study (a comparison of several specs) rather than a spec."""
    return isinstance(raw, dict) and "study" in raw


def raw_specs(path: Source) -> dict[str, Any]:
    """Return a dict from the names of the specs in a spec file to the raw specs. Raises SpecError if the file cannot be read.

    Raw specs in older formats are converted to the current format. This function does not validate the specs and does not replace
    variables.
    """
    entries = {name: raw for name, raw in raw_entries(path)[1].items() if not is_study(raw)}
    for raw in entries.values():
        if isinstance(raw, dict):
            migrate_spec(raw, Report())
    return entries


def find_spec_file(path: str | Path) -> Path:
    """Return the path of a spec file: `path` itself, or the first file with this path in the folder slm_lab/spec or in one of its
    subfolders.

    The prefix slm_lab/spec/ of `path` is optional.

    Raises: SpecError if no spec file with this path exists. The error message suggests the file with the most similar name.
    """
    given = Path(path).expanduser()
    try:
        if given.is_file():
            return given
        inside = Path(*given.parts[2:]) if given.parts[:2] == ("slm_lab", "spec") else given
        folders = [] if given.is_absolute() else [SPEC_FOLDER, *sorted(path for path in SPEC_FOLDER.rglob("*") if path.is_dir())]
        for folder in folders:
            if (folder / inside).is_file():
                return folder / inside
    except (OSError, ValueError) as error:  # the path is too long, or contains a null character
        raise SpecError(str(path), [Problem("", f"no such file: {getattr(error, 'strerror', None) or error}")]) from None
    reason = "is a folder, not a spec file" if given.is_dir() else "no such file here or under slm_lab/spec/"
    # names are compared without suffixes, because equal suffixes would make different names similar
    known = {Path(name).stem: name for name in (*(file.name for file in shipped_spec_files()), *_sibling_files(given))}
    near = closest_word(given.stem, known)
    raise SpecError(str(path), [Problem("", reason + ("" if near is None else f"; did you mean '{known[near]}'?"))])


def _sibling_files(path: Path) -> list[str]:
    """Return the names of the JSON and YAML files in the parent folder of `path`."""
    try:
        return [file.name for file in path.parent.iterdir() if file.suffix in (".json", ".yaml", ".yml")]
    except (OSError, ValueError):
        return []


def raw_entries(path: Source, name: str | None = None, repeated: dict[str, list[str]] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the path of a spec file, and a dict from names to the unmodified specs and studies in the file. Raises SpecError if the file
    cannot be read.

    Args:
        name: name that the spec receives if `path` is a dict with a single spec.
        repeated: dict to which messages about duplicate keys are added (see `parse_file`).
    """
    if isinstance(path, Mapping):
        source, content = "spec", to_plain_json(dict(path), "spec")
        if content.keys() & {"agent", "env"}:
            content = {name or "spec": content}
    else:
        file = find_spec_file(path)
        source, content = str(file), parse_file(file, repeated)
        if is_single_spec(content):
            content = {content["name"]: {key: value for key, value in content.items() if key != "name"}}
    if not isinstance(content, dict):
        raise SpecError(source, [Problem("", f"must be an object of named specs, not {format_json(content)}")])
    entries = {name: raw for name, raw in content.items() if not name.startswith(("_", "$"))}
    if not entries:
        raise SpecError(source, [Problem("", "contains no spec (names that begin with _ or $ are ignored)")])
    return source, entries


def is_single_spec(content: Any) -> bool:
    """Return whether the content of a spec file is a single spec with a key `name`, which is the form in which SLM Lab saves the spec of a
    run."""
    return isinstance(content, dict) and content.keys() >= {"agent", "env", "meta"} and isinstance(content.get("name"), str)


def read_arc_files(raw: dict[str, Any], folder: Path | None, report: Report) -> dict[str, Any]:
    """Replace `arc_file` (the name of a file) in the nets of a raw spec by `arc` (the content of the file), in place.

    Args: folder: folder of the spec file, or None if the spec is not in a file.
    """
    for location in (NET, CRITIC_NET):
        net = value_at(raw, location)
        if not isinstance(net, dict) or net.get("arc_file") is None or "TorchArcNet" not in (net.get("name"), net.get("type")):
            continue
        name, path = net.pop("arc_file"), (*location, "arc_file")
        if net.get("arc") is not None:
            report.note_ineffective_key(path, "has no effect: arc is given; ignored")
            continue
        if not isinstance(name, str):
            report.add_problem(path, f"must be the name of a YAML or JSON file, not {format_json(name)}")
            continue
        candidates = [where / name for where in (folder, Path()) if where is not None]
        file = next((file for file in candidates if file.is_file()), None)
        if file is None:
            report.add_problem(path, f"no such file: {' or '.join(dict.fromkeys(map(str, candidates)))}")
            continue
        try:
            arc = parse_file(file)
        except SpecError as error:
            report.add_problem(path, f"{file}: {error.problems[0].message}")
            continue
        if arc is None:
            report.add_problem(path, f"{file} is empty")
            continue
        net["arc"] = arc
        report.record_move((*location, "arc"), path)
    return raw


MAX_DEPTH = 64
"""Maximum nesting depth of a spec file."""
MAX_NODES = 1_000_000
"""Maximum number of values in a spec file. The number is limited because a few lines of YAML with anchors can create huge trees."""

_TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<comment>//[^\n]*|/\*(?:[^*]|\*(?!/))*(?P<closed>\*/)?)|(?P<variable>\$\{[^${}\n]*\})'
    r'|[{}\[\]:,]|\s+|[^\s"{}\[\]:,/$]+|["/$]'
)


def parse_file(path: Path, repeated: dict[str, list[str]] | None = None) -> Any:
    """Read and parse a spec file (JSON or YAML), and return its content.

    Args: repeated: dict to which messages about duplicate keys are added, as {name of the spec: [messages]}. Duplicate keys are allowed
    only in specs in the form of SLM Lab v4, in which the last value of a duplicate key is used.

    Raises: SpecError if the file cannot be read, or contains invalid text, a duplicate key, or NaN. The error message names the line and
    the column.
    """
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(source, [Problem("", f"cannot be read: {reason}")]) from None
    return parse_yaml(text, source) if path.suffix.lower() in (".yaml", ".yml") else parse_json(text, source, repeated)


def parse_json(text: str, source: str = "spec", repeated: dict[str, list[str]] | None = None) -> Any:
    """Parse JSON with // and /* */ comments, trailing commas, and ${var} with or without quotes.

    Args: source: name of the file, for error messages. repeated: dict for messages about duplicate keys (see `parse_file`).
    """
    clean, quoted, duplicates = _strict_json(text, source)
    try:
        value = json.loads(clean)
    except json.JSONDecodeError as error:
        added = sum(error.pos > location + count for count, location in enumerate(quoted))
        raise _error_at(text, error.pos - added, error.msg[0].lower() + error.msg[1:], source) from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise SpecError(source, [Problem("", reason)]) from None
    for name, key, position in duplicates:
        entry = value.get(name) if isinstance(value, dict) else None
        found = _error_at(text, position, f"duplicate key '{key}'", source)
        if not isinstance(entry, dict) or not isinstance(entry.get("agent"), list):
            raise found
        if repeated is not None:
            repeated.setdefault(name, []).append(f"{found.problems[0]}; the last one is used (v4 form)")
    return to_plain_json(value, source)


def parse_yaml(text: str, source: str = "spec") -> Any:
    """Parse YAML 1.2 (in which 1e-3 is a number and `no` is a string) with anchors and merge keys. A duplicate key raises SpecError."""
    from ruamel.yaml import YAML  # slow to import, and most specs are JSON
    from ruamel.yaml.error import YAMLError

    try:
        return to_plain_json(YAML(typ="safe", pure=True).load(text), source)
    except (YAMLError, RecursionError, ValueError, TypeError) as error:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        location = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(getattr(error, "problem", error)).split())
        raise SpecError(source, [Problem("", f"{location}{reason}")]) from None


def to_plain_json(value: Any, source: str) -> Any:
    """Return a deep copy of `value`, which must consist of JSON values (dict, list, str, int, float, bool, None).

    Raises: SpecError for a value of another type, a key that is not a string, a number that is not finite, and a value that is nested too
    deeply or too large.
    """
    problems: list[Problem] = []
    nodes = 0

    def copy(node: Any, path: KeyPath) -> Any:
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


def _strict_json(text: str, source: str) -> tuple[str, list[int], list[tuple[str, str, int]]]:
    """Convert JSON to strict JSON: replace comments and trailing commas by spaces, and put ${var} in quotes where quotes are missing.

    Returns the strict JSON, the positions in `text` of the added quotes, and the duplicate keys as tuples (name, key, position). `name` is
    the key of the root object whose value contains the duplicate key, or "" for a duplicate key of the root object itself. Raises
    SpecError for an unterminated comment, and for NaN.
    """
    clean, quoted, duplicates, outermost = list[str](), list[int](), list[tuple[str, str, int]](), ""
    keys: list[set[str]] = []
    """For each JSON object (or list) around the current position, from the outermost to the innermost: the keys that have been read so
    far."""
    before, start, comma = "", 0, 0
    """The last token, the position of this token, and its index in `clean` if it is a comma after a value, else 0."""
    for match in _TOKEN.finditer(text):
        part = match.group()
        if match["comment"]:
            if part.startswith("/*") and not match["closed"]:
                raise _error_at(text, match.start(), "unterminated comment", source)
            part = re.sub(r"[^\n]", " ", part)
        elif match["variable"]:
            quoted += match.span()
            part = f'"{part}"'
        elif part in ("NaN", "Infinity", "-Infinity"):
            raise _error_at(text, match.start(), f"{part} is not a number in JSON", source)
        if not part.isspace():
            if part in "[{":
                keys.append(set())
            elif part in "]}" and keys:
                keys.pop()
                if comma:
                    clean[comma] = " "
            elif part == ":" and keys:
                key = _decode_string(before)
                outermost = key if len(keys) == 1 else outermost
                if key in keys[-1]:
                    duplicates.append(("" if len(keys) == 1 else outermost, key, start))
                keys[-1].add(key)
            comma = len(clean) if part == "," and before not in ("", *"[{,:") else 0
            before, start = part, match.start()
        clean.append(part)
    return "".join(clean), quoted, duplicates


def _decode_string(string: str) -> str:
    """Return the string that a JSON string literal represents, or the literal itself if it is invalid."""
    try:
        return str(json.loads(string))
    except ValueError:
        return string


def _error_at(text: str, position: int, message: str, source: str) -> SpecError:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return SpecError(source, [Problem("", f"line {line}, column {column}: {message}")])
