"""Tests of the statistics of comparisons.

Values are compared with hand calculations and with rliable. Intervals must have the stated coverage and stay within the range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slm_lab.experiment.report.metrics import estimate_difference, estimate_mean
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.report.statistics import (
    adjust_holm,
    bootstrap_statistic,
    confidence_sequence,
    first_decisive_count,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    t_test,
)
from slm_lab.experiment.report.student_t import student_t_quantile, student_t_tails

A = np.array([[0.1, 0.9, 0.5], [0.4, 0.7, 0.5], [0.3, 0.8, 0.55], [0.9, 0.2, 0.6], [0.35, 0.6, 1.3]])
B = np.array([[0.2, 0.9, 0.6], [0.5, 0.95, 0.5], [0.6, 0.85, 0.7]])
"""Scores of two algorithms: [seeds, envs]."""
TAUS = np.linspace(0.0, 1.4, 8)
LOW, HIGH = 0.0, 500.0


def test_aggregates_by_hand() -> None:
    """The interquartile mean drops the two lowest and the two highest of eight values, and one at each end of seven values."""
    assert interquartile_mean(np.array([8.0, 1, 2, 3, 4, 5, 6, 100])) == (3 + 4 + 5 + 6) / 4
    assert interquartile_mean(np.array([7.0, 1, 2, 3, 4, 5, 100])) == (2 + 3 + 4 + 5 + 7) / 5
    assert optimality_gap(np.array([0.5, 2.0])) == 0.25
    assert bootstrap_statistic([np.array([3.0]), np.array([5.0])], interquartile_mean) == (4.0, None, None)


def test_the_probability_of_improvement_by_hand() -> None:
    """Of six pairs, two are won and three are ties, which count as half."""
    one = probability_of_improvement([np.array([1.0, 3.0, 3.0])], [np.array([1.0, 3.0])])
    assert one.value == pytest.approx((2 + 3 / 2) / 6)
    assert (one.low, one.high) != (None, None)
    assert probability_of_improvement([np.array([1.0])], [np.array([2.0])]) == (0.0, None, None)
    two_envs = probability_of_improvement([np.array([1.0]), np.array([5.0, 5.0])], [np.array([2.0]), np.array([4.0])])
    assert two_envs.value == 0.5, "mean over the envs, whatever their numbers of seeds"


def test_a_performance_profile_by_hand() -> None:
    one = performance_profile([np.array([0.2, 0.8]), np.array([0.5, 0.5])], np.array([0.0, 0.2, 0.5, 0.9]))
    assert one.fraction.tolist() == [1.0, 0.75, 0.25, 0.0]
    assert (one.low <= one.fraction).all()
    assert (one.fraction <= one.high).all()
    assert (one.low[0], one.high[-1]) == (1.0, 0.0)


def test_the_bootstrap_of_three_values_against_all_its_samples() -> None:
    """The interval must match the percentiles of the interquartile means of all 27 equally likely samples of three seeds.

    With three values, the interquartile mean equals the mean.
    """
    values = np.array([1.0, 2.0, 6.0])
    every = [np.mean(sample) for sample in itertools.product(values, repeat=3)]
    one = bootstrap_statistic([values], interquartile_mean, replicates=50_000)
    assert (one.low, one.high) == pytest.approx(tuple(np.quantile(every, (0.025, 0.975), method="inverted_cdf")), abs=0.34)


def test_the_bootstrap_draws_each_env_separately() -> None:
    """If the seeds of each env agree, there is no uncertainty, however far apart the envs are; drawing over all envs would show some."""
    one = bootstrap_statistic([np.array([0.0, 0.0]), np.array([1.0, 1.0])], lambda values: np.asarray(values.mean(axis=-1)))
    assert one == (0.5, 0.5, 0.5)


def test_numbers_of_rliable() -> None:
    """The expected numbers were computed with rliable 1.2.0."""
    assert interquartile_mean(A.ravel()) == pytest.approx(0.5555555555555556, abs=1e-12)
    assert interquartile_mean(B.ravel()) == pytest.approx(0.65, abs=1e-12)
    assert optimality_gap(A.ravel()) == pytest.approx(0.44, abs=1e-12)
    assert probability_of_improvement(list(B.T), list(A.T)).value == pytest.approx(0.6888888888888888, abs=1e-12)
    above = [1.0, 0.9333333333333333, 0.7333333333333333, 0.3333333333333333, 0.26666666666666666]
    above += [0.06666666666666667, 0.06666666666666667, 0.0]
    assert performance_profile(list(A.T), TAUS).fraction == pytest.approx(above, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_rliable_agrees(seed: int) -> None:
    """Compare with rliable on random scores, some of which are equal."""
    metrics = pytest.importorskip("rliable.metrics", reason="rliable is not installed: pip install rliable scipy arch")
    library = pytest.importorskip("rliable.library", reason="rliable is not installed: pip install rliable scipy arch")
    rng = np.random.default_rng(seed)
    one, other = rng.normal(size=(7, 4)).round(1), rng.normal(0.5, size=(5, 4)).round(1)
    assert interquartile_mean(one.ravel()) == pytest.approx(metrics.aggregate_iqm(one), abs=1e-9)
    assert optimality_gap(one.ravel()) == pytest.approx(metrics.aggregate_optimality_gap(one), abs=1e-9)
    ours = probability_of_improvement(list(other.T), list(one.T)).value
    assert ours == pytest.approx(metrics.probability_of_improvement(other, one), abs=1e-9)
    assert performance_profile(list(one.T), TAUS).fraction == pytest.approx(library.score_distributions(one, TAUS), abs=1e-9)


@pytest.mark.parametrize(
    ("t", "freedom", "p"), [(2.0, 3.0, 0.13932596855884305), (0.5, 12.7, 0.6256260038138604), (9.0, 1.5, 0.027658755205530988)]
)
def test_tails_of_students_t(t: float, freedom: float, p: float) -> None:
    """The expected values are twice scipy.stats.t.sf."""
    assert student_t_tails(t, freedom) == pytest.approx(p, rel=1e-9)
    assert student_t_tails(-t, freedom) == student_t_tails(t, freedom)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1.0, 12.706204736174694), (1.3, 7.500529325562029), (4.0, 2.7764451051977934), (27.6, 2.0497454254479184)],
)
def test_quantiles_of_students_t(freedom: float, quantile: float) -> None:
    """The expected values are scipy.stats.t.ppf(0.975)."""
    assert student_t_quantile(freedom) == pytest.approx(quantile, rel=1e-9)


@pytest.mark.parametrize("paired", [False, True])
def test_the_interval_excludes_zero_exactly_if_p_is_below_0_05(paired: bool) -> None:
    rng = np.random.default_rng(0)
    values, others = rng.normal(0.0, 1.0, 4), rng.normal(0.0, 5.0, 4)
    for shift in np.linspace(0.0, 30.0, 3001):
        moved = list(values + shift)
        p, difference = t_test(moved, list(others), paired=paired), estimate_difference(moved, list(others), paired=paired)
        assert p is not None
        assert difference is not None
        assert difference.low is not None
        assert difference.high is not None
        assert (p < 0.05) == (difference.low > 0.0 or difference.high < 0.0)


def test_p_values() -> None:
    """Holm's method by hand: 0.01 · 3, then max(0.03, 0.02 · 2), then max(0.04, 0.03)."""
    assert adjust_holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert adjust_holm([0.6, 0.7]) == [1.0, 1.0]
    assert t_test([1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 6.0, 9.0, 10.0]) == pytest.approx(0.07903604042521092), "scipy.stats.ttest_ind"
    assert t_test([1.0, 1.0], [2.0, 2.0]) is None
    assert t_test([1.0], [2.0, 3.0]) is None


