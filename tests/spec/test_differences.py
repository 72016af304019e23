"""Tests of specs written for SLM Lab: how they are recognised, which differences are noted, and the forms that only they have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.spec.compat.differences import transitions_at_first_update
from slm_lab.spec.load.loader import dump_spec, load_spec, load_specs, load_with_notices
from slm_lab.spec.models.search import parse_search
from slm_lab.spec.models.spec import SPEC_VERSION
from tests.spec.conftest import Specs, changed

V5: dict[str, Any] = {
    "agent": {
        "name": "A2C",
        "algorithm": {"name": "ActorCritic", "gamma": 0.98, "lam": 0.9, "training_frequency": 16},
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {"type": "MLPNet", "shared": True, "hid_layers": [8], "gpu": False},
    },
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_t": None, "max_frame": 800},
    "meta": {"distributed": False, "max_session": 2, "max_trial": 1},
}
DQN = {
    "agent.algorithm": {
        "name": "DoubleDQN",
        "action_pdtype": "Argmax",
        "action_policy": "epsilon_greedy",
        "explore_var_spec": {"name": "no_decay", "start_val": 0.1},
        "training_start_step": 32,
    },
    "agent.memory": {"name": "Replay", "batch_size": 32, "max_size": 1000},
    "agent.net.shared": ...,
    "agent.net.update_frequency": 100,
}
SAC = {
    "agent.algorithm": {"name": "SoftActorCritic"},
    "agent.memory": {"name": "Replay", "batch_size": 32, "max_size": 1000},
    "agent.net": {"type": "MLPNet", "hid_layers": [8], "update_type": "polyak", "polyak_coef": 0.01},
    "env.name": "Pendulum-v1",
    "env.max_frame": 5000,
}


PPO = {"name": "PPO", "gamma": 0.98, "lam": 0.9, "clip_eps_spec": {"name": "no_decay", "start_val": 0.2}, "training_epoch": 2}
ON_POLICY, OUTSIDE = ["time limits", "rows of resets"], ["actions outside the bounds"]
OFF_POLICY = ["rows of resets", "precision of the replay", "start of training"]
CRITIC = {"type": "MLPNet", "hid_layers": [16], "batch_norm": True, "loss_spec": {"name": "SmoothL1Loss"}}
FIXED = {"name": "no_decay", "start_val": 0.1}
IMAGES = {"type": "ConvNet", "shared": True, "batch_norm": False}
ARC = {
    "modules": {"linear": {"LazyLinear": {"out_features": 8}}, "norm": {"LazyBatchNorm1d": {}}},
    "graph": {"input": "x", "modules": {"linear": ["x"], "norm": ["linear"]}, "output": "norm"},
}


def v4(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the same spec in the v4 form."""
    return {**spec, "agent": [spec["agent"]], "env": [spec["env"]], "body": {"product": "outer", "num": 1}}


def loaded(specs: Specs, changes: dict[str, Any], base: dict[str, Any] = V5) -> list[str]:
    """Load a changed spec; return its differences from SLM Lab, a few words each."""
    differences = load_with_notices(specs.file({"it": changed(base, changes)}), "it").differences
    assert differences is not None
    return differences


@pytest.mark.parametrize(
    "changes",
    [
        {"agent.net.type": ..., "agent.net.name": "MLPNet"},  # the name of the key in this package
        {"meta.distributed": ...},
        {"meta.max_trial": ...},
        {"meta.distributed": None},
        {"meta.run": [{"git_sha": "0", "spec_version": SPEC_VERSION}]},  # a run saves this key
    ],
)
def test_specs_for_this_package_are_loaded_without_notes(specs: Specs, changes: dict[str, Any]) -> None:
    found = load_with_notices(specs.file({"it": changed(V5, changes)}), "it")
    assert found.differences is None
    assert not found.notes


def test_max_trial_may_be_null(specs: Specs) -> None:
    assert loaded(specs, {"meta.max_trial": None}) == ON_POLICY


def test_the_first_of_several_items_is_used(specs: Specs) -> None:
    """SLM Lab v4 does the same: its single-agent session reads item 0."""
    other = {**V5["env"], "name": "Acrobot-v1"}
    spec = load_spec(specs.file({"it": {**v4(V5), "env": [V5["env"], other]}}))
    assert spec.env.name == "CartPole-v1"
    assert "env" in specs.notices()


@pytest.mark.parametrize(("given", "envs"), [(True, 4), (False, 0)])
def test_evaluation_in_as_many_environments(specs: Specs, given: bool, envs: int) -> None:
    assert load_spec(specs.file({"it": changed(V5, {"meta.rigorous_eval": given})})).meta.rigorous_eval == envs


