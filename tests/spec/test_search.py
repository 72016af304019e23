"""Tests of the search section."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.experiment.session.session import Session
from slm_lab.spec.load.loader import LoadedSpecs, load_spec, load_with_notices
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.search import DISTRIBUTIONS, SearchKey, parse_search
from slm_lab.spec.report import Report, SpecError, set_value_at, to_path
from tests.spec.conftest import Specs

GOOD: dict[str, list[Any]] = {
    "choice": [0.9, 0.95],
    "grid_search": [0.9, 0.95],
    "uniform": [0.5, 0.9],
    "quniform": [0.5, 0.9, 0.1],
    "loguniform": [0.5, 0.9],
    "qloguniform": [0.5, 0.9, 0.1],
    "randn": [0.5, 0.1],
    "qrandn": [0.5, 0.1, 0.1],
    "normal": [0.5, 0.1],
    "randint": [0, 1],
    "qrandint": [0, 1, 1],
    "lograndint": [1, 10],
    "qlograndint": [1, 10, 2],
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution(specs: Specs, distribution: str) -> None:
    key = "agent.algorithm.time_horizon" if "lograndint" in distribution else "agent.algorithm.lam"
    spec = specs.load({"search": {f"{key}__{distribution}": GOOD[distribution]}})
    assert parse_search(spec.search) == [SearchKey(tuple(key.split(".")), distribution, tuple(GOOD[distribution]))]


def test_an_empty_list_searches_nothing(specs: Specs) -> None:
    assert specs.load({"search": []}).search is None


def test_nested_and_dotted_keys_are_one(specs: Specs) -> None:
    search = {
        "agent": {"algorithm": {"lam__uniform": [0.5, 0.9]}, "net.hid_layers[0]__choice": [8, 16]},
        "agent.net.optim_spec.lr__loguniform": [1e-4, 1e-2],
    }
    spec = specs.load({"agent.net.hid_layers": [8], "search": search})
    assert spec.search == search
    assert [key.path for key in parse_search(spec.search)] == [
        ("agent", "algorithm", "lam"),
        ("agent", "net", "hid_layers", 0),
        ("agent", "net", "optim_spec", "lr"),
    ]


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ({"agent.algorithm.gama__uniform": [0, 1]}, "agent.algorithm.gama__uniform (unknown)"),
        ({"agent": {"algorithm": {"lam__unifrm": [0, 1]}}}, "agent.algorithm.lam__unifrm"),
        ({"agent": {"algorithm": {"lam": 0.9}}}, "agent.algorithm.lam"),
        ({"agent.algorithm.lam__uniform": [0.5, 2]}, "agent.algorithm.lam__uniform"),
        ({"agent.algorithm.lam__uniform": [0.9, 0.5]}, "agent.algorithm.lam__uniform"),
        ({"agent.algorithm.lam__uniform": 0.9}, "agent.algorithm.lam__uniform"),
        ({"agent.algorithm.lam__uniform": [0.5]}, "agent.algorithm.lam__uniform"),
        ({"agent.algorithm.lam__loguniform": [0, 0.5]}, "agent.algorithm.lam__loguniform"),
        ({"agent.algorithm.lam__quniform": [0, 0.5, 0]}, "agent.algorithm.lam__quniform"),
        ({"agent.algorithm.lam__qloguniform": [0.1, 0.5, 0, 10]}, "agent.algorithm.lam__qloguniform"),
        ({"agent.algorithm.lam__qloguniform": [0.1, 0.5, 0.1, 0]}, "agent.algorithm.lam__qloguniform"),
        ({"agent.algorithm.lam__normal": [0.5, -1]}, "agent.algorithm.lam__normal"),
        ({"agent.algorithm.time_horizon__randn": [64, 8]}, "agent.algorithm.time_horizon__randn"),
        ({"agent.algorithm.time_horizon__normal": [2048, 500]}, "agent.algorithm.time_horizon__normal"),
        ({"env.max_frame__normal": [1_000_000, 1000]}, "env.max_frame__normal"),
        ({"agent.algorithm.training_epoch__uniform": [1000, 2000]}, "agent.algorithm.training_epoch__uniform"),
        ({"agent.algorithm.time_horizon__randint": [1.5, 3]}, "agent.algorithm.time_horizon__randint"),
        ({"agent.algorithm.lam__choice": []}, "agent.algorithm.lam__choice"),
        ({"agent.algorithm.lam__quniform": [0.51, 0.59, 0.1]}, "agent.algorithm.lam__quniform"),
        ({"agent.algorithm.time_horizon__uniform": [8, 16]}, "agent.algorithm.time_horizon__uniform"),
        ({"agent.algorithm.lam_choice": [0.5, 0.6]}, "agent.algorithm.lam_choice"),
        ({"agent.algorithm.lam__uniform": [0.5, 0.6], "agent": {"algorithm": {"lam__choice": [0.5]}}}, "agent.algorithm.lam__choice"),
        ({"meta.max_trial__choice": [2, 3]}, "meta.max_trial__choice"),
        ({"meta": {"eval_episodes__choice": [0, 3]}}, "meta.eval_episodes__choice"),
        ({"meta.rigorous_eval__choice": [0, 3]}, "meta.rigorous_eval__choice"),
        ({"agent": {"net": {"hid_layers": [{}, {"x__choice": [1]}]}}}, "agent.net.hid_layers[1].x__choice"),
        ({"agent.net.optim_spec__choice": [{"name": "Adam", "lr__uniform": [-1, 1]}]}, "agent.net.optim_spec__choice[0].lr__uniform"),
        ({"agent.net.optim_spec__choice": [{"name": "Adam", "lr__unform": [0.1, 1]}]}, "agent.net.optim_spec__choice[0].lr__unform"),
        ({"agent.algorithm.lam__choice": [0.9, "x"]}, "agent.algorithm.lam__choice"),
        ({"agent.net.optim_spec.name__choice": ["Adam", "Adm"]}, "agent.net.optim_spec.name__choice"),
        ({"agent.net.optim_spec.betass__choice": [[0.9, 0.9]]}, "agent.net.optim_spec.betass__choice (unknown)"),
    ],
)
def test_search_that_does_not_fit(specs: Specs, search: Any, problem: str) -> None:
    assert specs.problems({"search": search}) == [f"search.{problem}"]


LOG_ALPHA: dict[str, Any] = {"agent.algorithm.log_alpha_max__uniform": [-3, -2], "agent.algorithm.log_alpha_min__choice": [0, 1]}
OFF_POLICY = {"agent.algorithm": {"name": "SoftActorCritic"}, "agent.memory": {"name": "Replay", "batch_size": 8}, "env.max_frame": 5000}
LAM = {"search": {"agent.algorithm.lam__choice": [0.5]}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (OFF_POLICY | {"search": LOG_ALPHA}, "search"),  # each key alone could be searched
        (LAM | {"meta.search_algorithm": "grid"}, "meta.search_algorithm"),
        (LAM | {"meta.max_trial": 0}, "meta.max_trial"),
        (LAM | {"agent.net.loss_spec": {"name": "CrossEntropyLoss"}}, "agent.net.loss_spec.name"),  # reported once, not for each value
    ],
)
def test_a_spec_that_does_not_fit_its_search(specs: Specs, changes: dict[str, Any], problem: str) -> None:
    assert specs.problems(changes) == [problem]


def test_search_over_an_optimizer_that_serves_both(specs: Specs) -> None:
    """Published specs have use_same_optim together with the actor's and the critic's optimizer; the actor's is used for both."""
    own = {"name": "RMSprop", "lr": 5e-3}
    net = {"type": "MLPNet", "use_same_optim": True, "actor_optim_spec": own, "critic_optim_spec": own}
    search = {"agent": {"net": {"actor_optim_spec": {"lr__choice": [0.1, 0.2]}, "critic_optim_spec": {"lr__choice": [0.1]}}}}
    spec = specs.load({"agent.net": net, "search": search})
    assert spec.search == {"agent.net.optim_spec.lr__choice": [0.1, 0.2]}
    assert specs.notices()[-1] == "search.agent.net.critic_optim_spec.lr__choice"


