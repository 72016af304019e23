"""Tests of Q-learning with several discrete actions per step: each has its own values and targets with its own next action value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.algorithm.dqn import QLearning
from slm_lab.agent.ops.targets import action_value, double_q_value, max_value, split_by_component
from slm_lab.agent.replay.replay import Transitions
from slm_lab.agent.replay.sequences import SequenceBatch
from slm_lab.lib.records import ActionSpace
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import MLP, RNN, ToyEnv, agent_of, changed, drive, info, spec

NVEC = (2, 3)
MULTI = ActionSpace("multi_discrete", NVEC, 2)
HYDRA = {"name": "HydraMLPNet", "hid_layers": [[[6], [5]], [8], []], "optim_spec": {"name": "Adam", "lr": 0.01}}
DUELING = {**MLP, "name": "DuelingMLPNet"}


def multi_spec(name: str, net: dict[str, Any], memory: str = "Replay", **algorithm: Any) -> Spec:
    explore = {"action_policy": "epsilon_greedy", "explore_var_spec": {"name": "no_decay", "start_val": 0.3}}
    return changed(spec({"name": name, **explore, "gamma": 0.9, **algorithm}, net, memory), memory={"batch_size": 8, "max_size": 90})


def test_values_by_component_by_hand() -> None:
    q, other = torch.tensor([[1.0, 3.0, 5.0, 4.0, 0.0]]), torch.tensor([[7.0, -1.0, 0.5, 6.0, 8.0]])
    padded = split_by_component(q, NVEC)
    assert padded.tolist() == [[[1.0, 3.0, -math.inf], [5.0, 4.0, 0.0]]]
    assert max_value(padded).tolist() == [[3.0, 5.0]]
    assert double_q_value(padded, split_by_component(other, NVEC)).tolist() == [[-1.0, 0.5]]
    assert action_value(padded, torch.tensor([[0, 2]])).tolist() == [[1.0, 0.0]]
    assert split_by_component(torch.arange(4.0), (2, 2)).tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["VanillaDQN", "DQN", "DoubleDQN"])
@pytest.mark.parametrize("net", [HYDRA, DUELING, RNN], ids=["hydra", "dueling", "recurrent"])
@pytest.mark.parametrize("memory", ["Replay", "PrioritizedReplay"])
def test_a_step_by_hand(name: str, net: dict[str, Any], memory: str) -> None:
    agent = agent_of(multi_spec(name, net, memory), info(3, MULTI))
    algorithm: Any = agent.algorithm
    assert isinstance(algorithm, QLearning)
    drive(agent, ToyEnv(info(3, MULTI), 1), 30)
    target = algorithm.net
    if algorithm.target is not None:
        algorithm.target.flat.param.add_(torch.randn(len(algorithm.target.flat.param), generator=torch.Generator().manual_seed(0)))
        target = algorithm.target.net
    batch: Transitions | SequenceBatch = algorithm.memory.sample()
    with torch.no_grad():
        if isinstance(batch, SequenceBatch):
            now, after = (pick(batch.unroll(algorithm.net)[1]) for pick in (batch.current_outputs, batch.next_outputs))
            target_after = batch.next_outputs(batch.unroll(target)[1])
        else:
            now, after, target_after = algorithm.net.critic(batch.obs_B), *(n.critic(batch.next_obs_B) for n in (algorithm.net, target))
    rows = len(batch.reward_B)
    error, weight = np.zeros((rows, 2)), np.ones(rows) if batch.weight_B is None else batch.weight_B.numpy()
    for b in range(rows):
        for d, part in enumerate((slice(0, 2), slice(2, 5))):
            online, other = after[b, part], target_after[b, part]
            value = {"VanillaDQN": online.max(), "DQN": other.max(), "DoubleDQN": other[online.argmax()]}[name]
            goal = float(batch.reward_B[b]) + (0.0 if batch.terminated_B[b] else 0.9 * float(value))
            error[b, d] = goal - float(now[b, part][batch.action_B[b, d]])
    algorithm.meter.begin()
    algorithm._step(batch)
    metrics = algorithm.meter.end()
    assert metrics.loss == pytest.approx((weight * (error**2).mean(1)).mean(), rel=1e-4)
    assert metrics.extra["td_error"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
    if memory == "PrioritizedReplay" and not isinstance(batch, SequenceBatch):
        ring = algorithm.memory
        last = {int(row): b for b, row in enumerate(batch.row_B)}
        expected = [(np.abs(error[b]).mean() + ring.epsilon) ** ring.alpha for b in last.values()]
        assert ring.tree.get(np.array(list(last))) == pytest.approx(np.array(expected), rel=1e-3)


def test_dueling_advantages_are_centred_for_each() -> None:
    """The advantages of each action are centred separately, as in eq. 1 of arXiv:1711.08946."""
    algorithm: Any = agent_of(multi_spec("DQN", DUELING), info(3, MULTI)).algorithm
    net, obs = algorithm.net, torch.randn(5, 4)
    with torch.no_grad():
        features = net.actor_body(obs)
        a, value = net.actor_head(features), net.value_head(features)
        expected = torch.cat([value + part - part.mean(1, keepdim=True) for part in (a[:, :2], a[:, 2:])], 1)
        assert torch.allclose(net.critic(obs), expected, atol=1e-6)


def test_greedy_in_each_component() -> None:
    agent = agent_of(multi_spec("DQN", HYDRA), info(3, MULTI))
    agent.policy.explore_var = 0.0
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with torch.no_grad():
        q: torch.Tensor = agent.policy.net.actor(torch.from_numpy(obs))  # type: ignore[union-attr]  # it has one
    expected = torch.stack([q[:, :2].argmax(1), q[:, 2:].argmax(1)], 1).numpy()
    assert np.array_equal(agent.policy.act(obs, deterministic=True).action_N, expected)
    assert np.array_equal(agent.policy._choose(q.numpy())[0], expected)


def test_it_finds_the_best_of_each() -> None:
    """The agent solves a bandit whose reward is the sum of the rewards of both actions."""
    agent = agent_of(multi_spec("DoubleDQN", HYDRA, training_start_step=20), info(1, MULTI))
    obs, algorithm = np.zeros((1, 4), np.float32), agent.algorithm
    env, rng = ToyEnv(info(1, MULTI)), np.random.default_rng(0)
    step, yes = env.step(np.zeros((1, 2), int)), np.ones(1, bool)
    for _ in range(80):
        action = rng.integers(NVEC)[None]
        reward = np.array([[0.0, 1.0][action[0, 0]] + [0.0, -1.0, 2.0][action[0, 1]]], np.float32)
        out = agent.act(obs)._replace(action_N=action)
        algorithm.observe(obs, yes, None, out, step._replace(reward_N=reward, terminated_N=yes, truncated_N=~yes, first_N=yes, valid_N=yes))
    for _ in range(200):
        algorithm.update()
    assert agent.policy.act(obs, deterministic=True).action_N.tolist() == [[1, 2]]