def test_without_a_critic_the_actors_optimizer_has_no_effect(specs: Specs) -> None:
    keys = {
        "agent.algorithm": {"name": "Reinforce", "gamma": 0.9, "training_frequency": 1},
        "agent.memory.name": "OnPolicyReplay",
        "agent.net.actor_optim_spec": {"name": "SGD", "lr": 0.1},
    }
    net = load_spec(specs.file({"it": changed(V5, keys)})).agent.net
    assert net is not None
    assert (net.optim_spec.name, net.optim_spec.lr, net.actor_optim_spec) == ("Adam", 0.001, None)
    assert "agent.net.actor_optim_spec" in specs.notices()
    ours = load_spec(specs.file({"it": changed(V5, keys | {"meta.max_trial": ...})})).agent.net
    assert ours is not None
    assert ours.optim_spec.name == "SGD"


def test_clip_vloss_ignores_the_loss(specs: Specs) -> None:
    loss = {"agent.net.loss_spec": {"name": "SmoothL1Loss"}}
    keys = {"agent.algorithm": PPO | {"time_horizon": 32, "minibatch_size": 8, "clip_vloss": True}, **loss}
    load_spec(specs.file({"it": changed(V5, keys)}))
    assert "agent.net.loss_spec" in specs.notices()


def test_a_saved_spec_is_one_for_this_package(specs: Specs) -> None:
    spec = load_spec(specs.file({"it": V5}))
    found = load_with_notices(dump_spec(spec), None)
    assert (found.differences, found.notes, found.specs) == (None, [], [spec])


@pytest.mark.parametrize("form", [dict, v4])
def test_one_line_for_each_difference(specs: Specs, form: Any) -> None:
    load_spec(specs.file({"it": form(V5)}))
    paths = [path.replace("[0]", "") for path in specs.notices()]
    assert sorted(set(paths) - {"agent", "env", "body"}) == ["env.name", "env.num_envs"]
    assert len(specs.told()) == len(set(specs.told()))


