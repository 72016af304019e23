"""Models of a study: a comparison of specs, each of which is run in several envs with several seeds."""

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
    """A spec that a study compares with other specs."""

    spec: str
    """Spec of the entry: FILE:NAME, or the NAME of a spec in the study's own file."""
    label: str | None = None
    """Name of the entry in tables and figures, by default the NAME of the spec."""
    set: dict[str, Any] = {}
    """Values of keys and variables for the runs of the entry, such as {"env.max_frame": 1e5}. As in `--set` arguments, a value is given for
    the path of a key or for the name of a variable, but objects may also be nested."""
    env: str | None = None
    """In a study without `envs`, the name of the entry's env in tables and figures, by default the env id. Entries in different envs can
    have the same label."""
    published: Real | None = None
    """Published score with which the results of the entry are compared, unless the env has a published score."""
    random_seed: Annotated[list[Seed], Field(min_length=1)] | None = None
    """Seeds of the entry's runs in place of the study's random_seed, for example fewer seeds if the runs take long."""

    @property
    def title(self) -> str:
        return self.label or self.spec.rpartition(":")[2]


class StudyEnv(SpecModel):
    """An env in which all entries of a study are run."""

    name: str
    """Env id. This id is the value of the variable ${env} in a spec, or replaces env.name in a spec without this variable."""
    label: str | None = None
    """Name of the env in tables and figures, by default a short form of the env id."""
    set: dict[str, Any] = {}
    """Values of keys and variables for the runs in this env."""
    solve: Real | None = None
    """Score at or above which this env counts as solved, by default the key `solve` of the study."""
    published: Real | dict[str, Real] | None = None
    """Published score with which entries are compared in this env: one score for all entries, or an object from labels of entries to
    scores."""

    @property
    def title(self) -> str:
        return self.label or self.name.rpartition(":")[2]


class StudySpec(SpecModel):
    """A study: specs that are run in several envs with several seeds, and keys that determine how the results are compared."""

    entries: Annotated[list[StudyEntry], Field(min_length=1)]
    """The specs that the study compares."""
    envs: list[StudyEnv] = []
    """The envs in which each entry is run. By default, each entry is run in the env of its spec."""
    random_seed: Annotated[list[Seed], Field(min_length=1)]
    """Seeds with which each entry is run in each env, unless the entry has its own seeds. A run with one seed has meta.max_session
    Sessions."""
    set: dict[str, Any] = {}
    """Values of keys and variables for all runs. Values in the key `set` of an env take precedence over values in the key `set` of the
    study, and values in the key `set` of an entry take precedence over all others."""
    x: Annotated[list[Axis], Field(min_length=1)] = ["frame"]
    """Quantities on the horizontal axes of the figures. With wall_t (seconds), the study trains one run at a time."""
    metric: Metric | None = None
    """Column of a run's log whose last value is the score of the run, or "evaluation" to use the score of the last evaluation. The default
    is total_reward_ma if the study has published scores (which are values of total_reward_ma), otherwise current_return."""
    solve: Real | None = None
    """Value of `metric` at or above which an env counts as solved."""
    baseline: str | None = None
    """Label of the entry with which all other entries are compared."""
    paired: Flag = False
    """Whether differences from the baseline are computed seed by seed, with the interval and the p-value of the paired t-test instead of
    Welch's t-test. Paired differences are useful if runs with the same random_seed are correlated."""


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: the training of one spec, with the values that the study sets, in one env with one seed."""

    entry: str
    """Label of the run's entry in the study."""
    env: str
    """Label of the run's env."""
    spec: Spec
    settings: Mapping[str, Any]
    """Maps the dotted path of each key that determines the results of the run, except the seed, to the value of the key (see
    `study_file.settings_that_affect_results`)."""

    @property
    def random_seed(self) -> int:
        seed = self.spec.meta.random_seed
        assert seed is not None
        return seed

    def with_seed(self, random_seed: int) -> StudyRun:
        """Return a copy of the run with another random_seed."""
        return replace(self, spec=self.spec.with_meta(random_seed=random_seed))

    @property
    def digest(self) -> str:
        """Hash of the run's settings, which is equal for runs that differ only in their seeds."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"{self.entry}, {self.env}, random_seed {self.random_seed}"


class PlannedRun(NamedTuple):
    """A run of a study, identified by the label of its entry, the label of its env, and its random_seed."""

    entry: str
    env: str
    random_seed: int


@dataclass(frozen=True)
class StudyPlan:
    """The information about a study that reports need, without the specs of the runs."""

    name: str
    source: str
    """Path of the file that contains the study."""
    spec: StudySpec
    raw: Mapping[str, Any]
    """The raw study from the file, with --set arguments applied."""
    runs: tuple[PlannedRun | StudyRun, ...]
    scores: Mapping[tuple[str, str], float]
    """Maps (label of an entry, label of an env) to the published score."""
    sets: tuple[str, ...] = ()
    """`--set` arguments with which the study was loaded."""

    @property
    def metric(self) -> Metric:
        return self.spec.metric or ("total_reward_ma" if self.scores else "current_return")

    @property
    def entries(self) -> list[str]:
        """Labels of the study's entries."""
        return list(dict.fromkeys(run.entry for run in self.runs))

    @property
    def envs(self) -> list[str]:
        """Labels of the study's envs."""
        return list(dict.fromkeys(run.env for run in self.runs))

    def solve_score(self, env: str) -> float | None:
        """Return the score at or above which an env counts as solved, or None if the study does not give this score."""
        env_score = next((study_env.solve for study_env in self.spec.envs if study_env.title == env), None)
        return self.spec.solve if env_score is None else env_score

    def published_score(self, entry: str, env: str) -> float | None:
        """Return the published score with which an entry is compared in an env, or None if the study does not give this score."""
        return self.scores.get((entry, env))


@dataclass(frozen=True)
class Study(StudyPlan):
    """A loaded study, including the specs of all runs."""

    runs: tuple[StudyRun, ...]

    def with_additional_seed(self, keys: Collection[tuple[str, str]]) -> Study:
        """Return a copy of the study with one additional run for each (entry, env) in `keys`.

        The random_seed of the additional runs is the smallest seed that no run of the study has.
        """
        used = {run.random_seed for run in self.runs}
        seed = next(seed for seed in count() if seed not in used)
        first = {(run.entry, run.env): run for run in reversed(self.runs)}
        return replace(self, runs=(*self.runs, *(first[key].with_seed(seed) for key in first if key in keys)))

    @property
    def plan_json(self) -> dict[str, Any]:
        """The planned runs and the published scores of the study, as JSON values."""
        return {
            "runs": [PlannedRun(run.entry, run.env, run.random_seed) for run in self.runs],
            "scores": [[*key, score] for key, score in self.scores.items()],
        }
