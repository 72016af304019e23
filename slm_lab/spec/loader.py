"""Spec file → Spec.

text (text.py) → ${var} filled (variables.py) → current form (migrate.py) → --set paths
→ files of arcs read (arc_file.py) → keys without effect removed (tidy.py)
→ validated (validate.py) → rules across sections (rules.py) → resolved (resolve.py) → Spec. SpecError reports all problems at once.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any

from slm_lab.lib.log import notice
from slm_lab.spec import env_ids
from slm_lab.spec.arc_file import read_arc_files
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.differences import adapt, is_for_slm_lab, note_differences
from slm_lab.spec.hints import suggest_argument
from slm_lab.spec.migrate import migrate
from slm_lab.spec.report import Path, Report, nearest, show, value_at
from slm_lab.spec.resolve import resolve
from slm_lab.spec.rules import check_rules, check_updates
from slm_lab.spec.sampler_rules import derive_sizes
from slm_lab.spec.search import prune_search
from slm_lab.spec.search_check import check_search, drop_misplaced, note_search
from slm_lab.spec.spec import SPEC_VERSION, Spec
from slm_lab.spec.text import plain, read
from slm_lab.spec.tidy import drop_ineffective, drop_nulls, fill_names
from slm_lab.spec.validate import likely_names, models_at, validate, wrong_parts
from slm_lab.spec.variables import Sets, combinations, fill, override, parse_sets

SPEC_FOLDER = FilePath(__file__).parent
_NO_SPECS = ("spec.schema.json", "known_envs.json", "torch_names.json")
"""Files there that hold no specs."""
_NAME = re.compile(r"(?=.{1,100}$)(?!\.+$)[\w.+=@-]+( [\w.+=@-]+)*")


@dataclass
class Loaded:
    """Loaded specs, and one line per notice."""

    specs: list[Spec] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differences: list[str] | None = None
    """What differs from SLM Lab, a few words each; None if none of the specs was written for it."""


Source = str | FilePath | Mapping[str, Any]
"""A spec file, its content, or one spec."""


def load_spec(path: Source, name: str | None = None, sets: Sequence[str] = (), for_search: bool = True) -> Spec:
    """Load the spec `name`, with --set arguments applied ("var=value", "agent.algorithm.gamma=0.9").

    Args:
        path: a spec file; or a dict, its content {name: {agent, env, …}} or one spec {agent, env, …}.
        name: may be left out if there is only one. One spec without a name is named "spec".
        for_search: False: nothing is searched, and the search section is left out, with a notice, once it was checked. Values that only
            --set makes invalid are not an error then.

    Raises: SpecError with all problems. Notices go to lib.log.
    """
    source, entries = _read(path, name)
    if name is None:
        if len(entries) != 1:
            raise SpecError(source, [Problem("", f"the name is missing; expected one of {', '.join(entries)}")])
        (name,) = entries
    loaded = load(path, name, sets, for_search)
    if len(loaded.specs) > 1:
        names = ", ".join(spec.name for spec in loaded.specs)
        raise SpecError(source, [Problem(f"{name}.spec_params", f"expands to {len(loaded.specs)} specs; expected one of {names}")])
    notify(loaded.notes)
    return loaded.specs[0]


def load_specs(path: Source, name: str | None = None, sets: Sequence[str] = ()) -> list[Spec]:
    """Load all specs of a file, or all that `name` expands to (by `spec_params`). Raises as load_spec does."""
    loaded = load(path, name, sets)
    notify(loaded.notes)
    return loaded.specs


def raw_entries(path: Source) -> tuple[str, dict[str, Any]]:
    """Return a file's path, and the entries in it as they stand there: name → spec or study. Raises: SpecError."""
    return _read(path)


def spec_names(path: Source) -> list[str]:
    """Return the names of the specs and studies in a file, without names that begin with _ or $. Raises: SpecError."""
    return [*_read(path)[1]]


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
    entries = {name: raw for name, raw in _read(path)[1].items() if not is_study(raw)}
    for raw in entries.values():
        if isinstance(raw, dict):
            migrate(raw, Report())
    return entries


