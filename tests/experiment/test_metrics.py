"""Tests of the metrics against hand calculations with the formulas in docs/equations.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slm_lab.experiment.report.metrics import (
    SESSION_METRICS,
    Strengths,
    consistency,
    consistency_curve,
    last_value,
    mean_current_return,
    mean_metrics,
    metric_columns,
    session_metrics,
)
from slm_lab.experiment.report.trial_figures import common_strengths


def strengths(values: list[float], baseline: float | None = 0.0, opt_step: list[float] | None = None, every: int = 100) -> Strengths:
    frame = every * np.arange(1.0, len(values) + 1)
    table = {"frame": frame, "total_reward": np.array(values), "opt_step": frame / 10 if opt_step is None else np.array(opt_step)}
    return Strengths.from_table(table, baseline)


def test_session_by_hand() -> None:
    metrics = session_metrics(strengths([30.0, 50.0, 40.0, 60.0], baseline=20.0))  # s = 10, 30, 20, 40
    assert metrics["strength"] == 25
    assert metrics["max_strength"] == 40
    assert metrics["final_strength"] == 40
    # 10/100 + 30/200 + 20/300 + 40/400 = 0.41667, by Σs = 100
    assert metrics["sample_efficiency"] == pytest.approx(0.0041666667)
    assert metrics["training_efficiency"] == pytest.approx(0.041666667)
    # one fall, of 10, by 10 + 30 + 20
    assert metrics["stability"] == pytest.approx(1 - 10 / 60)


def test_all_falls_count_in_stability_and_the_last_strength_does_not() -> None:
    assert session_metrics(strengths([4.0, 2.0, 3.0, 1.0, 100.0]))["stability"] == pytest.approx(1 - (2 + 2) / (4 + 2 + 3 + 1))
    assert session_metrics(strengths([-4.0, -6.0, -2.0]))["stability"] == pytest.approx(1 - 2 / 10)


def test_rows_without_a_return_are_left_out() -> None:
    full, holed = strengths([10.0, 30.0]), strengths([np.nan, 10.0, np.nan, 30.0, np.inf])
    assert holed.frame.tolist() == [200, 400]
    assert session_metrics(holed)["strength"] == session_metrics(full)["strength"] == 20
    assert session_metrics(holed)["sample_efficiency"] == pytest.approx((10 / 200 + 30 / 400) / 40)


def test_rows_before_the_first_optimizer_step_have_no_training_efficiency() -> None:
    late, trained = strengths([5.0, 6.0, 8.0], opt_step=[0, 10, 20]), strengths([6.0, 8.0], opt_step=[10, 20])
    assert (
        session_metrics(late)["training_efficiency"] == session_metrics(trained)["training_efficiency"] == pytest.approx((0.6 + 0.4) / 14)
    )


def test_none_where_a_denominator_is_zero() -> None:
    balanced = session_metrics(strengths([-5.0, 5.0]))
    assert balanced["sample_efficiency"] is None
    assert balanced["training_efficiency"] is None
    assert balanced["stability"] == 1  # its denominator is |-5|
    assert session_metrics(strengths([0.0, 0.0, 7.0]))["stability"] is None
    assert session_metrics(strengths([5.0]))["stability"] is None
    untrained = session_metrics(strengths([5.0, 6.0], opt_step=[0, 0]))
    assert untrained["training_efficiency"] is None
    assert untrained["sample_efficiency"] is not None
    for nothing in (strengths([]), strengths([np.nan, np.nan]), strengths([1.0, 2.0], baseline=None)):
        assert session_metrics(nothing) == dict.fromkeys(SESSION_METRICS)


def test_curves_are_the_metric_up_to_each_row() -> None:
    values = [30.0, 50.0, 40.0, 60.0, 10.0]
    columns = metric_columns(strengths(values, 20.0))
    for count in range(2, 6):
        upto = session_metrics(strengths(values[:count], 20.0))
        for name in ("sample_efficiency", "training_efficiency", "stability"):
            assert columns[name][count - 1] == pytest.approx(upto[name])
    assert columns["strength"].tolist() == [10, 30, 20, 40, -10]
    assert np.isnan(columns["stability"][0])


def test_consistency_by_hand() -> None:
    """Consistency uses the frames that all Sessions have; it is 1 for equal Sessions and None for zero strength."""
    common = common_strengths([strengths([10.0, 20.0]), strengths([14.0, 30.0, 1000.0]), strengths([])])
    # std (population) 2 and 5, means 12 and 25
    assert consistency(common) == pytest.approx(1 - 2 * 7 / 37)
    assert consistency_curve(common).value == pytest.approx([1 - 2 * 2 / 12, 1 - 2 * 7 / 37])
    assert consistency(common_strengths([strengths([3.0, 4.0]), strengths([3.0, 4.0])])) == 1
    assert consistency(common_strengths([strengths([3.0]), strengths([-3.0])])) is None
    assert consistency(common_strengths([strengths([3.0, 4.0])])) is None, "a single Session has no spread"
    assert consistency(common_strengths([strengths([1.0]), strengths([1.0], every=77)])) is None
    assert consistency(common_strengths([strengths([])])) is consistency(common_strengths([])) is None


def test_trial_is_the_mean_over_sessions_that_have_the_metric() -> None:
    """The mean of integer counts is an integer."""
    assert mean_metrics([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}]) == {"a": 2.0, "b": None}
    assert mean_metrics([{"a": 1.0}, {"a": None}]) == {"a": 1.0}
    assert mean_metrics([]) == {}
    frame, one = (mean_metrics(sessions) for sessions in ([{"frame": 1000}, {"frame": 2001}], [{"frame": 1.0}]))
    assert [repr(metrics["frame"]) for metrics in (frame, one)] == ["1500", "1.0"]


def test_final_moving_average_is_the_last_there_is() -> None:
    table = {"frame": np.array([1.0, 2.0, 3.0]), "total_reward_ma": np.array([5.0, 6.0, np.nan])}
    assert last_value(table, "total_reward_ma") == 6
    assert last_value({"frame": np.empty(0)}, "total_reward_ma") is None


def found(value: float | None, error: float | None = None) -> dict[str, float | None]:
    return {"current_return": value, "current_return_se": error, "final_return": 0.0}


def test_the_current_return_of_a_trial_is_a_mean_over_sessions() -> None:
    """Its error is computed over Sessions if there are several, else over episodes, since the policies of a Session are not independent."""
    several = mean_current_return({0: found(1.0, 9.0), 1: found(3.0, 9.0), 2: found(None)})
    assert several == {"current_return": 2.0, "current_return_se": pytest.approx(math.sqrt(2.0) / math.sqrt(2.0))}
    assert mean_current_return({0: found(None), 1: found(3.0, 9.0)}) == {"current_return": 3.0, "current_return_se": 9.0}
    assert mean_current_return({0: found(None)}) == mean_current_return({}) == {"current_return": None, "current_return_se": None}
    policies = {0: found(1.0, 3.0), 1: found(3.0, 4.0)}
    assert mean_current_return(policies, 2) == {"current_return": 2.0, "current_return_se": 2.5}
    sessions = {**policies, 2: found(4.0, 1.0), 3: found(6.0, 1.0)}
    assert mean_current_return(sessions, 2) == {"current_return": 3.5, "current_return_se": pytest.approx(1.5)}
