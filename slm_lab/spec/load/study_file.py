"""Functions that load a study (a comparison of specs in several envs with several seeds) from a spec file, and expand the study to training
runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from slm_lab.spec.load.files import find_spec_file, raw_entries
from slm_lab.spec.load.loader import dump_spec, load_with_notices, log_notices, name_rule, parse_set_arguments
from slm_lab.spec.load.validate import add_validation_problems
from slm_lab.spec.models.spec import Spec, models_at
from slm_lab.spec.models.study import Study, StudyEntry, StudyEnv, StudyRun, StudySpec
from slm_lab.spec.report import (
    KeyPath,
    Problem,
    Report,
    SpecError,
    diff,
    flatten_leaves,
    format_json,
    nearest_hint,
    set_value_at,
    show_path,
    to_path,
    value_at,
)

OPERATIONAL = (
    "meta.random_seed", "meta.run", "meta.save_", "meta.checkpoint_frequency", "meta.stall_", "meta.max_restart", "meta.observers",
    "meta.track",
)  # fmt: skip
"""Prefixes of the paths of those spec keys that do not affect what the agent learns."""
_LABEL_BYTES = 190
"""Maximum number of bytes of an entry's label and an env's label together. Most file systems limit the name of a file to 255 bytes."""


def settings_that_affect_results(spec: Spec) -> dict[str, Any]:
    """Return a dict from dotted paths to values for all keys of a spec that determine the results of the spec's runs.

    The dict does not contain seeds, provenance and other keys whose paths begin with a prefix in OPERATIONAL.
    """
    ((_, body),) = dump_spec(spec).items()
    return {path: value for path, value in flatten_leaves(body) if not path.startswith(OPERATIONAL)}


def differing_paths(before: Mapping[str, Any], after: Mapping[str, Any], spec: Spec) -> list[str]:
    """Return the dotted paths of the keys in which two results of `settings_that_affect_results` differ.

    Args: spec: the spec that has the settings `after`.

    A key that only `after` contains is left out if it has its default value, because the key may have been added to the package after the
    run with the settings `before`, and the default value does not change what this run learned.
    """
    ((_, body),) = dump_spec(spec).items()
    return [path for path in diff(before, after) if path in before or not _is_default(path, after[path], body)]


def _is_default(path: str, value: Any, body: Any) -> bool:
    *section, key = path.split(".")
    fields = [model.model_fields[key] for model in models_at(tuple(section), body) if key in model.model_fields]
    if len(fields) != 1 or fields[0].is_required():
        return False
    return bool(to_jsonable_python(fields[0].get_default(call_default_factory=True)) == value)


def study_entries(path: str | Path, name: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a spec file, and a dict from names to all specs and studies in the file. Raises SpecError if the file contains no
    study `name`."""
    source, entries = raw_entries(path)
    if name not in entries:
        hint = nearest_hint(name, entries) or f"; expected one of {', '.join(entries)}"
        raise SpecError(source, [Problem("", f"unknown study '{name}'{hint}")])
    if not isinstance(entries[name], dict) or "study" not in entries[name]:
        problem = Problem("", "is a spec, not a study: it has no 'study' object; its modes are train, dev and search")
        raise SpecError(f"{source} {name}", [problem])
    return source, entries


def load_study(path: str | Path, name: str, sets: Sequence[str] = ()) -> Study:
    """Load the study `name` of a spec file and the specs of all its runs. Raises SpecError with all problems of the study."""
    source, entries = study_entries(path, name)
    raw, where, report = entries[name], f"{source} {name}", Report()
    if rule := name_rule(name):
        raise SpecError(where, [Problem("", rule)])
    unknown = [key for key in raw if key not in ("study", "$schema")]
    beside = [Problem(key, f"unknown key beside 'study'{nearest_hint(key, ['study'])}", "unknown") for key in unknown]
    body = _apply_set_arguments(json.loads(json.dumps(raw["study"])), sets, report)
    spec = _validate_study(body, report)
    if spec is None or report.problems or beside:
        raise SpecError(where, [*beside, *_prefix_study_path(report.problems)])
    _check_study(spec, report)
    planner = _RunPlanner(spec, source, report)
    runs = tuple(planner.runs())
    if spec.paired:
        planner.check_pairs(runs)
    if report.problems:
        raise SpecError(where, _prefix_study_path(report.problems))
    log_notices(planner.notes)
    return Study(name, source, spec, {"study": body}, runs, planner.scores, tuple(sets))


