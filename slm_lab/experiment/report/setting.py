"""Settings: runs that differ only in their seeds, the metric by which settings are compared, and the summary of a setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from slm_lab.experiment.report.metrics import (
    AlignedCurves,
    Bounds,
    Estimate,
    Median,
    aggregate_known,
    estimate_mean,
    interpolate,
    median_point,
)
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.seed_result import TOTAL, TRAINING, SeedResult, seed_results, training_column
from slm_lab.experiment.report.statistics import bootstrap_statistic, interquartile_mean


@dataclass(frozen=True)
class Setting:
    """Runs in one env that differ only in their seeds, or that have the same --label. Figures show a setting as one curve."""

    name: str
    runs: list[Run]
    label: str = ""
    """Name of the setting without the env, or "" if the label is equal to `name`. Settings of the same agent in different envs have the
    same label."""

    @cached_property
    def all_seeds(self) -> list[SeedResult]:
        return [seed for run in self.runs for seed in seed_results(run)]

    @property
    def seeds(self) -> list[SeedResult]:
        """The seeds to compare: the seeds whose training is done or, if there are none, all seeds."""
        return [seed for seed in self.all_seeds if seed.status == "done"] or self.all_seeds

    @property
    def status(self) -> str:
        """Text that says how the runs of the seeds ended, such as "done", "1 failed (left out)", or, if no seed is done, "2 stopped"."""
        each = (status for run in self.runs for status in ([run.status] if run.shares_one_net else run.sessions.values()))
        counts = Counter(status for status in each if status != "done")
        left_out = " (left out)" if any(seed.status == "done" for seed in self.all_seeds) else ""
        return f"{', '.join(f'{count} {status}' for status, count in counts.items())}{left_out}" if counts else "done"

    @property
    def sessions(self) -> int:
        return sum(len(seed.worker_tables) or 1 for seed in self.seeds)

    @property
    def shares_one_net(self) -> bool:
        return any(run.shares_one_net for run in self.runs)

    @property
    def env(self) -> str:
        """Name of the env, which is the same for all runs of the setting."""
        return self.runs[0].env

    @cached_property
    def bounds(self) -> Bounds | None:
        """Lowest and highest possible return of the env, or None if these bounds are unknown or differ between the runs."""
        ranges = {return_range(run.settings()) for run in self.runs}
        return ranges.pop() if len(ranges) == 1 else None

    def scores(self, metric: str = "current_return") -> np.ndarray:
        """Return the final return of each seed that has a final return, float64 [seeds]."""
        return np.array([value for seed in self.seeds if (value := seed.final_return(metric)) is not None], dtype=np.float64)

    def aligned_curves(self, column: str, x_column: str) -> AlignedCurves:
        """Return the curves of `seeds` (`column` over `x_column`), interpolated at F common points. value_SF has the shape [seeds, F].

        The common points are in the range of `x_column` that all nonempty curves cover.
        """
        return interpolate([seed.curve(column, x_column) for seed in self.seeds])

    def count_text(self) -> str:
        """Return the number of seeds as text, such as "3 seeds", "1 seed with 4 sessions" or "2 seeds with 4 policies each"."""
        count, policies = len(self.seeds), max(run.policies for run in self.runs)
        parts = f"{self.sessions // count} sessions" if self.shares_one_net else f"{policies} policies" if policies > 1 else ""
        return f"{count} seed{'s' * (count != 1)}{f' with {parts}' if parts else ''}{' each' if parts and count != 1 else ''}"


class ComparableMetric(NamedTuple):
    """The metric by which all seeds of a comparison can be compared, and the reason if this metric is not the requested metric."""

    metric: str
    reason: str = ""
    """Reason why `metric` is not the requested metric, or "" if `metric` is the requested metric."""


def comparable_metric(metric: str, settings: Iterable[Setting]) -> ComparableMetric:
    """Return `metric` if `metric` is measured in the same way for all seeds, else another metric by which all seeds can be compared.

    The current return of a seed is computed from training episodes, from evaluations with deterministic actions, or from evaluations with
    sampled actions. If the seeds differ in this respect, the metric training_return (the current return of training episodes) is returned.
    If training episodes are compared and a run has no column current_return, the metric total_reward is returned.
    """
    if training_column(metric) != "current_return":
        return ComparableMetric(metric)
    settings = list(settings)
    sources: dict[str, set[str]] = {}
    for setting in settings:  # in a study, settings of different envs have the same name
        sources.setdefault(setting.name, set()).update(seed.source for seed in setting.seeds)
    all_sources = set[str]().union(*sources.values())
    if metric == "current_return" and len(all_sources) < 2 and all_sources != {TRAINING}:
        return ComparableMetric(metric)
    for setting in settings:
        if not all("current_return" in table for seed in setting.all_seeds for table in seed.tables):
            return ComparableMetric("total_reward", f"{setting.name} has no column current_return, so the comparison uses {TOTAL}")
    if metric == "training_return" or len(all_sources) < 2:
        return ComparableMetric(metric)
    differing = "; ".join(f"{name}: {' and '.join(sorted(kinds))}" for name, kinds in sources.items())
    reason = f"The current returns at the end differ in kind ({differing}), so the comparison uses the returns of training episodes"
    return ComparableMetric("training_return", reason)


class Summary(NamedTuple):
    """The results of a setting: one row of the comparison tables. A result that is not known is None."""

    name: str
    label: str
    """Name of the setting without the env (see Setting.label)."""
    env: str
    seeds: int
    sessions: int
    status: str
    """How the seeds ended (see Setting.status)."""
    solved: int | None
    """Number of seeds that reached the threshold, or None if there is no threshold."""
    solved_by: str | None
    """Key of RULES that names the data that were compared with the threshold. If this key differs between seeds, the keys are joined by the
    word "and"."""
    seconds_to_threshold: Median | None
    """Median, over the seeds, of the time until the threshold was reached, in seconds since the start of training. The median is infinite
    if at least half of the seeds did not reach the threshold. The field is None if there is no threshold."""
    steps_to_threshold: Median | None
    """Median, over the seeds, of the number of global frames until the threshold was reached. The field is infinite or None in the same
    cases as seconds_to_threshold."""
    final_return: Estimate | None
    """Mean of the final returns over the seeds. The fields opt_steps_per_second and grad_norm are also means over the seeds."""
    final_return_median: float | None
    interquartile_mean: Estimate | None
    """Interquartile mean of the final returns, with the bootstrap interval over seeds."""
    opt_steps_per_second: float | None
    grad_norm: float | None


def summarize(
    setting: Setting, threshold: float | None, metric: str = "current_return", seeds: Sequence[SeedResult] | None = None, rule: str = ""
) -> Summary:
    """Return the Summary of a setting: its results over the seeds.

    A seed counts as solved if one of its tables reaches `threshold` (see SeedResult.first_reached).

    Args:
        metric: the column whose last value is the final return of a seed.
        seeds: the seeds to summarize, by default `setting.seeds`.
        rule: name of the data to compare with the threshold (see SeedResult.first_reached).
    """
    seeds = setting.seeds if seeds is None else seeds
    steps = [seed.first_reached(threshold, "global_frame", rule) for seed in seeds]
    seconds = [seed.first_reached(threshold, "wall_t", rule) for seed in seeds]
    finals = [seed.final_return(metric) for seed in seeds]
    judged, known = threshold is not None, np.array([value for value in finals if value is not None])
    return Summary(
        name=setting.name,
        label=setting.label or setting.name,
        env=setting.env,
        seeds=len(seeds),
        sessions=setting.sessions,
        status=setting.status,
        solved=sum(value is not None for value in steps) if judged else None,
        solved_by=" and ".join(sorted({seed.threshold_rule for seed in seeds})) if judged else None,
        seconds_to_threshold=median_point(seconds) if judged else None,
        steps_to_threshold=median_point(steps) if judged else None,
        final_return=estimate_mean(finals, setting.bounds),
        final_return_median=aggregate_known(finals, np.median),
        interquartile_mean=bootstrap_statistic([known], interquartile_mean) if len(known) else None,
        opt_steps_per_second=aggregate_known(seed.updates_per_second() for seed in seeds),
        grad_norm=aggregate_known(seed.grad_norm() for seed in seeds),
    )