@pytest.mark.parametrize(
    ("changes", "topics"),
    [
        ({}, ["time limits", "rows of resets"]),
        ({"env.num_envs": 1}, ["time limits", "total_reward"]),
        ({"env.max_t": 50}, ["time limits", "max_t", "rows of resets"]),
        ({"env.name": "ALE/Pong-v5", "agent.net": {"type": "ConvNet", "shared": True}}, ["rows of resets", "batch_norm"]),
        ({"env.name": "ALE/Pong-v5", "agent.net": {"type": "ConvNet", "shared": True, "batch_norm": False}}, ["rows of resets"]),
        ({"meta.rigorous_eval": 4, "env.normalize_obs": True}, [*ON_POLICY, "evaluation", "normalisation in evaluation"]),
        ({"meta.rigorous_eval": 2}, ["time limits", "rows of resets", "evaluation"]),
        ({"agent.net.lr_scheduler_spec": {"name": "LinearToZero", "frame": 1000}}, ["time limits", "rows of resets", "LinearToZero"]),
        ({"agent.net.out_layer_activation": "tanh"}, ["time limits", "rows of resets", "out_layer_activation"]),
        (
            {"agent.net.shared": True, "agent.net.actor_init_std": 0.1},
            ["time limits", "rows of resets", "initialisation of the output layers"],
        ),
        ({"env.name": "Pendulum-v1", "agent.net.log_std_init": 0.0}, ["time limits", "rows of resets", "log_std_init"]),
        ({"agent.algorithm": PPO | {"time_horizon": 128, "minibatch_size": 400}}, ["time limits", "rows of resets", "minibatches"]),
        ({"agent.algorithm": PPO | {"time_horizon": 128, "minibatch_size": 256}}, ["time limits", "rows of resets"]),
        ({"meta.distributed": "synced"}, ["time limits", "rows of resets", "distributed"]),
        ({"agent.net": {"type": "RecurrentNet", "shared": True}}, ["time limits", "rows of resets", "RecurrentNet"]),
        (
            {"agent.net.shared": False, "agent.net.critic_init_std": 1.0},
            ["time limits", "rows of resets", "initialisation of the output layers"],
        ),
        ({"agent.algorithm.name": "SIL", "agent.memory.sil_replay_name": "Replay"}, ["time limits", "rows of resets", "self-imitation"]),
        (DQN, [*OFF_POLICY, "exploration"]),
        (DQN | {"agent.net.out_layer_activation": "tanh"}, [*OFF_POLICY, "exploration"]),
        (
            DQN | {"agent.net": {"type": "DuelingMLPNet", "hid_layers": [8], "layer_norm": True, "out_layer_activation": "tanh"}},
            [*OFF_POLICY, "exploration", "layer_norm", "out_layer_activation"],
        ),
        (DQN | {"agent.net": {"type": "DuelingMLPNet", "hid_layers": [8], "batch_norm": True}}, [*OFF_POLICY, "exploration", "batch_norm"]),
        (DQN | {"env.num_envs": 1}, ["time limits", "total_reward", *OFF_POLICY[1:]]),
        (
            DQN | {"agent.algorithm.name": "DQN", "env.num_envs": 1},
            ["time limits", "total_reward", "precision of the replay", "DQN", *OFF_POLICY[2:]],
        ),
        (
            DQN | {"agent.algorithm": {"name": "DoubleDQN"}, "env.num_envs": 1},
            ["time limits", "total_reward", *OFF_POLICY[1:], "exploration"],
        ),
        (
            DQN | {"agent.algorithm": {"name": "DoubleDQN", "action_policy": "default"}, "env.num_envs": 1},
            ["time limits", "total_reward", *OFF_POLICY[1:], "exploration"],
        ),
        (DQN | {"agent.algorithm.action_pdtype": ..., "env.num_envs": 1}, ["time limits", "total_reward", *OFF_POLICY[1:]]),
        (
            DQN | {"agent.memory": {"name": "PrioritizedReplay", "batch_size": 32, "max_size": 1000, "alpha": 0.6, "epsilon": 0.01}},
            [*OFF_POLICY[:2], "prioritised draws", "start of training", "exploration"],
        ),
        (
            {"agent.algorithm": {"name": "SARSA", "training_frequency": 8, "action_policy": "default"}, "agent.net.shared": ...},
            [*ON_POLICY, "SARSA"],
        ),
        (SAC, OFF_POLICY),
        (SAC | {"meta.rigorous_eval": 2}, [*OFF_POLICY, "evaluation"]),
        (SAC | {"agent.net.actor_optim_spec": {"name": "SGD", "lr": 0.1}}, [*OFF_POLICY, "optimizers of actor and critics"]),
        (SAC | {"agent.critic_net": {"type": "MLPNet", "hid_layers": [16]}}, [*OFF_POLICY, "critic_net"]),
        (
            SAC | {"agent.algorithm.name": "CrossQ", "agent.critic_net": CRITIC, "agent.net": {"type": "MLPNet", "hid_layers": [8]}},
            [*OFF_POLICY, "loss_spec"],
        ),
        ({"env.normalize_reward": True}, [*ON_POLICY, "normalize_reward"]),
        ({"env.name": "HalfCheetah-v5"}, [*ON_POLICY, "actions outside the bounds"]),
        (
            {"env.name": "HalfCheetah-v5", "agent.algorithm.action_pdtype": "MultivariateNormal"},
            [*ON_POLICY, *OUTSIDE, "MultivariateNormal"],
        ),
        ({"agent.net.normalize": True, "agent.net.type": "TorchArcNet", "agent.net.arc": ARC}, [*ON_POLICY, "batch_norm", "normalize"]),
        ({"agent.net.layer_norm": True, "agent.net.batch_norm": True}, [*ON_POLICY, "batch_norm", "layer_norm"]),
        (
            {
                "agent.algorithm": PPO
                | {"time_horizon": 32, "minibatch_size": 8, "action_policy": "epsilon_greedy", "explore_var_spec": FIXED}
            },
            [*ON_POLICY, "exploration"],
        ),
        (
            {"agent.algorithm.lam": ..., "agent.algorithm.num_step_returns": 3, "agent.memory.name": "OnPolicyReplay"},
            [*ON_POLICY, "num_step_returns"],
        ),
        (
            {"env.name": "ALE/Pong-v5", "env.num_envs": 1, "agent.net": IMAGES},
            ["total_reward", "Atari with one environment", "clip_reward"],
        ),
    ],
)
def test_what_differs(specs: Specs, changes: dict[str, Any], topics: list[str]) -> None:
    assert loaded(specs, changes) == topics


