"""Problems: all at once, each at its path, with the value seen, what is allowed and the nearest right thing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spec.conftest import Specs

ALGORITHM = "agent.algorithm"
ALGORITHM_NAMES = (
    "'Random', 'Reinforce', 'ActorCritic', 'PPO', 'SIL', 'PPOSIL', 'SARSA', 'VanillaDQN', 'DQN', 'DoubleDQN', 'SoftActorCritic', 'CrossQ'"
)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (f"{ALGORITHM}.gama", 0.9, "unknown key; did you mean 'gamma'?"),
        (f"{ALGORITHM}.hid_layers", [64], "unknown key; it belongs in agent.net"),
        (f"{ALGORITHM}.zzzz", 1, "unknown key"),
        (f"{ALGORITHM}.gamma", 1.5, "must be a number from 0 to 1, not 1.5"),
        (f"{ALGORITHM}.gamma", "0.9", 'must be a number from 0 to 1, not "0.9"'),
        (f"{ALGORITHM}.gamma", True, "must be a number from 0 to 1, not true"),
        (f"{ALGORITHM}.clip_vloss", 1, "must be true or false, not 1"),
        (f"{ALGORITHM}.training_epoch", 2.5, "must be a whole number > 0, not 2.5"),
        (f"{ALGORITHM}.normalize_advantages", "percentle", "did you mean 'percentile'?"),
        (f"{ALGORITHM}.action_policy", "epsilon_gredy", "did you mean 'epsilon_greedy'?"),
        (f"{ALGORITHM}.name", "POP", f"must be one of {ALGORITHM_NAMES}, not \"POP\"; did you mean 'PPO'?"),
        (f"{ALGORITHM}.name", "SAC", 'not "SAC"'),
        (f"{ALGORITHM}.name", None, "missing; must be one of 'Random'"),
        (f"{ALGORITHM}.name", ["PPO"], 'not ["PPO"]'),
        (ALGORITHM, "PPO", 'must be an object, not "PPO"'),
        (f"{ALGORITHM}.clip_eps_spec", 0.2, "must be an object, not 0.2"),
        ("agent.memory.name", "Repaly", "did you mean 'Replay'?"),
        ("agent.net.type", "MLP", "did you mean 'MLPNet'?"),
        ("agent.net.hid_layers", [64, -1], None),
        ("agent.net.hid_layers", 64, "must be a list of items, each a whole number > 0, not 64"),
        ("agent.net.gpu", "yes", "must be true or false or 'auto', not \"yes\""),
        ("agent.net.optim_spec.lr", 0, "must be a number > 0, not 0"),
        ("env.num_envs", 0, "must be a whole number > 0, not 0"),
        ("env.max_frame", -5, "must be a whole number > 0, not -5"),
        ("env.max_frame", None, "missing; must be a whole number > 0"),
        ("env.reward_scale", "sgn", "must be a number > 0 or 'sign', not \"sgn\"; did you mean 'sign'?"),
        ("env.backend", "envpol", "did you mean 'envpool'?"),
        ("meta.distributed", "sync", "must be one of false, 'shared', 'synced', not \"sync\"; did you mean 'synced'?"),
        ("meta.rigorous_eval", -1, "must be a whole number ≥ 0, not -1"),
        ("meta.random_seed", 2**32, "must be a whole number ≥ 0 and < 4294967296, not 4294967296"),
        ("meta", [], "must be an object, not []"),
        ("mta", {}, "unknown key; did you mean 'meta'?"),
        ("env", None, "missing; must be an object"),
    ],
)
def test_one_problem(specs: Specs, path: str, value: Any, problem: str | None) -> None:
    found = specs.problems({path: value})
    where = f"{path}[1]" if problem is None else path
    assert len(found) == 1, found
    assert found[0].startswith(f"{where}: "), found
    assert (problem or "must be a whole number > 0, not -1") in found[0]


def test_no_name_of_a_union_stands_in_a_path(specs: Specs) -> None:
    decay = {"name": "linear_decay", "start_val": "a", "end_vall": 0, "end_step": 1}
    conv = {"type": "ConvNet", "conv_hid_layers": [[32, "a"], [32, [3, "b"]], [32]]}
    assert specs.problems({f"{ALGORITHM}.clip_eps_spec": decay, "agent.net": conv}) == [
        'agent.algorithm.clip_eps_spec.start_val: must be a number, not "a"',
        "agent.algorithm.clip_eps_spec.end_val: missing; must be a number",
        "agent.algorithm.clip_eps_spec.end_vall: unknown key; did you mean 'end_val'?",
        'agent.net.conv_hid_layers[0][1]: must be a whole number ≥ 0 or a list of items, each a whole number ≥ 0, not "a"',
        'agent.net.conv_hid_layers[1][1][1]: must be a whole number ≥ 0, not "b"',
        "agent.net.conv_hid_layers[2]: must be a list of 2 to 5 items, "
        "each a whole number ≥ 0 or a list of items, each a whole number ≥ 0, not [32]",
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
    assert [problem.split(": ")[0] for problem in specs.problems(changes)] == [
        "agent.algorithm.gama",
        "env.max_frame",
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


def test_1e6_is_a_whole_number(specs: Specs) -> None:
    assert specs.load({"env.max_frame": 1e6}).env.max_frame == 1_000_000


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
        "ppo: agent.algorithm.center_return: has no effect in PPO; dropped",
        "ppo: agent.algorithm.training_iter: has no effect in PPO; dropped",
        "ppo: agent.net.normalize: has no effect in MLPNet; dropped",
        "ppo: env.device: has no effect in this version; dropped",
        "ppo: agent.critic_net: has no effect in PPO, only in SoftActorCritic and CrossQ; dropped",
        "ppo: agent.memory.batch_size: has no effect in OnPolicyBatchReplay, but for SIL and PPOSIL; dropped",
    ]


def test_clip_val_loss_is_not_lost(specs: Specs) -> None:
    """Defect 14: unknown keys were dropped in silence."""
    spec = specs.load({f"{ALGORITHM}.clip_val_loss": True, "agent.net.actor_init_std": 0.01})
    assert spec.agent.algorithm.model_dump()["clip_vloss"] is True
    assert spec.agent.net is not None
    assert spec.agent.net.actor_init_std == 0.01
    assert specs.notices() == ["ppo: agent.algorithm.clip_val_loss: an old name; read as 'clip_vloss'"]


def test_name_and_type_of_a_net_are_one(specs: Specs) -> None:
    net = {"name": "MLPNet", "hid_layers": [8]}
    assert specs.load({"agent.net": net}) == specs.load({"agent.net": {"type": "MLPNet", "hid_layers": [8]}})
    assert specs.problems({"agent.net": {"name": "MLPNet", "type": "ConvNet", "conv_hid_layers": [[1, 1]]}})[0].startswith(
        "agent.net.type: "
    )


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
        ({"agent.net.type": ...}, "agent.net.name"),
        ({"agent.net.type": 7}, "agent.net.type"),
        ({"agent.net.type": "ConvNet"}, "agent.net.conv_hid_layers"),
        ({"agent.net.hid_layers": [64, -1]}, "agent.net.hid_layers[1]"),
        ({"agent.net.type": "HydraMLPNet"}, "agent.net.hid_layers"),
        ({"agent.net.type": "HydraMLPNet", "agent.net.hid_layers": [64]}, "agent.net.hid_layers"),
        ({"agent.net.type": "ConvNet", "agent.net.conv_hid_layers": [[32]]}, "agent.net.conv_hid_layers[0]"),
        ({"agent.net.optim_spec": {"name": "Adm", "lr": "x"}}, "agent.net.optim_spec.lr"),
        ({f"{ALGORITHM}.name": "POP"}, f"{ALGORITHM}.name"),
    ],
)
def test_wrong_names_of_torch_are_told_whatever_else_is_wrong(specs: Specs, changes: dict[str, Any], place: str) -> None:
    found = {problem.split(": ")[0] for problem in specs.problems(TORCH_NAMES | changes)}
    assert found == {place, "agent.net.optim_spec.name", "agent.net.hid_layers_activation", "agent.net.init_fn"}


@pytest.mark.parametrize("name", ["POP", "Nothing", "PPOSL", 3, ...])
def test_a_wrong_name_hides_no_other_mistake(specs: Specs, name: Any) -> None:
    changes = {f"{ALGORITHM}.name": name, f"{ALGORITHM}.gama": 0.9, f"{ALGORITHM}.minibatch_size": 8, f"{ALGORITHM}.training_iter": 4}
    schedule = {"name": "linear_decy", "start_val": 1, "end_val": 0, "end_step": "x"}
    problems = specs.problems(changes | {f"{ALGORITHM}.entropy_coef_spec": schedule, "agent.net": ...})
    assert problems[0].startswith(f"{ALGORITHM}.name: m")
    assert problems[1:] == [
        f"{ALGORITHM}.entropy_coef_spec.name: must be one of 'no_decay', 'linear_decay', 'rate_decay', 'periodic_decay', "
        "not \"linear_decy\"; did you mean 'linear_decay'?",
        f"{ALGORITHM}.gama: unknown key; did you mean 'gamma'?",
        f'{ALGORITHM}.entropy_coef_spec.end_step: must be a number ≥ 0, not "x"',
    ]


def test_nothing_follows_from_a_name_that_was_guessed(specs: Specs) -> None:
    found = specs.problems({f"{ALGORITHM}.name": "PPOSAIL", "agent.memory.name": "OnPolicyReplay"})
    assert [problem.split(": ")[0] for problem in found] == [f"{ALGORITHM}.name"]
