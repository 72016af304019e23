"""Load specs from spec files, apply --set arguments, and return Spec objects. Invalid specs raise a SpecError with all problems."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slm_lab.lib.log import notice
from slm_lab.spec.compat import env_ids
from slm_lab.spec.compat.migrate import OTHER_NAMES, migrate_spec
from slm_lab.spec.load.build import LoadOptions, build, drop_nulls
from slm_lab.spec.load.files import Source, is_study, raw_entries, to_plain_json
from slm_lab.spec.models.spec import Spec, models_at
from slm_lab.spec.report import (
    KeyPath,
    Problem,
    Report,
    SpecError,
    append_set_marker,
    closest_word,
    format_json,
    nearest_hint,
    show_path,
    to_path,
)

_NAME = re.compile(r"(?!\.+$)[\w.+=@-]+( [\w.+=@-]+)*")
_NAME_CHARACTERS, _NAME_BYTES = 100, 160
"""Maximum length of a spec name in characters and in bytes of UTF-8. The names of files contain the name of the spec, and most file systems
limit the name of a file to 255 bytes."""


@dataclass
class LoadedSpecs:
    """Specs that were loaded from a file, and the one-line notices that loading these specs has produced."""

    specs: list[Spec] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differences: list[str] | None = None
    """Short descriptions of those differences between SLM Lab and this package that affect the specs, or None if no spec was written for
    SLM Lab."""


def load_spec(path: Source, name: str | None = None, sets: Sequence[str] = (), for_search: bool = True, builds_env: bool = True) -> Spec:
    """Load the spec `name` of a spec file, with --set arguments applied.

    Args:
        path: path of a spec file, or a dict that contains either the content of a spec file, {name: {agent, env, …}}, or one spec, {agent,
            env, …}.
        name: name of the spec, which may be omitted if there is only one spec. A single spec without a name gets the name "spec".
        sets: --set arguments, such as "var=value" or "agent.algorithm.gamma=0.9".
        for_search: whether the spec is used for a hyperparameter search. If `for_search` is False, the search section is checked and then
            removed with a notice. Values in the search section that are invalid only because of --set arguments are not errors.
        builds_env: whether the env of the spec will be created. If False, an unknown env id and missing packages of the env are not
            problems. A trained policy, for example, can be loaded on a machine without its env.

    Raises: SpecError with all problems of the spec. Notices on the spec are logged (see `lib.log.notice`).
    """
    source, entries = raw_entries(path, name)
    if name is None:
        if len(entries) != 1:
            raise SpecError(source, [Problem("", f"the name is missing; expected one of {', '.join(entries)}")])
        (name,) = entries
    loaded = load_with_notices(path, name, sets, for_search, builds_env)
    if len(loaded.specs) > 1:
        names = ", ".join(spec.name for spec in loaded.specs)
        raise SpecError(source, [Problem(f"{name}.spec_params", f"expands to {len(loaded.specs)} specs; expected one of {names}")])
    log_notices(loaded.notes)
    return loaded.specs[0]


def load_specs(path: Source, name: str | None = None, sets: Sequence[str] = ()) -> list[Spec]:
    """Load all specs of a spec file or, if `name` is not None, all specs to which the entry `name` of the file expands.

    An entry with the key `spec_params`, {variable: [values]}, expands to one spec for each combination of values. Raises the same errors as
    `load_spec`.
    """
    loaded = load_with_notices(path, name, sets)
    log_notices(loaded.notes)
    return loaded.specs


def dump_spec(spec: Spec) -> dict[str, Any]:
    """Return a spec as a dict of JSON values, `{name: {agent, env, meta, search}}`. Loading the returned dict gives the same spec without
    notices.

    The returned dict includes default values, except for keys that the spec does not give and whose values a run determines. A run
    determines the values of meta.log_frequency and, for a spec without agent.net (see Spec.lacks_net), of agent.net and the keys of
    agent.algorithm. The key meta.eval_episodes is left out if other keys disable the default evaluations.
    """
    body: dict[str, Any] = spec.model_dump(mode="json", exclude={"name"})
    if spec.lacks_net:
        body["agent"]["algorithm"] = spec.agent.algorithm.model_dump(mode="json", exclude_unset=True)
    if "log_frequency" not in spec.meta.model_fields_set:
        del body["meta"]["log_frequency"]
    if spec.meta.eval_episodes == "auto" and not spec.meta.evaluates_by_default:
        del body["meta"]["eval_episodes"]
    search = body.pop("search", None)
    drop_nulls(body)
    return {spec.name: body | ({"search": search} if search else {})}


def name_rule(name: str) -> str:
    """Return the rule that the name of a spec or study violates, or "" if the name is valid."""
    if len(name) > _NAME_CHARACTERS or len(name.encode(errors="surrogatepass")) > _NAME_BYTES:
        return f"the name is too long; allowed: at most {_NAME_CHARACTERS} characters and {_NAME_BYTES} bytes of UTF-8"
    return "" if _NAME.fullmatch(name) else "invalid spec name; allowed characters: letters, digits, spaces and _ - . + = @"


def load_with_notices(
    path: Source, name: str | None, sets: Sequence[str] = (), for_search: bool = True, builds_env: bool = True
) -> LoadedSpecs:
    """Load specs as `load_specs` does, but return the notices instead of logging the notices.

    Args: for_search, builds_env: see `load_spec`.
    """
    arguments = parse_set_arguments(sets)
    repeated: dict[str, list[str]] = {}
    source, entries = raw_entries(path, name, repeated)
    keys = [key for key in entries if not is_study(entries[key])] if name is None else [_find_entry_key(name, entries, arguments, source)]
    loaded, used = LoadedSpecs(), set[str]()
    folder = None if isinstance(path, Mapping) else Path(source).parent
    options = LoadOptions(arguments.overrides, folder, for_search, builds_env)
    problems = [Problem(key, rule) for key in keys if (rule := name_rule(key))]
    for key in keys:
        prefix = f"{key}." if name is None else ""
        for made, spec, report in _load_entry(key, entries[key], arguments, used, options):
            if name not in (None, key, made):
                continue  # another expansion of spec_params than the requested one
            if made != key and (rule := name_rule(made)):
                problems.append(Problem(f"{prefix}spec_params", f"{made}: {rule}"))
            problems += [replace(p, path=f"{prefix}{p.path}".rstrip(".")) for p in report.problems]
            loaded.specs += [spec] if spec else []
            loaded.notes += [f"{made}: {note}" for note in (*repeated.get(key, ()), *report.notes)]
            if report.for_slm_lab:
                loaded.differences = list(dict.fromkeys([*(loaded.differences or ()), *report.differences]))
    problems += _unused_variable_problems(arguments, used, [entries[key] for key in keys])
    if problems:
        log_notices([note for note in loaded.notes if not note.endswith("; ignored")])  # keys without effect do not cause problems
        raise SpecError(source if name is None else f"{source} {name}", list(dict.fromkeys(problems)))
    counts = Counter(spec.name for spec in loaded.specs)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise SpecError(source, [Problem(name, "duplicate spec name") for name in twice])
    return loaded


def _unused_variable_problems(arguments: SetArguments, used: set[str], entries: list[Any]) -> list[Problem]:
    """Return a problem, with a suggestion, for each variable that a --set argument gives and that no spec contains."""
    unfilled = used - arguments.variables.keys()
    return [
        Problem("", f"--set {name}: there is no ${{{name}}} in the spec{suggest_argument(name, value, unfilled, entries)}", "unknown")
        for name, value in arguments.variables.items()
        if name not in used
    ]


def log_notices(notes: list[str]) -> None:
    """Log each of the notices `notes` once, even if the list contains a notice several times."""
    for note in dict.fromkeys(notes):
        notice(note)


def _find_entry_key(name: str, entries: dict[str, Any], arguments: SetArguments, source: str) -> str:
    """Find the entry of a spec file that contains the spec `name`, and return the key of this entry. Raises SpecError if no entry contains
    the spec.

    The returned key is `name` itself, or the key of an entry whose `spec_params` expand to a spec with the name `name`.
    """
    if name in entries:
        return name
    made = {full: key for key, raw in entries.items() for full in _expanded_names(key, raw, arguments)}
    if name in made:
        return made[name]
    known = [*entries, *made]
    raise SpecError(
        source, [Problem("", f"unknown spec '{name}'{nearest_hint(name, known) or '; expected one of ' + ', '.join(known[:20])}")]
    )


def _expanded_names(key: str, raw: Any, arguments: SetArguments) -> list[str]:
    params = raw.get("spec_params") if isinstance(raw, dict) else None
    combos = [] if params is None else expand_spec_params(params, arguments.variables, Report())
    return [key + _name_suffix(combo) for combo in combos]


def _name_suffix(variables: dict[str, Any]) -> str:
    """Return the suffix that the values of variables add to the name of a spec, with shortened env ids."""
    return "".join(f"_{env_ids.short_name(str(value)) or 'x'}" for value in variables.values())


def _load_entry(
    key: str, raw: Any, arguments: SetArguments, used: set[str], options: LoadOptions
) -> Iterator[tuple[str, Spec | None, Report]]:
    """Yield a tuple (name, spec, report) for each spec to which an entry of a spec file expands (see `load_specs`).

    In a tuple, the spec is None if the spec is invalid.
    """
    report = Report()
    if not isinstance(raw, dict) or is_study(raw):
        study = "is a study, not a spec; run it in mode study"
        report.add_problem((), study if isinstance(raw, dict) else f"must be an object with agent and env, not {format_json(raw)}")
        yield key, None, report
        return
    params = raw.get("spec_params")
    combos: list[dict[str, Any]] = [{}] if params is None else expand_spec_params(params, arguments.variables, report)
    if not combos:
        yield key, None, report
    for combo in combos:
        body = {inner: value for inner, value in raw.items() if inner != "spec_params"}
        one, found = Report(), dict[str, list[KeyPath]]()
        filled = fill_variables(body, arguments.variables | combo, found, one)
        replaced = [show_path(path) for path in options.overrides]  # variables in the replaced values need no value
        below = tuple(f"{path}{separator}" for path in replaced for separator in ".[")
        one.problems = [problem for problem in one.problems if problem.path not in replaced and not problem.path.startswith(below)]
        for location in (location for variable in found.keys() & arguments.variables.keys() for location in found[variable]):
            one.mark_set_argument(location)
        used |= found.keys() | (set(params) if isinstance(params, dict) else set())
        named = {"env": arguments.variables["env"]} if "env" in arguments.variables and "env" in found else {}
        name = key + _name_suffix(named | combo)
        yield name, build(name, filled, options, one), one


def suggest_argument(name: str, value: Any, unfilled: Iterable[str], entries: Iterable[Any]) -> str:
    """Return a hint for an invalid argument `--set name=value`.

    The hint suggests a variable that has no value, or the paths of keys in the raw specs `entries` that are equal or similar to `name`.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    variable = closest_word(name, unfilled)
    if variable is not None:
        return f"; did you mean {variable}={text}?"
    found = dict.fromkeys(path for raw in entries if isinstance(raw, dict) for path in _possible_key_paths(raw))
    keys = {str(path[-1]) for path, _, _ in found}
    if name in OTHER_NAMES and name not in keys:
        return f"; slm_lab calls it {OTHER_NAMES[name]}"
    key = closest_word(name, keys, cutoff=0.75)
    ends = [path for path in found if path[0][-1] == key]
    ends = [path for path in ends if path[1]] or ends  # keys that the file contains are preferred
    words = []
    for path, _, is_section in ends:
        if is_section and isinstance(value, str):
            words.append(f"{show_path(path)}.name={text}")
        elif len(path) > 1:  # a single word is always the name of a variable
            words.append(f"{show_path(path)}={text}")
    if not words:
        return "; a name without a dot is a variable of the spec, and a key is named by its path, such as env.max_frame"
    return f"; did you mean {' or '.join(words[:3])}?"


