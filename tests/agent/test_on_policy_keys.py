"""Tests of the keys of the policy-gradient algorithms, each against its rule written out in this file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slm_lab.agent.ops import objective
from slm_lab.agent.ops.arrays import as_tensor
from tests.agent.helpers import MLP, gathered
from tests.agent.test_algorithms import ACTOR_CRITIC, ENTROPY, PPO, log_pi

SMALL = {**PPO, "minibatch_size": 7, "training_epoch": 3, "lam": 0.9}
CLIP = 0.05


def squash(value: Tensor) -> Tensor:
    return value.sign() * (value.abs() + 1.0).log()


class Twin:
    """PPO's update written out, with the state that it keeps between minibatches."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys, self.low, self.high, self.targets = keys, 0.0, 0.0, np.zeros(0)

    def advantages(self, given: Tensor) -> Tensor:
        match self.keys.get("normalize_advantages", "standardize"):
            case "standardize" | True if len(given) > 1:
                return (given - given.mean()) / (given.std() + 1e-8)
            case "percentile":
                low, high = np.percentile(given.numpy(), [5, 95])
                self.low, self.high = 0.99 * self.low + 0.01 * low, 0.99 * self.high + 0.01 * high
                return given / max(1.0, self.high - self.low)
        return given

    def value_loss(self, value: Tensor, old: Tensor, target: Tensor) -> Tensor:
        if self.keys.get("symlog"):
            value, old, target = squash(value), squash(old), squash(target)
        if self.keys.get("clip_vloss"):
            near = old + (value - old).clamp(-CLIP, CLIP)
            return 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).mean()
        if self.keys.get("normalize_v_targets"):
            self.targets = np.append(self.targets, target.double().numpy())
            std = max(1.0, float(self.targets.std()))
            value, target = (value / std).clamp(-10.0, 10.0), (target / std).clamp(-10.0, 10.0)
        return (value - target).square().mean()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("closed_form", [True, False])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"normalize_advantages": True},
        {"normalize_advantages": "percentile"},
        {"normalize_advantages": False},
        {"normalize_v_targets": True},
        {"symlog": True},
        {"clip_vloss": True},
        {"clip_vloss": True, "symlog": True},
        {"symlog": True, "normalize_v_targets": True},
    ],
    ids=str,
)
def test_ppo(keys: dict[str, Any], closed_form: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs over minibatches equal a plain implementation. Rewards are so large that every scale has an effect."""
    monkeypatch.setattr(objective, "CLOSED_FORM", closed_form)
    algorithm = {**SMALL, **keys, "clip_eps_spec": {"name": "no_decay", "start_val": CLIP}, "val_loss_coef": 0.3}
    agent, other = (gathered(algorithm, "OnPolicyBatchReplay") for _ in range(2))
    for one in (agent, other):
        one.algorithm.memory.slabs["reward"] *= 30.0
    net, rollout, twin = other.policy.net, other.algorithm.memory.rollout(), Twin(keys)
    net.actor_numpy = net.critic_numpy = None  # the reference uses autograd
    batch, _ = other.algorithm._batch_with_advantages(rollout)
    optimizer = torch.optim.Adam([p.detach_().requires_grad_() for p in net.parameters()], lr=0.01)
    for part in batch.epoch_minibatches(3, 7, np.random.default_rng(other.algorithm.seeds.update)):
        logp, entropy = log_pi(net, part.inputs, part.action_B)
        ratio, advantage = (logp - part.logp_B).exp(), twin.advantages(part.advantage_B)
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        value_loss = twin.value_loss(net.critic(part.inputs), part.value_B, part.target_B)
        optimizer.zero_grad()
        (0.3 * value_loss - surrogate - 0.01 * entropy).backward()
        optimizer.step()
    agent.update()
    assert agent.clock.opt_step == 12
    for ours, theirs in zip(agent.policy.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_the_whole_rollout_is_standardised() -> None:
    agent = gathered({**SMALL, "normalize_advantages": "rollout"}, "OnPolicyBatchReplay")
    batch, _ = agent.algorithm._batch_with_advantages(agent.algorithm.memory.rollout())
    advantage = next(batch.microbatches())[0].advantage_B
    assert float(advantage.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantage.std()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("normalize", [None, False])
@pytest.mark.parametrize("keys", [{"num_step_returns": 10}, {"training_frequency": 10}], ids=str)
def test_advantages_of_actor_critic(keys: dict[str, Any], normalize: bool | None) -> None:
    """Returns with num_step_returns, or without it and lam, reach to the end of the rollout.

    Their advantages are standardised like those with lam.
    """
    given = {} if normalize is None else {"normalize_advantages": normalize}
    algorithm = {"name": "ActorCritic", "entropy_coef_spec": ENTROPY, "val_loss_coef": 0.5, **keys, **given}
    agent = gathered(algorithm, "OnPolicyBatchReplay")
    net, rollout = agent.policy.net, agent.algorithm.memory.rollout()
    with torch.no_grad():
        value, cut = net.critic(rollout.obs_TN.flatten(0, 1)).view(11, 3), rollout.truncations
        following = value[1:].clone()
        following[cut.t_K, cut.n_K] = net.critic(cut.obs_K)
        target, running = torch.zeros(10, 3), following[-1]
        for t in reversed(range(10)):
            running = torch.where(rollout.truncated_TN[t], following[t], running)
            running = target[t] = rollout.reward_TN[t] + 0.99 * torch.where(rollout.terminated_TN[t], 0.0, running)
        advantage = target - value[:-1]
        if normalize is None:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    obs = rollout.obs_TN[:-1].flatten(0, 1)
    logp, entropy = log_pi(net, obs, rollout.action_TN.flatten())
    loss = -(logp * advantage.flatten()).mean() + 0.5 * (net.critic(obs) - target.flatten()).square().mean() - 0.01 * entropy
    assert agent.update().loss == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("closed_form", [True, False])
def test_value_loss_of_actor_critic(closed_form: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and targets are divided by the deviation of all targets so far, including those of this rollout, and clamped to ±10."""
    monkeypatch.setattr(objective, "CLOSED_FORM", closed_form)
    agent = gathered({**ACTOR_CRITIC, "normalize_v_targets": True}, "OnPolicyBatchReplay")
    agent.algorithm.memory.slabs["reward"] *= 30.0
    rollout = agent.algorithm.memory.rollout()
    rollout.reward_TN[3, 0] = 3e3  # more than ten standard deviations
    past = np.random.default_rng(0).normal(size=400)
    agent.algorithm.deviation.update(torch.from_numpy(past))
    batch = next(agent.algorithm._batch_with_advantages(rollout).microbatches())[0]
    value_B, target_B = as_tensor(batch.value_B), as_tensor(batch.target_B)
    std = float(np.append(past, target_B.numpy()).std())
    assert std > 1.0
    assert float(target_B.max()) > 10 * std
    value, target = (value_B / std).clamp(-10, 10), (target_B / std).clamp(-10, 10)
    agent.algorithm.meter.begin()
    agent.algorithm._add_loss(batch, 1.0)
    agent.algorithm.meter.step()
    assert agent.algorithm.meter.end().extra["value_loss"] == pytest.approx(float((value - target).square().mean()), rel=1e-4)


def test_a_small_deviation_counts_as_one() -> None:
    agent = gathered({**ACTOR_CRITIC, "normalize_v_targets": True}, "OnPolicyBatchReplay")
    agent.algorithm.deviation.update(torch.randn(100) / 10)
    assert agent.algorithm.value_std == 1.0


@pytest.mark.parametrize("algorithm", [ACTOR_CRITIC, {**PPO, "training_epoch": 1, "minibatch_size": 1000}], ids=lambda keys: keys["name"])
@pytest.mark.parametrize("own_optim", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_clipped_by_the_norm_of_each_net(algorithm: dict[str, Any], own_optim: bool, shared: bool) -> None:
    """One SGD step with a learning rate of 1 moves the weights by the clipped gradient. Separate nets are clipped by their own norms."""
    sgd = {"name": "SGD", "lr": 1.0}
    net = {**MLP, "shared": shared, "optim_spec": sgd}
    net |= {"use_same_optim": False, "actor_optim_spec": sgd, "critic_optim_spec": sgd} if own_optim else {}
    moved = []
    for clip in (None, 0.01):
        agent = gathered(algorithm, "OnPolicyBatchReplay", net={**net, "clip_grad_val": clip})
        before = {name: weight.clone() for name, weight in agent.weights().items()}
        agent.update()
        moved.append({name: before[name] - weight for name, weight in agent.weights().items()})
    free, clipped = moved
    for part in [("actor", "critic")] if shared else [("actor",), ("critic",)]:
        names = [name for name in free if name.startswith(part)]
        norm = float(torch.linalg.vector_norm(torch.cat([free[name].flatten() for name in names])))
        assert norm > 0.01
        for name in names:
            assert torch.allclose(clipped[name], free[name] * 0.01 / norm, rtol=1e-3, atol=1e-7)


def test_parameters_of_a_net_are_one_part_of_the_flat_vector() -> None:
    agent = gathered(ACTOR_CRITIC, "OnPolicyBatchReplay")
    flat, net = agent.algorithm.trainer.flat, agent.policy.net
    parts = [flat.param_slice(net.actor_parameters()), flat.param_slice(net.critic_parameters())]
    assert [parts[0].start, parts[0].stop, parts[1].stop] == [0, parts[1].start, flat.size]