def dump_spec(spec: Spec) -> dict[str, Any]:
    """Return `{name: {agent, env, meta, search?}}`, fully resolved: loading it gives the same spec without notices.

    What a short spec leaves to recommended values is left out here too.
    """
    body: dict[str, Any] = spec.model_dump(mode="json", exclude={"name"})
    if spec.is_short:
        body["agent"]["algorithm"] = spec.agent.algorithm.model_dump(mode="json", exclude_unset=True)
    search = body.pop("search", None)
    drop_nulls(body)
    return {spec.name: body | ({"search": search} if search else {})}


def _files_beside(path: FilePath) -> list[str]:
    """Return the names of the spec files in the folder of a path."""
    try:
        return [file.name for file in path.parent.iterdir() if file.suffix in (".json", ".yaml", ".yml")]
    except (OSError, ValueError):
        return []


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


def load(path: Source, name: str | None, sets: Sequence[str] = (), for_search: bool = True) -> Loaded:
    """As load_specs, but return the notices instead of logging them."""
    arguments = parse_sets(sets)
    repeated: dict[str, list[str]] = {}
    source, entries = _read(path, name, repeated)
    keys = [key for key in entries if not is_study(entries[key])] if name is None else [_key_of(name, entries, arguments, source)]
    loaded, used = Loaded(), set[str]()
    folder = None if isinstance(path, Mapping) else FilePath(source).parent
    rule = "invalid spec name; allowed characters: letters, digits, spaces and _ - . + = @"
    problems = [Problem(key, rule) for key in keys if not _NAME.fullmatch(key)]
    for key in keys:
        prefix = f"{key}." if name is None else ""
        for made, spec, report in _load_entry(key, entries[key], arguments, used, folder, for_search):
            if name not in (None, key, made):
                continue  # another expansion of spec_params than the one asked for
            problems += [replace(p, path=f"{prefix}{p.path}".rstrip(".")) for p in report.problems]
            loaded.specs += [spec] if spec else []
            loaded.notes += [f"{made}: {note}" for note in (*repeated.get(key, ()), *report.notes)]
            if report.for_slm_lab:
                loaded.differences = list(dict.fromkeys([*(loaded.differences or ()), *report.differences]))
    problems += _unused(arguments, used, [entries[key] for key in keys])
    if problems:
        notify(loaded.notes)
        raise SpecError(source if name is None else f"{source} {name}", list(dict.fromkeys(problems)))
    _check_unique_names(loaded.specs, source)
    return loaded


def _unused(arguments: Sets, used: set[str], entries: list[Any]) -> list[Problem]:
    """Return a problem for each --set variable that no spec has, with a suggestion."""
    unfilled = used - arguments.variables.keys()
    return [
        Problem("", f"--set {name}: there is no ${{{name}}} in the spec{suggest_argument(name, value, unfilled, entries)}", "unknown")
        for name, value in arguments.variables.items()
        if name not in used
    ]


def notify(notes: list[str]) -> None:
    """Log each notice once."""
    for note in dict.fromkeys(notes):
        notice(note)


def _check_unique_names(specs: list[Spec], source: str) -> None:
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(source, [Problem(name, "duplicate spec name") for name in twice])