def _possible_key_paths(raw: dict[str, Any]) -> Iterator[tuple[KeyPath, bool, bool]]:
    """Yield a tuple (path, is_present, is_named_section) for every key that a raw spec contains or may contain, breadth first.

    A named section is an object with a key `name`, such as agent.net.
    """
    raw = copy.deepcopy(raw)
    migrate_spec(raw, Report())
    locations: list[tuple[KeyPath, Any]] = [((), raw)]
    for location, section in locations:
        there = section if isinstance(section, dict) else {}
        fields = [key for model in models_at(location, raw) for key in model.model_fields if (*location, key) != ("name",)]
        for key in dict.fromkeys([*there, *fields]):
            below = models_at((*location, key), raw)
            yield (*location, key), key in there, any("name" in model.model_fields for model in below)
            if below:
                locations.append(((*location, key), there.get(key)))


_VARIABLE = re.compile(r"\$\{([^${}]*)\}")
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class SetArguments:
    """Parsed --set arguments of the command line."""

    variables: dict[str, Any] = field(default_factory=dict)
    """Maps the names of variables (${var}) to their values."""
    overrides: dict[KeyPath, Any] = field(default_factory=dict)
    """Maps the paths of keys to their values."""


def parse_set_arguments(sets: Sequence[str]) -> SetArguments:
    """Parse --set arguments into variables (var=value) and overrides (path.to.key=value).

    Raises: SpecError if an argument has neither the form var=value nor the form path.to.key=value.
    """
    parsed, problems = SetArguments(), []
    for text in sets:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not to_path(name) or "" in to_path(name):
            problems.append(Problem("", f"must be name=value or path.to.key=value, not {format_json(text)}"))
        elif "." in name or "[" in name:
            path = to_path(name)
            parsed.overrides.pop(path, None)  # the last value of a key is also set last: a section may have been set in between
            parsed.overrides[path] = parse_value(value, name)
        else:
            parsed.variables[name] = parse_value(value, name)
    if problems:
        raise SpecError("--set", problems)
    return parsed