@pytest.mark.parametrize(
    ("schedule", "differs"),
    [
        ({"name": "linear_decay", "start_val": 0.1, "end_val": 0.01}, False),
        ({"name": "linear_decay", "start_val": 0.1, "end_val": 0.1}, False),
        ({"name": "linear_decay", "start_val": 0.1, "end_val": 0}, True),
        ({"name": "linear_decay", "start_val": 0.1, "end_val": 0.2}, True),
        ({"name": "rate_decay", "start_val": 0.1, "end_val": 0.01}, True),
        ({"name": "periodic_decay", "start_val": 0.1, "end_val": 0.01}, True),
        ({"name": "no_decay", "start_val": 0.1}, False),
    ],
)
def test_schedules_that_differ(specs: Specs, schedule: dict[str, Any], differs: bool) -> None:
    steps = {} if schedule["name"] == "no_decay" else {"start_step": 0, "end_step": 500}
    assert ("schedules" in loaded(specs, {"agent.algorithm.entropy_coef_spec": schedule | steps})) == differs


def test_no_decay_is_end_val(specs: Specs) -> None:
    schedule = {"name": "no_decay", "start_val": 0.2, "end_val": 0.05, "start_step": 0, "end_step": 100}
    theirs = load_spec(specs.file({"it": changed(V5, {"agent.algorithm.entropy_coef_spec": schedule})}))
    assert theirs.agent.algorithm.entropy_coef_spec.value(0) == 0.05
    ours = load_spec(specs.file({"it": changed(V5, {"agent.algorithm.entropy_coef_spec": schedule, "meta.max_trial": ...})}))
    assert ours.agent.algorithm.entropy_coef_spec.value(0) == 0.2


def test_check_ends_with_a_line_of_what_differs(specs: Specs, capsys: pytest.CaptureFixture[str]) -> None:
    two = {"one": V5, "two": changed(V5, DQN | {"env.num_envs": 1})}
    assert main(["check", str(specs.file(two))]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("written for SLM Lab")
    for topic in ("time limits", "rows of resets", "total_reward", "precision of the replay"):
        assert last.count(topic) == 1
    assert main(["check", str(specs.file({"one": changed(V5, {"meta.max_trial": ...})}))]) == 0
    assert "SLM Lab" not in capsys.readouterr().out
    random = changed(V5, {"agent.algorithm": {"name": "Random"}, "agent.net": {}, "agent.memory": ...})
    assert main(["check", str(specs.file({"one": v4(random)}))]) == 0
    assert "same" in capsys.readouterr().out.splitlines()[-1]


def test_a_searched_key_without_a_valid_value_is_not_searched(specs: Specs) -> None:
    """SLM Lab's hydra_dqn.json has such a key. A key with some valid values keeps these values."""
    net = {"type": "HydraMLPNet", "shared": True, "hid_layers": [[[8]], [8], []]}
    search = {"agent": {"net": {"hid_layers__choice": [[32], [64]]}, "algorithm": {"gamma__choice": [0.9, 2.0]}}}
    spec = load_spec(specs.file({"it": changed(V5, {"agent.net": net, "search": search})}))
    assert spec.search == {"agent": {"net": {}, "algorithm": {"gamma__choice": [0.9]}}}
    assert {"search.agent.net.hid_layers__choice", "search.agent.algorithm.gamma__choice"} <= set(specs.notices())


def test_the_last_of_two_equal_keys_counts_in_a_v4_file(specs: Specs) -> None:
    text = json.dumps({"it": v4(V5), "other": v4(V5)}).replace('"gamma": 0.98', '"gamma": 0.5, "gamma": 0.7', 1)
    file = specs.file(text)
    assert load_spec(file, "it").agent.algorithm.gamma == 0.7
    assert [note for note in specs.told() if "duplicate" in note and "'gamma'" in note and note.startswith("it: line 1, ")]
    specs.log.clear()
    assert load_spec(file, "other").agent.algorithm.gamma == 0.98
    assert not [note for note in specs.told() if "duplicate" in note]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"it": V5}).replace('"gamma": 0.98', '"gamma": 0.5, "gamma": 0.7'),
        json.dumps({"it": v4(V5)})[:-1] + ', "it": 3}',  # it is unknown which spec is meant
        json.dumps({"it": V5, "old": v4(V5)}).replace('"gamma": 0.98', '"gamma": 0.5, "gamma": 0.7', 1),
    ],
)
def test_equal_keys_elsewhere_are_refused(specs: Specs, text: str) -> None:
    assert specs.found(load_specs, specs.file(text)) == [""]


@pytest.mark.parametrize(("key", "algorithm"), [("gamma__uniform", "random"), ("gamma__grid_search", "grid")])
def test_the_search_algorithm_of_v4(specs: Specs, key: str, algorithm: str) -> None:
    search = {"agent": [{"algorithm": {key: [0.9, 0.99]}}]}
    spec = load_spec(specs.file({"it": v4(changed(V5, {"meta.search": "RandomSearch", "search": search}))}))
    assert spec.meta.search_algorithm == algorithm
    assert "meta.search" in specs.notices()
    assert load_spec(specs.file({"it": changed(V5, {"meta.search": "RandomSearch"})})).meta.search_algorithm == "random"
    assert specs.found(load_spec, specs.file({"it": changed(V5, {"meta.search": "Bayes"})})) == ["meta.search"]


