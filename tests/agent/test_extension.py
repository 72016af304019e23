"""Tests of a user's algorithms, nets and memories: spec models whose `implementation()` returns the class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from slm_lab.agent.algorithm.ppo import PPO
from slm_lab.agent.build import build_agent
from slm_lab.agent.policy.policy import build_policy
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.rollout.rollout import OnPolicyBatchReplay
from slm_lab.lib.clock import Clock
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.algorithm import PPOSpec
from slm_lab.spec.models.memory import OnPolicyBatchReplaySpec, ReplaySpec
from slm_lab.spec.models.net import NetSpec
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import ToyEnv, drive
from tests.contract.combinations import Case


class MyPPO(PPO):
    pass


class MyNet(nn.Module):
    def __init__(self, spec: MyNetSpec, obs: Any, role: str) -> None:
        super().__init__()
        self.features, self.role = spec.width, role
        self.linear = nn.Linear(obs.shape[0], spec.width)

    def forward(self, obs_B: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(obs_B))


class MyStorage(OnPolicyBatchReplay):
    pass


class MyReplay(Replay):
    pass


class MyPPOSpec(PPOSpec):
    @classmethod
    def implementation(cls) -> Any:
        return MyPPO


class MyNetSpec(NetSpec):
    width: int = 7

    @classmethod
    def implementation(cls) -> Any:
        return MyNet


class MyStorageSpec(OnPolicyBatchReplaySpec):
    @classmethod
    def implementation(cls) -> Any:
        return MyStorage


class MyReplaySpec(ReplaySpec):
    @classmethod
    def implementation(cls) -> Any:
        return MyReplay


def replaced(spec: Spec, **sections: Any) -> Spec:
    return spec.model_copy(update={"agent": spec.agent.model_copy(update=sections)})


def test_a_users_algorithm_net_and_storage_train() -> None:
    case = Case("PPO", "OnPolicyBatchReplay", "MLPNet")
    plain = case.spec()
    spec = replaced(
        plain,
        algorithm=MyPPOSpec(**plain.agent.algorithm.model_dump()),
        net=MyNetSpec(name="tests:MyNetSpec"),
        memory=MyStorageSpec(**plain.agent.memory.model_dump()),
    )
    agent = build_agent(spec, case.info(), session_seeds(0, 0, 0), Clock())
    assert type(agent.algorithm) is MyPPO
    assert type(agent.algorithm.memory) is MyStorage
    before = agent.weights()
    assert any(isinstance(module, MyNet) and module.role == "critic" for module in agent.policy.net.modules())  # type: ignore[union-attr]
    assert all(np.isfinite(m.loss) for m in drive(agent, ToyEnv(case.info(), 1), 30))
    assert all(not torch.equal(value, before[name]) for name, value in agent.weights().items())


def test_a_users_net_and_replay_train_q_learning() -> None:
    case = Case("DQN", "Replay", "MLPNet")
    plain = case.spec()
    spec = replaced(plain, net=MyNetSpec(name="tests:MyNetSpec"), memory=MyReplaySpec(**plain.agent.memory.model_dump()))
    agent = build_agent(spec, case.info(), session_seeds(0, 0, 0), Clock())
    assert type(agent.replay) is MyReplay
    assert drive(agent, ToyEnv(case.info(), 1), 30)


def test_a_policy_needs_nothing_that_learns() -> None:
    """A policy that is built alone and loads an agent's weights takes the same actions, for one observation and several.

    Deterministic actions are compared as well.
    """
    for case in (Case("PPO", "OnPolicyBatchReplay", "RecurrentNet"), Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)):
        agent = build_agent(case.spec(), case.info(), session_seeds(0, 0, 0), Clock())
        drive(agent, ToyEnv(case.info(), 1), 30)
        policy = build_policy(case.spec().agent, case.info(), np.random.default_rng(5))
        policy.load_weights(agent.weights())
        agent.policy.rng = np.random.default_rng(5)
        obs_N, state_N = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32), policy.initial_state(2)
        ours, theirs = policy.act(obs_N, state_N), agent.act(obs_N, state_N)
        assert np.array_equal(ours.action_N, theirs.action_N)
        assert torch.equal(policy.flat.param, agent.policy.flat.param)
        greedy = [policy.act(obs_N, state_N, deterministic=True).action_N for _ in range(2)]
        assert np.array_equal(*greedy)
        one = policy.act(obs_N[:1], None if state_N is None else state_N[:1], deterministic=True).action_N
        np.testing.assert_allclose(one, greedy[0][:1], rtol=1e-5)
