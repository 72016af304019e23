"""Several runs side by side: which are seeds of one setting, and the numbers of each setting.

A seed is what was trained independently: a Session of a plain run, with all its policies, and all Sessions together of a distributed one,
which train one net.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.analysis.run_folder import Run, read_run, run_folders
from slm_lab.experiment.analysis.table import Aligned, Curve, Table, curve, interpolate
from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice

_RESAMPLES = 10_000


@dataclass(frozen=True)
class Seed:
    """One sample: the tables of what was trained together."""

    tables: list[Table]

    def curve(self, column: str, over: str) -> Curve:
        """The column over frame, global_frame, wall_t (seconds) or opt_step; of several Sessions the mean where all have it."""
        curves = [_curve(table, column, over) for table in self.tables]
        return curves[0] if len(curves) == 1 else interpolate(curves).mean()

    def steps_to(self, threshold: float) -> float | None:
        """Frames, of all Sessions together, after which the first of them had this total_reward; None: none had. Of policies, the frames of
        the first that had."""
        return self._first("global_frame", threshold)

    def seconds_to(self, threshold: float) -> float | None:
        """The same in seconds since the start."""
        return self._first("wall_t", threshold)

    def _first(self, over: str, threshold: float) -> float | None:
        curves = (_curve(table, "total_reward", over) for table in self.tables)
        reached = [float(one.frame[one.value >= threshold][0]) for one in curves if (one.value >= threshold).any()]
        return min(reached, default=None)

    def final_return(self) -> float | None:
        """The last total_reward, mean over Sessions; None where no episode ended."""
        return _mean([curve(table, "total_reward").value[-1:] for table in self.tables])

    def grad_norm(self) -> float | None:
        """Mean over rows and Sessions."""
        return _mean([curve(table, "grad_norm").value for table in self.tables])

    def updates_per_second(self) -> float | None:
        """Optimizer steps per second of training, of all Sessions together; None where nobody knows the time."""
        steps = [curve(table, "opt_step", "wall_t") for table in self.tables]
        known = [float(one.value[-1] / one.frame[-1]) for one in steps if len(one.frame) and one.frame[-1] > 0]
        return sum(known) if known else None


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seeds only, drawn as one curve."""

    name: str
    runs: list[Run]

    @property
    def seeds(self) -> list[Seed]:
        return [Seed(group) for run in self.runs for group in run.groups]

    @property
    def sessions(self) -> int:
        return sum(len(run.tables if run.distributed else run.groups) for run in self.runs)

    @property
    def distributed(self) -> bool:
        return any(run.distributed for run in self.runs)

    def aligned(self, column: str, over: str) -> Aligned:
        """The seeds' curves, over the range that all seeds with points share; value_SF is [seeds, F]."""
        return interpolate([seed.curve(column, over) for seed in self.seeds])

    def count(self) -> str:
        """In words, as in 3 seeds, 1 seed of 4 sessions, or 2 seeds of 4 policies."""
        count, policies = len(self.seeds), max(run.policies for run in self.runs)
        of = f" of {self.sessions // count} sessions" if self.distributed else f" of {policies} policies" if policies > 1 else ""
        return f"{count} seed{'s' if count != 1 else ''}{of}"


