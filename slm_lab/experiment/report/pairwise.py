"""Compare each setting of a comparison with the first setting, in each env and over all envs together.

A setting is a group of runs that differ only in their seeds (see compare.Setting).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slm_lab.experiment.report.baseline import SHIPPED
from slm_lab.experiment.report.figure import Figure, Line, Panel
from slm_lab.experiment.report.metrics import Curve, Estimate, estimate_difference
from slm_lab.experiment.report.setting import Setting
from slm_lab.experiment.report.statistics import (
    Profile,
    adjust_holm,
    bootstrap_statistic,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    t_test,
)

PUBLISHED_SCORE = "the published score"
"""Value of ReturnNormalization.one_is if the normalised return 1 is the published score."""
_POINTS = 201
"""Number of thresholds at which a performance profile is computed."""


class PairComparison(NamedTuple):
    """The comparison of the returns of setting B with the returns of setting A in one env."""

    env: str
    a: str
    b: str
    difference: Estimate
    """Mean return of setting B minus mean return of setting A, with Welch's interval."""
    improvement: Estimate
    """P(B > A): the probability that a seed of setting B has a higher return than a seed of setting A."""
    p_value: float | None
    """Two-sided p-value of Welch's t-test, or None if setting A or B has a single seed, or if the returns of both settings do not vary."""
    p_holm: float | None
    """`p_value`, adjusted by Holm's method for the number of compared pairs of settings."""


class OverallResult(NamedTuple):
    """The results of a setting over all envs, computed from normalised returns (see ReturnNormalization)."""

    name: str
    seeds: int
    interquartile_mean: Estimate
    optimality_gap: Estimate
    improvement: Estimate | None
    """Probability that a seed of this setting has a higher return than a seed of the first setting, as a mean over the envs, or None if
    this setting is the first setting."""


class ReturnNormalization(NamedTuple):
    """The returns of an env that correspond to the normalised returns 0 and 1, and the descriptions of these two returns."""

    env: str
    zero: float
    one: float
    zero_is: str
    one_is: str


class Comparison(NamedTuple):
    """Result of compare_pairs: the comparisons in each env, and the results over all envs."""

    pairs: list[PairComparison]
    overall: list[OverallResult]
    """The results of the settings over all envs, or [] if there are fewer than two envs in which the settings can be compared."""
    scales: list[ReturnNormalization]
    profiles: dict[str, Profile]
    """Name of each setting → performance profile of the setting over all envs."""


def compare_pairs(settings: Sequence[Setting], metric: str, published: Mapping[str, float] | None = None) -> Comparison:
    """Compare each setting with the first setting, in each env and over all envs together.

    In an env in which the first setting has no results, the settings are compared with the first setting that has results in this env.

    Args: published: env → published score. In an env with a published score, returns are normalised so that 1 is the published score
        instead of the highest possible return.
    """
    pairs = []
    for env in dict.fromkeys(one.env for one in settings):
        of_env = [one for one in settings if one.env == env and len(one.scores(metric))]
        if of_env:
            first = next((one for one in of_env if _label(one) == _label(settings[0])), of_env[0])
            pairs += [_compare_pair(first, one, metric) for one in of_env if one is not first]
    adjusted = adjust_holm([one.p_value for one in pairs])
    pairs = [one._replace(p_holm=p) for one, p in zip(pairs, adjusted, strict=True)]
    return Comparison(pairs, *_compare_over_envs(settings, metric, published or {}))


def _label(setting: Setting) -> str:
    return setting.label or setting.name


def _compare_pair(a: Setting, b: Setting, metric: str) -> PairComparison:
    scores_a, scores_b = a.scores(metric), b.scores(metric)
    values_a, values_b = scores_a.tolist(), scores_b.tolist()
    difference = estimate_difference(values_b, values_a, bounds=a.bounds if a.bounds == b.bounds else None)
    assert difference is not None
    improvement = probability_of_improvement([scores_b], [scores_a])
    return PairComparison(a.env, _label(a), _label(b), difference, improvement, t_test(values_b, values_a), None)


