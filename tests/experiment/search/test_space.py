"""The search space: draws within their distributions, conditional keys, and the spec of a trial."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.search.prepare import check_search_values
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.search_space import SearchSpace, value_at_quantile
from slm_lab.spec.models.search import SearchKey
from slm_lab.spec.report import SpecError
from tests.experiment.search.landscape import toy_space
from tests.spec.conftest import PPO, changed

OPTIM: dict[str, Any] = {
    "agent": {
        "algorithm": {"gamma__uniform": [0.9, 0.99]},
        "net": {
            "optim_spec__choice": [
                {"name": "Adam", "lr__loguniform": [1e-4, 1e-3]},
                {"name": "SGD", "lr__loguniform": [1e-2, 1e-1], "momentum__uniform": [0, 0.9]},
            ]
        },
    }
}


def ppo_space(search: Any, **changes: Any) -> SearchSpace:
    return SearchSpace(load_spec(changed(PPO, {"search": search, **changes})))


@pytest.mark.parametrize(
    ("distribution", "args", "allowed"),
    [
        ("uniform", (2, 4), lambda x: 2 <= x <= 4),
        ("quniform", (0.1, 0.5, 0.1), lambda x: x in (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("loguniform", (1e-3, 1e-1), lambda x: 1e-3 <= x <= 1e-1),
        ("qloguniform", (0.1, 10, 0.1), lambda x: 0.1 <= x <= 10 and abs(x * 10 - round(x * 10)) < 1e-9),
        ("randint", (1, 4), lambda x: x in (1, 2, 3)),
        ("qrandint", (10, 40, 10), lambda x: x in (10, 20, 30, 40)),
        ("lograndint", (1, 5), lambda x: x in (1, 2, 3, 4)),
        ("qlograndint", (8, 64, 8), lambda x: x % 8 == 0 and 8 <= x <= 64),
        ("qrandn", (0, 1, 0.5), lambda x: (x * 2).is_integer()),
    ],
)
def test_draws_fit_their_distribution(distribution: str, args: tuple[float, ...], allowed: Any) -> None:
    """Draws stay in the allowed set, reach both bounds, and are ints for integer distributions."""
    key = SearchKey(("x",), distribution, args)
    drawn = [value_at_quantile(key, u) for u in np.linspace(0, 1, 2001)]
    assert all(allowed(x) for x in drawn)
    assert all(isinstance(x, int) == key.is_integer for x in drawn)
    if not key.is_normal:
        assert (min(drawn), max(drawn)) == key.bounds


@pytest.mark.parametrize(("distribution", "args"), [("normal", (5, 2)), ("randn", (5, 2)), ("uniform", (5 - 12**0.5, 5 + 12**0.5))])
def test_moments(distribution: str, args: tuple[float, ...]) -> None:
    key = SearchKey(("x",), distribution, args)
    drawn = [value_at_quantile(key, u) for u in (np.arange(4000) + 0.5) / 4000]
    assert np.mean(drawn) == pytest.approx(5, abs=0.01)
    assert np.std(drawn) == pytest.approx(2, abs=0.02)


def test_log_distributions_have_as_many_values_in_each_decade() -> None:
    drawn = np.array([value_at_quantile(SearchKey(("x",), "loguniform", (1e-4, 1e-2)), u) for u in np.linspace(0, 1, 1001)])
    assert (drawn < 1e-3).mean() == pytest.approx(0.5, abs=0.002)


def test_only_the_keys_of_the_chosen_value_are_active() -> None:
    space, rng, names = ppo_space(OPTIM), np.random.default_rng(0), set()
    for _ in range(30):
        values = space.sample(rng)
        optim = values["agent.net.optim_spec"]["name"]
        names.add(optim)
        assert ("agent.net.optim_spec.momentum" in values) == (optim == "SGD")
        assert (values["agent.net.optim_spec.lr"] >= 1e-2) == (optim == "SGD")
        applied = space.trial_spec(values).agent.net
        assert (applied.optim_spec.name, applied.optim_spec.lr) == (optim, values["agent.net.optim_spec.lr"])
        assert space.values_from(space.choices_of(values)) == values
    assert names == {"Adam", "SGD"}
    assert space.keys == ("agent.algorithm.gamma", "agent.net.optim_spec", "agent.net.optim_spec.lr", "agent.net.optim_spec.momentum")


def test_grids_nest() -> None:
    search = {"agent.net.optim_spec__grid_search": [{"name": "Adam", "lr__grid_search": [0.1, 0.2]}, {"name": "SGD"}]}
    space = ppo_space(search)
    assert [values.get("agent.net.optim_spec.lr") for values in space.grid] == [0.1, 0.2, None]
    assert ppo_space(OPTIM).grid == ({},)


def test_a_trial_has_no_search() -> None:
    space = ppo_space(OPTIM, **{"meta.max_trial": 9, "meta.search_metric": "stability", "meta.search_keep": "all"})
    spec = space.trial_spec(space.sample(np.random.default_rng(0)))
    assert spec.search is None
    assert (spec.meta.max_trial, spec.meta.search_metric, spec.meta.search_keep, spec.meta.max_session) == (1, None, 10, 2)


def test_lists_and_every_section() -> None:
    search = {
        "env": {"num_envs__choice": [2], "reward_scale__uniform": [0.5, 1]},
        "meta": {"log_frequency__randint": [5, 7]},
        "agent": {
            "algorithm": {"clip_eps_spec": {"start_val__uniform": [0.1, 0.3]}},
            "net": {"hid_layers": [None, {}], "hid_layers[1]__choice": [7], "lr_scheduler_spec": {"frame__randint": [500, 600]}},
        },
    }
    base = {
        "agent.net.hid_layers": [4, 5],
        "agent.net.lr_scheduler_spec": {"name": "LinearToZero", "frame": 1000},
        "agent.algorithm.clip_eps_spec": {"name": "no_decay", "start_val": 0.2},
        "env.reward_scale": 1.0,
    }
    space = ppo_space(search, **base)
    spec = space.trial_spec(space.sample(np.random.default_rng(0)))
    assert spec.env.num_envs == 2
    assert spec.agent.net.hid_layers == [4, 7]  # type: ignore[union-attr]
    assert spec.meta.log_frequency in (5, 6)


def test_items_of_a_list_by_position() -> None:
    body = {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}
    arc = {"modules": {"body": body}, "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"}}
    search = {"agent": {"net": {"arc": {"modules": {"body": {"Sequential": [{"LazyLinear": {"out_features__choice": [3]}}]}}}}}}
    space = ppo_space(search, **{"agent.net": {"type": "TorchArcNet", "arc": arc}})
    (key,) = space.keys
    assert key == "agent.net.arc.modules.body.Sequential[0].LazyLinear.out_features"
    assert "3" in str(space.trial_spec({key: 3}).agent.net)


def test_another_component_has_its_own_defaults() -> None:
    """PPO's default of lam is 0.95 and ActorCritic's is none; a value that the spec gives is kept."""
    search = {"agent.algorithm.name__choice": ["PPO", "ActorCritic"]}
    applied = [
        ppo_space(search, **{"agent.algorithm": {"name": "PPO", "gamma": 0.9, **given}}).trial_spec({"agent.algorithm.name": "ActorCritic"})
        for given in ({}, {"lam": 0.5})
    ]
    assert [getattr(spec.agent.algorithm, "lam", None) for spec in applied] == [None, 0.5]
    assert [spec.agent.algorithm.gamma for spec in applied] == [0.9, 0.9]


def test_an_invalid_combination_is_an_error() -> None:
    space = toy_space({"bonus__normal": [0.5, 1]})
    with pytest.raises(SpecError, match=r"agent\.algorithm\.bonus"):
        space.trial_spec({"agent.algorithm.bonus": 2.0})


def test_nothing_to_search() -> None:
    with pytest.raises(SpecError) as caught:
        ppo_space({"agent": {"algorithm": {}}})
    assert [problem.path for problem in caught.value.problems] == ["search"]


def test_number_of_trials() -> None:
    grid = {"rule__grid_search": ["sum", "mean"], "width__grid_search": [16, 32]}
    assert [toy_space(grid, max_trial=count).num_trials for count in (1, 3, 9)] == [4, 3, 4]
    assert toy_space({**grid, "bonus__uniform": [0, 1]}, max_trial=3).num_trials == 3


@pytest.mark.parametrize(
    ("search", "changes", "path"),
    [
        ({"agent.algorithm.action_pdtype__choice": ["default", "Beta"]}, {}, "agent.algorithm.action_pdtype__choice"),
        ({"env": {"nonsense__uniform": [1, 2]}}, {}, "env.nonsense__uniform"),
        ({"agent.net__choice": [{"type": "ConvNet", "fc_hid_layers__choice": [[8]]}]}, {}, "agent.net__choice"),
    ],
)
def test_values_that_cannot_be_built(search: Any, changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_search_values(ppo_space(search, **changes), Plan())
    assert {problem.path for problem in caught.value.problems} == {f"search.{path}"}


@pytest.mark.slow
def test_values_that_can_be_built() -> None:
    check_search_values(ppo_space(OPTIM), Plan())