@pytest.mark.parametrize(
    ("value", "update", "becomes"), [(0.9, "replace", 1), (0.9, "polyak", 1), (0.25, "replace", 1), (100, "replace", 100)]
)
def test_update_frequency_below_a_step(specs: Specs, value: float, update: str, becomes: int) -> None:
    changes = DQN | {"agent.net.update_frequency": value, "agent.net.update_type": update, "agent.net.polyak_coef": 0.1}
    spec = load_spec(specs.file({"it": changed(V5, changes)}))
    assert spec.agent.net is not None
    assert spec.agent.net.update_frequency == becomes
    assert ("agent.net.update_frequency" in specs.notices()) == (value < 1)


@pytest.mark.parametrize("value", [1.5, 0, -0.5])
def test_other_fractions_of_update_frequency_are_refused(specs: Specs, value: float) -> None:
    file = specs.file({"it": changed(V5, DQN | {"agent.net.update_frequency": value})})
    assert specs.found(load_spec, file) == ["agent.net.update_frequency"]


def test_a_loss_where_no_values_are_learned(specs: Specs) -> None:
    loss = {"agent.net.loss_spec": {"name": "CrossEntropyLoss"}}
    reinforce = loss | {"agent.algorithm": {"name": "Reinforce", "training_frequency": 2}, "agent.memory.name": "OnPolicyReplay"}
    spec = load_spec(specs.file({"it": changed(V5, reinforce)}))
    assert "agent.net.loss_spec.name" in specs.notices()
    assert spec.agent.net is not None
    assert spec.agent.net.loss_spec.name == "MSELoss"
    assert specs.found(load_spec, specs.file({"it": changed(V5, loss)})) == ["agent.net.loss_spec.name"]
    sets = ["agent.net.loss_spec.name=CrossEntropyLoss"]
    assert specs.found(load_spec, specs.file({"it": changed(V5, reinforce)}), None, sets) == ["agent.net.loss_spec.name"]


@pytest.mark.parametrize("net", [{}, {"gpu": False}, {"hid_layers": [8]}])
def test_a_net_without_type(specs: Specs, net: dict[str, Any]) -> None:
    random = {"agent.algorithm": {"name": "Random"}, "agent.net": net, "env.name": "tests.spec.user.models:Nowhere-v0"}
    assert load_spec(specs.file({"it": changed(V5, random)})).agent.net is None
    named = load_spec(specs.file({"it": changed(V5, {"agent.net": {"hid_layers": [8], "shared": True}})})).agent.net
    assert named is not None
    assert named.name == "MLPNet"


def test_keys_that_slm_lab_ignores_in_that_place(specs: Specs) -> None:
    load_spec(specs.file({"it": v4(changed(V5, {"agent.algorithm.normalize_state": True}))}))
    assert "agent[0].algorithm.normalize_state" in specs.notices()


def test_lookahead_of_a_global_net(specs: Specs) -> None:
    optim = {"name": "Lookahead", "optimizer": "RAdam", "k": 5, "lr": 0.02}
    spec = load_spec(specs.file({"it": v4(changed(V5, {"meta.distributed": "synced", "agent.net.optim_spec": optim}))}))
    assert spec.agent.net is not None
    assert spec.agent.net.optim_spec.model_dump() == {"name": "RAdam", "lr": 0.02}


@pytest.mark.parametrize(
    ("name", "env", "keys", "words"),
    [
        ("playground/CheetahRun", "CheetahRun-v1", None, "physics is C MuJoCo, not MJX"),
        ("playground/Go1Getup", "MuJoCoPlayground/Go1Getup-v1", ["state"], 'env.obs_keys is set to ["state"]'),
        ("playground/PendulumSwingup", "PendulumSwingup-v1", None, "repeats each action four times"),
    ],
)
def test_playground_envs_run_in_envpool(specs: Specs, name: str, env: str, keys: list[str] | None, words: str) -> None:
    loaded = load_with_notices(specs.file({"it": changed(V5, {"env.name": name})}), "it")
    (spec,) = loaded.specs
    assert (spec.env.name, spec.env.obs_keys) == (env, keys)
    (note,) = [note for note in loaded.notes if "MJX" in note]
    assert words in note
    own = load_with_notices(specs.file({"it": changed(V5, {"env.name": env})}), "it")
    assert not [note for note in own.notes if "MJX" in note]
    assert own.specs[0].env.obs_keys is None