# ---- several envs


def _compare_over_envs(
    settings: Sequence[Setting], metric: str, published: Mapping[str, float]
) -> tuple[list[OverallResult], list[ReturnNormalization], dict[str, Profile]]:
    """Compare the settings that have results in several envs, over the envs in which all of these settings have results.

    Returns the fields overall, scales and profiles of a Comparison. They are empty if fewer than two envs have results of all compared
    settings.
    """
    of_label: dict[str, dict[str, Setting]] = {}
    for one in settings:
        if len(one.scores(metric)):
            of_label.setdefault(_label(one), {})[one.env] = one
    wide = {label: own for label, own in of_label.items() if len(own) > 1}
    envs = [env for env in dict.fromkeys(one.env for one in settings) if wide and all(env in own for own in wide.values())]
    if len(envs) < 2:
        return [], [], {}
    scales = [_return_normalization(env, [own[env] for own in wide.values()], metric, published.get(env)) for env in envs]
    scores = {
        label: [(own[scale.env].scores(metric) - scale.zero) / (scale.one - scale.zero) for scale in scales] for label, own in wide.items()
    }
    first = next(iter(scores))
    overall = [
        OverallResult(
            label,
            sum(map(len, own)),
            bootstrap_statistic(own, interquartile_mean),
            bootstrap_statistic(own, optimality_gap),
            None if label == first else probability_of_improvement(own, scores[first]),
        )
        for label, own in scores.items()
    ]
    every = np.concatenate([one for own in scores.values() for one in own])
    thresholds = np.linspace(min(0.0, float(every.min())), max(1.0, float(every.max())), _POINTS)
    return overall, scales, {label: performance_profile(own, thresholds) for label, own in scores.items()}


def _return_normalization(env: str, settings: Sequence[Setting], metric: str, published: float | None) -> ReturnNormalization:
    """Return the returns of an env that are normalised to 0 and 1.

    The return of the random baseline is normalised to 0. If the baseline is unknown, the lowest score of the settings is normalised to 0.
    The first known return in this list is normalised to 1: the published score, the highest possible return, the highest score of the
    settings. If that return is not above the return for 0, the lowest score of the settings is normalised to 0 and the highest to 1.
    """
    scores = np.concatenate([one.scores(metric) for one in settings])
    lowest, highest = (float(scores.min()), "the lowest score here"), (float(scores.max()), "the highest score here")
    zero, zero_is = _random_baseline(settings[0]), "the return of random actions"
    if zero is None:
        zero, zero_is = lowest
    bounds = settings[0].bounds
    one, one_is = highest if bounds is None else (bounds[1], "the highest possible return")
    if published is not None:
        one, one_is = published, PUBLISHED_SCORE
    if one <= zero:
        (zero, zero_is), (one, one_is) = lowest, highest
    return ReturnNormalization(env, zero, one if one > zero else zero + 1.0, zero_is, one_is)


def _random_baseline(setting: Setting) -> float | None:
    measured = [value for run in setting.runs if (value := run.metrics.get("random_baseline")) is not None]
    shipped: dict[str, float] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return measured[0] if measured else shipped.get(str(setting.runs[0].settings().get("env.name")))


def profile_figure(comparison: Comparison, colours: Sequence[str]) -> Figure:
    """Return the figure of the performance profiles of all settings over all envs, with 95 % bands."""
    lines = [
        Line(name, Curve(one.threshold, one.fraction), colour, band=(one.low, one.high))
        for (name, one), colour in zip(comparison.profiles.items(), colours, strict=False)
    ]
    panel = Panel(
        "fraction of runs above τ", lines, x_label="normalised return τ", y_limits=(-0.02, 1.02), band="95 % band (stratified bootstrap)"
    )
    return Figure(f"performance profiles over {len(comparison.scales)} envs, with pointwise 95 % bands", (panel,))
