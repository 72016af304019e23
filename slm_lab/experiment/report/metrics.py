"""Learning curves, the metrics of docs/equations.md, and estimates over seeds with 95 % confidence intervals.

A curve is a column of a table over another column, such as the frame. The strength s of a row is its total_reward minus the random
baseline; rows without a total_reward are omitted. A metric whose denominator is zero is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slm_lab.lib.episodes import MAX_AGE

Table = dict[str, np.ndarray]
"""Column → float64 [rows]; NaN where a cell is empty or not a number."""
_MAX_POINTS = 5000
"""Maximum number of points of interpolated curves."""


class Curve(NamedTuple):
    """Values over frames, or over another increasing column (seconds, global frames). Both arrays are float64 [points] and finite."""

    frame: np.ndarray
    value: np.ndarray


def curve(table: Table, column: str, x_column: str = "frame") -> Curve:
    """Return the finite values of a column over `x_column`; the curve is empty if a column is missing.

    If several rows have the same `x_column` value (other than frame), the last one is used. In tables of SLM Lab, which have no
    current_return, total_reward is used instead.
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
class Aligned:
    """Curves of several Sessions at common points of an axis: frames or another increasing column."""

    frame: np.ndarray
    """[F], increasing."""
    value_SF: np.ndarray
    """[sessions, F], NaN where a Session has no value at the frame."""

    def mean(self) -> Curve:
        """Return the mean over the Sessions that have a value at the frame."""
        return Curve(self.frame, np.nanmean(self.value_SF, axis=0) if len(self.frame) else np.empty(0))

    def std(self) -> np.ndarray:
        """Return the population standard deviation over the Sessions that have a value at the frame, [F]."""
        return np.asarray(np.nanstd(self.value_SF, axis=0)) if len(self.frame) else np.empty(0)

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean minus and plus one standard deviation."""
        mean, std = self.mean().value, self.std()
        return mean - std, mean + std


def five_digits(value: float) -> float | None:
    """Return the value rounded to five significant digits, for a JSON file; integers keep all digits. None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.5g}")


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return the indices of `most` evenly spaced points out of `count` points, or of all points if `count` is smaller."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def align(curves: Sequence[Curve], min_count: int = 1) -> Aligned:
    """Align curves at the frames at which at least `min_count` of them have a value."""
    frame = np.unique(np.concatenate([np.empty(0), *(one.frame for one in curves)]))
    value_SF = np.full((len(curves), len(frame)), np.nan)
    for row, one in zip(value_SF, curves, strict=True):
        row[np.searchsorted(frame, one.frame)] = one.value
    kept = np.isfinite(value_SF).sum(axis=0) >= max(min_count, 1)
    return Aligned(frame[kept], value_SF[:, kept])


def align_or_interpolate(curves: Sequence[Curve], min_count: int = 2) -> Aligned:
    """Align curves that share a grid of frames; interpolate curves that do not, for example curves of policies that share envs.

    Curves share a grid if at least `min_count` of them have values at half as many common frames as the shortest curve has points.
    """
    min_count = min(min_count, len(curves))
    aligned = align(curves, min_count)
    shortest = min((len(one.frame) for one in curves if len(one.frame)), default=0)
    return aligned if min_count < 2 or 2 * len(aligned.frame) >= shortest else interpolate(curves)


def interpolate(curves: Sequence[Curve]) -> Aligned:
    """Align curves by linear interpolation, at the frames of all curves within the range that every curve covers.

    Curves without points are omitted. If there are more than _MAX_POINTS frames, _MAX_POINTS evenly spaced ones are used.
    """
    curves = [one for one in curves if len(one.frame)]
    if not curves:
        return align([])
    frame = np.unique(np.concatenate([one.frame for one in curves]))
    shared = (frame >= max(one.frame[0] for one in curves)) & (frame <= min(one.frame[-1] for one in curves))
    frame = frame[shared]
    frame = frame[evenly_spaced(len(frame), _MAX_POINTS)]
    return Aligned(frame, np.stack([np.interp(frame, one.frame, one.value) for one in curves]))


Scalars = dict[str, float | None]
SESSION_METRICS = ("strength", "max_strength", "final_strength", "sample_efficiency", "training_efficiency", "stability")
INTERVAL = "95 % interval over seeds: Student's t, within the range of possible returns if it is known"
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom."""


@dataclass(frozen=True)
class Strengths:
    """The strength s of each row that has a total_reward, with the row's frame and optimizer step. All arrays are float64 [rows]."""

    frame: np.ndarray
    opt_step: np.ndarray
    value: np.ndarray

    @staticmethod
    def from_table(table: Table, baseline: float | None) -> Strengths:
        """Return the strengths of a table; empty without a baseline."""
        total_reward = table.get("total_reward", np.empty(0))
        if baseline is None or not len(total_reward):
            return Strengths(np.empty(0), np.empty(0), np.empty(0))
        known = np.isfinite(total_reward)
        opt_step = np.nan_to_num(table.get("opt_step", np.zeros(len(total_reward))))
        return Strengths(table["frame"][known], opt_step[known], total_reward[known] - baseline)


