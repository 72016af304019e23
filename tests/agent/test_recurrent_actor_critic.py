"""Tests of recurrent actors and critics of replay algorithms against nets that run one sequence step by step: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slm_lab.agent.algorithm.replay_actor_critic import ReplayActorCritic
from slm_lab.agent.net.q_nets import RecurrentCritics
from slm_lab.agent.replay.sequences import SequenceBatch
from slm_lab.lib.records import ActionSpace
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, RNN, drive
from tests.agent.test_gradients import autograd, step_gradient
from tests.agent.test_soft_actor_critic import build, with_alpha

ALPHA, GAMMA = 0.3, 0.9
NET = {**RNN, "seq_len": 6, "update_type": "polyak", "polyak_coef": 0.5}


def trained(name: str, action: ActionSpace = CONTINUOUS, **keys: Any) -> tuple[Any, SequenceBatch]:
    """Return an algorithm whose memory has sequences with episode ends, and a batch."""
    memory = {"name": "PrioritizedReplay", "batch_size": 4, "max_size": 500, "burn_in": 3}
    agent, env = build(action, name=name, gamma=GAMMA, net=NET, memory=memory, training_start_step=400, **keys)
    drive(agent, env, 60)
    algorithm = agent.algorithm
    assert isinstance(algorithm, ReplayActorCritic)
    torch.manual_seed(2)
    for target in algorithm.target_nets():
        target.flat.param.add_(0.3 * torch.randn_like(target.flat.param))
    batch = algorithm.memory.sample()
    assert isinstance(batch, SequenceBatch)
    assert batch.state_MS.any(), "also while actions are random"
    assert batch.starts_episode_C.any()
    assert not batch.starts_episode_C.all()
    return algorithm, batch


def step_by_step(batch: SequenceBatch, body: Any, state_MS: Tensor) -> Tensor:
    """Return the features of a recurrent body for each step of each segment, [P + 1, C, F], one sequence at a time."""
    columns = []
    never = torch.zeros(1, 1, dtype=torch.bool)
    for c, m in enumerate(batch.sequence_C.tolist()):
        state = state_MS[m : m + 1]
        with torch.no_grad():
            for t in range(len(batch.burn_in_obs_TM)):
                state = state * 0.0 if batch.burn_in_first_TM[t, m] else state
                _, state = body.unroll(batch.burn_in_obs_TM[t, m][None, None], never, state)
        state = state * 0.0 if batch.starts_episode_C[c] else state
        steps = []
        for obs in batch.obs_PC[:, c]:
            out, state = body.unroll(obs[None, None], never, state)
            steps.append(out[0, 0])
        columns.append(torch.stack(steps))
    return torch.stack(columns, 1)


def actor_of(batch: SequenceBatch, net: Any, after: bool) -> Tensor:
    features = step_by_step(batch, net.actor_body, batch.state_MS).flatten(0, 1)
    return net.actor_head((batch.next_outputs if after else batch.current_outputs)(features))


def critics_of(batch: SequenceBatch, critics: Any, action: Tensor, after: bool) -> Tensor:
    found = []
    for critic in critics.critics:
        features = step_by_step(batch, critic.body, torch.zeros(len(batch.state_MS), critic.body.state_size)).flatten(0, 1)
        found.append(
            critic.head(critic.joint(torch.cat(((batch.next_outputs if after else batch.current_outputs)(features), action), 1))).squeeze(1)
        )
    return torch.stack(found)


def test_gradients_of_td3() -> None:
    algorithm, batch = trained("TD3", target_noise=0.0)
    assert isinstance(algorithm.critics, RecurrentCritics)
    algorithm.meter.begin()
    found = step_gradient(algorithm.trainer, lambda: algorithm._critic_step(batch))
    with torch.no_grad():
        next_action = torch.tanh(actor_of(batch, algorithm.actor_target.net, after=True))
        value = critics_of(batch, algorithm.target.net, next_action, after=True).amin(0)
        target = batch.reward_B + GAMMA * (1.0 - batch.terminated_B) * value
    weight = 1.0 if batch.weight_B is None else batch.weight_B
    loss = (weight * (critics_of(batch, algorithm.critics, batch.action_B, after=False) - target) ** 2).mean(1).sum()
    torch.testing.assert_close(found, autograd(algorithm.trainer, loss), rtol=1e-3, atol=1e-5)
    found = step_gradient(algorithm.actor_trainer, lambda: algorithm._actor_step(batch, torch.zeros(0)))
    action = torch.tanh(actor_of(batch, algorithm.net, after=False))
    loss = -critics_of(batch, algorithm.critics, action, after=False)[0].mean()
    expected = autograd(algorithm.actor_trainer, loss)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["SoftActorCritic", "TQC"])
def test_soft_targets_are_of_the_history(name: str) -> None:
    algorithm, batch = trained(name)
    with_alpha(algorithm, ALPHA)
    noise = torch.randn(len(batch.reward_B), 2)
    algorithm.sample_action_noise = lambda rows, example: noise if isinstance(example, Tensor) else noise.numpy()
    _, q, target = algorithm.values_and_targets(batch)
    with torch.no_grad():
        sample = algorithm.distribution.rsample(actor_of(batch, algorithm.net, after=True), noise)
    if name == "TQC":
        assert target.shape == (len(batch.reward_B), 5 * 23)
        return
    expected = critics_of(batch, algorithm.critics, batch.action_B, after=False)
    torch.testing.assert_close(q, expected.detach(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        value = critics_of(batch, algorithm.target.net, sample.action_BD, after=True).amin(0) - ALPHA * sample.logp_B
    torch.testing.assert_close(target, batch.reward_B + GAMMA * (1.0 - batch.terminated_B) * value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic_net", [None, MLP], ids=["recurrent critics", "critics without memory"])
@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("SoftActorCritic", DISCRETE),
        ("SoftActorCritic", CONTINUOUS),
        ("TQC", CONTINUOUS),
        ("DistributionalSAC", CONTINUOUS),
        ("DDPG", CONTINUOUS),
    ],
)
def test_updates_change_all_nets(name: str, action: ActionSpace, critic_net: dict[str, Any] | None) -> None:
    algorithm, _ = trained(name, action, critic_net=critic_net)
    assert isinstance(algorithm.critics, RecurrentCritics) is (critic_net is None)
    flats = [algorithm.trainer.flat, algorithm.actor_trainer.flat]
    before = [flat.param.clone() for flat in flats]
    metrics = algorithm.update()
    assert all(((flat.param != old).float().mean() > 0.5) for flat, old in zip(flats, before, strict=True))
    assert metrics.loss == metrics.loss
