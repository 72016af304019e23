"""Trials of a search: their results, their ranking, and the importance of each key for the metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from slm_lab.spec.load.search_space import KeyChoices, SearchSpace, Values, frozen_trial

TrialStatus = Literal["finished", "stopped", "failed", "running"]
"""stopped: the trial was ended by the scheduler (ASHA)."""


@dataclass(frozen=True)
class TrialRecord:
    """The hyperparameter values and the results of a trial."""

    trial: int
    values: Values
    metrics: dict[str, float | None]
    """Metrics of the trial; None for a metric that is not defined."""
    metric: float | None
    """Value of meta.search_metric, where higher is better; None if unknown."""
    frame: int
    """Number of frames that every Session has reached."""
    seconds: float
    """Wall-clock time of the trial so far."""
    status: TrialStatus
    random_seed: int | None
    confirmed: float | None = None
    """The metric after the values were trained again with new seeds (--confirm); None if they were not trained again."""
    confirmed_interval: tuple[float, float] | None = None
    """95 % interval of `confirmed` over its Sessions."""
    cause: str = ""
    """Why the trial failed."""

    @property
    def known_metric(self) -> float | None:
        """The metric if it is finite, else None."""
        return self.metric if self.metric is not None and math.isfinite(self.metric) else None


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials, best first: confirmed trials ordered by `confirmed`, then finished trials and then other trials by metric.

    Trials that failed or have no metric are last, ordered by index.
    """
    return sorted(records, key=_rank)


def _rank(record: TrialRecord) -> tuple[float, ...]:
    metric = record.known_metric
    if record.status == "failed" or metric is None:
        return (3, record.trial)
    if record.confirmed is not None and math.isfinite(record.confirmed):
        return (0, -record.confirmed, -metric, record.trial)
    return (1 if record.status == "finished" else 2, -metric, record.trial)


METHOD = "PED-ANOVA"
EXPLANATION = "how far the values of a key among the best trials differ from its values among all trials; the shares add up to 1"
MIN_TRIALS = 10
"""Minimum number of trials with a metric for the computation of the importance."""
_BEST, _FEWEST = 0.25, 5
"""Fraction of trials that count as the best, and their minimum number."""


@dataclass(frozen=True)
class Importance:
    """The importance of each key of a search."""

    shares: dict[str, float]
    """Path of a key → its share of the total importance, from 0 to 1; largest first."""
    trials: int
    """Number of trials that were compared."""
    best: int
    """Number of compared trials that count as the best."""
    method: str = f"{METHOD}: {EXPLANATION}"


def key_importance(space: SearchSpace, records: Sequence[TrialRecord]) -> Importance | None:
    """Return the importance of each key, computed from the trials that finished or were stopped.

    The method is PED-ANOVA (Watanabe et al., 2023), in its conditional form for keys that are active only in some trials. Returns None if
    there are fewer than MIN_TRIALS such trials, if their metrics are equal, or if the package optuna is not installed.
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
    study.add_trials([frozen_trial(optuna, space, _quantiles(space, one), one.known_metric) for one in known])
    best = max(_BEST, _FEWEST / len(known))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a key with one value has no importance
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    shares = dict.fromkeys(space.keys, 0.0)
    for name, share in found.items():
        shares[space.named[name].text] += share
    return Importance(dict(sorted(shares.items(), key=lambda item: -item[1])), len(known), int(np.ceil(best * len(known))))


def _quantiles(space: SearchSpace, record: TrialRecord) -> KeyChoices:
    """Return the choices of a trial, in which values of normal distributions are replaced by their quantiles, which are bounded."""
    return {
        name: NormalDist(*key.args[:2]).cdf(choice) if (key := space.named[name]).is_normal else choice
        for name, choice in space.choices_of(record.values).items()
    }