def _prefix_study_path(problems: Sequence[Problem]) -> list[Problem]:
    return [replace(one, path=f"study.{one.path}".rstrip(".")) for one in problems]


def _apply_set_arguments(body: Any, sets: Sequence[str], report: Report) -> Any:
    """Apply --set arguments to a raw study, and return the raw study. The paths in the --set arguments refer to keys of the study, not to
    keys of the specs in the study."""
    arguments = parse_set_arguments(sets)
    keys = StudySpec.model_fields
    overrides: dict[KeyPath, Any] = {(variable,): value for variable, value in arguments.variables.items()}
    for key, value in (overrides | arguments.overrides).items():
        if key[0] not in keys:
            inside = f", or 'set.{show_path(key)}' for the specs of all runs" if len(key) > 1 else ""
            hint = nearest_hint(str(key[0]), keys) or f"; allowed: {', '.join(keys)}"
            report.add_problem(key, f"unknown key of a study{hint}{inside}", "unknown")
        elif isinstance(body, dict):
            set_value_at(body, _set_argument_path(body, key), value, report)
    return body


def _set_argument_path(body: dict[str, Any], key: KeyPath) -> KeyPath:
    """Return the path in a raw study at which the value of a --set argument is set. The path ("set", "env", "max_frame") in a --set
    argument becomes ("set", "env.max_frame").

    This function flattens the object at a key `set` to dotted paths in place, and removes the changed path from the object so that the new
    value comes last.
    """
    depth = {"set": 1, "entries": 3, "envs": 3}.get(str(key[0]), len(key))
    given = value_at(body, key[:depth])
    if len(key) <= depth or key[depth - 1] != "set" or not isinstance(given, dict):
        return key
    listed = dict(_flatten_set_values(given, key[:depth], Report()))
    inner = show_path(key[depth:])
    listed.pop(inner, None)
    given.clear()
    given.update(listed)
    return (*key[:depth], inner)


def _drop_nulls(body: Any) -> None:
    """Remove keys of a study, its entries and its envs whose value is None (null in JSON), in place. Values in `set` are not changed."""
    if not isinstance(body, dict):
        return
    for section in (body, *(one for key in ("entries", "envs") if isinstance(body.get(key), list) for one in body[key])):
        for key in [key for key, value in section.items() if value is None] if isinstance(section, dict) else ():
            del section[key]


def _validate_study(body: Any, report: Report) -> StudySpec | None:
    _drop_nulls(body)
    if isinstance(body, dict) and isinstance(body.get("envs"), list):
        body["envs"] = [{"name": env} if isinstance(env, str) else env for env in body["envs"]]
    try:
        return StudySpec.model_validate(body)
    except ValidationError as error:
        add_validation_problems(error, body, report, StudySpec)
    return None


