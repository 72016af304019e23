"""A study: specs × envs × seeds that are run and compared together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from slm_lab.spec.models.base import Flag, Real, Seed, SpecModel
from slm_lab.spec.models.spec import Spec

Axis = Literal["frame", "global_frame", "opt_step", "wall_t"]
Metric = Literal["current_return", "total_reward", "total_reward_ma", "return_new", "evaluation"]


class StudyEntry(SpecModel):
    """One of the specs that are compared."""

    spec: str
    """FILE:NAME, or the NAME of a spec in the study's own file."""
    label: str | None = None
    """Name in tables and figures; default: NAME."""
    set: dict[str, Any] = {}
    """Values of keys by path, and of variables by name, as `--set` takes them: {"env.max_frame": 1e5}, or nested."""
    env: str | None = None
    """Name of the entry's env in tables and figures, in a study without `envs`; default: the id. Entries in different envs can have one
    label."""
    published: Real | None = None
    """Score to compare with, unless the env has one."""
    random_seed: Annotated[list[Seed], Field(min_length=1)] | None = None
    """Seeds of this entry in place of the study's random_seed, for example fewer seeds if the runs take long."""

    @property
    def title(self) -> str:
        return self.label or self.spec.rpartition(":")[2]


class StudyEnv(SpecModel):
    """One of the envs in which the entries are run."""

    name: str
    """Id of the env: fills ${env}, or replaces env.name in a spec without that variable."""
    label: str | None = None
    """Name in tables and figures; default: a short form of the id."""
    set: dict[str, Any] = {}
    """Values of keys and variables for the runs in this env."""
    solve: Real | None = None
    """Return that counts as solved in this env; default: the study's `solve`."""
    published: Real | dict[str, Real] | None = None
    """Score to compare with: one for all entries, or one for each label."""

    @property
    def title(self) -> str:
        return self.label or self.name.rpartition(":")[2]


class StudySpec(SpecModel):
    """Specs × envs × seeds, and how they are compared."""

    entries: Annotated[list[StudyEntry], Field(min_length=1)]
    """The specs that are compared."""
    envs: list[StudyEnv] = []
    """The envs; each entry is run in each env. Default: each entry is run in the env of its spec."""
    random_seed: Annotated[list[Seed], Field(min_length=1)]
    """Seeds: each entry is run once per env and seed, unless it has its own seeds; a run has meta.max_session Sessions."""
    set: dict[str, Any] = {}
    """Values of keys and variables for all runs. Values of an env override them, and values of an entry override both."""
    x: Annotated[list[Axis], Field(min_length=1)] = ["frame"]
    """Horizontal axes of the figures. With wall_t (seconds), one run is trained at a time."""
    metric: Metric | None = None
    """The score: the last value of this column of the table, or the last evaluation; default: current_return, or total_reward_ma if
    there are published scores, which are of this column."""
    solve: Real | None = None
    """Return of `metric` that counts as solved."""
    baseline: str | None = None
    """Label of the entry that the other entries are compared with."""
    paired: Flag = False
    """Compute differences from the baseline seed by seed. This is useful if runs with the same random_seed are correlated."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: the same as `train` with these overrides and this random_seed."""

    entry: str
    """Label of the entry."""
    env: str
    """Label of the env."""
    spec: Spec
    settings: Mapping[str, Any]
    """Everything except the seed that determines the results: path → value (see `settings`)."""

    @property
    def random_seed(self) -> int:
        seed = self.spec.meta.random_seed
        assert seed is not None
        return seed

    def with_seed(self, random_seed: int) -> StudyRun:
        """Return the same run with another random_seed."""
        return replace(self, spec=self.spec.with_meta(random_seed=random_seed))

    @property
    def digest(self) -> str:
        """Hash of the settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"{self.entry}, {self.env}, random_seed {self.random_seed}"


class PlannedRun(NamedTuple):
    """A run of a study by label of its entry, label of its env, and random_seed."""

    entry: str
    env: str
    random_seed: int


@dataclass(frozen=True)
class StudyPlan:
    """What reports of a study need: without the specs of its runs."""

    name: str
    source: str
    """The file."""
    spec: StudySpec
    raw: Mapping[str, Any]
    """The study's entry in the file, with --set applied."""
    runs: tuple[PlannedRun | StudyRun, ...]
    scores: Mapping[tuple[str, str], float]
    """(entry, env) → published score."""
    sets: tuple[str, ...] = ()
    """`--set` arguments with which it was loaded."""

    @property
    def metric(self) -> Metric:
        return self.spec.metric or ("total_reward_ma" if self.scores else "current_return")

    @property
    def entries(self) -> list[str]:
        """Labels of the entries."""
        return list(dict.fromkeys(run.entry for run in self.runs))

    @property
    def envs(self) -> list[str]:
        """Labels of the envs."""
        return list(dict.fromkeys(run.env for run in self.runs))

    def solve(self, env: str) -> float | None:
        """Return which return counts as solved in an env."""
        own = next((one.solve for one in self.spec.envs if one.title == env), None)
        return self.spec.solve if own is None else own

    def published(self, entry: str, env: str) -> float | None:
        """Return the score that an entry is compared with in an env."""
        return self.scores.get((entry, env))


@dataclass(frozen=True)
class Study(StudyPlan):
    """A loaded study."""

    runs: tuple[StudyRun, ...]

    def with_seed(self, keys: Collection[tuple[str, str]]) -> Study:
        """Return the study with one more run of each (entry, env) in `keys`, with the smallest random_seed that no run has."""
        used = {run.random_seed for run in self.runs}
        seed = next(seed for seed in count() if seed not in used)
        first = {(run.entry, run.env): run for run in reversed(self.runs)}
        return replace(self, runs=(*self.runs, *(first[key].with_seed(seed) for key in first if key in keys)))

    @property
    def plan(self) -> dict[str, Any]:
        """The planned runs and published scores, for a JSON file."""
        return {
            "runs": [PlannedRun(run.entry, run.env, run.random_seed) for run in self.runs],
            "scores": [[*key, score] for key, score in self.scores.items()],
        }
