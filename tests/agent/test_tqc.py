"""Tests of TQC: dropped quantiles and targets computed by hand, losses against all pairs through autograd, and invalid specs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slm_lab.agent.algorithm.tqc import TQC
from slm_lab.agent.net.passes import direct
from slm_lab.agent.net.q_nets import SeparateCritics
from slm_lab.agent.ops.targets import truncated_mixture
from tests.agent.helpers import CONTINUOUS, MLP, drive
from tests.agent.test_gradients import autograd, step_gradient
from tests.agent.test_soft_actor_critic import Scripted, build, prepared, transitions

C, M, DROPPED, ROWS, ALPHA, GAMMA = 3, 4, 1, 6, 0.3, 0.9


def algorithm_of(**keys: Any) -> TQC:
    algorithm = prepared("TQC", ALPHA, **{"num_critics": C, "num_quantiles": M, "dropped_quantiles": DROPPED, "gamma": GAMMA, **keys})
    assert isinstance(algorithm, TQC)
    return algorithm


def test_the_greatest_quantiles_of_all_critics_are_dropped() -> None:
    two = torch.tensor([[[5.0, 1.0, 9.0], [0.0, 0.0, 0.0]], [[2.0, 8.0, 7.0], [-1.0, 3.0, 4.0]]])  # 2 critics, 2 rows, 3 quantiles
    assert truncated_mixture(two, 1).tolist() == [[1.0, 2.0, 5.0, 7.0], [-1.0, 0.0, 0.0, 0.0]]
    assert truncated_mixture(two, 0).tolist() == [[1.0, 2.0, 5.0, 7.0, 8.0, 9.0], [-1.0, 0.0, 0.0, 0.0, 3.0, 4.0]]


def all_pairs(quantile_CBM: Tensor, target_BK: Tensor, weight_B: Tensor) -> Tensor:
    """Return the loss by its definition, one pair at a time."""
    loss = quantile_CBM.new_zeros(())
    for critic in quantile_CBM:
        for row in range(len(critic)):
            for index in range(M):
                tau = (2 * index + 1) / (2 * M)
                for target in target_BK[row]:
                    u = target - critic[row, index]
                    huber = 0.5 * u**2 if u.abs() <= 1.0 else u.abs() - 0.5
                    loss = loss + weight_B[row] * abs(tau - float(u < 0)) * huber / (len(critic) * M * len(target_BK[row]))
    return loss


@pytest.mark.parametrize("on", [True, False], ids=["direct", "autograd"])
@pytest.mark.parametrize("net", [MLP, {**MLP, "layer_norm": True}], ids=["stacked", "separate"])
def test_gradients(net: dict[str, Any], on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIRECT", on)
    algorithm = algorithm_of(net=net)
    assert isinstance(algorithm.critics, SeparateCritics) is ("layer_norm" in net)
    batch = transitions(torch.rand(ROWS, 2) - 0.5, weight_B=torch.rand(ROWS))
    noise = np.random.default_rng(5).standard_normal((ROWS, 2))
    algorithm.rng = Scripted(noise, noise, noise)  # type: ignore[assignment]
    algorithm.meter.begin()
    found = step_gradient(algorithm.trainer, lambda: algorithm._critic_step(batch))
    with torch.no_grad():
        next_action = algorithm._sample_actions(algorithm.net.actor(batch.next_obs_B).detach())
        assert algorithm.target is not None
        pooled = algorithm.target.net(batch.next_obs_B, torch.as_tensor(next_action.action_BD)).transpose(0, 1).reshape(ROWS, -1)
        kept = pooled.sort(1).values[:, : C * (M - DROPPED)] - ALPHA * torch.as_tensor(next_action.logp_B).unsqueeze(1)
        target = batch.reward_B.unsqueeze(1) + GAMMA * (1.0 - batch.terminated_B).unsqueeze(1) * kept
    assert batch.weight_B is not None
    loss = all_pairs(algorithm.critics(batch.obs_B, batch.action_B), target, batch.weight_B)
    assert algorithm.meter.end().loss == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(found, autograd(algorithm.trainer, loss), rtol=1e-4, atol=1e-5)

    reports: list[Any] = []
    found = step_gradient(algorithm.actor_trainer, lambda: reports.append(algorithm._actor_step(batch, torch.zeros(0))))
    params = algorithm.net.actor(batch.obs_B)
    normal = torch.distributions.Normal(params[:, :2], params[:, 2:].exp())
    u = normal.loc + normal.scale * torch.from_numpy(noise.astype(np.float32))
    logp = (normal.log_prob(u) - torch.log(1.0 - torch.tanh(u) ** 2)).sum(1)
    loss = (ALPHA * logp).mean() - algorithm.critics(batch.obs_B, torch.tanh(u)).mean()
    assert reports[0][0] == pytest.approx(loss.item(), rel=1e-3)
    expected = autograd(algorithm.actor_trainer, loss)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert expected.abs().max() > 1e-3


def test_priorities_are_errors_of_the_mean() -> None:
    memory = {"name": "PrioritizedReplay", "batch_size": 4, "max_size": 500}
    agent, env = build(CONTINUOUS, name="TQC", num_critics=2, gamma=0.0, memory=memory)
    drive(agent, env, 10)
    algorithm: Any = agent.algorithm
    batch = transitions(torch.rand(4, 2) - 0.5)
    told: list[Tensor] = []
    algorithm.memory.update_priorities = lambda row_B, error_B: told.append(error_B)
    with torch.no_grad():
        expected = algorithm.critics(batch.obs_B, batch.action_B).mean((0, 2)) - batch.reward_B
    algorithm.meter.begin()
    algorithm._critic_step(batch)
    torch.testing.assert_close(told[0], expected)
