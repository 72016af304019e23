"""Tests of problems: all are reported at once, each with its path, the given value, what is allowed, and the nearest valid choice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spec.conftest import Specs

ALGORITHM = "agent.algorithm"


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (f"{ALGORITHM}.gama", 0.9, "unknown"),
        (f"{ALGORITHM}.hid_layers", [64], "unknown"),
        (f"{ALGORITHM}.zzzz", 1, "unknown"),
        (f"{ALGORITHM}.gamma", 1.5, ""),
        (f"{ALGORITHM}.gamma", "0.9", ""),
        (f"{ALGORITHM}.gamma", True, ""),
        (f"{ALGORITHM}.clip_vloss", 1, ""),
        (f"{ALGORITHM}.training_epoch", 2.5, ""),
        (f"{ALGORITHM}.normalize_advantages", "percentle", ""),
        (f"{ALGORITHM}.action_policy", "epsilon_gredy", ""),
        (f"{ALGORITHM}.name", "POP", ""),
        (f"{ALGORITHM}.name", None, "missing"),
        (f"{ALGORITHM}.name", ["PPO"], ""),
        (ALGORITHM, "PPO", ""),
        (f"{ALGORITHM}.clip_eps_spec", 0.2, ""),
        ("agent.memory.name", "Repaly", ""),
        ("agent.net.type", "MLP", ""),
        ("agent.net.hid_layers[1]", [64, -1], ""),
        ("agent.net.hid_layers", 64, ""),
        ("agent.net.gpu", "yes", ""),
        ("agent.net.optim_spec.lr", 0, ""),
        ("agent.net.optim_spec.lr", 1e308, ""),
        ("env.clip_obs", 1e39, ""),
        ("env.reward_scale", 1e300, ""),
        ("env.max_frame", -5, ""),
        ("env.max_frame", None, "missing"),
        ("env.reward_scale", "sgn", ""),
        ("env.backend", "envpol", ""),
        ("meta.distributed", "sync", ""),
        ("meta.rigorous_eval", -1, ""),
        ("meta.random_seed", 2**32, ""),
        ("meta.stall_limit", 0, ""),
        ("meta", [], ""),
        ("mta", {}, "unknown"),
        ("env", None, "missing"),
    ],
)
def test_one_problem(specs: Specs, path: str, value: Any, code: str) -> None:
    assert specs.problems({path.removesuffix("[1]"): value}) == [f"{path} ({code})" if code else path]


def test_no_name_of_a_union_stands_in_a_path(specs: Specs) -> None:
    decay = {"name": "linear_decay", "start_val": "a", "end_vall": 0, "end_step": 1}
    conv = {"type": "ConvNet", "conv_hid_layers": [[32, "a"], [32, [3, "b"]], [32]]}
    assert specs.problems({f"{ALGORITHM}.clip_eps_spec": decay, "agent.net": conv}) == [
        "agent.algorithm.clip_eps_spec.start_val",
        "agent.algorithm.clip_eps_spec.end_val (missing)",
        "agent.algorithm.clip_eps_spec.end_vall (unknown)",
        "agent.net.conv_hid_layers[0][1]",
        "agent.net.conv_hid_layers[1][1][1]",
        "agent.net.conv_hid_layers[2]",
    ]


def test_problems_of_every_stage_come_together(specs: Specs) -> None:
    changes = {
        f"{ALGORITHM}.gama": 1,
        f"{ALGORITHM}.clip_eps_spec": {"name": "linear_decay", "start_val": 1, "end_val": 0, "start_step": 5, "end_step": 4},
        "agent.net.optim_spec": {"name": "Adm"},
        "env.max_frame": ...,
        "env.name": "CartPol-v1",
        "meta.max_session": "2",
        "search": {"agent.algorithm.lam__unifrom": [0, 1]},
    }
    assert specs.problems(changes) == [
        "agent.algorithm.gama (unknown)",
        "env.max_frame (missing)",
        "meta.max_session",
        "agent.algorithm.clip_eps_spec.end_step",
        "agent.net.optim_spec.name",
        "env.name",
        "search.agent.algorithm.lam__unifrom",
    ]


def test_null_equals_absent(specs: Specs) -> None:
    nulls = {"explore_var_spec": None, "clip_eps_spec": None, "lam": None}
    changes = {f"{ALGORITHM}.{key}": value for key, value in nulls.items()} | {
        "meta.random_seed": None,
        "env.max_t": None,
        "env.render_mode": None,
    }
    spec = specs.load(changes | {"agent.memory": None, "search": None, "agent.net.lr_scheduler_spec": None, "agent.net.gpu": None})
    assert spec == specs.load({})
    assert specs.notices() == []


def test_null_is_a_value_where_form_is_free(specs: Specs) -> None:
    modules = {"body": {"Sequential": [{"Tanh": None}]}, "last": {"Tanh": None}}
    arc = {"modules": modules, "graph": {"input": "x", "modules": {"body": ["x"], "last": ["body"]}, "output": "last"}}
    spec = specs.load(
        {
            "agent.net": {"type": "TorchArcNet", "arc": arc},
            "env.options": {"a": None},
            "search": {"agent.net.clip_grad_val__choice": [None, 1]},
        }
    )
    assert spec.agent.net is not None
    assert spec.agent.net.model_dump()["arc"] == arc
    assert spec.env.kwargs == {"options": {"a": None}}
    assert spec.search == {"agent.net.clip_grad_val__choice": [None, 1]}


def test_keys_valid_elsewhere_are_dropped_with_a_notice(specs: Specs) -> None:
    changes = {
        f"{ALGORITHM}.center_return": True,
        f"{ALGORITHM}.training_iter": 4,
        "agent.memory.batch_size": 32,
        "agent.net.normalize": False,
        "agent.net.update_type": "polyak",
        "agent.critic_net": {"type": "MLPNet"},
        "env.device": "cpu",
    }
    assert specs.load(changes) == specs.load({})
    assert specs.notices() == [
        "agent.algorithm.center_return",
        "agent.algorithm.training_iter",
        "agent.net.normalize",
        "env.device",
        "agent.net.update_type",
        "agent.critic_net",
        "agent.memory.batch_size",
    ]


def test_name_and_type_of_a_net_are_one(specs: Specs) -> None:
    net = {"name": "MLPNet", "hid_layers": [8]}
    assert specs.load({"agent.net": net}) == specs.load({"agent.net": {"type": "MLPNet", "hid_layers": [8]}})
    assert specs.problems({"agent.net": {"name": "MLPNet", "type": "ConvNet", "conv_hid_layers": [[1, 1]]}})[0] == "agent.net.type"


TORCH_NAMES = {
    "agent.net.optim_spec": {"name": "Adm", "lr": 0.1},
    "agent.net.hid_layers_activation": "rellu",
    "agent.net.init_fn": "orthogonl_",
}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"agent.net.gpu": "yes"}, "agent.net.gpu"),
        ({"agent.net.type": "MLPNt"}, "agent.net.type"),
        ({"agent.net.type": "ConvNet", "agent.net.conv_hid_layers": []}, "agent.net.conv_hid_layers"),
        ({"agent.net.hid_layers": [64, -1]}, "agent.net.hid_layers[1]"),
        ({"agent.net.type": "HydraMLPNet"}, "agent.net.hid_layers"),
        ({"agent.net.type": "ConvNet", "agent.net.conv_hid_layers": [[32]]}, "agent.net.conv_hid_layers[0]"),
        ({"agent.net.optim_spec": {"name": "Adm", "lr": "x"}}, "agent.net.optim_spec.lr"),
        ({f"{ALGORITHM}.name": "POP"}, f"{ALGORITHM}.name"),
    ],
)
def test_wrong_names_of_torch_are_told_whatever_else_is_wrong(specs: Specs, changes: dict[str, Any], place: str) -> None:
    found = {problem.split()[0] for problem in specs.problems(TORCH_NAMES | changes)}
    assert found == {place, "agent.net.optim_spec.name", "agent.net.hid_layers_activation", "agent.net.init_fn"}


@pytest.mark.parametrize("name", ["Nothing", "PPOSL", 3, ...])
def test_a_wrong_name_hides_no_other_mistake(specs: Specs, name: Any) -> None:
    changes = {f"{ALGORITHM}.name": name, f"{ALGORITHM}.gama": 0.9, f"{ALGORITHM}.minibatch_size": 8, f"{ALGORITHM}.training_iter": 4}
    schedule = {"name": "linear_decy", "start_val": 1, "end_val": 0, "end_step": "x"}
    problems = specs.problems(changes | {f"{ALGORITHM}.entropy_coef_spec": schedule, "agent.net": ...})
    assert problems == [
        f"{ALGORITHM}.name" + " (missing)" * (name is ...),
        f"{ALGORITHM}.entropy_coef_spec.name",
        f"{ALGORITHM}.gama (unknown)",
        f"{ALGORITHM}.entropy_coef_spec.end_step",
    ]


def test_nothing_follows_from_a_name_that_was_guessed(specs: Specs) -> None:
    assert specs.problems({f"{ALGORITHM}.name": "PPOSAIL", "agent.memory.name": "OnPolicyReplay"}) == [f"{ALGORITHM}.name"]


def test_several_missing_keys_of_a_section_leave_out_this_section_only(specs: Specs) -> None:
    """The rules still apply to the algorithm of the file: DQN needs a replay buffer, and it can be distributed, because it learns."""
    changes = {"agent.algorithm": {"name": "DQN", "explore_var_spec": {"name": "linear_decay"}}, "meta.distributed": "synced"}
    schedule = f"{ALGORITHM}.explore_var_spec"
    assert specs.problems(changes) == [
        f"{schedule}.start_val (missing)",
        f"{schedule}.end_val (missing)",
        f"{schedule}.end_step (missing)",
        "agent.memory.name",
    ]


def test_nothing_follows_from_an_algorithm_that_is_left_out(specs: Specs) -> None:
    assert specs.problems({"agent.algorithm": 3, "agent.net": ..., "meta.distributed": "synced"}) == [ALGORITHM]


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("A2C", "ActorCritic"),
        ("sac", "SoftActorCritic"),
        ("PPO2", "PPO"),
        ("DDQN", "DoubleDQN"),
        ("A3C", "meta.distributed"),
        ("Rainbow", "(see rainbow_lunar.json)"),
    ],
)
def test_an_algorithm_that_other_libraries_call_otherwise(specs: Specs, name: str, here: str) -> None:
    messages = specs.messages({"agent.algorithm.name": name})
    assert any("slm_lab calls it" in message and message.rpartition("calls it ")[2].endswith(here) for message in messages)
