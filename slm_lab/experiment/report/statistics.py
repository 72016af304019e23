"""Estimates over seeds with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

INTERVAL = "95 % interval over seeds: Student's t"
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom."""


class Estimate(NamedTuple):
    """A mean or median over seeds and its 95 % interval, which a single seed does not have."""

    value: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean of the known values with its interval; None if no value is known. Equal values give an equal interval."""
    known = [value for value in values if value is not None]
    value = average(known)
    if value is None or len(known) == 1:
        return None if value is None else Estimate(value, None, None)
    half = _t_quantile(len(known) - 1) * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    return Estimate(value, value - half, value + half)


def average(values: Iterable[float | None], compute: Callable[..., Any] = np.mean) -> float | None:
    """Return the mean, or another statistic, of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return float(compute(known)) if known else None


def _t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond the table by its series, with an error below 0.001."""
    return _T_QUANTILES[freedom - 1] if freedom <= len(_T_QUANTILES) else 1.96 + 2.3723 / freedom + 2.8224 / freedom**2


def difference(values: Sequence[float], others: Sequence[float], *, paired: bool = False) -> Estimate | None:
    """Return mean(values) − mean(others) with its 95 % interval: Student's t of the differences if paired, else Welch's.

    None without values; without an interval if one side has a single value.
    """
    if not values or not others:
        return None
    if paired:
        return estimate([one - other for one, other in zip(values, others, strict=True)])
    value = float(np.mean(values)) - float(np.mean(others))
    if len(values) < 2 or len(others) < 2:
        return Estimate(value, None, None)
    parts = [float(np.var(sample, ddof=1)) / len(sample) for sample in (values, others)]
    variance = sum(parts)
    if variance == 0.0:
        return Estimate(value, value, value)
    freedom = variance**2 / sum(part**2 / (len(sample) - 1) for part, sample in zip(parts, (values, others), strict=True))
    half = _t_quantile(max(1, math.floor(freedom))) * math.sqrt(variance)
    return Estimate(value, value - half, value + half)


def median_reached(values: Sequence[float | None]) -> Estimate:
    """Return the median of when something was reached, with a 95 % interval by order statistics; None counts as never (infinite).

    The interval is distribution-free: its coverage is at least 95 %, and with fewer than 6 values it does not exist.
    """
    ordered = sorted(math.inf if value is None else value for value in values)
    count = len(ordered)
    middle = ordered[(count - 1) // 2 : count // 2 + 1]
    value = math.inf if math.isinf(middle[-1]) else sum(middle) / len(middle)
    below, tail = -1, 0.0
    while (more := tail + math.comb(count, below + 1) / 2**count) <= 0.025:
        below, tail = below + 1, more
    return Estimate(value, None, None) if below < 0 else Estimate(value, ordered[below], ordered[count - 1 - below])