def test_search_over_nets(specs: Specs) -> None:
    assert specs.load({"search": {"agent.net.type__choice": ["MLPNet", "RecurrentNet"]}}).search
    found = specs.problems({"search": {"agent.net.type__choice": ["MLPNt"]}})
    assert found == ["search.agent.net.type__choice"]


def test_retired_keys_and_keys_without_effect_are_dropped(specs: Specs) -> None:
    keys = ["clip_eps", "entropy_coef", "clip_grad", "lr_decay_frequency", "lr_anneal_timestep", "center_return", "training_iter"]
    search = {"agent": {"algorithm": {f"{key}__uniform": [0, 1] for key in keys}}, "agent.algorithm.lam__uniform": [0.5, 0.9]}
    assert specs.load({"search": search}).search == {"agent": {"algorithm": {}}, "agent.algorithm.lam__uniform": [0.5, 0.9]}
    assert len(specs.notices()) == len(keys)
    assert specs.notices()[0] == "search.agent.algorithm.clip_eps__uniform"
    assert specs.notices()[-1] == "search.agent.algorithm.training_iter__uniform"


def test_a_value_that_only_some_combinations_allow(specs: Specs) -> None:
    """A seq_len longer than the rollout is an error, unless another searched key makes the rollout long enough."""
    base = {"agent.net": {"type": "RecurrentNet", "seq_len": 8}, "agent.algorithm.time_horizon": 8}
    key = "agent.net.seq_len__choice"
    assert specs.problems({**base, "search": {key: [8, 16]}}) == [f"search.{key}"]
    assert specs.load({**base, "search": {key: [8, 16], "agent.algorithm.time_horizon__choice": [8, 32]}}).search


