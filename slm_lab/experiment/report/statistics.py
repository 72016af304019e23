"""Statistics for the comparison of agents, computed with numpy alone.

The module computes interquartile means, probabilities of improvement, performance profiles, significance tests and confidence sequences.
The intervals of a confidence sequence stay valid even if the intervals are inspected after every seed.

The type Scores is a sequence with one array for each env, float64 [seeds of the env]. The number of seeds may differ between envs. The
statistics over several envs and their stratified bootstrap, which resamples the seeds of each env separately, are described in Agarwal et
al., 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (https://arxiv.org/abs/2108.13264). The formulas are in
docs/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from slm_lab.experiment.report.metrics import Estimate
from slm_lab.experiment.report.student_t import student_t_tails

Scores = Sequence[np.ndarray]
"""Scores of an agent: one array for each env, float64 [seeds]."""
Interval = tuple[float, float]
REPLICATES = 2000
"""Number of bootstrap samples."""
LEVEL = 0.05
"""Probability that an interval does not contain the true value (1 − confidence level)."""
_QUANTILES = (LEVEL / 2, 1 - LEVEL / 2)
_SEED = 0
"""Random seed of the bootstrap. With a fixed seed, a repeated comparison gives the same intervals."""


# ---- aggregates


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of the values along the last axis.

    Of N values, the ⌊N / 4⌋ lowest values and the ⌊N / 4⌋ highest values are dropped.
    """
    count = values.shape[-1]
    cut = count // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1))


def optimality_gap(values: np.ndarray, target: float = 1.0) -> np.ndarray:
    """Return the mean of max(target − value, 0) along the last axis: the mean amount by which the values are below `target`."""
    return np.asarray(target - np.minimum(values, target).mean(axis=-1))


def bootstrap_statistic(scores: Scores, statistic: Callable[[np.ndarray], np.ndarray], replicates: int = REPLICATES) -> Estimate:
    """Return a statistic of the scores of all envs together, with the percentile interval of the stratified bootstrap.

    If every env has a single seed, the ends of the interval are None.

    Args: statistic: function of values [..., N] that reduces the last axis, such as `interquartile_mean`.
    """
    value = float(statistic(np.concatenate(scores)))
    if max(map(len, scores)) < 2:
        return Estimate(value, None, None)
    rng = np.random.default_rng(_SEED)
    samples = np.concatenate([one[rng.integers(0, len(one), (replicates, len(one)))] for one in scores], axis=-1)
    return Estimate(value, *_percentile_interval(statistic(samples)))


def probability_of_improvement(scores: Scores, others: Scores, replicates: int = REPLICATES) -> Estimate:
    """Return P(scores > others), with the percentile interval of the stratified bootstrap.

    In each env, P(scores > others) is the probability that a random seed of `scores` is better than a random seed of `others`. The returned
    estimate is the mean of the probabilities of the envs. The probability in an env is the Mann-Whitney statistic U / (n m), in which a
    pair of equal values counts one half. If `scores` and `others` have a single seed in every env, the ends of the interval are None.
    """
    rng = np.random.default_rng(_SEED)
    values, samples = [], []
    for own, theirs in zip(scores, others, strict=True):
        wins = (own[:, None] > theirs) + 0.5 * (own[:, None] == theirs)
        values.append(wins.mean())
        counts, their_counts = _counts(rng, len(own), replicates), _counts(rng, len(theirs), replicates)
        samples.append(((counts @ wins) * their_counts).sum(axis=1) / wins.size)
    if max(map(len, (*scores, *others))) < 2:
        return Estimate(float(np.mean(values)), None, None)
    return Estimate(float(np.mean(values)), *_percentile_interval(np.mean(samples, axis=0)))


class Profile(NamedTuple):
    """A performance profile: the fraction of runs whose score is above each of T thresholds. All fields are arrays, float64 [T]."""

    threshold: np.ndarray
    fraction: np.ndarray
    """Fraction of the runs of all envs together whose score is above the threshold."""
    low: np.ndarray
    high: np.ndarray
    """`low` and `high` are the lower and upper limits of the 95 % interval at each threshold."""