def session_metrics(strengths: Strengths) -> Scalars:
    """Return the SESSION_METRICS of one Session."""
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
    """Return for each row its strength and the other metrics over all rows up to it, float64 [rows]; NaN where a metric is not defined."""
    s = strengths.value
    return {
        "strength": s,
        "sample_efficiency": efficiencies(s, strengths.frame),
        "training_efficiency": efficiencies(s, strengths.opt_step),
        "stability": stabilities(s),
    }


def efficiencies(s: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Return Σ (sᵢ / spentᵢ) / Σ sᵢ over the first 1, 2, … rows, where `spent` is frames or optimizer steps. NaN if the denominator is
    zero.

    Rows before the first optimizer step have no training efficiency; both sums exclude them.
    """
    begun = spent > 0
    return _ratio(np.cumsum(np.where(begun, _ratio(s, spent), 0.0)), np.cumsum(np.where(begun, s, 0.0)))


def stabilities(s: np.ndarray) -> np.ndarray:
    """Return 1 − |Σ min(sᵢ₊₁ − sᵢ, 0) / Σ_{i<N} sᵢ| over the first N = 1, 2, … rows; NaN if the denominator is zero, and for N = 1."""
    falls = np.cumsum(np.minimum(np.diff(s), 0.0))
    return np.concatenate([np.full(min(len(s), 1), np.nan), 1.0 - np.abs(_ratio(falls, np.cumsum(s[:-1])))])


def consistencies(strengths: Aligned) -> np.ndarray:
    """Return 1 − 2 Σᵢ stdⱼ(sᵢⱼ) / Σᵢ meanⱼ(sᵢⱼ) over the first 1, 2, … frames of `strengths`, with the population standard deviation.

    NaN for fewer than two Sessions, for which no deviation is defined; SLM Lab writes 1 for a single Session.
    """
    if len(strengths.value_SF) < 2:
        return np.full(len(strengths.frame), np.nan)
    return 1.0 - 2.0 * _ratio(np.cumsum(strengths.std()), np.cumsum(strengths.mean().value))


def consistency_curve(strengths: Aligned) -> Curve:
    """Return the consistencies over frames, where they are defined. `strengths` contains the frames that all Sessions have."""
    return _finite(strengths.frame, consistencies(strengths))


def consistency(strengths: Aligned) -> float | None:
    """Return the consistency of a trial."""
    return _last(consistencies(strengths))


def mean_scalars(sessions: Sequence[Scalars]) -> Scalars:
    """Return the mean of each metric over the Sessions in which it is defined; the mean of integers (counts) is rounded to an integer."""
    names = sessions[0] if sessions else {}
    known = {name: [value for session in sessions if (value := session[name]) is not None] for name in names}
    return {name: _mean(values) if values else None for name, values in known.items()}


def _mean(values: Sequence[float]) -> float:
    mean = float(np.mean(values))
    return round(mean) if all(isinstance(value, int) for value in values) else mean


def current_return(table: Table) -> Scalars:
    """Return the last finite current_return of a table, and its standard error."""
    known = np.flatnonzero(np.isfinite(table.get("current_return", np.empty(0))))
    errors = table.get("current_return_se")
    error = _last(errors[known[-1:]]) if errors is not None and len(known) else None
    return {"current_return": last_value(table, "current_return"), "current_return_se": error}


def is_recent(evaluation: Table | None, table: Table) -> bool:
    """Return whether the last evaluation of a Session is at most as old as the oldest training episodes that current_return may include."""
    if evaluation is None or not len(evaluation["frame"]) or not len(table["frame"]):
        return False
    return float(evaluation["frame"][-1]) >= (1.0 - MAX_AGE) * float(table["frame"][-1])


def mean_rating(ratings: Sequence[tuple[float, float | None]]) -> tuple[float, float | None] | None:
    """Return the mean Elo rating of several Sessions and its standard error; a single rating is returned as it is, None for no rating.

    Args: ratings: (Elo, standard error) of each Session.
    """
    if len(ratings) < 2:
        return ratings[0] if ratings else None
    values = [elo for elo, _ in ratings]
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def mean_current_return(tables: Mapping[int, Scalars], policies: int = 1) -> Scalars:
    """Return the mean current return and its standard error, which is over Sessions if there are several, and else over episodes.

    Args: tables: index of each table (Session · policies + policy) → its metrics. The policies of a Session are one training: their mean
        is one value.
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
    """Return the last finite value of a column, None if there is none."""
    return _last(curve(table, column).value)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    quotient = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator != 0)
    return quotient


