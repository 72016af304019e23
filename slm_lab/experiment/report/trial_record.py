"""Record the results of the trials of a search, rank the trials, and compute the importance of each searched key for the metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from slm_lab.spec.load.search_space import KeyChoices, SearchSpace, Values, create_frozen_trial

TrialStatus = Literal["finished", "stopped", "failed", "running"]
"""Status of a trial. "stopped" means that the scheduler (ASHA) ended the trial early."""


@dataclass(frozen=True)
class TrialRecord:
    """The hyperparameter values and the results of a trial of a search."""

    trial: int
    values: Values
    metrics: dict[str, float | None]
    """Name of each metric of the trial → value, which is None if the metric is not defined."""
    metric: float | None
    """Value of the metric meta.search_metric, by which trials are ranked (higher is better), or None if the value is unknown."""
    frame: int
    """Number of frames that every Session of the trial has reached."""
    seconds: float
    """Wall-clock time that the trial has taken so far, s."""
    status: TrialStatus
    random_seed: int | None
    confirmed: float | None = None
    """Metric of a second training with the same values and new seeds (--confirm), or None if the trial had no second training."""
    confirmed_interval: tuple[float, float] | None = None
    """95 % interval of the metric `confirmed` over the Sessions of the second training."""
    cause: str = ""
    """Cause of the failure if the trial failed, else ""."""

    @property
    def known_metric(self) -> float | None:
        """The value of `metric` if this value is finite, else None."""
        return self.metric if self.metric is not None and math.isfinite(self.metric) else None


def rank_trials(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials, sorted from the best to the worst trial.

    The list begins with the confirmed trials, sorted by `confirmed`. The other finished trials follow, sorted by `metric`, and then the
    trials that are stopped or running, sorted by `metric`. Trials that failed or have no metric are last, sorted by index.
    """
    return sorted(records, key=_sort_key)


def _sort_key(record: TrialRecord) -> tuple[float, ...]:
    metric = record.known_metric
    if record.status == "failed" or metric is None:
        return (3, record.trial)
    if record.confirmed is not None and math.isfinite(record.confirmed):
        return (0, -record.confirmed, -metric, record.trial)
    return (1 if record.status == "finished" else 2, -metric, record.trial)


METHOD = "PED-ANOVA"
EXPLANATION = "how far the values of a key among the best trials differ from its values among all trials; the shares add up to 1"
MIN_TRIALS = 10
"""Minimum number of trials with a metric that is needed to compute the importance of keys."""
_BEST, _FEWEST = 0.25, 5
"""Fraction of the trials that count as the best trials in the computation of the importance, and minimum number of best trials."""


@dataclass(frozen=True)
class Importance:
    """How important each searched key of a search is for the metric of the search."""

    shares: dict[str, float]
    """Path of each searched key → share of the total importance, from 0 to 1, in descending order."""
    trials: int
    """Number of trials from which the importance was computed."""
    best: int
    """Number of these trials (see `trials`) that count as the best trials."""
    method: str = f"{METHOD}: {EXPLANATION}"


def key_importance(space: SearchSpace, records: Sequence[TrialRecord]) -> Importance | None:
    """Return the importance of each searched key, computed from the trials that finished or were stopped.

    The method is PED-ANOVA (Watanabe et al., 2023), whose conditional form is used for keys that are active only in some trials. Returns
    None if fewer than MIN_TRIALS trials finished or were stopped, if the metrics of these trials are equal, or if the package optuna is not
    installed.
    """
    known = [one for one in records if one.status in ("finished", "stopped") and one.known_metric is not None]
    if len(known) < MIN_TRIALS or np.ptp([one.known_metric for one in known]) == 0:
        return None
    try:
        import optuna
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    study.add_trials([create_frozen_trial(optuna, space, _bounded_choices(space, one), one.known_metric) for one in known])
    best = max(_BEST, _FEWEST / len(known))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore the warning that a key with a single value has no importance
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    shares = dict.fromkeys(space.keys, 0.0)
    for name, share in found.items():
        shares[space.named[name].text] += share
    return Importance(dict(sorted(shares.items(), key=lambda item: -item[1])), len(known), int(np.ceil(best * len(known))))


def _bounded_choices(space: SearchSpace, record: TrialRecord) -> KeyChoices:
    """Return the hyperparameter choices of a trial for the computation of the importance.

    Values that were sampled from a normal distribution are replaced by their cumulative probabilities, which are bounded.
    """
    return {
        name: NormalDist(*key.args[:2]).cdf(choice) if (key := space.named[name]).is_normal else choice
        for name, choice in space.choices_of(record.values).items()
    }