def performance_profile(scores: Scores, thresholds: np.ndarray, replicates: int = REPLICATES) -> Profile:
    """Return the performance profile: for each threshold, the fraction of runs with a higher score, and its bootstrap interval."""
    rng = np.random.default_rng(_SEED)
    total = sum(map(len, scores))
    above = [one[:, None] > thresholds for one in scores]
    fraction = np.sum([one.sum(axis=0) for one in above], axis=0) / total
    samples = np.sum([_counts(rng, len(one), replicates) @ one for one in above], axis=0) / total
    low, high = np.quantile(samples, _QUANTILES, axis=0)
    return Profile(thresholds, fraction, low, high)


def _counts(rng: np.random.Generator, count: int, replicates: int) -> np.ndarray:
    """Return how often each of `count` seeds is drawn in each bootstrap sample, float64 [replicates, count]."""
    return rng.multinomial(count, np.full(count, 1 / count), size=replicates).astype(np.float64)


def _percentile_interval(samples: np.ndarray) -> Interval:
    low, high = np.quantile(samples, _QUANTILES)
    return float(low), float(high)


# ---- tests


def t_test(values: Sequence[float], others: Sequence[float], *, paired: bool = False) -> float | None:
    """Return the two-sided p-value of the t-test of equal means that belongs to the interval of `metrics.estimate_difference`.

    If `paired` is true, the test is the paired t-test, which tests the differences `values` − `others`. Otherwise, the test is Welch's
    t-test. Returns None if there are fewer than two differences, or fewer than two elements of `values` or `others`, or if the tested
    values do not vary by more than rounding errors.

    Args: paired: whether each element of `values` belongs to the element of `others` at the same position.
    """
    samples = [[one - other for one, other in zip(values, others, strict=True)]] if paired else [values, others]
    if min(map(len, samples)) < 2:
        return None
    rounding = 8 * float(np.finfo(np.float64).eps) * max(map(abs, (*values, *others)))
    deviations = [float(np.std(sample, ddof=1)) for sample in samples]
    parts = [deviation**2 / len(sample) if deviation > rounding else 0.0 for deviation, sample in zip(deviations, samples, strict=True)]
    if (variance := sum(parts)) == 0.0:
        return None
    # for the single sample of differences, the degrees of freedom of Welch's test are n − 1
    freedom = 1.0 / sum((part / variance) ** 2 / (len(sample) - 1) for part, sample in zip(parts, samples, strict=True))
    return student_t_tails((float(np.mean(values)) - float(np.mean(others))) / math.sqrt(variance), freedom)