def _finite(frame: np.ndarray, value: np.ndarray) -> Curve:
    known = np.isfinite(value)
    return Curve(frame[known], value[known])


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None


# ---- estimates over seeds


class Estimate(NamedTuple):
    """A mean or median over seeds and its 95 % confidence interval; `low` and `high` are None for a single seed."""

    value: float
    low: float | None
    high: float | None


Bounds = tuple[float, float]
"""Lowest and highest possible value."""


def estimate(values: Sequence[float | None], bounds: Bounds | None = None) -> Estimate | None:
    """Return the mean of the values that are not None and its interval (zero width if they are equal); None if there are no values.

    Args: bounds: range of possible values, to which the interval is clipped; this does not change how often it contains the true mean.
        None: unknown. Bounds that a value violates are ignored.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Estimate(float(known[0]), None, None) if known else None
    half = t_quantile(len(known) - 1) * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    return _around(float(np.mean(known)), half, usable_bounds(bounds, known))


def usable_bounds(bounds: Bounds | None, values: Iterable[float]) -> Bounds | None:
    """Return the bounds; None if a value violates them."""
    return None if bounds is None or not all(bounds[0] <= value <= bounds[1] for value in values) else bounds


def _around(value: float, half: float, bounds: Bounds | None = None) -> Estimate:
    low, high = bounds or (-math.inf, math.inf)
    return Estimate(value, max(value - half, min(low, value)), min(value + half, max(high, value)))


def average(values: Iterable[float | None], compute: Callable[..., Any] = np.mean) -> float | None:
    """Return the mean, or another statistic, of the values that are not None; None if there are no values."""
    known = [value for value in values if value is not None]
    return float(compute(known)) if known else None


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, from a table or, for more degrees of freedom, a series expansion (error below 0.001)."""
    return _T_QUANTILES[freedom - 1] if freedom <= len(_T_QUANTILES) else 1.96 + 2.3723 / freedom + 2.8224 / freedom**2


def difference(values: Sequence[float], others: Sequence[float], *, paired: bool = False, bounds: Bounds | None = None) -> Estimate | None:
    """Return mean(values) − mean(others) with its 95 % interval: Student's t interval of the differences if paired, else Welch's interval.

    Returns None if one side has no values, and an estimate without interval if one side has a single value.

    Args: bounds: range of possible values of both sides; the interval is clipped to differences that are possible within it.
    """
    if not values or not others:
        return None
    bounds = usable_bounds(bounds, [*values, *others])
    widest = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    if paired:
        return estimate([one - other for one, other in zip(values, others, strict=True)], widest)
    value = float(np.mean(values)) - float(np.mean(others))
    if len(values) < 2 or len(others) < 2:
        return Estimate(value, None, None)
    parts = [float(np.var(sample, ddof=1)) / len(sample) for sample in (values, others)]
    variance = sum(parts)
    if variance == 0.0:
        return _around(value, 0.0)
    # computed from the shares of the total variance, since squares of tiny variances would underflow
    freedom = 1.0 / sum((part / variance) ** 2 / (len(sample) - 1) for part, sample in zip(parts, (values, others), strict=True))
    return _around(value, t_quantile(max(1, math.floor(freedom))) * math.sqrt(variance), widest)


class Reached(NamedTuple):
    """The point at which a curve reached a threshold."""

    point: float
    at_most: bool = False
    """Whether the first value of the curve is already at or above the threshold, so that the point is only an upper limit."""


def first_reached(one: Curve, threshold: float, *, between: bool) -> Reached | None:
    """Return the first point at which a curve is at or above a threshold; None if the curve never reaches it.

    Args: between: interpolate linearly between that point and the one before it.
    """
    above = np.flatnonzero(one.value >= threshold)
    if not len(above):
        return None
    last = int(above[0])
    if last == 0 or not between:
        return Reached(float(one.frame[last]), at_most=last == 0)
    (x, end), (y, top) = one.frame[last - 1 : last + 1], one.value[last - 1 : last + 1]
    return Reached(float(x + (end - x) * (threshold - y) / (top - y)))


class Median(NamedTuple):
    """Median of the points at which curves reached a threshold, and its 95 % interval, which is None for fewer than 6 points."""

    value: float
    low: float | None
    high: float | None
    at_most: bool = False
    """Whether `value` is only an upper limit of the median."""


def median_reached(values: Sequence[Reached | None]) -> Median:
    """Return the median of the points at which curves reached a threshold, with a 95 % interval by order statistics.

    A curve that never reached the threshold is None and counts as infinite. The interval assumes no distribution: its coverage is at least
    95 %, and it does not exist for fewer than 6 values. For the lower end of the interval, a point that is only an upper limit counts as 0.
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
