"""Rules across sections."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from slm_lab.spec import env_ids
from tests.spec.conftest import Specs

DECAY = {"name": "linear_decay", "start_val": 1.0, "end_val": 0.0, "start_step": 0, "end_step": 10}
A2C = {"agent.algorithm": {"name": "ActorCritic"}}
GRAPH = {"input": "x", "modules": {"body": ["x"]}, "output": "body"}


def arc(*layers: Any, graph: Any = None) -> dict[str, Any]:
    return {"agent.net": {"type": "TorchArcNet", "arc": {"modules": {"body": {"Sequential": list(layers)}}, "graph": graph or GRAPH}}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"agent.algorithm": {"name": "ActorCritic", "lam": 0.9, "num_step_returns": 5}}, "agent.algorithm.num_step_returns: excludes lam"),
        ({"agent.net": ...}, "agent.net: missing; PPO needs a net"),
        ({"agent.memory.name": "OnPolicyReplay"}, "agent.memory.name: must be 'OnPolicyBatchReplay'"),
        (
            {"agent.algorithm.entropy_coef_spec": DECAY | {"start_step": 11}},
            "agent.algorithm.entropy_coef_spec.end_step: must be at least start_step (11), not 10",
        ),
        (
            {"agent.algorithm.clip_eps_spec": DECAY | {"start_val": -1}},
            "agent.algorithm.clip_eps_spec.start_val: must be a number ≥ 0, not -1",
        ),
        (
            {"agent.algorithm.action_policy": "boltzmann"},
            "agent.algorithm.explore_var_spec: missing; the action_policy 'boltzmann' needs it",
        ),
        (
            {"agent.net.optim_spec": {"name": "LBFGS"}},
            "agent.net.optim_spec.name: 'LBFGS' is no optimizer of torch.optim to use here; LBFGS calls the loss again",
        ),
        ({"agent.net.optim_spec": {"name": "SparseAdam"}}, "takes sparse gradients only"),
        ({"agent.net.optim_spec": {"name": "adamw"}}, "did you mean 'AdamW'?"),
        (
            {"agent.net.optim_spec": {"name": "Adam", "bets": [0.9, 0.9]}},
            "agent.net.optim_spec.bets: Adam takes no such argument; did you mean 'betas'?",
        ),
        ({"agent.net.optim_spec": {"name": "Lookahead", "optimizer": "RAdm"}}, "agent.net.optim_spec.optimizer: 'RAdm' is no optimizer"),
        (
            {"agent.net.optim_spec": {"name": "Lookahead", "optimizer": "RAdam", "moment": 1}},
            "agent.net.optim_spec.moment: Lookahead around RAdam takes no such",
        ),
        ({"agent.net.lr_scheduler_spec": {"name": "ReduceLROnPlateau"}}, "needs a metric at each step"),
        ({"agent.net.lr_scheduler_spec": {"name": "SequentialLR"}}, "made of other schedulers"),
        ({"agent.net.lr_scheduler_spec": {"name": "ChainedScheduler"}}, "made of other schedulers"),
        ({"agent.net.lr_scheduler_spec": {"name": "LambdaLR"}}, "needs a function"),
        ({"agent.net.lr_scheduler_spec": {"name": "MultiplicativeLR"}}, "needs a function"),
        ({"agent.net.lr_scheduler_spec": {"name": "StepLR"}}, "agent.net.lr_scheduler_spec.step_size: missing; StepLR needs it"),
        ({"agent.net.lr_scheduler_spec": {"name": "LinearToZero"}}, "agent.net.lr_scheduler_spec.frame: missing; LinearToZero needs it"),
        (
            {"agent.net.loss_spec": {"name": "MSE"}},
            "agent.net.loss_spec.name: 'MSE' is no regression loss of torch.nn to use here; did you mean 'MSELoss'?",
        ),
        (
            {"agent.net.hid_layers_activation": "reluu"},
            "agent.net.hid_layers_activation: 'reluu' is no activation of torch.nn; did you mean 'ReLU'?",
        ),
        (
            {"agent.net.init_fn": "orthogonal"},
            "agent.net.init_fn: 'orthogonal' is no function of torch.nn.init to use here; did you mean 'orthogonal_'?",
        ),
        ({"agent.net": {"type": "TorchArcNet"}}, "agent.net.arc: missing"),
        ({"agent.net": {"type": "TorchArcNet", "actor_arc": arc({"Tanh": None})["agent.net"]["arc"]}}, "agent.net.critic_arc: missing"),
        (
            arc({"LazyLiner": {"out_features": 1}}),
            "agent.net.arc.modules.body.Sequential[0].LazyLiner: no layer of torch.nn; did you mean 'LazyLinear'?",
        ),
        (
            arc({"LazyLinear": {"features": 1}}),
            "agent.net.arc.modules.body.Sequential[0].LazyLinear.features: LazyLinear takes no such argument",
        ),
        (
            arc({"Tanh": None}, graph=GRAPH | {"modules": {"bdy": ["x"]}}),
            "agent.net.arc.graph.modules.bdy: no such name among the modules; did you mean 'body'?",
        ),
        (
            {"agent.net": {"type": "ConvNet", "conv_hid_layers": [[32, 0]]}},
            "agent.net.conv_hid_layers[0][1]: must be a kernel above 0, not 0",
        ),
        ({"agent.net": {"type": "RecurrentNet", "bidirectional": True}}, "agent.net.bidirectional: must be false, not true"),
        ({"env.backend": "ale"}, "env.backend: 'ale' steps the envs ALE/… only"),
        ({"env.name": ""}, "env.name: must be a Gymnasium id (as CartPole-v1) or package.module:EnvId; it is empty"),
        (
            {"env.name": "MiniGrid-Empty-5x5-v0"},
            "env.name: no env of the name 'MiniGrid-Empty-5x5-v0' is registered with Gymnasium "
            "(an env of another package: install that, and write 'package.module:MiniGrid-Empty-5x5-v0')",
        ),
        ({"env.name": "CartPol-v1"}, "env.name: no env of the name 'CartPol-v1' is registered with Gymnasium; did you mean 'CartPole-v1'?"),
        ({"env.name": "Pong-v6"}, None),
        ({"env.name": "ALE/Pongg-v5"}, "did you mean 'ALE/Pong-v5'?"),
        ({"env.name": "no_such_package.envs:MyEnv-v0"}, "no package 'no_such_package' is installed"),
        ({"env.name": "a b:c"}, "env.name: must be a Gymnasium id, or package.module:EnvId"),
    ],
)
def test_what_contradicts(specs: Specs, changes: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        assert specs.load(changes).env.name == "ALE/Pong-v5"  # any version of an Atari id is the one there is
        return
    found = specs.problems(changes)
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"agent.net.optim_spec": {"name": name, "lr": 0.1}}
        for name in ("Adam", "AdamW", "RMSprop", "SGD", "RAdam", "Muon", "Adafactor", "Lookahead")
    ]
    + [
        {"agent.net.optim_spec": {"name": "Lookahead", "optimizer": "RAdam", "lr": 0.1, "k": 5, "alpha": 0.5, "betas": [0.9, 0.99]}},
        {"agent.net.lr_scheduler_spec": {"name": "StepLR", "step_size": 1000, "gamma": 0.9}},
        {"agent.net.lr_scheduler_spec": {"name": "LinearToMin", "frame": 1e6, "min_factor": 0.1}},
        {"agent.net.loss_spec": {"name": "SmoothL1Loss", "beta": 2.0}},
        {"agent.net.hid_layers_activation": "SiLU"},
        arc(
            "Tanh", {"LazyLinear": {"out_features": 4}}, {"NormalTanh": None}, {"LazyBatchRenorm1d": {"momentum": 0.01}}, {"Linear": [4, 4]}
        ),
        {"agent.net": {"type": "RecurrentNet", "cell_type": "LSTM"}},
        {"agent.algorithm": {"name": "Reinforce"}, "agent.memory.name": "OnPolicyReplay"},
        {"agent.algorithm": {"name": "Random"}, "agent.net": ...},
        {"env.name": "tests.spec:MyEnv-v0"},
        {"agent.algorithm.clip_eps_spec": {"name": "no_decay", "start_val": 0.2, "end_val": 0.2, "start_step": 0, "end_step": 0}},
    ],
)
def test_what_is_fine(specs: Specs, changes: dict[str, Any]) -> None:
    specs.load(changes)
    assert specs.notices() == []


def test_minibatch_larger_than_the_rollout_is_clamped(specs: Specs) -> None:
    spec = specs.load({"agent.algorithm.minibatch_size": 1000, "agent.algorithm.time_horizon": 32})
    assert spec.agent.algorithm.model_dump()["minibatch_size"] == 128
    assert specs.notices() == ["ppo: agent.algorithm.minibatch_size: 1000 is larger than the rollout of 32 steps × 4 envs; 128 is used"]


def test_training_frequency_of_ppo_is_its_horizon(specs: Specs) -> None:
    assert specs.load({"agent.algorithm.training_frequency": 1}).agent.algorithm.model_dump()["training_frequency"] is None
    assert "training_frequency" in specs.notices()[0]


@pytest.mark.parametrize(
    ("changes", "same", "optim", "actor", "notices"),
    [
        ({}, False, 1e-3, 0.1, 1),  # not said: read as meant
        ({"agent.net.use_same_optim": False}, False, 1e-3, 0.1, 0),
        ({"agent.net.use_same_optim": True}, True, 0.1, None, 2),  # the actor's serves both
        ({"agent.net.use_same_optim": True, "agent.net.optim_spec": {"name": "Adam", "lr": 0.3}}, True, 0.3, None, 2),
        ({"agent.algorithm": {"name": "Reinforce"}}, True, 0.1, None, 2),
    ],
)
def test_separate_optimizers(specs: Specs, changes: dict[str, Any], same: bool, optim: float, actor: float | None, notices: int) -> None:
    separate = {"agent.net.actor_optim_spec": {"name": "Adam", "lr": 0.1}, "agent.net.critic_optim_spec": {"name": "Adam", "lr": 0.2}}
    net = specs.load(separate | changes).agent.net
    assert net is not None
    assert (net.use_same_optim, net.optim_spec.lr, net.actor_optim_spec and net.actor_optim_spec.lr) == (same, optim, actor)
    assert len(specs.notices()) == notices


def test_explore_var_without_a_policy_that_explores(specs: Specs) -> None:
    assert specs.load({"agent.algorithm.explore_var_spec": DECAY}).agent.algorithm.explore_var_spec is None
    assert "no effect with the action_policy 'default'" in specs.notices()[0]


def test_activation_with_an_underscore(specs: Specs) -> None:
    net = specs.load({"agent.net.hid_layers_activation": "leaky_relu"}).agent.net
    assert net is not None
    assert net.model_dump()["hid_layers_activation"] == "LeakyReLU"


def test_env_key_near_a_known_one(specs: Specs) -> None:
    assert specs.load({"env.clip_rewards": 1, "env.continuous": True}).env.kwargs == {"clip_rewards": 1, "continuous": True}
    assert specs.notices() == ["ppo: env.clip_rewards: goes to the env's constructor; did you mean 'clip_reward'?"]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "slm-lab[atari]"),
        ("HalfCheetah-v5", "mujoco", "slm-lab[mujoco]"),
        ("LunarLander-v3", "Box2D", "slm-lab[box2d]"),
    ],
)
def test_env_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *more: None if module == package else find(module, *more))
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert env_ids.problem(name) == f"{name} needs the package {package}: pip install '{extra}'"


def test_envs_that_others_registered_are_known() -> None:
    import gymnasium

    assert env_ids.problem("SpecRoomTest-v0") is not None
    gymnasium.register("SpecRoomTest-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    try:
        assert env_ids.problem("SpecRoomTest-v0") is None
    finally:
        del gymnasium.registry["SpecRoomTest-v0"]