@pytest.mark.parametrize(
    "name",
    ["Unity3DBall-v0", "gridworld", "RoboschoolHumanoidFlagrun-v1", "RoboschoolPong-v1", "KukaBulletEnv-v0", "playground/Nothing"],
)
def test_envs_that_are_no_more(specs: Specs, name: str) -> None:
    assert specs.found(load_spec, specs.file({"it": v4(changed(V5, {"env.name": name}))})) == ["env[0].name"]
    with pytest.raises(Exception, match=r"no package provides|not an env of DeepMind Control"):
        load_spec(specs.file({"it": changed(V5, {"env.name": name})}))


SEARCH = {
    "agent": {
        "agent": {"training_frequency__choice": [8, 16]},  # a key of another section: SLM Lab sets it, but nothing reads it
        "algorithm": {"gamma__uniform": [0.9, 0.99], "entropy_coef_spec": {"start_step__choice": [0, 100, 900]}},
    }
}
ENTROPY = {"name": "linear_decay", "start_val": 0.1, "end_val": 0.01, "start_step": 0, "end_step": 500}


def test_search_keys_without_effect_are_not_searched(specs: Specs) -> None:
    changes = {"search": SEARCH, "agent.algorithm.entropy_coef_spec": ENTROPY}
    spec = load_spec(specs.file({"it": changed(V5, changes)}))
    assert spec.search is not None
    assert {key.text: key.args for key in parse_search(spec.search)} == {
        "agent.algorithm.gamma": (0.9, 0.99),
        "agent.algorithm.entropy_coef_spec.start_step": (0, 100),
    }
    found = ["search.agent.agent.training_frequency__choice", "search.agent.algorithm.entropy_coef_spec.start_step__choice"]
    assert [path for path in specs.notices() if path.startswith("search")] == found
    ours = specs.file({"it": changed(V5, changes | {"meta.max_trial": ...})})
    assert specs.found(load_spec, ours) == [f"{found[0]} (unknown)", found[1]]
    typo = {"search": {"agent": {"algorithm": {"gama__choice": [0.9]}}}}
    assert specs.found(load_spec, specs.file({"it": changed(V5, typo)})) == ["search.agent.algorithm.gama__choice (unknown)"]


def test_priorities_without_epsilon(specs: Specs) -> None:
    memory = {"agent.memory": {"name": "PrioritizedReplay", "alpha": 1.0, "epsilon": 0.0, "batch_size": 4, "max_size": 100}}
    spec = load_spec(specs.file({"it": changed(V5, DQN | memory)}))
    assert spec.agent.memory.model_dump()["epsilon"] == 0


@pytest.mark.parametrize(
    ("horizon", "minibatch", "used"),
    [(17, 30, (20, 32)), (16, 30, (16, 32)), (17, 32, (20, 32)), (16, 32, (16, 32)), (3, 99, (4, 16))],  # at most a rollout
)
def test_sizes_of_ppo_are_multiples_of_num_envs(specs: Specs, horizon: int, minibatch: int, used: tuple[int, int]) -> None:
    """The sizes are rounded up, as in SLM Lab; in a spec for this package they are used as written."""
    algorithm = {"name": "PPO", "gamma": 0.98, "lam": 0.9, "time_horizon": horizon, "minibatch_size": minibatch}
    spec = load_spec(specs.file({"it": changed(V5, {"agent.algorithm": algorithm})}), "it")
    assert (spec.agent.algorithm.time_horizon, spec.agent.algorithm.minibatch_size) == used  # type: ignore[attr-defined]
    own = load_spec(specs.file({"it": changed(V5, {"agent.algorithm": algorithm, "meta.max_trial": ...})}), "it").agent.algorithm
    assert (own.time_horizon, own.minibatch_size) == (horizon, min(minibatch, 4 * horizon))  # type: ignore[attr-defined]


def test_what_ppo_rounds_is_noted(specs: Specs) -> None:
    algorithm = {"name": "PPO", "gamma": 0.98, "lam": 0.9, "time_horizon": 17, "minibatch_size": 32}
    file = specs.file({"it": changed(V5, {"agent.algorithm": algorithm})})
    rounded = [note for note in load_with_notices(file, "it").notes if "rounded" in note]
    assert rounded == ["it: agent.algorithm.time_horizon: 17 is rounded up to a multiple of num_envs (4) in SLM Lab; 20 is used"]
    assert not [note for note in load_with_notices(file, "it", ["agent.algorithm.time_horizon=18"]).notes if "rounded" in note]


