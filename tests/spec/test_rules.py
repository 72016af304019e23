"""Tests of the rules across sections of a spec."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from slm_lab.spec.compat import env_ids
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.load.search_space import SearchSpace
from tests.spec.conftest import Specs

DECAY = {"name": "linear_decay", "start_val": 1.0, "end_val": 0.0, "start_step": 0, "end_step": 10}
A2C = {"agent.algorithm": {"name": "ActorCritic"}}
GRAPH = {"input": "x", "modules": {"body": ["x"]}, "output": "body"}


@pytest.fixture(autouse=True)
def _without_minigrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove MiniGrid's ids, which another test may have registered in this process by an import of the module."""
    import gymnasium

    for name in [name for name in gymnasium.registry if name.startswith("MiniGrid-")]:
        monkeypatch.delitem(gymnasium.registry, name)


def arc(*layers: Any, graph: Any = None) -> dict[str, Any]:
    return {"agent.net": {"type": "TorchArcNet", "arc": {"modules": {"body": {"Sequential": list(layers)}}, "graph": graph or GRAPH}}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"agent.memory.name": "OnPolicyReplay"}, "agent.memory.name"),
        ({"agent.algorithm.entropy_coef_spec": DECAY | {"start_step": 11}}, "agent.algorithm.entropy_coef_spec.end_step"),
        ({"agent.algorithm.clip_eps_spec": DECAY | {"start_val": -1}}, "agent.algorithm.clip_eps_spec.start_val"),
        ({"agent.algorithm.action_policy": "boltzmann"}, "agent.algorithm.explore_var_spec (missing)"),
        ({"agent.net.optim_spec": {"name": "LBFGS"}}, "agent.net.optim_spec.name"),
        ({"agent.net.optim_spec": {"name": "SparseAdam"}}, "agent.net.optim_spec.name"),
        ({"agent.net.optim_spec": {"name": "adamw"}}, "agent.net.optim_spec.name"),
        ({"agent.net.optim_spec": {"name": "Adam", "bets": [0.9, 0.9]}}, "agent.net.optim_spec.bets (unknown)"),
        ({"agent.net.optim_spec": {"name": "Lookahead", "optimizer": "RAdm"}}, "agent.net.optim_spec.optimizer"),
        ({"agent.net.optim_spec": {"name": "Lookahead", "optimizer": "RAdam", "moment": 1}}, "agent.net.optim_spec.moment (unknown)"),
        ({"agent.net.lr_scheduler_spec": {"name": "ReduceLROnPlateau"}}, "agent.net.lr_scheduler_spec.name"),
        ({"agent.net.lr_scheduler_spec": {"name": "SequentialLR"}}, "agent.net.lr_scheduler_spec.name"),
        ({"agent.net.lr_scheduler_spec": {"name": "LambdaLR"}}, "agent.net.lr_scheduler_spec.name"),
        ({"agent.net.lr_scheduler_spec": {"name": "StepLR"}}, "agent.net.lr_scheduler_spec.step_size (missing)"),
        ({"agent.net.lr_scheduler_spec": {"name": "LinearToZero"}}, "agent.net.lr_scheduler_spec.frame (missing)"),
        ({"agent.net.loss_spec": {"name": "MSE"}}, "agent.net.loss_spec.name"),
        ({"agent.net.hid_layers_activation": "reluu"}, "agent.net.hid_layers_activation"),
        ({"agent.net.init_fn": "orthogonal"}, "agent.net.init_fn"),
        ({"agent.net": {"type": "TorchArcNet"}}, "agent.net.arc (missing)"),
        ({"agent.net": {"type": "TorchArcNet", "actor_arc": arc({"Tanh": None})["agent.net"]["arc"]}}, "agent.net.critic_arc (missing)"),
        (arc({"LazyLiner": {"out_features": 1}}), "agent.net.arc.modules.body.Sequential[0].LazyLiner"),
        (arc({"LazyLinear": {"out_features": 1, "features": 1}}), "agent.net.arc.modules.body.Sequential[0].LazyLinear.features (unknown)"),
        (arc({"Tanh": None}, graph=GRAPH | {"modules": {"bdy": ["x"]}}), "agent.net.arc.graph.modules.bdy"),
        ({"agent.net": {"type": "ConvNet", "conv_hid_layers": [[32, 0]]}}, "agent.net.conv_hid_layers[0][1]"),
        ({"agent.net": {"type": "RecurrentNet", "bidirectional": True}}, "agent.net.bidirectional"),
        ({"agent.net": {"type": "RecurrentNet", "dtype": "bfloat16"}}, "agent.net.dtype"),
        ({"env.backend": "ale"}, "env.backend"),
        ({"env.name": ""}, "env.name"),
        ({"env.name": "MyGrid-Empty-5x5-v0"}, "env.name"),
        ({"env.name": "CartPol-v1"}, "env.name"),
        ({"env.name": "ALE/Pongg-v5"}, "env.name"),
        ({"env.name": "no_such_package.envs:MyEnv-v0"}, "env.name"),
        ({"env.name": "a b:c"}, "env.name"),
    ],
)
def test_what_contradicts(specs: Specs, changes: dict[str, Any], problem: str) -> None:
    assert specs.problems(changes) == [problem]


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


