"""Tests of DistributionalSAC: target distributions computed by hand, losses against autograd, and the gradient of the actor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slm_lab.agent.algorithm.distributional_sac import DistributionalSAC
from slm_lab.agent.ops.projection import lowest_mean_distribution
from tests.agent.helpers import CONTINUOUS, MLP, drive
from tests.agent.test_gradients import autograd, step_gradient
from tests.agent.test_soft_actor_critic import Scripted, build, prepared, transitions

ROWS, ALPHA, GAMMA, LOW, HIGH, Z = 6, 0.3, 0.9, -1.0, 2.0, 7
ATOMS = np.linspace(LOW, HIGH, Z)
SIMBA = {"name": "SimbaV2Net", "width": 8, "optim_spec": {"name": "Adam", "lr": 0.01}}


def algorithm_of(**keys: Any) -> DistributionalSAC:
    algorithm = prepared("DistributionalSAC", ALPHA, **{"num_atoms": Z, "v_min": LOW, "v_max": HIGH, "gamma": GAMMA, **keys})
    assert isinstance(algorithm, DistributionalSAC)
    return algorithm


def test_the_distribution_with_the_lower_mean() -> None:
    first, second = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
    lower = lowest_mean_distribution(torch.tensor([first, second]), torch.tensor([-1.0, 0.0, 1.0]))
    assert lower.tolist() == [first[0], second[1]]


def target_by_hand(p_Z: np.ndarray, reward: float, terminated: float, cost: float) -> np.ndarray:
    """Move each atom to r + γ (z − α log π), and divide its probability between its neighbours."""
    target = np.zeros(Z)
    for p, z in zip(p_Z, ATOMS, strict=True):
        position = (np.clip(reward + GAMMA * (1.0 - terminated) * (z - cost), LOW, HIGH) - LOW) / (ATOMS[1] - ATOMS[0])
        left = min(int(position), Z - 2)
        target[left] += p * (left + 1 - position)
        target[left + 1] += p * (position - left)
    return target


@pytest.mark.parametrize("reduction", ["min", "mean"])
@pytest.mark.parametrize("net", [MLP, SIMBA], ids=["MLPNet", "SimbaV2Net"])
def test_targets_and_gradients(net: dict[str, Any], reduction: str) -> None:
    algorithm = algorithm_of(net=net, critic_reduction=reduction)
    batch = transitions(torch.rand(ROWS, 2) - 0.5, weight_B=torch.rand(ROWS))
    noise = np.random.default_rng(5).standard_normal((ROWS, 2))
    algorithm.rng = Scripted(noise, noise, noise, noise)  # type: ignore[assignment]
    _, _, target = algorithm.values_and_targets(batch)
    with torch.no_grad():
        next_action = algorithm._sample_actions(algorithm.net.actor(batch.next_obs_B).detach())
        assert algorithm.target is not None
        p_CBZ = algorithm.target.net(batch.next_obs_B, torch.as_tensor(next_action.action_BD)).softmax(-1).numpy()
        cost_B = ALPHA * np.asarray(next_action.logp_B)
    for row in range(ROWS):
        lower = p_CBZ[:, row].mean(0) if reduction == "mean" else p_CBZ[np.argmin(p_CBZ[:, row] @ ATOMS), row]
        expected = target_by_hand(lower, float(batch.reward_B[row]), float(batch.terminated_B[row]), float(cost_B[row]))
        np.testing.assert_allclose(target[row], expected, atol=1e-5)

    algorithm.meter.begin()
    found = step_gradient(algorithm.trainer, lambda: algorithm._critic_step(batch))
    logp_CBZ = algorithm.critics(batch.obs_B, batch.action_B).log_softmax(-1)
    assert batch.weight_B is not None
    loss = -(batch.weight_B * (target * logp_CBZ).sum(-1)).mean(1).sum()
    assert algorithm.meter.end().loss == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(found, autograd(algorithm.trainer, loss), rtol=1e-4, atol=1e-5)

    reports: list[Any] = []
    found = step_gradient(algorithm.actor_trainer, lambda: reports.append(algorithm._actor_step(batch, torch.zeros(0))))
    params = algorithm.net.actor(batch.obs_B)
    normal = torch.distributions.Normal(params[:, :2], params[:, 2:].exp())
    u = normal.loc + normal.scale * torch.from_numpy(noise.astype(np.float32))
    logp = (normal.log_prob(u) - torch.log(1.0 - torch.tanh(u) ** 2)).sum(1)
    q_CB = algorithm.critics(batch.obs_B, torch.tanh(u)).softmax(-1) @ torch.from_numpy(ATOMS).float()
    loss = (ALPHA * logp - (q_CB.mean(0) if reduction == "mean" else q_CB.amin(0))).mean()
    assert reports[0][0] == pytest.approx(loss.item(), rel=1e-3)
    expected_grad = autograd(algorithm.actor_trainer, loss)
    torch.testing.assert_close(found, expected_grad, rtol=1e-3, atol=1e-4)
    assert expected_grad.abs().max() > 1e-3


def test_priorities_are_errors_of_the_mean() -> None:
    memory = {"name": "PrioritizedReplay", "batch_size": 4, "max_size": 500}
    agent, env = build(CONTINUOUS, name="DistributionalSAC", gamma=0.0, v_min=-1.0, v_max=1.0, memory=memory)
    drive(agent, env, 10)
    algorithm: Any = agent.algorithm
    batch = transitions(torch.rand(4, 2) - 0.5)
    told: list[Tensor] = []
    algorithm.memory.update_priorities = lambda row_B, error_B: told.append(error_B)
    with torch.no_grad():
        q_CB = algorithm.critics(batch.obs_B, batch.action_B).softmax(-1) @ torch.linspace(-1.0, 1.0, 101)
    algorithm.meter.begin()
    algorithm._critic_step(batch)
    torch.testing.assert_close(told[0], q_CB.amin(0) - batch.reward_B.clamp(-1.0, 1.0), rtol=1e-4, atol=1e-5)
