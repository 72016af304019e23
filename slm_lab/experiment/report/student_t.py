"""Student's t distribution: p-values and quantiles."""

import math
from functools import cache


@cache
def student_t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, computed by bisection.

    Args: freedom: degrees of freedom, a finite number ≥ 1.
    """
    low, high = 1.9, 13.0  # the quantile is 12.706 for ν = 1 and decreases to 1.960 for ν → ∞
    while (middle := (low + high) / 2) not in (low, high):
        if student_t_tails(middle, freedom) > 0.05:
            low = middle
        else:
            high = middle
    return high


def student_t_tails(t: float, freedom: float) -> float:
    """Return P(|T| ≥ |t|) for Student's t distribution with ν = `freedom` degrees of freedom: I_x(ν/2, 1/2) with x = ν / (ν + t²)."""
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t), t * t / (freedom + t * t))


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), where `rest` is 1 − x (Numerical Recipes, section 6.4)."""
    if x <= 0.0 or rest <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(b, a, rest) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function I_x(a, b), computed by Lentz's method."""
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1.0 / (1.0 + term * d), 1.0 + term / c
            value *= d * c
        if abs(d * c - 1.0) < 1e-14:
            break
    return value