@pytest.mark.parametrize(
    ("changes", "same", "optim", "actor", "notices"),
    [
        ({}, False, 1e-3, 0.1, 1),  # use_same_optim is absent: the optimizers are separate
        ({"agent.net.use_same_optim": False}, False, 1e-3, 0.1, 0),
        ({"agent.net.use_same_optim": True}, True, 0.1, None, 2),  # the actor's optimizer serves both
        ({"agent.net.use_same_optim": True, "agent.net.optim_spec": {"name": "Adam", "lr": 0.3}}, True, 0.1, None, 2),
        ({"agent.net.use_same_optim": False, "agent.net.shared": True}, True, 0.1, None, 2),  # actor and critic share one net
        ({"agent.net.shared": True, "agent.net.critic_optim_spec": {"name": "Adam", "lr": 0.1}}, True, 0.1, None, 1),
        ({"agent.algorithm": {"name": "Reinforce"}}, True, 0.1, None, 2),
        ({"agent.algorithm": {"name": "Reinforce"}, "agent.net.optim_spec": {"name": "Adam", "lr": 0.3}}, True, 0.3, None, 2),
    ],
)
def test_separate_optimizers(specs: Specs, changes: dict[str, Any], same: bool, optim: float, actor: float | None, notices: int) -> None:
    separate = {"agent.net.actor_optim_spec": {"name": "Adam", "lr": 0.1}, "agent.net.critic_optim_spec": {"name": "Adam", "lr": 0.2}}
    net = specs.load(separate | changes).agent.net
    assert net is not None
    assert (net.use_same_optim, net.optim_spec.lr, net.actor_optim_spec and net.actor_optim_spec.lr) == (same, optim, actor)
    assert len(specs.notices()) == notices


@pytest.mark.parametrize(
    ("start", "problems"), [(4, []), (None, ["agent.memory.batch_size"]), (50, ["agent.algorithm.training_start_step"])]
)
def test_training_may_start_before_a_batch(specs: Specs, start: int | None, problems: list[str]) -> None:
    """A Session of 40 frames never collects a batch of 64: an error unless training starts within these frames."""
    memory = {"name": "Replay", "batch_size": 64, "max_size": 100}
    changes = {
        "agent.algorithm": {"name": "DQN", "training_start_step": start},
        "agent.memory": memory,
        "env.max_frame": 40,
        "env.num_envs": 1,
    }
    assert (specs.problems(changes) if problems else specs.load(changes) and []) == problems