def _read(path: Source, name: str | None = None, repeated: dict[str, list[str]] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of a source for messages, and name → raw spec. `repeated`: see text.read."""
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


def _key_of(name: str, entries: dict[str, Any], arguments: Sets, source: str) -> str:
    """Return the key in the file that `name` refers to: itself, or one whose spec_params expand to it."""
    if name in entries:
        return name
    made = {full: key for key, raw in entries.items() for full in _expanded_names(key, raw, arguments)}
    if name in made:
        return made[name]
    known = [*entries, *made]
    raise SpecError(source, [Problem("", f"unknown spec '{name}'{nearest(name, known) or '; expected one of ' + ', '.join(known[:20])}")])


def _expanded_names(key: str, raw: Any, arguments: Sets) -> list[str]:
    params = raw.get("spec_params") if isinstance(raw, dict) else None
    combos = [] if params is None else combinations(params, arguments.variables, Report())
    return [key + _suffix(combo) for combo in combos]


def _suffix(variables: dict[str, Any]) -> str:
    """Return the suffix of a spec's name: short names of envs, values of other variables."""
    return "".join(f"_{env_ids.short_name(str(value)) or 'x'}" for value in variables.values())


def _load_entry(
    key: str, raw: Any, arguments: Sets, used: set[str], folder: FilePath | None, for_search: bool
) -> Iterator[tuple[str, Spec | None, Report]]:
    """Yield (name, spec, report) of one entry of a file: once, or for each combination of spec_params."""
    report = Report()
    if not isinstance(raw, dict) or is_study(raw):
        study = "is a study, not a spec; run it in mode study"
        report.fail((), study if isinstance(raw, dict) else f"must be an object with agent and env, not {show(raw)}")
        yield key, None, report
        return
    params = raw.get("spec_params")
    combos: list[dict[str, Any]] = [{}] if params is None else combinations(params, arguments.variables, report)
    if not combos:
        yield key, None, report
    for combo in combos:
        body = {inner: value for inner, value in raw.items() if inner != "spec_params"}
        one, found = Report(), dict[str, list[Path]]()
        filled = fill(body, arguments.variables | combo, found, one)
        for place in (place for variable in found.keys() & arguments.variables.keys() for place in found[variable]):
            one.comes_from_set(place)
        used |= found.keys() | (set(params) if isinstance(params, dict) else set())
        named = {"env": arguments.variables["env"]} if "env" in arguments.variables and "env" in found else {}
        name = key + _suffix(named | combo)
        yield name, _build(name, filled, arguments, one, folder, for_search), one


def _build(
    name: str, raw: dict[str, Any], arguments: Sets, report: Report, folder: FilePath | None = None, for_search: bool = True
) -> Spec | None:
    """Build the Spec of one raw spec. Returns None if it is invalid; `report` then has the problems.

    Args: folder: of the spec file. for_search: as of `load_spec`.
    """
    given, raw = raw, copy.deepcopy(raw)  # --set values are shared between the specs of a file
    report.for_slm_lab = is_for_slm_lab(raw)
    migrate(raw, report)
    _check_version(raw, report)
    _apply_sets(raw, arguments, report)
    migrate(raw, report)
    read_arc_files(raw, folder, report)
    drop_nulls(raw)
    adapt(raw, report)
    fill_names(raw)
    drop_ineffective(raw, report)
    prune_search(raw, report)
    raw["name"] = name
    found = report.child()
    spec = validate(raw, found)
    report.merge(found)
    whole, guessed = spec is not None, set[Path]()
    if spec is None:
        spec, guessed = _valid_parts(raw, report)
    if spec is None:
        return None
    if whole:
        spec = derive_sizes(spec)
    found = report.child()
    check_rules(spec, found, algorithm_known=("agent", "algorithm", "name") not in guessed)
    if whole and not found.problems:
        check_updates(spec, found)
        note_differences(spec, found)
    spec, searched = _checked_search(spec, raw, report, found, whole)
    if not for_search and spec.search is not None:
        why = "only for a search; left out"
        if searched.problems and whole and arguments.overrides and _is_valid_without_sets(name, given, arguments, folder):
            why += _invalid_by_sets(searched)
            searched = report.child()
        found.note(("search",), why)
        spec = spec.model_copy(update={"search": None})
    found.merge(searched)
    report.merge(found)
    resolved = resolve(spec, report) if not report.problems else None
    return resolved if not report.problems else None


def _checked_search(spec: Spec, raw: dict[str, Any], report: Report, found: Report, whole: bool) -> tuple[Spec, Report]:
    """Check the search section of a spec, valid as a whole or in parts; return the spec and a report with the problems of the section.

    Notes are added to `found`. In a spec written for SLM Lab, values that cannot be searched are removed, also from `raw`.
    """
    searched, problems_of = report.child(), partial(_problems, spec.name)
    check_search(raw, searched, problems_of if whole else None)
    if searched.problems and whole and report.for_slm_lab:
        drop_misplaced(raw, searched.problems, found)
        searched = report.child()
        check_search(raw, searched, problems_of)
        spec = spec.model_copy(update={"search": raw["search"]})
    if whole and not searched.problems:
        note_search(raw, found)
    return spec, searched


def _apply_sets(raw: dict[str, Any], arguments: Sets, report: Report) -> None:
    """Write the values of --set into a raw spec."""
    for path, value in arguments.overrides.items():
        if value is None and value_at(raw, path) is None:
            names = [name for model in models_at(path[:-1], raw) for name in model.model_fields]
            if names and path[-1] not in names:
                report.fail(path, f"unknown key{nearest(str(path[-1]), names)}", "unknown")
        override(raw, path, copy.deepcopy(value), report)
        if path[:2] == ("meta", "run"):
            report.fail(path, "has no effect: written by a run, ignored on load")


def _invalid_by_sets(searched: Report) -> str:
    first, count = searched.problems[0], len(searched.problems)
    return f" (with --set {count} of its values {'is' if count == 1 else 'are'} invalid, first {first.path}: {first.message})"


def _check_version(raw: dict[str, Any], report: Report) -> None:
    """Report a spec that a run of another version has saved: its keys may mean something else."""
    starts = value_at(raw, ("meta", "run"))
    last = starts[-1] if isinstance(starts, list) and starts else starts  # an entry for each start of the run
    if isinstance(last, dict) and (version := last.get("spec_version")) != SPEC_VERSION:
        why = "another version of slm_lab saved this spec; remove meta.run to use its values as they are meant now"
        report.fail(("meta", "run"), f"spec_version {show(version)}; expected {SPEC_VERSION}: {why}")


def _is_valid_without_sets(name: str, raw: dict[str, Any], arguments: Sets, folder: FilePath | None) -> bool:
    """Return whether the search section is valid without the keys that --set changes; variables keep their values."""
    report = Report()
    _build(name, raw, replace(arguments, overrides={}), report, folder)
    return not any(problem.path.split(".")[0] == "search" for problem in report.problems)


def _problems(name: str, raw: dict[str, Any]) -> list[Problem]:
    """Return the problems of a raw spec, which is changed."""
    report = Report()
    _build(name, raw, Sets(), report)
    return report.problems


def _valid_parts(raw: dict[str, Any], report: Report) -> tuple[Spec | None, set[Path]]:
    """Return the Spec without its invalid parts, so that rules can check the rest in the same run, and the names that were guessed.

    Unknown names of components are replaced by likely ones, and the problems below them are added.
    """
    raw, guessed, cut = copy.deepcopy(raw), set[Path](), False
    for _ in range(10):
        wrong = wrong_parts(raw)
        if not wrong:
            return validate(raw, Report()), guessed
        likely = {} if cut else likely_names(raw, wrong)
        for path, name in likely.items():
            value_at(raw, path[:-1])["name"] = name
        if likely:
            guessed |= likely.keys()
            drop_ineffective(raw, Report())
            found = report.child()
            validate(raw, found)
            report.merge(found)
            continue
        cut = True
        for path in sorted(set(wrong), key=len, reverse=True):  # a key may be wrong in two ways
            _remove_part(raw, path)
    return None, guessed


_STAND_IN: dict[Path, Any] = {
    ("agent",): {"algorithm": {"name": "Random"}},
    ("agent", "algorithm"): {"name": "Random"},
    ("agent", "net", "conv_hid_layers"): [[1, 1]],
    ("agent", "critic_net", "conv_hid_layers"): [[1, 1]],
    ("agent", "net", "hid_layers"): [[[1]], [1], []],
    ("agent", "critic_net", "hid_layers"): [[[1]], [1], []],
    ("env",): {"name": "CartPole-v1", "max_frame": 1},
    ("env", "name"): "CartPole-v1",
    ("env", "max_frame"): 1,
}
"""Valid values for required parts."""


def _remove_part(rest: dict[str, Any], path: Path) -> None:
    """Remove the part at `path`, or what contains it if it is missing; replace required parts by a stand-in."""
    for end in range(len(path), 0, -1):
        section, key = value_at(rest, path[: end - 1]), path[end - 1]
        if not isinstance(section, dict):
            continue
        # remove a stand-in that did not help (a HydraMLPNet's hid_layers in another net)
        if path[:end] in _STAND_IN and section.get(key) != _STAND_IN[path[:end]]:
            section[key] = copy.deepcopy(_STAND_IN[path[:end]])
            return
        if key in section:
            del section[key]
            return
