"""Load specs of a file by name, with --set arguments applied, as Specs, or raise a SpecError with all problems."""

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
from slm_lab.spec.compat.migrate import OTHER_NAMES, migrate
from slm_lab.spec.load.build import Request, build, drop_nulls
from slm_lab.spec.load.files import Source, is_study, raw_entries, to_plain_json
from slm_lab.spec.models.spec import Spec, models_at
from slm_lab.spec.report import KeyPath, Problem, Report, SpecError, closest, mark_if_set, nearest_hint, show, show_path, to_path

_NAME = re.compile(r"(?=.{1,100}$)(?!\.+$)[\w.+=@-]+( [\w.+=@-]+)*")


@dataclass
class Loaded:
    """Loaded specs, and notices of one line each."""

    specs: list[Spec] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differences: list[str] | None = None
    """Differences from SLM Lab, a few words each; None if no spec was written for SLM Lab."""


def load_spec(path: Source, name: str | None = None, sets: Sequence[str] = (), for_search: bool = True) -> Spec:
    """Load the spec `name`, with --set arguments applied ("var=value", "agent.algorithm.gamma=0.9").

    Args:
        path: a spec file, or a dict: the content of a file {name: {agent, env, …}} or one spec {agent, env, …}.
        name: may be omitted if there is only one spec. A single spec without a name is named "spec".
        for_search: False if the spec is not for a search. The search section is then checked and left out, with a notice; values in this
            section that only --set makes invalid are not errors.

    Raises: SpecError with all problems. Notices go to lib.log.
    """
    source, entries = raw_entries(path, name)
    if name is None:
        if len(entries) != 1:
            raise SpecError(source, [Problem("", f"the name is missing; expected one of {', '.join(entries)}")])
        (name,) = entries
    loaded = load_with_notices(path, name, sets, for_search)
    if len(loaded.specs) > 1:
        names = ", ".join(spec.name for spec in loaded.specs)
        raise SpecError(source, [Problem(f"{name}.spec_params", f"expands to {len(loaded.specs)} specs; expected one of {names}")])
    notify(loaded.notes)
    return loaded.specs[0]


def load_specs(path: Source, name: str | None = None, sets: Sequence[str] = ()) -> list[Spec]:
    """Load all specs of a file, or all specs that `name` expands to (by `spec_params`). Raises the same errors as load_spec."""
    loaded = load_with_notices(path, name, sets)
    notify(loaded.notes)
    return loaded.specs


def dump_spec(spec: Spec) -> dict[str, Any]:
    """Return `{name: {agent, env, meta, search?}}`, fully resolved: loading it gives the same spec without notices.

    Defaults are included, except for keys that the spec does not give and that a run determines: the keys that a run adds to a short spec
    (see Spec.is_short) and meta.log_frequency. meta.eval_episodes is not included if other keys switch default evaluations off.
    """
    body: dict[str, Any] = spec.model_dump(mode="json", exclude={"name"})
    if spec.is_short:
        body["agent"]["algorithm"] = spec.agent.algorithm.model_dump(mode="json", exclude_unset=True)
    if "log_frequency" not in spec.meta.model_fields_set:
        del body["meta"]["log_frequency"]
    if spec.meta.eval_episodes == "auto" and not spec.meta.evaluates_by_default:
        del body["meta"]["eval_episodes"]
    search = body.pop("search", None)
    drop_nulls(body)
    return {spec.name: body | ({"search": search} if search else {})}


