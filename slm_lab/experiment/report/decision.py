"""Decide whether the scores of the entries of a study (the compared specs) differ.

With --until-decided, a study adds seeds until the decisions are made.

A decision is based on a confidence sequence of the differences between runs of two entries with equal seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slm_lab.experiment.report.metrics import Estimate, aggregate_known, usable_bounds
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.seed_result import seed_results
from slm_lab.experiment.report.setting import Setting, comparable_metric
from slm_lab.experiment.report.statistics import LEVEL, confidence_sequence, first_decisive_count
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.spec.models.study import StudyPlan

MAX_SEEDS = 32
"""Default value of the option --max-seeds."""


@dataclass(frozen=True)
class Decision:
    """The difference between the scores of an entry and of the reference entry in one env, and whether this difference is decided."""

    entry: str
    reference: str
    env: str
    pairs: int
    """Number of seeds with which both entries have been trained."""
    difference: Estimate | None
    """Mean difference of the paired runs and the current interval of the confidence sequence, or None if there are no paired runs. The ends
    `low` and `high` are None while the interval is infinite."""
    after: int | None
    """Number of seeds after which the interval excluded 0 for the first time, or None if the difference is not decided."""
    bounded: bool
    """Whether the range of possible returns is known. If the range is known, the interval of the difference is valid for any distribution
    of returns."""

    def text(self, where: str = "") -> str:
        """Return the decision as a sentence.

        Args: where: text that names the env in the sentence, such as " in CartPole-v1", or "".
        """
        if self.difference is None:
            return f"Not decided: {self.entry} and {self.reference}{where} have no seed in common."
        value, low, high = self.difference
        interval = f"[{_bound_text(low, '-∞')}, {_bound_text(high, '∞')}]"
        mean = f"mean difference {format_number(value)}, interval that holds at every number of seeds {interval}"
        if self.after is None:
            return f"Not decided after {self.pairs} seeds: {self.entry} and {self.reference}{where} ({mean})."
        way = "above" if value > 0 else "below"
        return f"Decided after {self.after} seeds: {self.entry} is {way} {self.reference}{where} ({mean}, {self.pairs} seeds)."


def _bound_text(value: float | None, infinite: str) -> str:
    return infinite if value is None else format_number(value)


def decisions(study: StudyPlan, settings: Mapping[tuple[str, str], Setting]) -> list[Decision]:
    """Return the decisions of a study: a Decision for each env and each entry except the reference entry of the env.

    The reference entry is the study's baseline or, in an env in which the baseline has no runs, the first entry of the env. The error
    probability of each interval is 0.05 / number of intervals. Therefore, with probability 0.95, all intervals of the study contain the
    true differences at every number of seeds.

    Args: settings: dict (env, study entry) → Setting with the ended runs of the entry in the env.
    """
    pairs = [(env, entry, _reference_entry(study, env)) for env in study.envs for entry in _entries_of_env(study, env)]
    pairs = [pair for pair in pairs if pair[1] != pair[2]]
    metric = comparable_metric(study.metric, settings.values()).metric
    return [_decide_difference(study, settings, metric, LEVEL / len(pairs), *pair) for pair in pairs]


def _entries_of_env(study: StudyPlan, env: str) -> list[str]:
    return list(dict.fromkeys(run.entry for run in study.runs if run.env == env))


def _reference_entry(study: StudyPlan, env: str) -> str:
    entries = _entries_of_env(study, env)
    return study.spec.baseline if study.spec.baseline in entries else entries[0]


def _decide_difference(
    study: StudyPlan, settings: Mapping[tuple[str, str], Setting], metric: str, level: float, env: str, entry: str, reference: str
) -> Decision:
    pair = [settings[env, name] for name in (entry, reference) if (env, name) in settings]
    own, theirs = (scores_by_seed(one, metric) for one in pair) if len(pair) == 2 else ({}, {})
    order = [run.random_seed for run in study.runs if (run.entry, run.env) == (entry, env)]
    common = [seed for seed in order if seed in own and seed in theirs]
    if not common:
        return Decision(entry, reference, env, 0, None, None, bounded=False)
    bounds = pair[0].bounds if pair[0].bounds == pair[1].bounds else None
    bounds = usable_bounds(bounds, [*own.values(), *theirs.values()])
    span = None if bounds is None else bounds[1] - bounds[0]
    differences = [own[seed] - theirs[seed] for seed in common]
    intervals = confidence_sequence(differences, span, level)
    low, high = intervals[-1]
    finite = (low, high) if math.isfinite(low) else (None, None)
    mean = Estimate(sum(differences) / len(differences), *finite)
    return Decision(entry, reference, env, len(common), mean, first_decisive_count(intervals), bounded=span is not None)


def scores_by_seed(setting: Setting, metric: str) -> dict[int, float]:
    """Return a dict: random_seed of each run of a setting → score of the run, which is the mean of `metric` over its Sessions."""
    runs = {run.random_seed: seed_results(run) for run in setting.runs if isinstance(run, ResultRun)}
    means = {key: aggregate_known(seed.final_return(metric) for seed in seeds) for key, seeds in runs.items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def decision_explanation(decided: Sequence[Decision]) -> str:
    """Return a text that explains the intervals of the decisions and the assumptions of these intervals."""
    ways = {one.bounded for one in decided if one.pairs}
    count = len(decided)
    every = f" With {count} differences, the confidence level of each interval is 1 − 0.05 / {count}." if count > 1 else ""
    betting = "computed by betting, which is valid for any distribution of returns within this range"
    mixture = "computed by a mixture of t-tests, which is valid for normally distributed differences"
    if ways == {True, False}:
        used = f" If the range of returns is known, the interval is {betting}; otherwise, the interval is {mixture}."
    else:
        used = f" The range of returns is known; therefore, the interval is {betting}." if True in ways else ""
        used += f" The range of returns is unknown; therefore, the interval is {mixture}." if False in ways else ""
    return (
        "A decision is based on the mean difference between scores with the same random_seed, and on a confidence sequence: one interval "
        "for each number of seeds, such that all intervals together contain the true difference with 95 % confidence. Therefore, it is "
        f"valid to stop as soon as an interval excludes 0.{every}{used} All other intervals and p-values assume a fixed number of seeds, "
        "and are therefore not valid after a stop at a decision."
    )