def _check_study(spec: StudySpec, report: Report) -> None:
    """Add a problem to `report` for each contradiction between the keys of a study."""
    labels = [entry.title for entry in spec.entries]
    names = [env.title for env in spec.envs]
    for index, name in enumerate(names):
        if name in names[:index]:
            report.add_problem(("envs", index), f"'{name}' is envs[{names.index(name)}] too; give each env its own label")
    entry_seeds: list[tuple[KeyPath, Sequence[int]]] = [
        (("entries", index), entry.random_seed or ()) for index, entry in enumerate(spec.entries)
    ]
    for location, seeds in [((), spec.random_seed), *entry_seeds]:
        for seed, count in Counter(seeds).items():
            if count > 1:
                report.add_problem((*location, "random_seed"), f"has {seed} {count} times; expected each seed once")
    if spec.baseline is not None and spec.baseline not in labels:
        message = f"must be the label of an entry, one of {', '.join(labels)}, not '{spec.baseline}'{nearest_hint(spec.baseline, labels)}"
        report.add_problem(("baseline",), message)
    if spec.paired and spec.baseline is None:
        report.add_problem(("paired",), "has no effect without baseline")
    solves: list[KeyPath] = [("solve",)] if spec.solve is not None else []
    solves += [("envs", index, "solve") for index, env in enumerate(spec.envs) if env.solve is not None]
    for path in solves if spec.metric is None else ():
        report.add_problem(
            path,
            "needs 'metric', the column compared with this score: current_return, evaluation, return_new, total_reward or total_reward_ma",
        )
    for index, env in enumerate(spec.envs):
        for label in env.published if isinstance(env.published, dict) else ():
            if label not in labels:
                report.add_problem(("envs", index, "published", label), f"unknown entry{nearest_hint(label, labels)}", "unknown")
    _check_entries(spec, labels, report)


def _check_entries(spec: StudySpec, labels: list[str], report: Report) -> None:
    """Add a problem to `report` for each key of a study's entry that contradicts the key `envs` of the study, and for each label that
    several entries have."""
    for index, entry in enumerate(spec.entries):
        if entry.env is not None and spec.envs:
            report.add_problem(("entries", index, "env"), "has no effect with envs: each entry is run in each env of envs")
        if entry.published is not None and len(spec.envs) > 1:
            report.add_problem(
                ("entries", index, "published"), f"is one score for {len(spec.envs)} envs; give the scores of each env in envs"
            )
        if spec.envs and entry.title in labels[:index]:
            _add_label_problem(index, entry.title, labels.index(entry.title), report)


def _add_label_problem(index: int, label: str, other: int, report: Report) -> None:
    report.add_problem(("entries", index, "label"), f"'{label}' is the label of entries[{other}] too; give each entry its own label")