def adjust_holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values for multiple testing by the method of Holm, 1979, "A simple sequentially rejective multiple test procedure".

    The k-th smallest of K p-values is multiplied by K − k + 1 and limited to 1. Finally, each adjusted p-value is raised to the largest
    adjusted p-value of all smaller p-values. An element None, which means that there was no test, is not counted and stays None.
    """
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted


# ---- confidence sequences

_GRID = 1001
"""Number of evenly spaced candidate means of a confidence sequence. The ends of an interval are rounded outwards to a candidate mean. The
distance between two candidate means is 1/500 of the range of returns."""
_BETS = 16
"""Number of betting fractions. Each fraction is used by two bettors: the first bets that the mean is above the candidate mean, the second
bets that the mean is below it. The wealth of all bettors is averaged."""


def confidence_sequence(differences: Sequence[float], span: float | None, level: float = LEVEL) -> list[Interval]:
    """Return the confidence intervals of the mean difference after the first 1, 2, … differences.

    An interval after too few differences is infinite. With probability 1 − `level`, *all* intervals contain the true mean. Therefore, it is
    valid to stop the experiment as soon as one interval excludes 0.

    Args: span: the largest possible |difference|, or None if unknown. If `span` is a number, the intervals are valid for any distribution
        of the differences. If `span` is None, the intervals are valid for normally distributed differences.
    """
    return list(_normal_sequence(differences, level) if span is None else _betting_sequence(differences, span, level))


def first_decisive_count(intervals: Sequence[Interval]) -> int | None:
    """Return the number of differences after which an interval of a confidence sequence excludes 0 for the first time.

    Returns None if no interval excludes 0.
    """
    return next((count for count, (low, high) in enumerate(intervals, 1) if low > 0.0 or high < 0.0), None)


def _betting_sequence(differences: Sequence[float], span: float, level: float) -> Iterator[Interval]:
    """Yield the intervals of a confidence sequence for differences in [−span, span].

    An interval contains the candidate means m that bets against m did not reject. With differences xᵢ scaled to [0, 1], a bettor who
    bets the fraction u of its wealth that the mean is above m has the wealth Π (1 − u + u xᵢ / m). For each u, another bettor bets the
    fraction u of its wealth that the mean is below m. If m is the true mean, the average wealth of all bettors is a martingale that starts
    at 1. The probability that the average wealth ever exceeds 1 / level is then at most `level` (Ville's inequality): Waudby-Smith and
    Ramdas 2024, "Estimating means of bounded random variables by betting" (https://arxiv.org/abs/2010.09686). The betting fractions follow
    the arcsine law of the universal portfolio, as in Orabona and Jun 2024, "Tight concentrations and confidence sequences from the regret
    of universal portfolio" (https://arxiv.org/abs/2110.14099). With the average over many betting fractions, no fraction has to be chosen,
    and the intervals do not depend on the order of the differences.
    """
    mean_G1 = np.linspace(0.0, 1.0, _GRID)[1:-1, None]
    bet_K = np.cos((2 * np.arange(1, _BETS + 1) - 1) * np.pi / (4 * _BETS))
    above_GK, below_GK = np.ones((2, _GRID - 2, _BETS))
    for count, difference in enumerate(differences, 1):
        x = min(max((difference / span + 1.0) / 2.0, 0.0), 1.0)
        with np.errstate(over="ignore"):  # a wealth that overflows is above 1 / level too
            above_GK *= 1.0 - bet_K + bet_K * (x / mean_G1)
            below_GK *= 1.0 - bet_K + bet_K * ((1.0 - x) / (1.0 - mean_G1))
            wealth_G = 0.5 * (above_GK.mean(axis=1) + below_GK.mean(axis=1))
        kept = np.flatnonzero(wealth_G < 1.0 / level)
        yield _grid_interval(kept, float(np.mean(differences[:count])), span)


def _grid_interval(kept: np.ndarray, mean: float, span: float) -> Interval:
    """Return an interval that contains every candidate mean that the bets did not reject.

    Each end of the interval is the nearest rejected candidate mean, or the end of the range. If all candidate means were rejected, the
    interval extends by one grid step on both sides of `mean`.

    Args:
        kept: indices of the candidate means that were not rejected.
        mean: mean of the differences, which is used if all candidate means were rejected.
        span: the largest possible |difference|.
    """
    step = 2.0 * span / (_GRID - 1)
    if not len(kept):  # the mean is between the outermost grid point and the end of the range
        return max(mean - step, -span), min(mean + step, span)
    return -span + step * float(kept[0]), -span + step * float(kept[-1] + 2)


def _normal_sequence(differences: Sequence[float], level: float) -> list[Interval]:
    """Return the intervals of a confidence sequence for normally distributed differences of unknown variance.

    An interval contains the means m that the mixture test of the t statistic has not rejected. For n differences and ν = n − 1, the
    likelihood ratio of t, for effects (mean − m) / σ ~ N(0, 1) against no effect, is

        (1 + n)^(−1/2) [(1 + t²/ν) / (1 + t²/(ν (1 + n)))]^(n/2).

    This likelihood ratio is a martingale if m is the true mean (Lai 1976, "On confidence sequences", and Wang and Ramdas 2025,
    "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", https://arxiv.org/abs/2310.03722). The ends
    of the interval follow from solving the equation likelihood ratio = 1 / level for |t|. With level=0.05, the intervals after fewer than 5
    differences are infinite.
    """
    count = np.arange(1, len(differences) + 1)
    shifted = np.asarray(differences, dtype=np.float64) - differences[0]  # the shift avoids numerical cancellation
    mean = np.cumsum(shifted) / count
    variance = np.maximum(np.cumsum(shifted**2) - count * mean**2, 0.0) / np.maximum(count - 1, 1)
    limit = (np.sqrt(1 + count) / level) ** (2 / count)
    finite = (count > 1) & (limit < 1 + count)
    ratio = (limit - 1) / np.where(finite, 1 - limit / (1 + count), 1.0)  # t² / ν
    half = np.where(finite, np.sqrt(variance * ratio * (count - 1) / count), math.inf)
    mean += differences[0]
    return list(zip((mean - half).tolist(), (mean + half).tolist(), strict=True))