def test_the_p_value_of_paired_scores_by_hand() -> None:
    """The differences 1, 2, 3 have mean 2 and s = 1, so t = 2 √3. With two degrees of freedom, p = 1 − |t| / √(2 + t²)."""
    scores, others = [1.0, 102.0, 203.0], [0.0, 100.0, 200.0]
    assert t_test(scores, others, paired=True) == pytest.approx(1 - math.sqrt(12 / 14))
    assert t_test(others, scores, paired=True) == pytest.approx(1 - math.sqrt(12 / 14))
    assert (t_test(scores, others) or 0.0) > 0.9, "the seeds vary much more than the differences"
    assert t_test([3.0, 5.0], [1.0, 3.0], paired=True) is None, "equal differences"
    assert t_test([0.3, 0.4, 0.7], [0.2, 0.3, 0.6], paired=True) is None, "equal except for rounding errors"
    assert t_test([0.1, 0.1, 0.1], [0.3, 0.3, 0.3]) is None, "equal except for rounding errors"
    assert t_test([1e-9, 2e-9, 3e-9], [0.0, 1e-9, 3e-9], paired=True) is not None, "small, but not rounding errors"
    assert t_test([3.0], [1.0], paired=True) is None
    assert t_test([], [], paired=True) is None


@pytest.mark.parametrize("seed", range(5))
def test_scipy_agrees_on_p_values(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng = np.random.default_rng(seed)
    own, theirs, more = rng.normal(size=6).tolist(), rng.normal(0.5, 2.0, 6).tolist(), rng.normal(0.5, 2.0, 9).tolist()
    assert t_test(own, theirs, paired=True) == pytest.approx(stats.ttest_rel(own, theirs).pvalue, rel=1e-9)
    assert t_test(own, more) == pytest.approx(stats.ttest_ind(own, more, equal_var=False).pvalue, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_of_paired_scores_excludes_0_if_their_p_value_is_below_5_percent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seeds = rng.normal(0.0, 50.0, 6)
    own, theirs = (seeds + rng.normal(1.0, 1.0, 6)).tolist(), seeds.tolist()
    one, p = estimate_difference(own, theirs, paired=True), t_test(own, theirs, paired=True)
    assert one is not None
    assert one.low is not None
    assert p is not None
    assert one.high is not None
    assert (one.low > 0.0 or one.high < 0.0) == (p < 0.05)


# ---- ranges of returns

RETURNS = st.lists(st.floats(LOW, HIGH), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
@example([0.0, 0.0], [0.0, 1.24e-143])
@given(RETURNS, RETURNS)
def test_no_interval_leaves_the_range(own: list[float], others: list[float]) -> None:
    for one in (estimate_mean(own, (LOW, HIGH)), bootstrap_statistic([np.array(own)], interquartile_mean, replicates=100)):
        assert one is not None
        assert one.low is not None
        assert one.high is not None
        assert LOW <= one.low <= one.value + 1e-9
        assert one.value - 1e-9 <= one.high <= HIGH
    apart = estimate_difference(own, others, bounds=(LOW, HIGH))
    assert apart is not None
    assert apart.low is not None
    assert apart.high is not None
    assert LOW - HIGH <= apart.low <= apart.value <= apart.high <= HIGH - LOW
    chance = probability_of_improvement([np.array(own)], [np.array(others)], replicates=100)
    assert chance.low is not None
    assert chance.high is not None
    assert 0.0 <= chance.low <= chance.high <= 1.0
    paired = [one - other for one, other in zip(own, others, strict=False)]
    for low, high in confidence_sequence(paired, HIGH - LOW):
        assert LOW - HIGH <= low <= high <= HIGH - LOW


def test_bounds_by_hand() -> None:
    """The interval of 100 and 380 in CartPole is clipped: it is not 240 [-1539, 2019]. A range that a value violates is ignored."""
    assert estimate_mean([100.0, 380.0], (0.0, 500.0)) == (240.0, 0.0, 500.0)
    free = estimate_mean([100.0, 380.0], (0.0, 200.0))
    assert free is not None
    assert free.low == pytest.approx(240 - 12.706204736 * 140)


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ({"env.name": "CartPole-v1", "env.num_envs": 4, "env.max_t": None, "env.wrappers": []}, (0.0, 500.0)),
        ({"env.name": "CartPole-v1", "env.max_t": 1000}, None),
        ({"env.name": "CartPole-v1", "env.sutton_barto_reward": True}, None),
        ({"env.name": "CartPole-v1", "env.wrappers": [{"name": "TransformReward"}]}, None),
        ({"env.name": "ALE/Pong-v5", "env.frameskip": 4}, (-21.0, 21.0)),
        ({"env.name": "minigrid:BabyAI-GoTo-v0"}, (0.0, 1.0)),
        ({"env.name": "CartpoleBalance-v1"}, (0.0, 1000.0)),
        ({"env.name": "envpool:CheetahRun-v1", "env.max_t": 100}, None),
        ({"env.name": "dm_control/cartpole-balance-v0"}, (0.0, 1000.0)),
        ({"env.name": "LqrLqr21-v1"}, None),
        ({"env.name": "HalfCheetah-v5"}, None),
    ],
)
def test_the_range_of_returns(spec: dict[str, object], known: tuple[float, float] | None) -> None:
    """The range is unknown if any setting may change it."""
    assert return_range(spec) == known


# ---- confidence sequences

Draw = Callable[[np.random.Generator, int], np.ndarray]


def _cartpole(rng: np.random.Generator, count: int, solved: float) -> np.ndarray:
    """Return the returns of seeds that reach 500 with the probability `solved`, and any value below otherwise."""
    return np.where(rng.random(count) < solved, HIGH, rng.uniform(LOW, HIGH, count))


BOUNDED: dict[str, tuple[Draw, float]] = {
    "same": (lambda rng, n: _cartpole(rng, n, 0.7) - _cartpole(rng, n, 0.7), 0.0),
    "better": (lambda rng, n: _cartpole(rng, n, 0.9) - _cartpole(rng, n, 0.3), 150.0),
    "rare failure": (lambda rng, n: 25.0 - np.where(rng.random(n) < 0.05, HIGH, 0.0), 0.0),
    "two values": (lambda rng, n: rng.choice([-HIGH, HIGH], n), 0.0),
}
NORMAL: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, n: rng.normal(3.0, 20.0, n), 3.0),
    "uniform": (lambda rng, n: rng.uniform(-1.0, 1.0, n), 0.0),
}