class _RunPlanner:
    """Planner that expands a study to its training runs, and adds problems to `report`.

    Attributes:
        notes: notices that loading the specs has produced.
        scores: maps (label of an entry, label of an env) to the published score.
        entries: maps (label of an entry, label of an env) to the index of the entry in the study.
    """

    def __init__(self, study: StudySpec, source: str, report: Report) -> None:
        self.study, self.source, self.report = study, source, report
        self.notes: list[str] = []
        self.scores: dict[tuple[str, str], float] = {}
        self.entries: dict[tuple[str, str], int] = {}
        self._trained: dict[str, tuple[str, str]] = {}
        """Maps the digest of a run's settings to (label of the entry, label of the env) of the run."""

    def runs(self) -> Iterator[StudyRun]:
        """Yield the runs of the study, one for each combination of env, entry and seed."""
        envs: list[StudyEnv | None] = [*self.study.envs] or [None]
        for env in envs:
            for index, entry in enumerate(self.study.entries):
                yield from self._runs_of(index, entry, env)

    def _runs_of(self, index: int, entry: StudyEntry, env: StudyEnv | None) -> Iterator[StudyRun]:
        spec = self._load_spec(index, entry, env)
        if spec is None:
            return
        key = (entry.title, (entry.env or spec.env.name.rpartition(":")[2]) if env is None else env.title)
        if key in self.entries and env is None:  # entries with the same label must have different envs
            _add_label_problem(index, key[0], self.entries[key], self.report)
            return
        self.entries[key] = index
        if (length := sum(len(label.encode(errors="surrogatepass")) for label in key)) > _LABEL_BYTES:
            rule = f"the labels of the entry and of the env {key[1]} have {length} bytes of UTF-8 together; allowed: {_LABEL_BYTES}"
            self.report.add_problem(("entries", index, "label"), f"{rule}, because files are named after them")
            return
        published = None if env is None else env.published.get(key[0]) if isinstance(env.published, dict) else env.published
        if (score := entry.published if published is None else published) is not None:
            self.scores[key] = score
        run = StudyRun(*key, spec, settings_that_affect_results(spec))
        if (other := self._trained.setdefault(run.digest, key)) != key:
            is_env = env is not None and other[1] != key[1]
            location: KeyPath = ("envs", self.study.envs.index(env)) if env is not None and is_env else ("entries", index)
            self.report.add_problem(
                location, f"'{key[0]}' in {key[1]} is the same spec as '{other[0]}' in {other[1]}, with the same values"
            )
            return
        for seed in entry.random_seed or self.study.random_seed:
            yield run.with_seed(seed)

    def check_pairs(self, runs: Sequence[StudyRun]) -> None:
        """Add a problem for each entry that has no random_seed in common with the baseline in the same env."""
        seeds: dict[tuple[str, str], set[int]] = {}
        for run in runs:
            seeds.setdefault((run.entry, run.env), set()).add(run.random_seed)
        for (entry, env), entry_seeds in seeds.items():
            if (base := seeds.get((str(self.study.baseline), env))) is not None and entry_seeds.isdisjoint(base):
                message = f"has no random_seed in common with the baseline '{self.study.baseline}'; paired needs at least one"
                self.report.add_problem(("entries", self.entries[entry, env], "random_seed"), message)

    def _load_spec(self, index: int, entry: StudyEntry, env: StudyEnv | None) -> Spec | None:
        """Return the spec of a study's entry in an env. If the spec is invalid, add the problems to the report and return None."""
        location: KeyPath = ("entries", index)
        file, _, name = entry.spec.rpartition(":")
        try:
            path, raw = self._find_raw_spec(file, name)
        except SpecError as error:
            for problem in error.problems:
                self.report.add_problem((*location, "spec"), problem.message)
            return None
        values = self._collect_set_values(index, env)
        if values is None:
            return None
        if env is not None:
            if "${env}" in json.dumps(raw):
                values["env"] = env.name
            if not _has_env_variable(raw):
                values["env.name"] = env.name
        try:
            found = load_with_notices(path, name, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        except SpecError as error:
            within = f" in {env.title}" if env is not None else ""
            for problem in error.problems:
                unknown = not problem.path and "unknown spec" in problem.message
                message = str(problem).replace("--set", "set")  # `set` of the study, its env or the entry
                self.report.add_problem((*location, "spec") if unknown else location, f"{entry.title}{within}: {message}")
            return None
        if (reason := self._unusable_reason(found.specs)) is not None:
            self.report.add_problem((*location, "spec"), f"'{name}' {reason}")
            return None
        self.notes += found.notes
        return found.specs[0]

    def _find_raw_spec(self, file: str, name: str) -> tuple[Path, Any]:
        """Return the path of the spec file and the raw spec of a study's entry. Raises SpecError if the file or the spec cannot be used.

        The spec file is first looked up in the folder of the study's file, and then with `find_spec_file`.
        """
        if not file and name.endswith((".json", ".yaml", ".yml")):
            message = f"'{name}' is a file; expected FILE:NAME, such as ppo_cartpole.json:ppo_cartpole"
            raise SpecError(self.source, [Problem("", message)])
        try:
            beside = Path(self.source).parent / file
            path = Path(self.source) if not file else beside if beside.is_file() else find_spec_file(file)
            raw = raw_entries(path)[1].get(name)
        except SpecError as error:
            raise SpecError(error.source, [replace(one, message=f"{file}: {one.message}") for one in error.problems]) from None
        if isinstance(raw, dict) and "study" in raw:
            raise SpecError(self.source, [Problem("", f"'{name}' is a study; expected a spec")])
        return path, raw

    def _collect_set_values(self, index: int, env: StudyEnv | None) -> dict[str, Any] | None:
        """Return a dict {path or variable: value} with the values in the keys `set` of the study, of the env, and of the entry with this
        index.

        If a key `set` is invalid, add a problem to the report and return None.
        """
        values: dict[str, Any] = {}
        before = len(self.report.problems)
        for at, section in _sections_with_values(self.study, index, env):
            for key, value in _flatten_set_values(section, at, self.report):
                if key == "meta.random_seed":
                    self.report.add_problem((*at, key), "is not used: the study has its own key random_seed; set that key")
                if env is not None and key in ("env", "env.name"):
                    self.report.add_problem((*at, key), f"is not used: envs gives the name of the env, {env.name}")
                values.pop(key, None)  # the last value is used, even after a value of an enclosing section
                values[key] = value
        return None if len(self.report.problems) > before else values

    def _unusable_reason(self, specs: Sequence[Spec]) -> str | None:
        """Return the reason why the study cannot run the specs of an entry, or None if the study can run the specs."""
        if len(specs) != 1:
            return f"expands to {len(specs)} specs (spec_params); name one of {', '.join(one.name for one in specs)}"
        if specs[0].search is not None:
            return "has a search block, which a study does not use; name a spec without one"
        if self.study.metric == "evaluation" and not specs[0].meta.rigorous_eval:
            return "makes no evaluations, which metric 'evaluation' needs; add 'meta.rigorous_eval' to set"
        return None


def _flatten_set_values(given: Mapping[str, Any], location: KeyPath, report: Report) -> Iterator[tuple[str, Any]]:
    """Yield a tuple (dotted path or variable, value) for each value in the object of a study's key `set`. The objects at the keys agent,
    env and meta may be nested."""
    for key, value in given.items():
        if key in ("agent", "env", "meta") and isinstance(value, dict):
            yield from flatten_leaves(value, f"{key}.")
        elif not to_path(key):
            report.add_problem((*location, key), f"must be a path such as env.max_frame, not {format_json(key)}")
        else:
            yield key, value


def locate_problem(study: StudySpec, run: StudyRun, problem: Problem) -> Problem:
    """Return a problem of the spec of a run as a problem of the study: at the key `set` (of the study, an env or an entry) that gives the
    value, or else at the entry."""
    entries = [index for index, entry in enumerate(study.entries) if entry.title == run.entry]
    same_env = [index for index in entries if study.entries[index].env == run.env]
    index, env = (same_env or entries)[0], next((one for one in study.envs if one.title == run.env), None)
    for location, values in reversed(_sections_with_values(study, index, env)):
        if any(_overlap(key, problem.path) for key, _ in _flatten_set_values(values, location, Report())):
            return replace(problem, path=f"{show_path(location)}.{problem.path}")
    return Problem(show_path(("entries", index)), f"{run.entry} in {run.env}: {problem}", problem.code)


def _sections_with_values(study: StudySpec, index: int, env: StudyEnv | None) -> list[tuple[KeyPath, dict[str, Any]]]:
    """Return (path, content) of the keys `set` that apply to an entry in an env. Values in later keys take precedence.

    Args: index: index of the entry. env: the env, or None in a study without envs.
    """
    of_env: list[tuple[KeyPath, dict[str, Any]]] = [] if env is None else [(("envs", study.envs.index(env), "set"), env.set)]
    return [(("set",), study.set), *of_env, (("entries", index, "set"), study.entries[index].set)]


def _overlap(key: str, path: str) -> bool:
    """Return whether two dotted paths are equal, or one contains the other."""
    return any(long == short or long.startswith((f"{short}.", f"{short}[")) for long, short in ((key, path), (path, key)))


def _has_env_variable(raw: Any) -> bool:
    """Return whether env.name of a spec contains the variable ${env}. In specs of SLM Lab v4, the section env is a list."""
    section = raw.get("env") if isinstance(raw, dict) else None
    first = section[0] if isinstance(section, list) and section else section
    return isinstance(first, dict) and "${env}" in str(first.get("name"))