def test_an_absent_minibatch_size_of_ppo_is_noted(specs: Specs) -> None:
    algorithm = {"name": "PPO", "gamma": 0.98, "lam": 0.9, "time_horizon": 32}
    spec = load_spec(specs.file({"it": changed(V5, {"agent.algorithm": algorithm})}), "it")
    assert spec.agent.algorithm.minibatch_size == 64  # type: ignore[attr-defined]
    assert "minibatch_size" in loaded(specs, {"agent.algorithm": algorithm})
    assert "minibatch_size" not in loaded(specs, {"agent.algorithm": {**algorithm, "minibatch_size": 64}})


def test_lam_wins_over_num_step_returns(specs: Specs) -> None:
    algorithm = {"name": "ActorCritic", "gamma": 0.98, "lam": 0.9, "num_step_returns": 5, "training_frequency": 16}
    spec = load_spec(specs.file({"it": changed(V5, {"agent.algorithm": algorithm})}), "it")
    assert (spec.agent.rollout_len, spec.agent.algorithm.num_step_returns) == (16, None)  # type: ignore[attr-defined]


PONG = {"env.name": "PongNoFrameskip-v4", "agent.net": IMAGES}
V4_ATARI = {"repeat_action_probability": 0.0, "life_loss_info": True}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, [*V4_ATARI]),
        ({"env.repeat_action_probability": 0.0}, ["life_loss_info"]),
        ({"env.episodic_life": False}, ["repeat_action_probability"]),
        ({"env.life_loss_info": None}, [*V4_ATARI]),
        ({"env.name": "PongNoFrameskip-v0"}, ["life_loss_info"]),
        ({"env.name": "PongDeterministic-v4"}, ["repeat_action_probability"]),
        ({f"env.{key}": value for key, value in V4_ATARI.items()}, []),
        ({"env.name": "ALE/Pong-v5"}, []),
    ],
)
def test_what_old_atari_ids_meant_is_noted(specs: Specs, changes: dict[str, Any], keys: list[str]) -> None:
    """There is one notice for each key that would restore the old meaning and is not set."""
    file = specs.file({"it": v4(changed(V5, PONG | changes))})
    found = load_with_notices(file, "it")
    assert [key for key in V4_ATARI if any(f"set env.{key} to" in note for note in found.notes)] == sorted(keys, key=[*V4_ATARI].index)
    assert found.differences is not None
    assert ("old Atari ids" in found.differences) == bool(keys)
    for sets in ([f"env.{key}={json.dumps(value)}" for key, value in V4_ATARI.items()], ["env.name=ALE/Pong-v5"]):
        assert not [note for note in load_with_notices(file, "it", sets).notes if "set env." in note]
    renamed = load_with_notices(file, "it", ["env.name=PongNoFrameskip-v4"]).notes
    assert any("set env." in note for note in renamed) == (not V4_ATARI.keys() <= {key.removeprefix("env.") for key in changes})


def test_in_a_spec_for_this_package_sticky_actions_of_an_old_atari_id_are_noted(specs: Specs) -> None:
    found = load_with_notices(specs.file({"it": changed(V5, PONG | {"meta.max_trial": ...})}), "it")
    assert [note.partition(":")[2].partition(": an")[0] for note in found.notes if "is now" not in note] == [" env.name: sticky actions"]


PER = {"name": "PrioritizedReplay", "batch_size": 32, "max_size": 1000, "alpha": 0.6, "epsilon": 0.01}
DQN_RNN = DQN | {"agent.net": {"type": "RecurrentNet", "seq_len": 4}, "agent.memory": PER}
SIL_RNN = {"agent.algorithm.name": "SIL", "agent.net": {"type": "RecurrentNet", "shared": True}}
CUT, SEQUENCES, DRAWS = "returns at the end of a rollout", "priorities of sequences", "prioritised draws"


