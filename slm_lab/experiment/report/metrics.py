"""Compute learning curves, the metrics of docs/equations.md, and estimates over seeds with 95 % confidence intervals.

A curve has the values of a table column over another column, such as the frame. The strength s of a table row is the total_reward of the
row minus the random baseline of the env. Table rows without a total_reward have no strength and are omitted. A metric whose denominator is
zero is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.report.student_t import student_t_quantile
from slm_lab.lib.episodes import MAX_AGE

Table = dict[str, np.ndarray]
"""Table of a Session as a dict: column → values, float64 [rows]. A value is NaN if its cell in the CSV file is empty or not a number."""
_MAX_POINTS = 5000
"""Maximum number of points of interpolated curves."""


class Curve(NamedTuple):
    """Values of a table column over frames, or over another increasing column such as seconds or global frames.

    `frame` and `value` are float64 [points] and finite. If the curve is not over frames, `frame` contains the values of the other column.
    """

    frame: np.ndarray
    value: np.ndarray


def curve(table: Table, column: str, x_column: str = "frame") -> Curve:
    """Return the curve of the finite values of `column` over `x_column`. The curve is empty if the table lacks one of the two columns.

    If several rows have the same value of `x_column`, only the last of these rows is used, except for x_column="frame". In tables of SLM
    Lab, which have no column current_return, total_reward is used for column="current_return".
    """
    if column == "current_return" and column not in table:
        column = "total_reward"
    none = np.full(len(table["frame"]), np.nan)
    frame, value = table.get(x_column, none), table.get(column, none)
    known = np.isfinite(frame) & np.isfinite(value)
    frame, value = frame[known], value[known]
    if x_column == "frame":
        return Curve(frame, value)
    order = np.argsort(frame, kind="stable")
    frame, value = frame[order], value[order]
    last = np.append(np.diff(frame) > 0, True)[: len(frame)]
    return Curve(frame[last], value[last])


@dataclass(frozen=True)
class AlignedCurves:
    """Curves of several Sessions at common points of the horizontal axis (frames or another increasing column)."""

    frame: np.ndarray
    """Common points of the horizontal axis in increasing order, [F]."""
    value_SF: np.ndarray
    """Value of each Session at each common point, [sessions, F], or NaN where a Session has no value."""

    def mean(self) -> Curve:
        """Return the curve of the mean, at each frame, over the Sessions that have a value at this frame."""
        return Curve(self.frame, np.nanmean(self.value_SF, axis=0) if len(self.frame) else np.empty(0))

    def std(self) -> np.ndarray:
        """Return the population standard deviation, at each frame, over the Sessions that have a value at this frame, [F]."""
        return np.asarray(np.nanstd(self.value_SF, axis=0)) if len(self.frame) else np.empty(0)

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges of the band around the mean: mean − standard deviation, and mean + standard deviation, [F] each."""
        mean, std = self.mean().value, self.std()
        return mean - std, mean + std


def round_to_five_digits(value: float) -> float | None:
    """Return the value rounded to five significant digits, for a JSON file. An integer value keeps all digits.

    Returns None if the value is not finite.
    """
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.5g}")