def mark_set_arguments(error: SpecError, source: str, sets: Sequence[str]) -> SpecError:
    """Return a copy of a SpecError with the source `source`. "(from --set)" is appended to each message about a key that the --set
    arguments `sets` give."""
    given = parse_set_arguments(sets).overrides
    problems = []
    for problem in error.problems:
        location = to_path(problem.path)
        named = append_set_marker(problem.message, location[1:], given)  # with several specs, paths begin with the spec's name
        problems.append(replace(problem, message=append_set_marker(named, location, given)))
    return SpecError(source, problems)


def parse_value(text: str, name: str = "") -> Any:
    """Parse the value of a --set argument as JSON, or as Python's True, False or None. Return any other text as a string.

    Args: name: key or variable of the argument, for error messages.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return to_plain_json(value, f"--set {name}={text[:40]}" if name else f"--set {text[:40]}")


def expand_spec_params(params: Any, given: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return a dict {variable: value} for each combination of the values of variables.

    Args: params: value of the spec's key spec_params, {variable: [values]}.

    The returned dicts do not contain the variables in `given`, whose values --set arguments give.
    """
    if not isinstance(params, dict) or not all(isinstance(values, list) and values for values in params.values()):
        report.add_problem(("spec_params",), f"must be an object of lists (not empty), not {format_json(params)}")
        return []
    lists = {name: values for name, values in params.items() if name not in given}
    if (count := math.prod(map(len, lists.values()))) > 10_000:
        report.add_problem(("spec_params",), f"expands to {count} specs; at most 10000 are allowed")
        return []
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def fill_variables(node: Any, variables: Mapping[str, Any], used: dict[str, list[KeyPath]], report: Report, path: KeyPath = ()) -> Any:
    """Return a copy of `node`, which consists of JSON values, in which each variable ${var} is replaced by the variable's value.

    A string that consists only of ${var} is replaced by the value itself, and in a longer string the value is inserted as text. A variable
    without a value is reported as a problem at each path at which the variable is used.

    Args: used: dict to which the function adds, for each variable, a list of the paths at which `node` uses the variable.
    """
    if isinstance(node, dict):
        filled = {}
        for key, inner in node.items():
            name = str(fill_variables(key, variables, used, report, (*path, key))) if "${" in key else key
            if name in filled:
                report.add_problem((*path, key), f"duplicate key '{name}' after filling variables")
            filled[name] = fill_variables(inner, variables, used, report, (*path, key))
        return filled
    if isinstance(node, list):
        return [fill_variables(inner, variables, used, report, (*path, index)) for index, inner in enumerate(node)]
    return _fill_text(node, variables, used, report, path) if isinstance(node, str) and "${" in node else node


def _fill_text(text: str, variables: Mapping[str, Any], used: dict[str, list[KeyPath]], report: Report, path: KeyPath) -> Any:
    names = _VARIABLE.findall(text)
    for name in names:
        used.setdefault(name, []).append(path)
        if name not in variables:
            report.add_problem(path, f"${{{name}}} has no value; use --set {name}=…", "missing")
    if any(name not in variables for name in names):
        return text
    whole = _VARIABLE.fullmatch(text)
    if whole:
        return variables[whole[1]]
    return _VARIABLE.sub(lambda match: _as_text(variables[match[1]]), text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
