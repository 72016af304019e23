"""Tests of C51 and QR-DQN: the projection, both losses, targets, and acting by the means of the distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.distributional_dqn import DistributionalQLearning
from slm_lab.agent.net.distributional import DistributionalQNet, build_q_net
from slm_lab.agent.ops.masks import MASKED
from slm_lab.agent.ops.projection import categorical_loss, project_distribution
from slm_lab.agent.ops.quantiles import quantile_huber_loss
from slm_lab.agent.replay.replay import Transitions
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import DuelingMLPNetSpec, MLPNetSpec
from slm_lab.spec.report import Report
from slm_lab.spec.rules.check import check_rules
from tests.agent.helpers import MLP, RNN, ToyEnv, agent_of, drive, info
from tests.agent.test_dqn import DUELING, batch_of, q_spec

KEYS: dict[str, dict[str, Any]] = {"QRDQN": {"num_quantiles": 6}, "C51": {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0}}
NAMES = list(KEYS)


def distributional(name: str, **options: Any) -> tuple[Agent, DistributionalQLearning]:
    agent = agent_of(q_spec(name, **KEYS[name] | options), info())
    assert isinstance(agent.algorithm, DistributionalQLearning)
    return agent, agent.algorithm


def test_projection_by_hand() -> None:
    """The projection of atoms −1, 0 and 1 equals values computed by hand.

    The return 0.5 + 0.5 z moves the atoms to 0, 0.5 and 1. After a termination only the reward remains. Values beyond the ends are clipped.
    """
    p_BZ = torch.tensor([[0.2, 0.3, 0.5]] * 3)
    found = project_distribution(p_BZ, torch.tensor([0.5, -0.25, 9.0]), torch.tensor([0.5, 0.0, 0.9]), -1.0, 1.0)
    assert torch.allclose(found, torch.tensor([[0.0, 0.35, 0.65], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]))


def test_projection_is_equation_7() -> None:
    """The projection equals eq. 7 for each atom: Σ_j clip(1 − |Tz_j − z_i| / Δ, 0, 1) p_j."""
    generator = torch.Generator().manual_seed(0)
    p_BZ = torch.rand(20, 7, generator=generator).softmax(1)
    return_B, discount_B = 4.0 * torch.randn(20, generator=generator), torch.rand(20, generator=generator)
    atom_Z = [-3.0 + i for i in range(7)]
    found = project_distribution(p_BZ, return_B, discount_B, -3.0, 3.0)
    for b in range(20):
        moved = [min(max(float(return_B[b] + discount_B[b] * z), -3.0), 3.0) for z in atom_Z]
        expected = [sum(float(p) * min(max(1.0 - abs(t - z), 0.0), 1.0) for p, t in zip(p_BZ[b], moved, strict=True)) for z in atom_Z]
        assert found[b].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(found.sum(1), torch.ones(20))
    assert not project_distribution(p_BZ, return_B.index_fill(0, torch.tensor([3]), math.nan), discount_B, -3.0, 3.0)[3].isfinite().all()


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_and_its_gradient(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logit_BZ, target_BZ = torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator).softmax(1)
    weight_B = torch.rand(4, generator=generator) if weighted else None
    leaf_BZ = logit_BZ.clone().requires_grad_()
    each_B = F.cross_entropy(leaf_BZ, target_BZ, reduction="none")
    expected = (each_B * (1.0 if weight_B is None else weight_B)).mean()
    loss, grad_BZ, divergence_B = categorical_loss(logit_BZ, target_BZ, weight_B)
    assert torch.allclose(loss, expected)
    assert torch.allclose(grad_BZ, torch.autograd.grad(expected, leaf_BZ)[0], atol=1e-7)
    assert torch.allclose(divergence_B, F.kl_div(logit_BZ.log_softmax(1), target_BZ, reduction="none").sum(1), atol=1e-6)


def by_hand(algorithm: DistributionalQLearning, batch: Transitions, double: bool) -> Tensor:
    """Return the loss of a batch, computed row by row from the definitions with autograd."""
    net, target = algorithm.net, algorithm.target.net  # type: ignore[union-attr]  # there is one
    A, losses = 3, []
    for b in range(4):
        row, after = batch.obs_B[b : b + 1], batch.next_obs_B[b : b + 1]
        atoms = net.actor_head.distribution_params(net.actor_body(row)).view(A, -1)[batch.action_B[b]]
        with torch.no_grad():
            next_AZ = target.actor_head.distribution_params(target.actor_body(after)).view(A, -1)
            chooser = net if double else target
            best = int(chooser.critic(after)[0].argmax())
        reward, discount = batch.reward_B[b], 0.9 * (1.0 - batch.terminated_B[b])
        if algorithm.spec.name == "QRDQN":
            losses.append(quantile_by_pairs(atoms, reward + discount * next_AZ[best]))
        else:
            p_Z = project_distribution(next_AZ[best].softmax(0)[None], reward[None], discount[None], -2.0, 2.0)[0]
            losses.append(-(p_Z * atoms.log_softmax(0)).sum())
    return torch.stack(losses).mean()


def quantile_by_pairs(atoms_N: Tensor, target_M: Tensor) -> Tensor:
    u = target_M[None] - atoms_N[:, None]
    tau_N = (torch.arange(len(atoms_N)) + 0.5) / len(atoms_N)
    return ((tau_N[:, None] - (u < 0).float()).abs() * F.huber_loss(u, torch.zeros_like(u), reduction="none")).mean(1).sum()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("net", [None, DUELING])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_by_hand(name: str, net: dict[str, Any] | None, double: bool) -> None:
    """Loss and gradient equal the definitions, with a target net that differs from the net. A terminated row has no next state."""
    _, algorithm = distributional(name, net=net, double_q=double)
    assert algorithm.target is not None
    noise = torch.randn(len(algorithm.target.flat.param), generator=torch.Generator().manual_seed(1))
    algorithm.target.flat.param.add_(noise)
    batch = batch_of(algorithm)  # type: ignore[arg-type]  # of any algorithm with a replay buffer
    expected = by_hand(algorithm, batch, double)
    value = float(expected.detach())
    expected_grad = torch.cat([g.reshape(-1) for g in torch.autograd.grad(expected, list(algorithm.net.parameters()))])
    algorithm.meter.begin()
    steps: list[Tensor] = []
    algorithm.trainer.step = lambda: steps.append(algorithm.trainer.flat.grad.clone()) or 0.0  # type: ignore[func-returns-value,method-assign]
    algorithm._step(batch)
    assert algorithm.meter.end().loss == pytest.approx(value, rel=1e-4)
    packed = torch.cat([parameter.grad.reshape(-1) for parameter in algorithm.net.parameters()])  # type: ignore[union-attr]
    assert torch.allclose(packed, expected_grad, atol=1e-5)
    assert len(steps) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("net", [None, DUELING, RNN])
def test_it_acts_by_the_means(name: str, net: dict[str, Any] | None) -> None:
    agent, algorithm = distributional(name, net=net)
    drive(agent, ToyEnv(info(), 3), 20)
    obs_N = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    out = agent.policy.act(obs_N, agent.policy.initial_state(3), deterministic=True)
    q = algorithm.net
    if net is RNN:
        mean = q.unroll(torch.from_numpy(obs_N)[None], torch.ones(1, 3, dtype=torch.bool), torch.zeros(3, q.state_size))[0][0]
    else:
        mean = q.critic(torch.from_numpy(obs_N))
        atoms_NAZ = q.distributions(torch.from_numpy(obs_N))[1].view(3, 3, -1)
        by_atoms = atoms_NAZ.mean(2) if name == "QRDQN" else atoms_NAZ.softmax(2) @ torch.linspace(-2.0, 2.0, 5)
        assert torch.allclose(mean, by_atoms, atol=1e-6)
        assert agent.policy._numpy_actor is None if net is DUELING else agent.policy._numpy_actor is not None
        if agent.policy._numpy_actor is not None:
            assert np.allclose(agent.policy._numpy_actor(obs_N), mean.detach().numpy(), atol=1e-5)
    assert out.action_N.tolist() == mean.argmax(1).tolist()


@pytest.mark.parametrize(
    "kind", [("quantiles", {"number": 4}), ("categorical", {"number": 4, "low": -1.0, "high": 1.0})], ids=lambda k: k[0]
)
@pytest.mark.parametrize("dueling", [False, True])
def test_masked_actions_are_never_best(kind: tuple[str, dict[str, Any]], dueling: bool) -> None:
    model: Any = DuelingMLPNetSpec if dueling else MLPNetSpec
    net_spec = model.model_validate({**MLP, "name": "DuelingMLPNet" if dueling else "MLPNet"})
    net = build_q_net(net_spec, ObservationSpace((7,), mask=(4, 7)), (3,), kind)
    assert isinstance(net, DistributionalQNet)
    obs_B = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    obs_B[:, 4:] = torch.tensor([1.0, 0.0, 1.0])
    values_BA, atoms_BX = net.distributions(obs_B)
    assert (values_BA[:, 1] == MASKED).all()
    assert (values_BA[:, [0, 2]].abs() < 100).all()
    assert (atoms_BX.abs() < 100).all()
    assert torch.equal(net.actor(obs_B), values_BA)


@pytest.mark.parametrize("name", NAMES)
def test_n_steps_and_priorities(name: str) -> None:
    agent, algorithm = distributional(name, memory="PrioritizedReplay", num_step_returns=3, net={**MLP, "layer_norm": True})
    before = algorithm.memory.tree.levels[0].copy()  # type: ignore[union-attr]  # a prioritised replay
    metrics = drive(agent, ToyEnv(info(), 3), 30)
    assert len(metrics) > 5
    assert all(np.isfinite(metric.loss) for metric in metrics)
    assert not np.array_equal(before, algorithm.memory.tree.levels[0])  # type: ignore[union-attr]


def test_quantile_loss_is_used_with_weights() -> None:
    loss, _ = quantile_huber_loss(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([0.0, 1.0]))
    assert float(loss) == pytest.approx(0.5 * 0.5 * (0.5 + 1.5 + 2.5) / 3)


def test_atoms_that_are_no_interval() -> None:
    report = Report()
    check_rules(q_spec("C51", v_min=3.0, v_max=3.0, num_atoms=1), report)
    found = {problem.path: problem.message for problem in report.problems}
    assert found["agent.algorithm.num_atoms"] == "must be at least 2, not 1"
    assert found["agent.algorithm.v_min"] == "must be below v_max (3), not 3"