def evenly_spaced_indices(count: int, most: int) -> np.ndarray:
    """Return the indices of `most` evenly spaced points out of `count` points, or the indices of all points if `count` ≤ `most`."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def align(curves: Sequence[Curve], min_count: int = 1) -> AlignedCurves:
    """Align curves at the frames at which at least `min_count` of the curves have a value. Missing values are NaN, not interpolated."""
    frame = np.unique(np.concatenate([np.empty(0), *(one.frame for one in curves)]))
    value_SF = np.full((len(curves), len(frame)), np.nan)
    for row, one in zip(value_SF, curves, strict=True):
        row[np.searchsorted(frame, one.frame)] = one.value
    kept = np.isfinite(value_SF).sum(axis=0) >= max(min_count, 1)
    return AlignedCurves(frame[kept], value_SF[:, kept])


def align_or_interpolate(curves: Sequence[Curve], min_count: int = 2) -> AlignedCurves:
    """Align curves that share a grid of frames, and interpolate curves that do not, for example curves of policies that share envs.

    A frame is common if at least `min_count` curves have a value at this frame. Curves share a grid if the number of common frames is at
    least half the number of points of the shortest curve. With `min_count` below 2, curves are never interpolated.
    """
    min_count = min(min_count, len(curves))
    aligned = align(curves, min_count)
    shortest = min((len(one.frame) for one in curves if len(one.frame)), default=0)
    return aligned if min_count < 2 or 2 * len(aligned.frame) >= shortest else interpolate(curves)


def interpolate(curves: Sequence[Curve]) -> AlignedCurves:
    """Align curves by linear interpolation. The common frames are all frames of the curves within the range that every curve covers.

    Curves without points are omitted. If there are more than _MAX_POINTS frames, only _MAX_POINTS evenly spaced frames are used.
    """
    curves = [one for one in curves if len(one.frame)]
    if not curves:
        return align([])
    frame = np.unique(np.concatenate([one.frame for one in curves]))
    shared = (frame >= max(one.frame[0] for one in curves)) & (frame <= min(one.frame[-1] for one in curves))
    frame = frame[shared]
    frame = frame[evenly_spaced_indices(len(frame), _MAX_POINTS)]
    return AlignedCurves(frame, np.stack([np.interp(frame, one.frame, one.value) for one in curves]))


Scalars = dict[str, float | None]
SESSION_METRICS = ("strength", "max_strength", "final_strength", "sample_efficiency", "training_efficiency", "stability")
INTERVAL = "95 % confidence interval (Student's t, limited to the range of possible returns if this range is known)"


@dataclass(frozen=True)
class Strengths:
    """Strength (`value`), frame and optimizer step of each table row that has a total_reward. All arrays are float64 [rows]."""

    frame: np.ndarray
    opt_step: np.ndarray
    value: np.ndarray

    @staticmethod
    def from_table(table: Table, baseline: float | None) -> Strengths:
        """Return the strengths of all rows of a table that have a total_reward.

        The arrays are empty if `baseline`, the random baseline of the env, is None.
        """
        total_reward = table.get("total_reward", np.empty(0))
        if baseline is None or not len(total_reward):
            return Strengths(np.empty(0), np.empty(0), np.empty(0))
        known = np.isfinite(total_reward)
        opt_step = np.nan_to_num(table.get("opt_step", np.zeros(len(total_reward))))
        return Strengths(table["frame"][known], opt_step[known], total_reward[known] - baseline)


def session_metrics(strengths: Strengths) -> Scalars:
    """Return the metrics SESSION_METRICS of one Session, computed from the strengths of its table. An undefined metric is None."""
    s = strengths.value
    if not len(s):
        return dict.fromkeys(SESSION_METRICS)
    return {
        "strength": float(s.mean()),
        "max_strength": float(s.max()),
        "final_strength": float(s[-1]),
        "sample_efficiency": _last(efficiencies(s, strengths.frame)),
        "training_efficiency": _last(efficiencies(s, strengths.opt_step)),
        "stability": _last(stabilities(s)),
    }


def metric_columns(strengths: Strengths) -> dict[str, np.ndarray]:
    """Return a dict: metric → value of the metric at each row, float64 [rows].

    The strength of a row is computed from this row, all other metrics from the rows up to this row. A value is NaN where the metric is not
    defined.
    """
    s = strengths.value
    return {
        "strength": s,
        "sample_efficiency": efficiencies(s, strengths.frame),
        "training_efficiency": efficiencies(s, strengths.opt_step),
        "stability": stabilities(s),
    }


def efficiencies(s: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Return the efficiency Σ (sᵢ / spentᵢ) / Σ sᵢ over the first 1, 2, … rows, float64 [rows]. An efficiency is NaN if Σ sᵢ is zero.

    Both sums exclude rows with spentᵢ = 0, such as the rows before the first optimizer step.

    Args:
        s: strength of each row.
        spent: frames (sample efficiency) or optimizer steps (training efficiency) of each row.
    """
    begun = spent > 0
    return _ratio(np.cumsum(np.where(begun, _ratio(s, spent), 0.0)), np.cumsum(np.where(begun, s, 0.0)))


def stabilities(s: np.ndarray) -> np.ndarray:
    """Return the stability 1 − |Σ min(sᵢ₊₁ − sᵢ, 0) / Σ_{i<N} sᵢ| over the first N = 1, 2, … rows, float64 [rows].

    The stability is NaN for N = 1, and if the denominator is zero.
    """
    falls = np.cumsum(np.minimum(np.diff(s), 0.0))
    return np.concatenate([np.full(min(len(s), 1), np.nan), 1.0 - np.abs(_ratio(falls, np.cumsum(s[:-1])))])


def consistencies(strengths: AlignedCurves) -> np.ndarray:
    """Return the consistency 1 − 2 Σᵢ stdⱼ(sᵢⱼ) / Σᵢ meanⱼ(sᵢⱼ) over the first 1, 2, … frames i of `strengths` and the Sessions j, [F].

    Here, std is the population standard deviation. The consistency of a single Session is NaN, since there is no deviation between
    Sessions, whereas SLM Lab writes 1.
    """
    if len(strengths.value_SF) < 2:
        return np.full(len(strengths.frame), np.nan)
    return 1.0 - 2.0 * _ratio(np.cumsum(strengths.std()), np.cumsum(strengths.mean().value))