@pytest.mark.parametrize("key", ["shared", "use_same_optim"])
def test_separate_optimizers_wait_for_a_search(specs: Specs, key: str) -> None:
    """The resolved spec keeps both optimizers, because each trial decides whether actor and critic share one."""
    search = {"agent": {"net": {f"{key}__choice": [True, False]}}}
    optim = {f"agent.net.{part}_optim_spec": {"name": "Adam", "lr": lr} for part, lr in (("actor", 0.1), ("critic", 0.2))}
    spec = specs.load(optim | {"agent.net.shared": key == "shared", "agent.net.use_same_optim": key != "shared", "search": search})
    together, apart = (SearchSpace(spec).trial_spec({f"agent.net.{key}": value}).agent.net for value in (True, False))
    assert together is not None
    assert apart is not None
    assert (together.optim_spec.learning_rate, together.actor_optim_spec, together.critic_optim_spec) == (0.1, None, None)
    assert (apart.actor_optim_spec.learning_rate, apart.critic_optim_spec.learning_rate) == (0.1, 0.2)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["SoftActorCritic", "CrossQ"])
def test_critics_of_their_own_keep_their_optimizer(specs: Specs, name: str) -> None:
    """`shared` has no effect on separate critics."""
    optim = {f"{part}_optim_spec": {"name": "Adam", "lr": lr} for part, lr in (("actor", 0.1), ("critic", 0.2))}
    net = {"name": "MLPNet", "hid_layers": [8], "batch_norm": True, "shared": True, "use_same_optim": False, **optim}
    memory = {"name": "Replay", "batch_size": 8, "max_size": 100}
    changes = {
        "agent.algorithm": {"name": name},
        "agent.memory": memory,
        "agent.net": net,
        "env.name": "Pendulum-v1",
        "env.max_frame": 4000,
    }
    found = specs.load(changes).agent.net
    assert found is not None
    assert (found.actor_optim_spec.learning_rate, found.critic_optim_spec.learning_rate) == (0.1, 0.2)  # type: ignore[union-attr]


def test_exploration_of_q_learning(specs: Specs) -> None:
    """By default, ε-greedy exploration decays over a tenth of the frames; keys that are given take precedence."""
    dqn = {"agent.algorithm": {"name": "DQN"}, "agent.memory": {"name": "Replay"}}
    algorithm = specs.load(dqn).agent.algorithm
    assert (algorithm.action_policy, algorithm.action_pdtype) == ("epsilon_greedy", "Argmax")
    assert algorithm.explore_var_spec is not None
    assert [algorithm.explore_var_spec.value(frame) for frame in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.525, 0.05, 0.05])
    asked = specs.load(dqn | {"agent.algorithm.action_policy": "boltzmann", "agent.algorithm.explore_var_spec": DECAY}).agent.algorithm
    assert (asked.action_policy, asked.action_pdtype, asked.explore_var_spec and asked.explore_var_spec.end_val) == (
        "boltzmann",
        "Categorical",
        0.0,
    )
    sampled = specs.load(dqn | {"agent.algorithm.action_policy": "default", "agent.algorithm.action_pdtype": "Categorical"})
    assert sampled.agent.algorithm.explore_var_spec is None
    assert specs.load(dqn | {"agent.algorithm.name": "SARSA", "agent.memory": ...}).agent.algorithm.action_policy == "default"
    assert specs.notices() == []