def test_lam_replaces_num_step_returns(specs: Specs) -> None:
    """SLM Lab uses lam if both are given."""
    base = {"agent.algorithm": {"name": "ActorCritic", "num_step_returns": 8}, "search": {"agent.algorithm.lam__uniform": [0.9, 0.95]}}
    assert specs.load(base).search


def test_a_key_that_lacks_an_underscore_and_has_no_effect_is_ignored(specs: Specs) -> None:
    """Published specs contain such a key."""
    assert specs.load({"search": {"agent.algorithm": {"training_batch_iter_choice": [4, 6], "lam__uniform": [0.5, 0.9]}}}).search
    assert specs.notices() == ["search.agent.algorithm.training_batch_iter_choice"]


WIDE: dict[str, Any] = {
    "agent": {"algorithm": {"name": "PPO", "time_horizon": 32}},
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 60_000},
    "search": {"agent.algorithm.time_horizon__choice": [32, 4096]},
}
FEW = ["env.max_frame=3000"]


def test_values_that_do_not_fit_set_stop_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If --set gives fewer frames than a searched rollout needs, `train` runs without the section and says so; `search` is refused."""
    with pytest.raises(SpecError) as caught:
        load_spec({"a": WIDE}, "a", FEW)
    assert [problem.path for problem in caught.value.problems] == ["search.agent.algorithm.time_horizon__choice"]
    spec = load_spec({"a": WIDE}, "a", FEW, for_search=False)
    assert (spec.search, spec.env.max_frame) == (None, 3000)
    assert load_spec({"a": WIDE}, "a", for_search=False).search is None
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"a": WIDE}), encoding="utf-8")
    words = ["--set", "env.max_frame=1000", "--data-dir", str(tmp_path / "data")]
    assert main([str(path), "a", "dev", *words]) == 0
    assert "1 of its values is invalid" in caplog.text
    assert main([str(path), "a", "search", *words]) == 2


@pytest.mark.parametrize(
    "search",
    [
        {"agent.algorithm.time_horizn__choice": [32]},
        {"agent.algorithm.gamma.x__choice": [1]},
        {"agent.algorithm.time_horizon__choice": [32, 100_000]},
        {"agent.net__choice": [{"name": "MLPNet", "hid_lyers": [8]}]},
    ],
)
def test_mistakes_in_the_file_stop_training_too(search: dict[str, Any]) -> None:
    for sets in ([], FEW):
        with pytest.raises(SpecError):
            load_spec({"a": {**WIDE, "search": search}}, "a", sets, for_search=False)


THEIRS: dict[str, Any] = {
    "agent": {
        "name": "PPO",
        "algorithm": {"name": "PPO", "time_horizon": 32, "minibatch_size": 32, "clip_eps_spec": {"name": "no_decay", "start_val": 0.2}},
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {"type": "MLPNet", "hid_layers": [8], "hid_layers_activation": "tanh"},
    },
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 20_000},
    "meta": {"distributed": False, "max_session": 1, "max_trial": 2, "random_seed": 0},
}
"""Spec written for SLM Lab."""


def searched(search: dict[str, Any], **changes: Any) -> LoadedSpecs:
    """Load THEIRS with a search section and other sections."""
    return load_with_notices({"a": {**THEIRS, **changes, "search": search}}, "a")


@pytest.mark.parametrize(
    ("search", "noted"),
    [
        ({"agent": {"algorithm": {"time_horizon__choice": [17, 32]}}}, "rounds them up"),
        ({"agent.algorithm.minibatch_size__grid_search": [32, 16]}, ""),
        ({"agent.algorithm.time_horizon__qrandint": [10, 30, 5]}, "rounds them up"),
        ({"agent.algorithm.time_horizon__choice": [32], "env.num_envs__choice": [4, 5]}, "rounds them up"),
        ({"agent.algorithm.gamma__choice": [0.9]}, ""),
        ({"agent.algorithm.clip_eps_spec.end_val__choice": [0.1, 0.3]}, "no_decay is start_val"),
        ({"agent.algorithm.clip_eps_spec.start_val__uniform": [0.1, 0.3]}, "no_decay is start_val"),
    ],
)
def test_searched_values_that_differ_from_slm_lab_are_noted(search: dict[str, Any], noted: str) -> None:
    notes = [note for note in searched(search).notes if "a: search." in note]
    assert len(notes) == bool(noted)
    assert all(noted in note for note in notes)
    own = {**THEIRS, "meta": {"max_session": 1}}
    assert not [note for note in load_with_notices({"a": {**own, "search": search}}, "a").notes if "a: search." in note]


def test_one_env_rounds_nothing() -> None:
    env = {"name": "CartPole-v1", "max_frame": 20_000}
    assert not [note for note in searched({"agent.algorithm.time_horizon__choice": [17]}, env=env).notes if "rounds" in note]


SAC: dict[str, Any] = {
    "algorithm": {"name": "SoftActorCritic", "fixed_alpha": None, "alpha_lr": 0.01},
    "memory": {"name": "Replay", "batch_size": 32},
    "net": {"type": "MLPNet", "hid_layers": [8], "update_type": "replace", "polyak_coef": 0.01},
}
VANILLA: dict[str, Any] = {
    "algorithm": {"name": "VanillaDQN", "training_frequency": 4},
    "memory": {"name": "PrioritizedReplay"},
    "net": {"type": "MLPNet", "hid_layers": [8], "update_type": "polyak", "polyak_coef": 0.02},
}
A2C: dict[str, Any] = {
    "algorithm": {"name": "ActorCritic", "lam": 0.9, "num_step_returns": 5, "training_frequency": 32},
    "memory": {"name": "OnPolicyBatchReplay"},
    "net": {"type": "MLPNet", "hid_layers": [8]},
}
REINFORCE: dict[str, Any] = {
    "algorithm": {"name": "Reinforce"},
    "memory": {"name": "OnPolicyReplay"},
    "net": {"type": "MLPNet", "hid_layers": [8], "loss_spec": {"name": "SmoothL1Loss"}},
}


@pytest.mark.parametrize(
    ("agent", "key", "value"),
    [
        (SAC, "agent.memory.batch_size", 1500),
        (SAC, "agent[0].memory.batch_size", 1500),
        (SAC, "agent.memory", {"name": "Replay", "batch_size": 1500}),
        (SAC, "agent.net.update_type", "polyak"),
        (SAC, "agent.algorithm.fixed_alpha", 0.1),
        ({**SAC, "algorithm": {**SAC["algorithm"], "fixed_alpha": 0.1}}, "agent.algorithm.fixed_alpha", None),
        (VANILLA, "agent.algorithm.name", "DQN"),
        (VANILLA, "agent.net", {"type": "RecurrentNet"}),
        (A2C, "agent.algorithm.lam", None),
        (REINFORCE, "agent.algorithm.name", "ActorCritic"),
        (THEIRS["agent"], "agent.algorithm.time_horizon", 4),
    ],
)
def test_a_trial_equals_the_same_value_written_in_the_file(agent: dict[str, Any], key: str, value: Any) -> None:
    """The consequences of a searched value are resolved for each trial, not once for the base spec."""
    spec = searched({f"{key}__choice": [value]}, agent=agent).specs[0]
    trial = SearchSpace(spec).trial_spec({SearchSpace(spec).keys[0]: value})
    written = copy.deepcopy({**THEIRS, "agent": agent})
    set_value_at(written, to_path(key.replace("[0]", "")), value, Report())
    direct = load_with_notices({"a": written}, "a").specs[0]
    assert trial.agent == direct.agent
    completed = Session(
        load_with_notices({"a": {**THEIRS, "agent": agent}}, "a").specs[0]
    ).build()  # the base spec trains as without the search section
    assert Session(spec).build().spec == completed.spec