def consistency_curve(strengths: AlignedCurves) -> Curve:
    """Return the curve of the consistency over frames, without the frames at which the consistency is not defined.

    Args: strengths: strengths of all Sessions at common frames.
    """
    return _finite_curve(strengths.frame, consistencies(strengths))


def consistency(strengths: AlignedCurves) -> float | None:
    """Return the consistency of a trial over all frames of `strengths`, or None if the consistency is not defined."""
    return _last(consistencies(strengths))


def mean_metrics(sessions: Sequence[Scalars]) -> Scalars:
    """Return the mean of each metric over the Sessions in which the metric is defined. A metric that is defined in no Session is None.

    If all values of a metric are integers (counts), the mean is rounded to an integer.
    """
    names = sessions[0] if sessions else {}
    known = {name: [value for session in sessions if (value := session[name]) is not None] for name in names}
    return {name: _mean(values) if values else None for name, values in known.items()}


def _mean(values: Sequence[float]) -> float:
    mean = float(np.mean(values))
    return round(mean) if all(isinstance(value, int) for value in values) else mean


def current_return(table: Table) -> Scalars:
    """Return the last finite current_return of a table and its standard error current_return_se. A value that the table lacks is None."""
    known = np.flatnonzero(np.isfinite(table.get("current_return", np.empty(0))))
    errors = table.get("current_return_se")
    error = _last(errors[known[-1:]]) if errors is not None and len(known) else None
    return {"current_return": last_value(table, "current_return"), "current_return_se": error}


def is_recent(evaluation: Table | None, table: Table) -> bool:
    """Return whether the last evaluation of a Session is recent.

    A recent evaluation is not older than the oldest training episodes that the current return of the training may include.

    Args:
        evaluation: evaluation table of the Session, or None if the Session has no evaluations.
        table: training table of the Session.
    """
    if evaluation is None or not len(evaluation["frame"]) or not len(table["frame"]):
        return False
    return float(evaluation["frame"][-1]) >= (1.0 - MAX_AGE) * float(table["frame"][-1])


def mean_rating(ratings: Sequence[tuple[float, float | None]]) -> tuple[float, float | None] | None:
    """Return the mean Elo rating of several Sessions and the standard error of this mean, or None if there are no ratings.

    For a single Session, return its rating and the standard error of its rating.

    Args: ratings: (Elo, standard error) of each Session.
    """
    if len(ratings) < 2:
        return ratings[0] if ratings else None
    values = [elo for elo, _ in ratings]
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def mean_current_return(tables: Mapping[int, Scalars], policies: int = 1) -> Scalars:
    """Return the mean current return of a trial and the standard error of this mean.

    The standard error is computed over the Sessions if there are several, and over episodes if there is one Session. For a Session with
    several policies, the mean over its policies is used as one value.

    Args: tables: index of each table (Session · policies + policy) → metrics current_return and current_return_se of the table.
    """
    of_session: dict[int, list[Scalars]] = {}
    for index, one in tables.items():
        if one["current_return"] is not None:
            of_session.setdefault(index // policies, []).append(one)
    means = [float(np.mean([one["current_return"] for one in several])) for several in of_session.values()]
    if len(means) > 1:
        return {"current_return": float(np.mean(means)), "current_return_se": float(np.std(means, ddof=1)) / math.sqrt(len(means))}
    errors = [one["current_return_se"] for several in of_session.values() for one in several]
    known = [error for error in errors if error is not None]
    joint = math.sqrt(sum(error**2 for error in known)) / len(known) if known and len(known) == len(errors) else None
    return {"current_return": means[0] if means else None, "current_return_se": joint}


def last_value(table: Table, column: str) -> float | None:
    """Return the last finite value of a table column, or None if the column has no finite value."""
    return _last(curve(table, column).value)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    quotient = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator != 0)
    return quotient


def _finite_curve(frame: np.ndarray, value: np.ndarray) -> Curve:
    known = np.isfinite(value)
    return Curve(frame[known], value[known])


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None


# ---- estimates over seeds


class Estimate(NamedTuple):
    """A statistic over seeds, such as the mean, and its 95 % confidence interval. `low` and `high` are None for a single seed."""

    value: float
    low: float | None
    high: float | None


Bounds = tuple[float, float]
"""Lowest and highest possible value."""


