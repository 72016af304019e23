"""Tests of Tune's schedulers, as a search uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slm_lab.experiment.files.search_state import TrialState
from slm_lab.experiment.run.search.schedule import Asha, Exploit, Pbt, check_evaluation, check_pbt, make_scheduler
from slm_lab.experiment.run.search.search import Search
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.packages import needs

packages = needs("ray.tune")


def trials(count: int) -> list[TrialState]:
    return [TrialState(index, {"agent.algorithm.gamma": 0.95}) for index in range(count)]


def test_asha_stops_a_trial_below_the_best_third() -> None:
    asha, known = Asha(100, 3, 1000), trials(6)
    assert [asha.decide(known[trial], 50, -9.0) for trial in range(3)] == [None] * 3  # before the grace period
    assert asha.decide(known[0], 100, 1.0) is None  # no other trial to compare with
    assert asha.decide(known[1], 100, 2.0) is None
    assert asha.decide(known[2], 104, 1.5) == "stop"
    assert asha.decide(known[0], 200, 0.0) is None  # there is no rung at this frame
    assert asha.decide(known[1], 300, 5.0) is None
    assert asha.decide(known[0], 300, 1.0) == "stop"


def test_asha_of_a_continued_search_decides_as_before() -> None:
    known = trials(3)
    reports = [(known[0], 100, 1.0), (known[1], 100, 2.0)]
    for metric, decision in ((1.5, "stop"), (2.5, None)):
        assert Asha(100, 3, 1000, reports).decide(known[2], 100, metric) == decision
        assert Asha(100, 3, 1000).decide(known[2], 100, metric) is None


def test_without_a_scheduler_or_with_a_long_grace_period_none_is_stopped(
    search_spec: Callable[..., Spec], caplog: pytest.LogCaptureFixture
) -> None:
    spec = search_spec()
    assert make_scheduler(spec, SearchSpace(spec), []) is None
    spec = search_spec(meta={"search_scheduler": {"grace_period": 1000}})
    assert make_scheduler(spec, SearchSpace(spec), []) is None
    assert "not below the 1,000 frames" in caplog.text
    spec = search_spec(meta={"search_scheduler": {"grace_period": 500}})
    assert isinstance(make_scheduler(spec, SearchSpace(spec), []), Asha)


@pytest.mark.parametrize(
    ("meta", "refused"),
    [
        ({"search_scheduler": {"grace_period": 500}}, True),
        ({"search_algorithm": "pbt"}, True),
        ({}, False),
        ({"search_scheduler": {"grace_period": 500}, "search_metric": "strength"}, False),
        ({"search_scheduler": {"grace_period": 500}, "eval_episodes": 0}, False),
        ({"search_scheduler": {"grace_period": 500}, "eval_episodes": 0, "rigorous_eval": 2}, False),
    ],
)
def test_trials_of_a_search_are_compared_by_one_measure(search_spec: Callable[..., Spec], meta: dict[str, Any], refused: bool) -> None:
    """A search that stops or replaces trials must not compare metrics of training episodes with metrics of evaluations."""
    spec = search_spec(meta={"eval_episodes": 3, **meta})
    if not refused:
        return check_evaluation(spec)
    with pytest.raises(SpecError, match="expected 0, or meta") as caught:
        Search(spec)
    assert [problem.path for problem in caught.value.problems] == ["meta.eval_episodes"]
    return None


def test_pbt_lets_the_worst_take_over_the_best(search_spec: Callable[..., Spec]) -> None:
    spec = search_spec(meta={"search_algorithm": "pbt"})
    pbt, known = Pbt(SearchSpace(spec), 100, 0), trials(4)
    for trial in known[:3]:
        assert pbt.decide(trial, 100, float(trial.trial)) is None or trial.trial == 0
    decision = pbt.decide(known[3], 104, -5.0)
    assert isinstance(decision, Exploit)
    assert decision.source == 2
    assert 0.9 <= decision.values["agent.algorithm.gamma"] <= 0.99
    assert pbt.decide(known[3], 150, -5.0) is None  # not before the next interval
    pbt.record_end(known[2])
    decision = pbt.decide(known[3], 300, -5.0)
    assert isinstance(decision, Exploit)
    assert decision.source == 1  # a trial that has ended cannot be the source


def test_pbt_refuses_keys_that_cannot_change_in_a_run(search_spec: Callable[..., Spec]) -> None:
    spec = search_spec({"agent": {"net": {"hid_layers__choice": [[8], [16]]}, "algorithm": {"gamma__uniform": [0.9, 0.99]}}})
    with pytest.raises(SpecError) as caught:
        check_pbt(spec, SearchSpace(spec))
    assert [problem.path for problem in caught.value.problems] == ["search.agent.net.hid_layers"]