def load_with_notices(path: Source, name: str | None, sets: Sequence[str] = (), for_search: bool = True) -> Loaded:
    """Do the same as load_specs, but return the notices instead of logging them."""
    arguments = parse_sets(sets)
    repeated: dict[str, list[str]] = {}
    source, entries = raw_entries(path, name, repeated)
    keys = [key for key in entries if not is_study(entries[key])] if name is None else [_key_of(name, entries, arguments, source)]
    loaded, used = Loaded(), set[str]()
    folder = None if isinstance(path, Mapping) else Path(source).parent
    rule = "invalid spec name; allowed characters: letters, digits, spaces and _ - . + = @"
    problems = [Problem(key, rule) for key in keys if not _NAME.fullmatch(key)]
    for key in keys:
        prefix = f"{key}." if name is None else ""
        for made, spec, report in _load_entry(key, entries[key], arguments, used, folder, for_search):
            if name not in (None, key, made):
                continue  # another expansion of spec_params than the requested one
            problems += [replace(p, path=f"{prefix}{p.path}".rstrip(".")) for p in report.problems]
            loaded.specs += [spec] if spec else []
            loaded.notes += [f"{made}: {note}" for note in (*repeated.get(key, ()), *report.notes)]
            if report.for_slm_lab:
                loaded.differences = list(dict.fromkeys([*(loaded.differences or ()), *report.differences]))
    problems += _unused(arguments, used, [entries[key] for key in keys])
    if problems:
        notify([note for note in loaded.notes if not note.endswith("; ignored")])  # a key without effect is not a cause of a problem
        raise SpecError(source if name is None else f"{source} {name}", list(dict.fromkeys(problems)))
    counts = Counter(spec.name for spec in loaded.specs)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise SpecError(source, [Problem(name, "duplicate spec name") for name in twice])
    return loaded


def _unused(arguments: Sets, used: set[str], entries: list[Any]) -> list[Problem]:
    """Return a problem, with a suggestion, for each --set variable that no spec contains."""
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


def _key_of(name: str, entries: dict[str, Any], arguments: Sets, source: str) -> str:
    """Return the key in the file that `name` refers to: `name` itself, or the key whose spec_params expand to `name`."""
    if name in entries:
        return name
    made = {full: key for key, raw in entries.items() for full in _expanded_names(key, raw, arguments)}
    if name in made:
        return made[name]
    known = [*entries, *made]
    raise SpecError(
        source, [Problem("", f"unknown spec '{name}'{nearest_hint(name, known) or '; expected one of ' + ', '.join(known[:20])}")]
    )


def _expanded_names(key: str, raw: Any, arguments: Sets) -> list[str]:
    params = raw.get("spec_params") if isinstance(raw, dict) else None
    combos = [] if params is None else combinations(params, arguments.variables, Report())
    return [key + _suffix(combo) for combo in combos]


def _suffix(variables: dict[str, Any]) -> str:
    """Return the suffix of a spec's name: short names of envs, values of other variables."""
    return "".join(f"_{env_ids.short_name(str(value)) or 'x'}" for value in variables.values())