@pytest.mark.parametrize(
    ("topic", "changes", "differs"),
    [
        ("normalize_advantages", {}, False),
        ("normalize_advantages", {"agent.algorithm.normalize_advantages": False}, True),
        (CUT, {"agent.algorithm.lam": ...}, True),
        (CUT, {}, False),
        (CUT, {"agent.algorithm.lam": ..., "agent.algorithm.num_step_returns": 8}, False),
        (CUT, {"agent.algorithm.lam": ..., "agent.memory.name": "OnPolicyReplay"}, False),
        (SEQUENCES, DQN_RNN, True),  # SLM Lab has no replay of sequences; given keys mean the same with any net
        (SEQUENCES, DQN_RNN | {"agent.memory.beta": 0.5}, True),
        (SEQUENCES, DQN_RNN | {"agent.memory.initial_error": 1.0}, True),
        (SEQUENCES, DQN_RNN | {"agent.memory.beta": 0.5, "agent.memory.initial_error": 1.0}, False),
        (SEQUENCES, DQN | {"agent.memory": PER}, False),
        (SEQUENCES, DQN_RNN | {"agent.memory": DQN["agent.memory"]}, False),
        (SEQUENCES, SIL_RNN | {"agent.memory.sil_replay_name": "PrioritizedReplay"}, True),
        (SEQUENCES, SIL_RNN | {"agent.memory.sil_replay_name": "Replay"}, False),
        (DRAWS, SIL_RNN | {"agent.memory.sil_replay_name": "PrioritizedReplay"}, True),
        (DRAWS, SIL_RNN | {"agent.memory.sil_replay_name": "Replay"}, False),
    ],
)
def test_whether_a_topic_differs(specs: Specs, topic: str, changes: dict[str, Any], differs: bool) -> None:
    assert (topic in loaded(specs, changes)) == differs


def test_each_difference_of_priorities_is_noted(specs: Specs) -> None:
    load_spec(specs.file({"it": changed(V5, DQN_RNN)}))
    assert specs.notices().count("agent.memory.name") == 4


def test_an_absent_polyak_coef_is_one_notice_and_a_topic(specs: Specs) -> None:
    absent = SAC | {"agent.net": {"type": "MLPNet", "hid_layers": [8], "update_type": "polyak"}}
    found = load_with_notices(specs.file({"it": changed(V5, absent)}), "it")
    assert found.differences == [*OFF_POLICY, "polyak_coef"]
    assert len([note for note in found.notes if "polyak_coef" in note]) == 1


def trainings(start: int, every: int, envs: int, theirs: bool) -> list[int]:
    """Return the transitions at the first 50 trainings by the rules of Replay (SLM Lab v5.3: add_experience, with head = seen − 1)."""
    found, seen = list[int](), 0
    while len(found) < 50:
        step = range(seen + 1, seen + envs + 1)
        seen += envs
        if theirs and any(one > start and (one - 1) % every == 0 for one in step):
            found.append(seen)
        if not theirs and seen >= start and seen // every > (seen - envs) // every:
            found.append(seen)
    return found


@pytest.mark.parametrize("start", [0, 1, 7, 8, 30, 32, 33])
@pytest.mark.parametrize("every", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("envs", [1, 2, 4, 6, 8, 9])
def test_the_start_of_training(start: int, every: int, envs: int) -> None:
    """After the first trainings, both packages train in the same vector steps if training_frequency is at most num_envs."""
    ours, theirs = (trainings(start, every, envs, one) for one in (False, True))
    assert transitions_at_first_update(start, every, envs) == (ours[0], theirs[0])
    assert (set(ours[10:40]) <= set(theirs)) == (every <= envs)


@pytest.mark.parametrize(
    ("envs", "every", "start", "paths"),
    [
        (4, 1, 32, ["training_start_step"]),
        (4, 4, 30, ["training_start_step"]),
        (4, 1, 30, []),
        (1, 4, 32, ["training_start_step", "training_frequency"]),
        (4, 8, 29, ["training_start_step", "training_frequency"]),
    ],
)
def test_the_start_of_training_is_noted(specs: Specs, envs: int, every: int, start: int, paths: list[str]) -> None:
    keys = {"env.num_envs": envs, "agent.algorithm.training_frequency": every, "agent.algorithm.training_start_step": start}
    file = specs.file({"it": changed(V5, DQN | keys)})
    assert ("start of training" in loaded(specs, DQN | keys)) == bool(paths)
    load_spec(file)
    assert [path for path in specs.notices() if ".training_" in path] == [f"agent.algorithm.{path}" for path in paths]


def test_a_choice_loses_the_values_that_contradict_the_spec_and_a_range_is_refused(specs: Specs) -> None:
    """A rollout of 512 steps is longer than the run. A range is refused as a whole, because its two ends belong together."""
    key = "agent.algorithm.training_frequency"
    spec = load_spec(specs.file({"it": changed(V5, {"search": {f"{key}__choice": [16, 512]}})}), "it")
    assert spec.search == {f"{key}__choice": [16]}
    whole = specs.file({"it": changed(V5, {"search": {f"{key}__qrandint": [16, 512, 16]}})})
    assert specs.found(load_spec, whole, "it") == [f"search.{key}__qrandint"]
