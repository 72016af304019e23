"""Studies: specs × envs × seeds that are run and compared together."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import to_jsonable_python

from slm_lab.lib.log import notice
from slm_lab.spec.base import Flag, Problem, Real, Seed, SpecError, SpecModel
from slm_lab.spec.loader import dump_spec, find_spec_file, load, raw_entries
from slm_lab.spec.report import Path, Report, nearest, show, show_path, to_path, value_at
from slm_lab.spec.spec import Spec
from slm_lab.spec.validate import explain, models_at
from slm_lab.spec.variables import override, parse_sets

Axis = Literal["frame", "global_frame", "opt_step", "wall_t"]
Metric = Literal["total_reward", "total_reward_ma", "return_new", "evaluation"]
OPERATIONAL = (
    "meta.random_seed", "meta.run", "meta.save_", "meta.checkpoint_frequency", "meta.stall_", "meta.max_restart", "meta.observers",
)  # fmt: skip
"""Beginnings of the paths of keys that do not change what is learned."""


class StudyEntry(SpecModel):
    """One of the specs that are compared."""

    spec: str
    """FILE:NAME, or the NAME of a spec in the study's own file."""
    label: str | None = None
    """Name in tables and figures; absent: NAME."""
    set: dict[str, Any] = {}
    """Values of keys by path, and of variables by name, as `--set` takes them: {"env.max_frame": 1e5}, or nested."""
    env: str | None = None
    """Name of its env in tables and figures, in a study without `envs`; absent: the id. Entries in different envs can have one label."""
    published: Real | None = None
    """Score to compare with, unless its env has one."""
    random_seed: Annotated[list[Seed], Field(min_length=1)] | None = None
    """Replaces the study's: fewer seeds for an entry whose runs take long, for example."""


class StudyEnv(SpecModel):
    """One of the envs."""

    name: str
    """Id of the env: fills ${env}, or replaces env.name in a spec without that variable."""
    label: str | None = None
    """Name in tables and figures; absent: a short form of the id."""
    set: dict[str, Any] = {}
    """Values of keys and variables for the runs in this env."""
    solve: Real | None = None
    """Return that counts as solved in this env; absent: that of the study."""
    published: Real | dict[str, Real] | None = None
    """Score to compare with: one for all entries, or by label."""


class StudySpec(SpecModel):
    """Specs × envs × seeds, and how they are compared."""

    entries: Annotated[list[StudyEntry], Field(min_length=1)]
    """The specs."""
    envs: list[StudyEnv] = []
    """The envs; absent: each entry's own. Each entry is run in each of them."""
    random_seed: Annotated[list[Seed], Field(min_length=1)]
    """One run of each entry in each env for each of these, unless the entry has its own; a run has meta.max_session Sessions."""
    set: dict[str, Any] = {}
    """Values of keys and variables for all runs; those of an env and of an entry come after them."""
    x: Annotated[list[Axis], Field(min_length=1)] = ["frame"]
    """Horizontal axes of the figures. With wall_t (seconds) one run at a time."""
    metric: Metric | None = None
    """The score: the last value of this column of the rows, or that of the rows of evaluation; absent: total_reward_ma."""
    solve: Real | None = None
    """Return of `metric` that counts as solved."""
    baseline: str | None = None
    """Label of the entry from which the differences of the others are computed."""
    paired: Flag = False
    """Compute differences to the baseline seed by seed: for entries that have the same random_seed in common by more than its number."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: what `train` would do with the overrides and this random_seed."""

    entry: str
    """Label of the entry."""
    env: str
    """Label of the env."""
    spec: Spec
    settings: Mapping[str, Any]
    """What determines its results but the seed: path → value (see `settings`)."""

    @property
    def random_seed(self) -> int:
        seed = self.spec.meta.random_seed
        assert seed is not None
        return seed

    @property
    def digest(self) -> str:
        """Hash of the settings."""
        return digest(self.settings)

    @property
    def name(self) -> str:
        return f"{self.entry}, {self.env}, random_seed {self.random_seed}"


@dataclass(frozen=True)
class Study:
    """A study that was loaded."""

    name: str
    source: str
    """The file."""
    spec: StudySpec
    raw: Mapping[str, Any]
    """Its entry of the file, with --set applied."""
    runs: tuple[StudyRun, ...]
    scores: Mapping[tuple[str, str], float]
    """(entry, env) → published score."""
    sets: tuple[str, ...] = ()
    """`--set` arguments with which it was loaded."""

    @property
    def metric(self) -> Metric:
        return self.spec.metric or "total_reward_ma"

    @property
    def entries(self) -> list[str]:
        """Labels of the entries."""
        return list(dict.fromkeys(run.entry for run in self.runs))

    @property
    def envs(self) -> list[str]:
        """Labels of the envs."""
        return list(dict.fromkeys(run.env for run in self.runs))

    def solve(self, env: str) -> float | None:
        """Return that counts as solved in an env."""
        own = next((one.solve for one in self.spec.envs if env_label(one) == env), None)
        return self.spec.solve if own is None else own

    def published(self, entry: str, env: str) -> float | None:
        """Return the score that an entry is compared with in an env."""
        return self.scores.get((entry, env))