def _load_entry(
    key: str, raw: Any, arguments: Sets, used: set[str], folder: Path | None, for_search: bool
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
        one, found = Report(), dict[str, list[KeyPath]]()
        filled = fill_variables(body, arguments.variables | combo, found, one)
        for location in (location for variable in found.keys() & arguments.variables.keys() for location in found[variable]):
            one.comes_from_set(location)
        used |= found.keys() | (set(params) if isinstance(params, dict) else set())
        named = {"env": arguments.variables["env"]} if "env" in arguments.variables and "env" in found else {}
        name = key + _suffix(named | combo)
        yield name, build(name, filled, Request(arguments.overrides, folder, for_search), one), one


def suggest_argument(name: str, value: Any, unfilled: Iterable[str], entries: Iterable[Any]) -> str:
    """Return a hint for `--set name=value`: a variable without a value, or paths in raw specs that end in `name` or a similar key."""
    text = value if isinstance(value, str) else json.dumps(value)
    variable = closest(name, unfilled)
    if variable is not None:
        return f"; did you mean {variable}={text}?"
    found = dict.fromkeys(path for raw in entries if isinstance(raw, dict) for path in _paths(raw))
    keys = {str(path[-1]) for path, _, _ in found}
    if name in OTHER_NAMES and name not in keys:
        return f"; slm_lab calls it {OTHER_NAMES[name]}"
    key = closest(name, keys, cutoff=0.75)
    ends = [path for path in found if path[0][-1] == key]
    ends = [path for path in ends if path[1]] or ends  # prefer keys that are in the file
    words = []
    for path, _, is_section in ends:
        if is_section and isinstance(value, str):
            words.append(f"{show_path(path)}.name={text}")
        elif len(path) > 1:  # a single word is always the name of a variable
            words.append(f"{show_path(path)}={text}")
    if not words:
        return "; a name without a dot is a variable of the spec, a key is named by its path (env.max_frame)"
    return f"; did you mean {' or '.join(words[:3])}?"


def _paths(raw: dict[str, Any]) -> Iterator[tuple[KeyPath, bool, bool]]:
    """Yield (path, whether it is present, whether it is a section with a name) for every key of a raw spec, breadth first."""
    raw = copy.deepcopy(raw)
    migrate(raw, Report())
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
class Sets:
    """The parsed --set arguments."""

    variables: dict[str, Any] = field(default_factory=dict)
    """Values of ${var}, by name."""
    overrides: dict[KeyPath, Any] = field(default_factory=dict)
    """Values of keys, by path."""


def parse_sets(sets: Sequence[str]) -> Sets:
    """Parse --set arguments into variables (var=value) and overrides (path.to.key=value).

    Raises: SpecError for an argument of another form.
    """
    parsed, problems = Sets(), []
    for text in sets:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not to_path(name):
            problems.append(Problem("", f"must be name=value or path.to.key=value, not {show(text)}"))
        elif "." in name or "[" in name:
            parsed.overrides[to_path(name)] = read_value(value)
        else:
            parsed.variables[name] = read_value(value)
    if problems:
        raise SpecError("--set", problems)
    return parsed


def mark_sets(error: SpecError, source: str, sets: Sequence[str]) -> SpecError:
    """Convert an error from building a spec to the form of load errors: with `source`, and with "(from --set)" at keys in `sets`."""
    given = parse_sets(sets).overrides
    problems = []
    for problem in error.problems:
        location = to_path(problem.path)
        named = mark_if_set(problem.message, location[1:], given)  # with several specs, paths begin with the name of the spec
        problems.append(replace(problem, message=mark_if_set(named, location, given)))
    return SpecError(source, problems)


def read_value(text: str) -> Any:
    """Parse a command-line value: JSON, True, False or None; return other text unchanged."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return to_plain_json(value, f"--set {text[:40]}")


def combinations(params: Any, given: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return the variables of each combination of `spec_params: {var: [values]}`; --set takes precedence."""
    if not isinstance(params, dict) or not all(isinstance(values, list) and values for values in params.values()):
        report.fail(("spec_params",), f"must be an object of lists (not empty), not {show(params)}")
        return []
    lists = {name: values for name, values in params.items() if name not in given}
    if (count := math.prod(map(len, lists.values()))) > 10_000:
        report.fail(("spec_params",), f"expands to {count} specs; at most 10000 are allowed")
        return []
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def fill_variables(node: Any, variables: Mapping[str, Any], used: dict[str, list[KeyPath]], report: Report, path: KeyPath = ()) -> Any:
    """Return `node` with each ${var} replaced by its value if the string consists only of ${var}, else by the text of the value.

    A variable without a value is reported as a problem at each of its paths.
    Args: used: dict to fill: variables in `node` → their paths.
    """
    if isinstance(node, dict):
        filled = {}
        for key, inner in node.items():
            name = str(fill_variables(key, variables, used, report, (*path, key))) if "${" in key else key
            if name in filled:
                report.fail((*path, key), f"duplicate key '{name}' after filling variables")
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
            report.fail(path, f"${{{name}}} has no value; use --set {name}=…", "missing")
    if any(name not in variables for name in names):
        return text
    whole = _VARIABLE.fullmatch(text)
    if whole:
        return variables[whole[1]]
    return _VARIABLE.sub(lambda match: _as_text(variables[match[1]]), text)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