def test_whole_numbers_of_schedulers_and_optimizers(specs: Specs) -> None:
    scheduler = {"name": "MultiStepLR", "milestones": [1e3, 2000.0], "gamma": 0.5}
    net = specs.load({"agent.net.lr_scheduler_spec": scheduler}).agent.net
    assert net is not None
    assert net.lr_scheduler_spec is not None
    found = net.lr_scheduler_spec.kwargs["milestones"]
    assert (found, [type(number) for number in found]) == ([1000, 2000], [int, int])
    problem = "agent.net.lr_scheduler_spec.milestones"
    assert specs.problems({"agent.net.lr_scheduler_spec": scheduler | {"milestones": [1e3, 1.5]}}) == [problem]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "slm-lab[atari]"),
        ("HalfCheetah-v5", "mujoco", "slm-lab[mujoco]"),
        ("LunarLander-v3", "Box2D", "slm-lab[box2d]"),
        ("MinAtar/Breakout-v1", "minatar", "slm-lab[minatar]"),
        ("AntMaze_UMaze-v5", "gymnasium_robotics", "slm-lab[robotics]"),
    ],
)
def test_env_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *more: None if module == package else find(module, *more))
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert env_ids.unavailable_reason(name) == f"{name} needs the package {package}: pip install '{extra}'"


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("MiniGrid-MultiRoom-N4-S5-v1", "minigrid", "minigrid"),
        ("MinAtar/Breakout-v0", "minatar", "minatar"),
        ("AntMaze_UMaze-v5", "gymnasium_robotics", "robotics"),
    ],
)
def test_an_id_of_a_package_with_and_without_its_module(
    name: str, module: str, extra: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: installed)
    for written in (name, f"{module}:{name}"):
        reason = env_ids.unavailable_reason(written)
        assert (reason is None) == installed
        assert (reason or "").startswith("" if installed else f"{name} needs the package {module}: pip install 'slm-lab[{extra}]'")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("MinAtar/Breakot-v1", "MinAtar/Breakout-v1"),
        ("MinAtar/SpaceInvaders-v2", "MinAtar/SpaceInvaders-v1"),
        ("Minatar/Asterix-v0", "MinAtar/Asterix-v1"),
    ],
)
def test_a_misspelt_id_of_minatar(name: str, suggested: str) -> None:
    assert f"unknown env '{name}'; did you mean '{suggested}'?" in (env_ids.unavailable_reason(name) or "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CheetahRum-v1", "did you mean 'CheetahRun-v1'?"),
        ("MetaWorld/Reech-v3", "did you mean 'MetaWorld/Reach-v3'?"),
        ("FetchReach-v3", "did you mean 'FetchReach-v4'?"),
        ("envpool:CartPol-v1", "EnvPool has no env 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        ("playground/CheetahRum", "did you mean 'playground/CheetahRun'?"),
        ("Cig-v1", "for several players"),
        ("Jumanji/Sudoku-v0", "a file of puzzles"),
    ],
)
def test_ids_of_envpool_that_are_refused(name: str, words: str) -> None:
    assert words in (env_ids.unavailable_reason(name) or "")


def test_ids_of_envpool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CheetahRun-v1", "envpool:CartPole-v1", "highway-fast-v0", "D1Basic-v1", "ConnectFour-v1", "intersection-multi-agent-v0"):
        assert env_ids.unavailable_reason(name) is None or not env_ids._is_installed("envpool")
    assert env_ids.envpool_id("CartPole-v1") is None
    assert env_ids.envpool_id("envpool:CartPole-v1") == "CartPole-v1"
    installed = env_ids._is_installed
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package != "envpool" and installed(package))
    assert env_ids.unavailable_reason("CheetahRun-v1") == "CheetahRun-v1 needs the package envpool: pip install 'slm-lab[envpool]'"
    assert "did you mean 'CheetahRun-v1'?" in (env_ids.unavailable_reason("CheetahRum-v1") or "")


@pytest.mark.parametrize(
    ("name", "tracked"),
    [
        ("MetaWorld/Reach-v3", ["success:max"]),
        ("FetchReach-v4", ["is_success"]),
        ("AdroitHandDoor-v1", ["success:max"]),
        ("CheetahRun-v1", []),
        ("CartPole-v1", []),
    ],
)
def test_success_is_tracked_by_default(specs: Specs, name: str, tracked: list[str]) -> None:
    assert specs.load({"env.name": name}).meta.track_info == tracked
    assert specs.load({"env.name": name, "meta.track_info": []}).meta.track_info == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpe2.simple_spread_v3:parallel_env", "write 'pettingzoo:mpe2.simple_spread_v3:parallel_env'"),
        ("pistonball_v6", "is an env of PettingZoo's kind, with several agents; write 'pettingzoo:pistonball_v6'"),
        ("jaxmarl:switch_riddle", "an env in JAX with several agents, which is not supported"),
        ("brax:ant", "is an env in JAX, not one of Gymnasium; to train in it, write a gymnasium.vector.VectorEnv around it"),
        ("jumanji:Game2048-v1", "not one of Gymnasium; EnvPool has 'Game2048-v1'; to train in it"),
    ],
)
def test_envs_of_several_agents_and_in_jax(name: str, words: str) -> None:
    assert words in (env_ids.unavailable_reason(name) or "")