def entry_label(entry: StudyEntry) -> str:
    """Return the label of an entry."""
    return entry.label or entry.spec.rpartition(":")[2]


def env_label(env: StudyEnv) -> str:
    """Return the label of an env."""
    return env.label or env.name.rpartition(":")[2]


def settings(spec: Spec) -> dict[str, Any]:
    """Return what determines the results of a spec's runs, by path: every key but seeds, provenance and operational ones."""
    ((_, body),) = dump_spec(spec).items()
    return {path: value for path, value in _flat(body) if not path.startswith(OPERATIONAL)}


def differing(before: Mapping[str, Any], after: Mapping[str, Any], spec: Spec) -> list[str]:
    """Return the paths at which settings differ, without keys that only those of `spec`, `after`, have, with their defaults.

    A key that was added in a later version does not change what was learned before.
    """
    ((_, body),) = dump_spec(spec).items()
    paths = [*before, *(path for path in after if path not in before and not _is_default(path, after[path], body))]
    return [path for path in paths if before.get(path) != after.get(path)]


def _is_default(path: str, value: Any, body: Any) -> bool:
    *section, key = path.split(".")
    fields = [model.model_fields[key] for model in models_at(tuple(section), body) if key in model.model_fields]
    return (
        len(fields) == 1 and not fields[0].is_required() and to_jsonable_python(fields[0].get_default(call_default_factory=True)) == value
    )


