"""Tests of proposers without Ray: their results in a known landscape, and the same proposals after an interruption."""

from __future__ import annotations

import builtins
import json
from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.plan import UserError
from slm_lab.experiment.run.search.proposer import Proposer, make_proposer
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.report import SpecError
from tests.experiment.search.landscape import toy_return, toy_space

GOOD = 95.0
"""At most 5 % below the best return; such points are 1.06 % of the search space by volume."""
CONDITIONAL: dict[str, Any] = {
    "rate__loguniform": [1e-5, 1e-1],
    "explore_var_spec__choice": [
        {"name": "no_decay", "start_val__uniform": [0.1, 0.9]},
        {"name": "linear_decay", "start_val": 1.0, "end_val__choice": [0.0, 0.1], "end_step__qrandint": [100, 500, 100]},
    ],
    "action_policy__choice": ["epsilon_greedy"],
}


def trials_until(proposer: Proposer, threshold: float, most: int) -> int:
    for trial in range(most):
        values = proposer.ask(trial)
        assert values is not None
        metric = toy_return(values)
        proposer.tell(trial, metric)
        if metric >= threshold:
            return trial + 1
    return most + 1


@pytest.mark.slow
def test_tpe_finds_the_best_region_sooner_than_random_search() -> None:
    space = toy_space()
    counts = {name: [trials_until(make_proposer(space, name, seed), GOOD, 120) for seed in range(20)] for name in ("optuna", "random")}
    medians = {name: float(np.median(one)) for name, one in counts.items()}
    assert medians["optuna"] <= 40
    assert medians["optuna"] < medians["random"]
    assert max(counts["optuna"]) <= 120  # no search remains in a bad category


@pytest.mark.parametrize("algorithm", ["grid", "optuna", "random"])
def test_a_grid_has_each_point_once(algorithm: str) -> None:
    space = toy_space({"rule__grid_search": ["sum", "mean"], "width__grid_search": [16, 32, 64]})
    proposer = make_proposer(space, algorithm, 0)
    asked = [proposer.ask(trial) for trial in range(space.num_trials)]
    assert space.num_trials == 6
    assert len({json.dumps(values) for values in asked}) == 6
    assert proposer.ask(6) is None


def test_a_grid_with_other_keys_begins_anew_with_other_draws() -> None:
    proposer = make_proposer(toy_space({"rule__grid_search": ["sum", "mean"], "bonus__uniform": [0, 1]}), "grid", 0)
    asked = [proposer.ask(trial) or {} for trial in range(4)]
    assert [values["agent.algorithm.rule"] for values in asked] == ["sum", "mean", "sum", "mean"]
    assert len({values["agent.algorithm.bonus"] for values in asked}) == 4


def test_a_grid_without_grid_search_is_an_error() -> None:
    with pytest.raises(SpecError) as caught:
        make_proposer(toy_space(), "grid", 0)
    assert [problem.path for problem in caught.value.problems] == ["meta.search_algorithm"]


@pytest.mark.parametrize("algorithm", ["optuna", "random", "grid"])
@pytest.mark.parametrize("search", [None, CONDITIONAL], ids=["plain", "conditional"])
def test_a_restored_proposer_continues_as_without_a_break(algorithm: str, search: dict[str, Any] | None) -> None:
    """A restored proposer makes the same proposals, with a failed, a running and finished trials; its state is saved as JSON."""
    keys = {**(search or {"bonus__uniform": [0, 1], "rate__loguniform": [1e-4, 1e-1]}), "rule__grid_search": ["sum", "mean", "max"]}
    space = toy_space(keys)

    def run(proposer: Proposer, begin: int, end: int) -> list[Any]:
        asked = []
        for trial in range(begin, end):
            asked.append(proposer.ask(trial))
            if trial % 5 != 4:
                proposer.tell(trial, None if trial % 5 == 3 else float(asked[-1]["agent.algorithm.rate"]))
        return asked

    straight = make_proposer(space, algorithm, 3)
    before, after = run(straight, 0, 14), run(straight, 14, 20)
    first = make_proposer(space, algorithm, 3)
    assert run(first, 0, 14) == before
    second = make_proposer(toy_space(keys), algorithm, 3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(second, 14, 20) == after


def test_proposals_depend_on_results_and_seed() -> None:
    space = toy_space()

    def last(seed: int, sign: int) -> Any:
        proposer = make_proposer(space, "optuna", seed)
        for trial in range(15):
            values = proposer.ask(trial)
            assert values is not None
            proposer.tell(trial, sign * toy_return(values))
        return proposer.ask(15)

    assert last(0, 1) == last(0, 1)
    assert last(0, 1) != last(1, 1)
    assert last(0, 1) != last(0, -1)


def test_running_trials_count_as_bad_ones() -> None:
    """The next proposal depends on whether trials are running or have failed: running trials count as bad, failed trials are ignored."""

    def proposed(running: bool, seed: int) -> Any:
        proposer = make_proposer(toy_space(), "optuna", seed)
        for trial in range(20):
            values = proposer.ask(trial)
            assert values is not None
            if trial < 12 or not running:
                proposer.tell(trial, toy_return(values) if trial < 12 else None)
        return proposer.ask(20)

    assert any(proposed(running=True, seed=seed) != proposed(running=False, seed=seed) for seed in range(6))


@pytest.mark.parametrize("algorithm", ["optuna", "random"])
def test_combinations_that_the_spec_refuses_are_not_proposed(algorithm: str) -> None:
    space = toy_space({"bonus__normal": [0.9, 0.5]})  # a fraction, so half of the draws are too large
    proposer = make_proposer(space, algorithm, 0)
    for trial in range(12):
        values = proposer.ask(trial)
        proposer.tell(trial, 1.0)
        assert 0 <= values["agent.algorithm.bonus"] <= 1


def test_optuna_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def lacking(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    space: SearchSpace = toy_space()
    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(UserError, match=r"slm-lab\[search\]"):
        make_proposer(space, "optuna", 0)
    assert make_proposer(space, "random", 0).ask(0)