def test_a_plain_id_means_the_same_env_whatever_is_installed_and_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It means EnvPool's env, even if the package has registered its own env of that id; a message names both."""
    import gymnasium

    name = "MiniGrid-DoorKey-8x8-v0"
    monkeypatch.setitem(gymnasium.registry, name, gymnasium.envs.registration.EnvSpec(name, "minigrid.envs:DoorKeyEnv"))
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package == "minigrid")
    assert env_ids.envpool_id(name) == name
    extra = "pip install 'slm-lab[envpool]'"
    assert (
        env_ids.unavailable_reason(name) == f'{name} needs the package envpool: {extra}; the package minigrid has it too: "minigrid:{name}"'
    )
    assert env_ids.unavailable_reason(f"minigrid:{name}") is None
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package == "envpool")
    assert env_ids.unavailable_reason(name) is None


def test_procgen_needs_qt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(env_ids, "find_library", lambda library: None)
    assert "apt-get install qtbase5-dev" in (env_ids.unavailable_reason("CoinrunHard-v0") or "")
    monkeypatch.setattr(env_ids, "find_library", lambda library: "libQt5Gui.so.5")
    assert env_ids.unavailable_reason("CoinrunHard-v0") is None


@pytest.mark.parametrize(("version", "refused"), [("1.2.5", True), ("1.2.6", False), ("1.10.0", False)])
def test_myosuite_is_refused_where_its_resets_are_the_same(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: True)
    monkeypatch.setattr(env_ids, "_version_of", lambda package: version)
    reason = env_ids.envpool_envs()["myoElbowPose1D6MRandom-v0"].unsupported_reason
    assert ("EnvPool 1.2.6" in (reason or "")) == refused


def test_envs_that_others_registered_are_known() -> None:
    import gymnasium

    assert env_ids.unavailable_reason("SpecRoomTest-v0") is not None
    gymnasium.register("SpecRoomTest-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    try:
        assert env_ids.unavailable_reason("SpecRoomTest-v0") is None
    finally:
        del gymnasium.registry["SpecRoomTest-v0"]


@pytest.mark.parametrize("init_fn", ["orthogonal_", "xavier_normal_", "kaiming_uniform_"])
def test_an_activation_without_a_gain_is_an_error_of_an_arc(specs: Specs, init_fn: str) -> None:
    net = {"type": "TorchArcNet", "arc": {"modules": {"body": {"LazyLinear": [4]}}}, "init_fn": init_fn, "hid_layers_activation": "silu"}
    assert specs.problems({"agent.net": net}) == ["agent.net.hid_layers_activation"]
    for change in ({"init_fn": "normal_"}, {"init_fn": None}, {"hid_layers_activation": "leaky_relu"}):
        specs.load({"agent.net": {**net, **change}})


def test_absent_lr_is_written_into_the_spec_unless_a_search_may_change_the_optimizer(specs: Specs) -> None:
    optim = {"agent.net.optim_spec": {"name": "RMSprop"}}
    saved = dump_spec(specs.load(optim))["ppo"]["agent"]["net"]["optim_spec"]
    assert saved == {"name": "RMSprop", "lr": 0.01}
    searched = specs.load(optim | {"search": {"agent": {"net": {"optim_spec": {"name__choice": ["Adam", "SGD"]}}}}})
    assert searched.agent.net is not None
    assert searched.agent.net.optim_spec.lr is None
    assert specs.notices() == []