def digest(values: Mapping[str, Any]) -> str:
    """Return a hash of settings."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def load_study(path: str | FilePath, name: str, sets: Sequence[str] = ()) -> Study:
    """Load the study `name` of a file and the specs of all its runs. Raises SpecError with all problems."""
    source, entries = raw_entries(path)
    if name not in entries:
        raise SpecError(
            source, [Problem("", f"unknown study '{name}'{nearest(name, entries) or '; expected one of ' + ', '.join(entries)}")]
        )
    raw = entries[name]
    where = f"{source} {name}"
    if not isinstance(raw, dict) or "study" not in raw:
        raise SpecError(where, [Problem("", "is a spec, not a study: it has no 'study' object; its modes are train, dev and search")])
    report = Report()
    beside = [
        Problem(key, f"unknown key beside 'study'{nearest(key, ['study'])}", "unknown") for key in raw if key not in ("study", "$schema")
    ]
    body = _with_sets(json.loads(json.dumps(raw["study"])), sets, report)
    spec = _validated(body, report)
    if spec is None or report.problems or beside:
        raise SpecError(where, [*beside, *_below_study(report.problems)])
    _check(spec, report)
    notes: list[str] = []
    scores: dict[tuple[str, str], float] = {}
    found: dict[tuple[str, str], int] = {}
    runs = tuple(_runs(spec, source, name, report, notes, scores, found))
    if spec.paired:
        _check_pairs(spec, runs, found, report)
    if report.problems:
        raise SpecError(where, _below_study(report.problems))
    for note in dict.fromkeys(notes):
        notice(note)
    return Study(name, source, spec, {"study": body}, runs, scores, tuple(sets))


def _below_study(problems: Sequence[Problem]) -> list[Problem]:
    return [replace(one, path=f"study.{one.path}".rstrip(".")) for one in problems]


def _with_sets(body: Any, sets: Sequence[str], report: Report) -> Any:
    """Return the study with --set arguments applied, which address its own keys."""
    arguments = parse_sets(sets)
    keys = StudySpec.model_fields
    overrides: dict[Path, Any] = {(variable,): value for variable, value in arguments.variables.items()}
    for key, value in (overrides | arguments.overrides).items():
        if key[0] not in keys:
            inside = f", or 'set.{show_path(key)}' for the specs of all runs" if len(key) > 1 else ""
            hint = nearest(str(key[0]), keys) or f"; allowed: {', '.join(keys)}"
            report.fail(key, f"unknown key of a study{hint}{inside}", "unknown")
        elif isinstance(body, dict):
            override(body, _within_set(body, key), value, report)
    return body


def _within_set(body: dict[str, Any], key: Path) -> Path:
    """Return the path of what --set addresses; inside a `set` of the study one key, as it is written there, which comes last."""
    depth = {"set": 1, "entries": 3, "envs": 3}.get(str(key[0]), len(key))
    given = value_at(body, key[:depth])
    if len(key) <= depth or key[depth - 1] != "set" or not isinstance(given, dict):
        return key
    flat = dict(_paths(given, key[:depth], Report()))
    inner = show_path(key[depth:])
    flat.pop(inner, None)
    given.clear()
    given.update(flat)
    return (*key[:depth], inner)


def _validated(body: Any, report: Report) -> StudySpec | None:
    if isinstance(body, dict) and isinstance(body.get("envs"), list):
        body["envs"] = [{"name": env} if isinstance(env, str) else env for env in body["envs"]]
    try:
        return StudySpec.model_validate(body)
    except ValidationError as error:
        explain(error, body, report, StudySpec)
    return None


def _check(spec: StudySpec, report: Report) -> None:
    """Add a problem for each contradiction."""
    labels = [entry_label(entry) for entry in spec.entries]
    names = [env_label(env) for env in spec.envs]
    for index, name in enumerate(names):
        if name in names[:index]:
            report.fail(("envs", index), f"'{name}' is envs[{names.index(name)}] too; give each env its own label")
    own: list[tuple[Path, Sequence[int]]] = [(("entries", index), entry.random_seed or ()) for index, entry in enumerate(spec.entries)]
    for place, seeds in [((), spec.random_seed), *own]:
        for seed, count in Counter(seeds).items():
            if count > 1:
                report.fail((*place, "random_seed"), f"has {seed} {count} times; expected each seed once")
    if spec.baseline is not None and spec.baseline not in labels:
        report.fail(
            ("baseline",),
            f"must be the label of an entry, one of {', '.join(labels)}, not '{spec.baseline}'{nearest(spec.baseline, labels)}",
        )
    for index, entry in enumerate(spec.entries) if spec.envs else ():
        if entry.env is not None:
            report.fail(("entries", index, "env"), "has no effect with envs: each entry is run in each of them")
    if spec.paired and spec.baseline is None:
        report.fail(("paired",), "has no effect without baseline")
    solves: list[Path] = [("solve",)] if spec.solve is not None else []
    solves += [("envs", index, "solve") for index, env in enumerate(spec.envs) if env.solve is not None]
    for path in solves if spec.metric is None else ():
        report.fail(path, "needs 'metric': the column that is compared with it (evaluation, return_new, total_reward or total_reward_ma)")
    for index, env in enumerate(spec.envs):
        for label in env.published if isinstance(env.published, dict) else ():
            if label not in labels:
                report.fail(("envs", index, "published", label), f"unknown entry{nearest(label, labels)}", "unknown")
    for index, entry in enumerate(spec.entries):
        if entry.published is not None and len(spec.envs) > 1:
            report.fail(("entries", index, "published"), f"is one score for {len(spec.envs)} envs; give the scores of each env in envs")
    for index, label in enumerate(labels) if spec.envs else ():
        if label in labels[:index]:
            _same_label(index, label, labels.index(label), report)


def _check_pairs(spec: StudySpec, runs: Sequence[StudyRun], found: Mapping[tuple[str, str], int], report: Report) -> None:
    """Add a problem for each entry that has no random_seed in common with the baseline in the same env (`found`: see _runs)."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for run in runs:
        seeds.setdefault((run.entry, run.env), set()).add(run.random_seed)
    for (entry, env), own in seeds.items():
        if (base := seeds.get((str(spec.baseline), env))) is not None and own.isdisjoint(base):
            message = f"has no random_seed in common with the baseline '{spec.baseline}'; paired needs at least one"
            report.fail(("entries", found[entry, env], "random_seed"), message)


def _same_label(index: int, label: str, other: int, report: Report) -> None:
    report.fail(("entries", index, "label"), f"'{label}' is the label of entries[{other}] too; give each entry its own")