def estimate_mean(values: Sequence[float | None], bounds: Bounds | None = None) -> Estimate | None:
    """Return the mean of the values that are not None, with the 95 % interval of this mean. Return None if there are no values.

    If all values are equal, the interval has zero width.

    Args: bounds: range of possible values, to which the interval is clipped, or None if the range is unknown. Clipping does not change how
        often the interval contains the true mean. If a value is outside the bounds, the bounds are ignored.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Estimate(float(known[0]), None, None) if known else None
    half = student_t_quantile(len(known) - 1) * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    return _clipped_interval(float(np.mean(known)), half, usable_bounds(bounds, known))


def usable_bounds(bounds: Bounds | None, values: Iterable[float]) -> Bounds | None:
    """Return `bounds`, or None if `bounds` is None or at least one of the values is outside the bounds."""
    return None if bounds is None or not all(bounds[0] <= value <= bounds[1] for value in values) else bounds


def _clipped_interval(value: float, half: float, bounds: Bounds | None = None) -> Estimate:
    low, high = bounds or (-math.inf, math.inf)
    return Estimate(value, max(value - half, min(low, value)), min(value + half, max(high, value)))


def aggregate_known(values: Iterable[float | None], compute: Callable[..., Any] = np.mean) -> float | None:
    """Return the mean, or the statistic `compute`, of the values that are not None. Return None if there are no values."""
    known = [value for value in values if value is not None]
    return float(compute(known)) if known else None


def estimate_difference(
    values: Sequence[float], others: Sequence[float], *, paired: bool = False, bounds: Bounds | None = None
) -> Estimate | None:
    """Return mean(values) − mean(others) with a 95 % interval: Student's t interval of the differences if `paired`, else Welch's interval.

    Returns None if `values` or `others` is empty. The estimate has no interval if `values` or `others` has a single element.

    Args:
        paired: whether each element of `values` belongs to the element of `others` at the same position.
        bounds: range of possible values. The interval is clipped to the differences that are possible for values within the bounds.
    """
    if not values or not others:
        return None
    bounds = usable_bounds(bounds, [*values, *others])
    widest = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    if paired:
        return estimate_mean([one - other for one, other in zip(values, others, strict=True)], widest)
    value = float(np.mean(values)) - float(np.mean(others))
    if len(values) < 2 or len(others) < 2:
        return Estimate(value, None, None)
    parts = [float(np.var(sample, ddof=1)) / len(sample) for sample in (values, others)]
    variance = sum(parts)
    if variance == 0.0:
        return _clipped_interval(value, 0.0)
    # computed from the shares of the total variance, since squares of tiny variances would underflow
    freedom = 1.0 / sum((part / variance) ** 2 / (len(sample) - 1) for part, sample in zip(parts, (values, others), strict=True))
    return _clipped_interval(value, student_t_quantile(freedom) * math.sqrt(variance), widest)


class ReachedPoint(NamedTuple):
    """The point on the horizontal axis at which a curve reached a threshold."""

    point: float
    at_most: bool = False
    """Whether the first value of the curve is already at or above the threshold, so that `point` is only an upper limit."""


def first_reached(values: Curve, threshold: float, *, between: bool) -> ReachedPoint | None:
    """Return the first point at which a curve is at or above a threshold, or None if the curve never reaches the threshold.

    Args: between: whether to interpolate linearly between the first point at or above the threshold and the point before.
    """
    above = np.flatnonzero(values.value >= threshold)
    if not len(above):
        return None
    first = int(above[0])
    if first == 0 or not between:
        return ReachedPoint(float(values.frame[first]), at_most=first == 0)
    (x, end), (y, top) = values.frame[first - 1 : first + 1], values.value[first - 1 : first + 1]
    return ReachedPoint(float(x + (end - x) * (threshold - y) / (top - y)))


class Median(NamedTuple):
    """Median of the points at which curves reached a threshold, and its 95 % interval.

    The ends `low` and `high` of the interval are None if there are fewer than 6 curves.
    """

    value: float
    low: float | None
    high: float | None
    at_most: bool = False
    """Whether `value` is only an upper limit of the true median."""


def median_point(values: Sequence[ReachedPoint | None]) -> Median:
    """Return the median of the points at which curves reached a threshold, with a 95 % interval by order statistics.

    A curve that never reached the threshold is None in `values` and counts as infinite. The interval is valid for any distribution: its
    coverage is at least 95 %. For fewer than 6 values, the ends of the interval are None. A point that is only an upper limit counts as 0
    in the computation of the lower end of the interval.
    """
    latest = sorted(math.inf if value is None else value.point for value in values)
    earliest = sorted(math.inf if value is None else 0.0 if value.at_most else value.point for value in values)
    count, value = len(latest), _median(latest)
    below, tail = -1, 0.0
    while (more := tail + math.comb(count, below + 1) / 2**count) <= 0.025:
        below, tail = below + 1, more
    low, high = (None, None) if below < 0 else (earliest[below], latest[count - 1 - below])
    return Median(value, low, high, at_most=_median(earliest) < value)


def _median(ordered: Sequence[float]) -> float:
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return math.inf if math.isinf(middle[-1]) else sum(middle) / len(middle)