def read_settings(words: Sequence[str], labels: Sequence[str] = ()) -> list[Setting]:
    """Group the runs that `words` name, by their labels, or by the names of their specs where there are none.

    A word is a run's folder or a pattern of such. Raises UserError. Runs of one group whose specs differ, and runs of different envs,
    are notices.
    """
    if not words:
        raise UserError("compare takes run folders, such as data/ppo_cartpole_2026_01_31_120000")
    if labels and len(labels) != len(words):
        runs = f"{len(words)} RUN{'s' if len(words) > 1 else ''}"
        raise UserError(f"--label is given {len(labels)} times for {runs}; allowed: one for each RUN, or none")
    if not all(label.strip() for label in labels):
        raise UserError("--label is empty; allowed: a name for each RUN")
    groups: dict[str, dict[Path, Run]] = {}
    for index, word in enumerate(words):
        for folder in run_folders(word):
            run = read_run(folder)
            group = groups.setdefault(labels[index] if labels else run.name, {})
            if folder.resolve() in group:
                notice(f"{folder} is given twice; it counts once")
            group[folder.resolve()] = run
    settings = [Setting(name, list(runs.values())) for name, runs in groups.items()]
    for setting in settings:
        _tell_differences(setting)
    envs = {run.env: setting.name for setting in settings for run in setting.runs}
    if len(envs) > 1:
        notice(f"the runs are of different envs: {', '.join(f'{env} ({name})' for env, name in envs.items())}")
    return settings


def _tell_differences(setting: Setting) -> None:
    specs = [run.settings() for run in setting.runs]
    differing = sorted(key for key in {key for spec in specs for key in spec} if any(spec.get(key) != specs[0].get(key) for spec in specs))
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        notice(f"the runs of '{setting.name}' differ in {', '.join(differing[:3])}{more}; --label tells settings apart")


class Estimate(NamedTuple):
    """A statistic over seeds and its 95 % interval (percentile bootstrap), which one seed alone does not have."""

    value: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float | None], statistic: Callable[..., Any]) -> Estimate | None:
    """`statistic` (np.mean, np.median) of the values that are known; None where there are none. The same values give the same interval."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return None
    if len(known) == 1:
        return Estimate(float(known[0]), None, None)
    drawn = known[np.random.default_rng(0).integers(len(known), size=(_RESAMPLES, len(known)))]
    low, high = np.percentile(statistic(drawn, axis=1), (2.5, 97.5))
    return Estimate(float(statistic(known)), float(low), float(high))


@dataclass(frozen=True)
class Summary:
    """What the table says of a setting; None where it is not known."""

    name: str
    seeds: int
    sessions: int
    solved: int | None
    """Seeds that reached the threshold; None without one."""
    steps: Estimate | None
    """Median over the seeds that solved, in global frames."""
    seconds: Estimate | None
    """The same since the start of training."""
    final_return: Estimate | None
    """Mean over seeds."""
    final_return_median: float | None
    updates_per_second: float | None
    """Mean over seeds."""
    grad_norm: float | None
    """Mean over seeds."""


def summarize(setting: Setting, threshold: float | None) -> Summary:
    """The numbers of a setting; a seed has solved once a row of one of its Sessions has a total_reward of at least `threshold`."""
    seeds = setting.seeds
    steps = [None if threshold is None else seed.steps_to(threshold) for seed in seeds]
    seconds = [None if threshold is None else seed.seconds_to(threshold) for seed in seeds]
    finals = [seed.final_return() for seed in seeds]
    median = estimate(finals, np.median)
    updates, norms = (
        estimate(values, np.mean) for values in ([seed.updates_per_second() for seed in seeds], [s.grad_norm() for s in seeds])
    )
    return Summary(
        name=setting.name,
        seeds=len(seeds),
        sessions=setting.sessions,
        solved=None if threshold is None else sum(value is not None for value in steps),
        steps=estimate(steps, np.median),
        seconds=estimate(seconds, np.median),
        final_return=estimate(finals, np.mean),
        final_return_median=median.value if median else None,
        updates_per_second=updates.value if updates else None,
        grad_norm=norms.value if norms else None,
    )


def _curve(table: Table, column: str, over: str) -> Curve:
    """A Session that trains a net of its own has no frames but its own."""
    return curve(table, column, "frame" if over == "global_frame" and over not in table else over)


def _mean(rows: Sequence[np.ndarray]) -> float | None:
    """Mean over Sessions of the mean over rows, of those that have any."""
    means = [float(one.mean()) for one in rows if len(one)]
    return float(np.mean(means)) if means else None