def _runs(
    spec: StudySpec,
    source: str,
    name: str,
    report: Report,
    notes: list[str],
    scores: dict[tuple[str, str], float],
    seen: dict[tuple[str, str], int],
) -> Iterator[StudyRun]:
    """Yield the runs: for each env and entry one for each seed.

    Adds the published scores to `scores`, and the index of each entry by (entry, env) to `seen`.
    """
    envs: list[StudyEnv | None] = [*spec.envs] or [None]
    trained: dict[str, tuple[str, str]] = {}
    """Digest → (entry, env) that trains it."""
    for env in envs:
        for index, entry in enumerate(spec.entries):
            loaded = _load(spec, index, entry, env, source, name, report, notes)
            if loaded is None:
                continue
            label = (entry.env or loaded.env.name.rpartition(":")[2]) if env is None else env_label(env)
            key = (entry_label(entry), label)
            if key in seen and env is None:  # several entries of one label are in envs of their own
                _same_label(index, key[0], seen[key], report)
                continue
            seen[key] = index
            published = None if env is None else env.published.get(key[0]) if isinstance(env.published, dict) else env.published
            if (score := entry.published if published is None else published) is not None:
                scores[key] = score
            found = settings(loaded)
            if (other := trained.setdefault(digest(found), key)) != key:
                place: Path = ("envs", spec.envs.index(env)) if env is not None and other[1] != label else ("entries", index)
                report.fail(place, f"'{key[0]}' in {label} is the same spec as '{other[0]}' in {other[1]}, with the same values")
                continue
            for seed in entry.random_seed or spec.random_seed:
                meta = loaded.meta.model_copy(update={"random_seed": seed})
                yield StudyRun(entry_label(entry), label, loaded.model_copy(update={"meta": meta}), found)


def _load(
    study: StudySpec, index: int, entry: StudyEntry, env: StudyEnv | None, source: str, name: str, report: Report, notes: list[str]
) -> Spec | None:
    """Return the spec of an entry in an env; None, with problems, if it is invalid."""
    place: Path = ("entries", index)
    file, _, spec_name = entry.spec.rpartition(":")
    if not file and spec_name.endswith((".json", ".yaml", ".yml")):
        report.fail((*place, "spec"), f"'{spec_name}' is a file; expected FILE:NAME, such as ppo_cartpole.json:ppo_cartpole")
        return None
    try:
        path = _spec_file(file, source)
        _, known = raw_entries(path)
    except SpecError as error:
        for problem in error.problems:
            report.fail((*place, "spec"), f"{file}: {problem.message}")
        return None
    if "study" in (known.get(spec_name) or {}):
        report.fail((*place, "spec"), f"'{spec_name}' is a study; expected a spec")
        return None
    values: dict[str, Any] = {}
    problems = len(report.problems)
    for at, given in (
        (("set",), study.set),
        (("envs", study.envs.index(env), "set") if env else (), env.set if env else {}),
        ((*place, "set"), entry.set),
    ):
        for key, value in _paths(given, at, report):
            if key == "meta.random_seed":
                report.fail((*at, key), "is the study's own random_seed; set that")
            if env is not None and key in ("env", "env.name"):
                report.fail((*at, key), f"is the name of an env, {env.name}, which envs gives")
            values.pop(key, None)  # the last one counts, also after one that encloses it
            values[key] = value
    if len(report.problems) > problems:
        return None
    if env is not None:
        values["env" if "${env}" in json.dumps(known.get(spec_name)) else "env.name"] = env.name
    try:
        found = load(path, spec_name, [f"{key}={json.dumps(value)}" for key, value in values.items()])
    except SpecError as error:
        within = f" in {env_label(env)}" if env is not None else ""
        for problem in error.problems:
            unknown = not problem.path and "unknown spec" in problem.message
            message = str(problem).replace("--set", "set")  # that of the study, its env or the entry
            report.fail((*place, "spec") if unknown else place, f"{entry_label(entry)}{within}: {message}")
        return None
    if len(found.specs) != 1:
        report.fail(
            (*place, "spec"),
            f"'{spec_name}' expands to {len(found.specs)} specs (spec_params); name one of {', '.join(one.name for one in found.specs)}",
        )
        return None
    (spec,) = found.specs
    if spec.search is not None:
        report.fail((*place, "spec"), f"'{spec_name}' has a search block, which a study does not use; name a spec without one")
        return None
    if study.metric == "evaluation" and not spec.meta.rigorous_eval:
        report.fail(
            (*place, "spec"), f"'{spec_name}' makes no evaluations, which metric 'evaluation' needs; add 'meta.rigorous_eval' to set"
        )
        return None
    notes += found.notes
    return spec


def _spec_file(file: str, source: str) -> FilePath:
    """Return the file of an entry: beside the study's own, or as find_spec_file finds it."""
    if not file:
        return FilePath(source)
    beside = FilePath(source).parent / file
    return beside if beside.is_file() else find_spec_file(file)


def _paths(given: Mapping[str, Any], place: Path, report: Report) -> Iterator[tuple[str, Any]]:
    """Yield path or variable → value of a `set`; agent, env and meta may be nested."""
    for key, value in given.items():
        if key in ("agent", "env", "meta") and isinstance(value, dict):
            yield from _flat(value, f"{key}.")
        elif not to_path(key):
            report.fail((*place, key), f"must be a path such as env.max_frame, not {show(key)}")
        else:
            yield key, value


def _flat(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