def missed(draw: Draw, mean: float, span: float | None, studies: int, looks: int) -> float:
    """Return the fraction of studies in which *any* of the intervals after 1, 2, …, `looks` seeds misses the mean."""
    rng = np.random.default_rng(0)
    studied = (confidence_sequence(draw(rng, looks).tolist(), span) for _ in range(studies))
    return sum(any(not low <= mean <= high for low, high in intervals) for intervals in studied) / studies


@pytest.mark.parametrize("name", BOUNDED)
def test_an_interval_at_every_number_of_seeds_quick(name: str) -> None:
    assert missed(*BOUNDED[name], span=HIGH - LOW, studies=10, looks=24) <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_betting_intervals_hold_at_every_number_of_seeds(name: str) -> None:
    """The intervals hold for any distribution within the range. docs/statistics.md states the figures."""
    found = missed(*BOUNDED[name], span=HIGH - LOW, studies=400, looks=48)
    print(f"{name}: {1 - found:.3f}")  # noqa: T201
    assert found <= 0.05


@pytest.mark.parametrize("name", NORMAL)
def test_intervals_of_normal_differences_hold_at_every_number_of_seeds(name: str) -> None:
    assert missed(*NORMAL[name], span=None, studies=1000, looks=64) <= 0.05


def test_ordinary_intervals_do_not_hold_at_every_number_of_seeds() -> None:
    """If Student's interval is checked after each seed, it finds a difference in about a third or more of studies of equal settings."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(100):
        values = rng.normal(0.0, 1.0, 64).tolist()
        intervals = [
            one for count in range(2, 40) if (one := estimate_mean(values[:count])) and one.low is not None and one.high is not None
        ]
        found += any(not low <= 0.0 <= high for _, low, high in intervals)
    assert found / 100 > 0.25


def test_decisions_by_hand() -> None:
    """The largest possible difference is decided after seven seeds.

    On n wins, the wealth of the universal portfolio is the mean of (1 + u)^n over the arcsine law, C(2 n, n) / 2^n: 14.4 for six wins and
    26.8 for seven, and 1 / 0.05 = 20 decides.
    """
    wealth = [math.comb(2 * n, n) / 2**n for n in range(1, 10)]
    first = next(n for n, value in enumerate(wealth, 1) if value >= 20)
    intervals = confidence_sequence([500.0] * 9, 500.0)
    assert first_decisive_count(intervals) == first == 7
    assert intervals == [(low, high) for low, high in intervals if high == 500.0]
    assert first_decisive_count(confidence_sequence([-500.0] * 9, 500.0)) == 7
    assert first_decisive_count(confidence_sequence([10.0, -10.0] * 8, 500.0)) is None


def test_the_interval_does_not_depend_on_the_order() -> None:
    values = np.random.default_rng(0).uniform(-200, 500, 12)
    for span in (500.0, None):
        one, other = (confidence_sequence(order.tolist(), span)[-1] for order in (values, values[::-1]))
        assert one == pytest.approx(other)


def test_the_interval_of_normal_differences_by_hand() -> None:
    """n = 9: (√10 / 0.05)^(2/9) = 2.513; t² / ν < 1.513 / (1 − 0.2513) = 2.021; half-width s √(2.021 · 8 / 9)."""
    values = np.arange(9.0)
    low, high = confidence_sequence(values.tolist(), None)[-1]
    assert (low + high) / 2 == pytest.approx(4.0)
    assert (high - low) / 2 == pytest.approx(float(values.std(ddof=1)) * math.sqrt(2.021 * 8 / 9), rel=1e-3)
    assert all(math.isinf(high) for _, high in confidence_sequence(values[:4].tolist(), None))
