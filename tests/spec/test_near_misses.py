"""Tests of nearly correct inputs: each is an error before the first step or runs as requested; none trains something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.report import to_path
from tests.spec.conftest import PPO, Specs, changed

DECAY = {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "start_step": 0, "end_step": 100}
DQN: dict[str, Any] = {"agent.algorithm": {"name": "DQN"}, "agent.memory": {"name": "Replay"}}
GREEDY: dict[str, Any] = DQN | {"agent.algorithm": {"name": "DQN", "action_pdtype": "Argmax", "explore_var_spec": DECAY}}
LONG: dict[str, Any] = {"env.max_frame": 100_000}
SAMPLED: dict[str, Any] = {"env.num_envs": ..., "meta.sampler": {}}
SYNCED: dict[str, Any] = {"meta.distributed": "synced", "agent.net.optim_spec": {"name": "GlobalAdam"}}
A2C: dict[str, Any] = {"agent.algorithm": {"name": "ActorCritic"}}
CONSTANT = '{"name": "no_decay", "start_val": 0.1, "end_val": 0.2}'
SHORT: dict[str, Any] = {"agent.net": ..., "agent.memory": ...}
RNN: dict[str, Any] = {"agent.net": {"type": "RecurrentNet", "seq_len": 64}}

ERRORS: list[tuple[dict[str, Any], list[str], str]] = [
    # keys
    ({"agent.algorithm.gama": 0.5}, [], "agent.algorithm.gama (unknown)"),
    ({"agent.algorithm.learning_rate": 0.5}, [], "agent.algorithm.learning_rate (unknown)"),
    ({"agent.algorithm.n_steps": 8}, [], "agent.algorithm.n_steps (unknown)"),
    ({"agent.algorithm.ent_coef": 0.1}, [], "agent.algorithm.ent_coef (unknown)"),
    ({"agent.net.policy_kwargs": {}}, [], "agent.net.policy_kwargs (unknown)"),
    ({"agent.memory.buffer_size": 10}, [], "agent.memory.buffer_size (unknown)"),
    ({"meta.seed": 1}, [], "meta.seed (unknown)"),
    ({"seed": 1}, [], "seed (unknown)"),
    ({"agent.net.lr_scheduler_spec": {"name": "StepLR", "step_size": 2.5}}, [], "agent.net.lr_scheduler_spec.step_size"),
    ({"agent.algorithm.name": "PP0"}, [], "agent.algorithm.name"),
    # keys that request behaviour which would not happen
    ({"agent.algorithm.explore_var_spec": DECAY}, [], "agent.algorithm.explore_var_spec"),
    (
        DQN | {"agent.algorithm": {"name": "DQN", "action_policy": "default", "explore_var_spec": DECAY}},
        [],
        "agent.algorithm.explore_var_spec",
    ),
    (GREEDY, ["agent.algorithm.action_policy=boltzmann"], "agent.algorithm.action_policy"),
    (DQN | {"agent.algorithm": {"name": "SoftActorCritic"}}, ["agent.net.shared=true"], "agent.net.shared"),
    ({"agent.algorithm.rho_bar": 2.0}, [], "agent.algorithm.rho_bar"),
    ({"meta.hogwild_lock": True}, [], "meta.hogwild_lock"),
    ({"meta.max_restart": 3}, [], "meta.max_restart"),
    ({"meta.save_replay": True}, [], "meta.save_replay"),
    (SYNCED | {"agent.algorithm": {"name": "Random"}}, [], "meta.distributed"),
    (SAMPLED | {"meta.sampler": {"pbt": {}}}, [], "meta.sampler.pbt"),
    (SAMPLED | DQN | {"meta.sampler": {"max_policy_lag": 5}}, [], "meta.sampler.max_policy_lag"),
    # env ids
    ({"env.name": "CartPol-v1"}, [], "env.name"),
    ({"env.name": "Pong-v6"}, [], "env.name"),
    ({"env.name": "Pong-ram-v4"}, [], "env.name"),
    ({"env.name": "BlackjackNoFrameskip-v4"}, [], "env.name"),
    ({"env.name": "CartPole-v9"}, [], "env.name"),
    # --set
    ({}, ["gamma=0.5"], " (unknown)"),
    ({}, ["learning_rate=0.5"], " (unknown)"),
    ({}, ["env=CartPole-v0"], " (unknown)"),
    ({}, ["agent.algorithm.gama=0.5"], "agent.algorithm.gama (unknown)"),
    ({}, ["agent.algorthm.gamma=0.5"], "agent.algorthm (unknown)"),
    ({}, ["agent.algorithm.training_frequency=8"], "agent.algorithm.training_frequency"),
    ({}, ["agent.algorithm.training_start_step=8"], "agent.algorithm.training_start_step"),
    ({}, ["agent.memory.batch_size=8"], "agent.memory.batch_size"),
    ({}, ["agent.net.polyak_coef=0.1"], "agent.net.polyak_coef"),
    ({}, ["agent.net.conv_hid_layers=[[8, 3]]"], "agent.net.conv_hid_layers"),
    ({}, ["agent.critic_net.type=MLPNet"], "agent.critic_net"),
    ({}, ["env.frame_op=concat"], "env.frame_op"),
    ({}, ["meta.run.git_sha=abc"], "meta.run.git_sha"),
    ({}, ["agent.algorithm.foo=null"], "agent.algorithm.foo (unknown)"),
    ({}, ["env.nonsense=null"], "env.nonsense (unknown)"),
    ({}, ["meta.eval_frequency=100"], "meta.eval_frequency"),
    ({"meta.eval_deterministic": True}, [], "meta.eval_deterministic"),
    ({"agent.net.gpu": False}, ["agent.net.cuda_id=1"], "agent.net.cuda_id"),
    (DQN, ["agent.net.actor_init_std=0.1"], "agent.net.actor_init_std"),
    (DQN, ["agent.net.shared=true"], "agent.net.shared"),
    ({}, [f"agent.algorithm.clip_eps_spec={CONSTANT}"], "agent.algorithm.clip_eps_spec.end_val"),
    (SAMPLED | LONG | {"meta.sampler": {"async_rl": False}}, ["meta.sampler.max_policy_lag=5"], "meta.sampler.max_policy_lag"),
    (SAMPLED | LONG | {"meta.sampler": {"inference": "local"}}, ["meta.sampler.worker_num_splits=4"], "meta.sampler.worker_num_splits"),
    (SAMPLED | LONG | {"meta.sampler": {"serial_mode": True}}, ["meta.sampler.async_rl=true"], "meta.sampler.async_rl"),
    (SAMPLED | LONG | {"meta.sampler": {"serial_mode": True}}, ["meta.sampler.inference=central"], "meta.sampler.inference"),
    # short specs
    (SHORT | {"agent.algorithm.gama": 0.5}, [], "agent.algorithm.gama (unknown)"),
    (SHORT, ["agent.algorithm.gamma=0,5"], "agent.algorithm.gamma"),
    (SHORT | A2C, ["env.max_frame=100"], "agent.algorithm.training_frequency"),
    (SHORT | {"meta.sampler": {}, "env.num_envs": ...}, [], "meta.sampler.num_batches_per_epoch"),
    ({"agent.net.polyak_coef": "${polyak}"}, ["polyak=0.1"], "agent.net.polyak_coef"),
    # sizes: no update within max_frame (1000 frames of 4 envs: 250 steps)
    ({"agent.algorithm.time_horizon": 251}, [], "agent.algorithm.time_horizon"),
    ({}, ["env.max_frame=100"], "agent.algorithm.time_horizon"),
    (A2C | {"agent.algorithm.training_frequency": 251}, [], "agent.algorithm.training_frequency"),
    (A2C | {"agent.algorithm.num_step_returns": 251}, [], "agent.algorithm.num_step_returns"),
    (
        {"agent.algorithm": {"name": "Reinforce", "training_frequency": 1001}, "agent.memory.name": "OnPolicyReplay"},
        [],
        "agent.algorithm.training_frequency",
    ),
    (DQN | {"agent.algorithm.training_start_step": 1000}, [], "agent.algorithm.training_start_step"),
    (DQN | {"agent.algorithm.training_frequency": 1001}, [], "agent.algorithm.training_frequency"),
    (DQN | {"agent.memory.batch_size": 1001}, [], "agent.memory.batch_size"),
    (SAMPLED | {"env.max_frame": 2000}, [], "meta.sampler.num_batches_per_epoch"),
    (SYNCED | {"meta.max_session": 4, "agent.algorithm.time_horizon": 64}, [], "agent.algorithm.time_horizon"),
    (RNN | A2C, [], "agent.net.seq_len"),
    (SAMPLED | {"meta.sampler": {"num_batches_per_epoch": 3}}, [], "meta.sampler.num_batches_per_epoch"),
]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("changes", "sets", "problem"), ERRORS)
def test_an_error_before_the_first_step(specs: Specs, changes: dict[str, Any], sets: list[str], problem: str) -> None:
    assert specs.problems(changes, sets) == [problem]


RUNS: list[tuple[dict[str, Any], list[str], str, Any, list[str]]] = [
    # changes, --set → a key, its value in the spec that runs, notices
    ({"env.name": "Blackjack-v1"}, [], "env.name", "Blackjack-v1", []),
    ({"env.name": "CartPole-v0"}, [], "env.name", "CartPole-v0", []),
    ({"env.name": "Hopper-v4"}, [], "env.name", "Hopper-v4", []),
    ({"env.name": "Ant-v4"}, [], "env.name", "Ant-v4", []),
    ({"env.name": "Hopper-v3"}, [], "env.name", "Hopper-v5", ["env.name"]),
    ({"env.name": "PongDeterministic-v4"}, [], "env.name", "ALE/Pong-v5", ["env.name", "env.name"]),
    ({"env.name": "VideoPinball-v0"}, [], "env.name", "ALE/VideoPinball-v5", ["env.name"]),
    ({"env.name": "Pong-v5"}, [], "env.name", "ALE/Pong-v5", ["env.name"]),  # EnvPool's id of the game
    (DQN, [], "agent.algorithm.action_policy", "epsilon_greedy", []),
    (
        GREEDY | {"agent.algorithm.action_policy": "boltzmann"},
        [],
        "agent.algorithm.action_pdtype",
        "Argmax",
        ["agent.algorithm.action_policy"],
    ),
    ({"agent.algorithm.minibatch_size": 1000}, [], "agent.algorithm.minibatch_size", 512, ["agent.algorithm.minibatch_size"]),
    ({"agent.algorithm.training_start_step": 8}, [], "agent.algorithm.gamma", 0.99, ["agent.algorithm.training_start_step"]),
    (SHORT, ["agent.net.optim_spec.lr=0.1"], "agent.net.name", "MLPNet", []),
    (SHORT, ["agent.memory.sil_replay_name=null"], "agent.memory.name", "OnPolicyBatchReplay", []),
    (SHORT | {"agent.net": {}}, [], "agent.net", None, []),
    (SHORT | {"env.name": "ALE/Pong-v5"}, ["agent.net.optim_spec.lr=0.1"], "agent.net.name", "ConvNet", []),
    (SHORT | {"agent.algorithm.minibatch_size": 1000}, [], "agent.algorithm.minibatch_size", 1000, []),  # valid if a rollout is as large
    ({"meta.hogwild_lock": False}, [], "meta.hogwild_lock", False, []),
    ({"env.clip_rewards": 1}, [], "env.clip_rewards", 1, ["env.clip_rewards"]),  # the env's constructor must accept it
    ({"env.max_frame": "${frames}"}, ["frames=1e5"], "env.max_frame", 100_000, []),
    ({}, ["agent.algorithm.clip_val_loss=true"], "agent.algorithm.clip_vloss", True, ["agent.algorithm.clip_val_loss"]),
]


@pytest.mark.parametrize(("changes", "sets", "key", "value", "notices"), RUNS)
def test_runs_as_asked(specs: Specs, changes: dict[str, Any], sets: list[str], key: str, value: Any, notices: list[str]) -> None:
    found: Any = specs.load(changes, sets)
    for part in to_path(key):
        found = getattr(found, str(part))
    assert found == value
    assert specs.notices() == notices


@pytest.mark.parametrize(
    "words",
    [
        ["trian"],
        ["train@latest"],
        ["dev@latest"],
        ["enjoy"],
        ["enjoy@"],
        ["search"],
        ["enjoy@latest", "-s", "env.name=Acrobot-v1"],
        ["enjoy@latest", "-s", "agent.algorithm.gamma=0.5"],
        ["enjoy@latest", "-s", "env=CartPole-v1"],
        ["enjoy@latest", "--jobs", "3"],
        ["train", "-s", "search.agent.algorithm.gamma__choice=[0.5]"],
        ["train", "-s", "meta.max_trial=4"],
    ],
)
def test_modes(specs: Specs, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "run", lambda self: pytest.fail("it trains"))
    assert main([str(specs.file({"ppo": PPO})), "ppo", *words, "--data-dir", str(specs.folder)]) == 2
    message = capsys.readouterr().err
    assert ("unknown mode 'trian'; did you mean 'train'?" in message) == (words == ["trian"])


def test_train_says_that_it_does_not_search(specs: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "run", lambda self: None)
    search = {"search": {"agent.algorithm.gamma__choice": [0.9, 0.99]}, "meta.max_trial": 4}
    file = specs.file({"ppo": changed(PPO, search), "plain": PPO})
    assert main([str(file), "ppo", "train"]) == main([str(file), "plain"]) == 0
    assert specs.notices() == ["search", "meta.max_trial"]


def test_one_bad_name_does_not_block_the_others(specs: Specs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Path] = []
    monkeypatch.setattr(Trial, "run", lambda self: ran.append(self.plan.data_dir))
    file = str(specs.file({"a/b": PPO, "ppo": PPO}))
    assert main([file, "ppo"]) == 0
    assert ran
    assert main([file, "a/b"]) == main(["check", file]) == main([file]) == 2
    assert "invalid spec name" in capsys.readouterr().err
