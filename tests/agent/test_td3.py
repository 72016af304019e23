"""Tests of TD3 and DDPG: targets and delay computed by hand, gradients against autograd, exploration, and invalid specs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.td3 import TD3
from slm_lab.agent.net.passes import direct
from slm_lab.agent.ops.distributions import Deterministic
from slm_lab.agent.ops.targets import smoothed_action
from slm_lab.lib.records import ActionSpace
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, drive
from tests.agent.test_gradients import autograd, step_gradient
from tests.agent.test_soft_actor_critic import CONV, Scripted, transitions
from tests.agent.test_soft_actor_critic import build as build_any

GAMMA, ROWS = 0.9, 6


def build(name: str = "TD3", action: ActionSpace = CONTINUOUS, **keys: Any) -> tuple[Agent, ToyEnv]:
    return build_any(action, name=name, gamma=GAMMA, **keys)


def algorithm_of(agent: Agent) -> TD3:
    assert isinstance(agent.algorithm, TD3)
    return agent.algorithm


def with_other_targets(algorithm: TD3) -> TD3:
    """Make the target nets differ from actor and critics."""
    torch.manual_seed(7)
    for target in algorithm.target_nets():
        target.flat.param.add_(0.3 * torch.randn_like(target.flat.param))
    return algorithm


def test_smoothing_clips_the_noise_and_the_action() -> None:
    action, noise = np.float32([[0.0, 0.0, 0.9, -0.9, 0.4]]), np.float32([[0.1, 3.0, 0.4, -7.0, -0.5]])
    found = smoothed_action(action, noise, 0.5)
    np.testing.assert_allclose(found, [[0.1, 0.5, 1.0, -1.0, -0.1]], rtol=1e-6)
    torch.testing.assert_close(smoothed_action(torch.from_numpy(action), torch.from_numpy(noise), 0.5), torch.from_numpy(found))


def test_the_target_is_the_lower_critic_of_the_smoothed_target_action() -> None:
    algorithm = with_other_targets(algorithm_of(build(target_noise=0.5, target_noise_clip=0.4)[0]))
    batch = transitions(torch.rand(ROWS, 2) - 0.5)
    noise = np.random.default_rng(1).standard_normal((ROWS, 2))
    algorithm.rng = Scripted(noise)  # type: ignore[assignment]
    assert algorithm.target is not None
    with torch.no_grad():
        q = algorithm.target.net(batch.next_obs_B, torch.zeros(ROWS, 2))
        list(algorithm.target.net.parameters())[-1][1] += (q[0] - q[1]).median()  # so that each critic is lower in some rows
    _, _, found = algorithm.values_and_targets(batch)
    with torch.no_grad():
        action = torch.tanh(algorithm.actor_target.net.actor(batch.next_obs_B))
        action = (action + (0.5 * torch.tensor(noise)).clamp(-0.4, 0.4).float()).clamp(-1.0, 1.0)
        q = algorithm.target.net(batch.next_obs_B, action)
    assert (q[0] < q[1]).any()
    assert (q[1] < q[0]).any()
    for row in range(ROWS):  # odd rows terminate; the others, of which some may be truncated, bootstrap
        value = 0.0 if row % 2 else GAMMA * min(q[0, row].item(), q[1, row].item())
        assert found[row].item() == pytest.approx(batch.reward_B[row].item() + value, rel=1e-4)


def test_ddpg_has_one_critic_and_targets_without_noise() -> None:
    algorithm = with_other_targets(algorithm_of(build("DDPG")[0]))
    algorithm.rng = Scripted()  # type: ignore[assignment]  # draws nothing
    batch = transitions(torch.rand(ROWS, 2) - 0.5)
    _, q, found = algorithm.values_and_targets(batch)
    assert q.shape == (1, ROWS)
    with torch.no_grad():
        assert algorithm.target is not None
        next_q = algorithm.target.net(batch.next_obs_B, torch.tanh(algorithm.actor_target.net.actor(batch.next_obs_B)))[0]
    torch.testing.assert_close(found, batch.reward_B + GAMMA * torch.tensor([1.0, 0.0] * 3) * next_q, rtol=1e-4, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "TD3": {},
    "DDPG": {"name": "DDPG"},
    "separate critics": {"critic_net": {**MLP, "layer_norm": True}},
    "layer norm": {"net": {**MLP, "layer_norm": True}},
    "weighted": {},
}


@pytest.mark.parametrize("on", [True, False], ids=["direct", "autograd"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIRECT", on)
    algorithm = with_other_targets(algorithm_of(build(**CASES[name])[0]))
    weight = torch.rand(ROWS) if name == "weighted" else None
    batch = transitions(torch.rand(ROWS, 2) - 0.5, weight_B=weight)
    algorithm.meter.begin()
    noise = np.zeros((ROWS, 2))
    algorithm.rng = Scripted(noise, noise)  # type: ignore[assignment]
    found = step_gradient(algorithm.trainer, lambda: algorithm._critic_step(batch))
    _, _, target = algorithm.values_and_targets(batch)
    error = algorithm.critics(batch.obs_B, batch.action_B) - target
    loss = ((1.0 if weight is None else weight) * error**2).mean(1).sum()
    torch.testing.assert_close(found, autograd(algorithm.trainer, loss), rtol=1e-4, atol=1e-5)

    reports: list[Any] = []
    found = step_gradient(algorithm.actor_trainer, lambda: reports.append(algorithm._actor_step(batch, torch.zeros(0))))
    loss = -algorithm.critics(batch.obs_B, torch.tanh(algorithm.net.actor(batch.obs_B)))[0].mean()
    expected = autograd(algorithm.actor_trainer, loss)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert reports[0][0] == pytest.approx(loss.item(), rel=1e-4)
    assert expected.abs().max() > 1e-4
    assert not algorithm.trainer.flat.grad.any(), "the critics' next step takes no gradient of the actor's loss"


def test_gradients_of_images() -> None:
    """Critics of images, whose actions enter after the convolutions: the actor's step computes only the first critic."""
    algorithm = algorithm_of(build(shape=(3, 12, 12), dtype="uint8", net=CONV)[0])
    images = torch.randint(0, 255, (2, ROWS, 3, 12, 12), dtype=torch.uint8)
    batch = transitions(torch.rand(ROWS, 2) - 0.5)._replace(obs_B=images[0], next_obs_B=images[1])
    found = step_gradient(algorithm.actor_trainer, lambda: algorithm._actor_step(batch, torch.zeros(0)))
    loss = -algorithm.critics(batch.obs_B, torch.tanh(algorithm.net.actor(batch.obs_B)))[0].mean()
    torch.testing.assert_close(found, autograd(algorithm.actor_trainer, loss), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delay", [1, 3])
def test_actor_and_target_nets_wait_for_the_delay(delay: int) -> None:
    net = {**MLP, "update_type": "polyak", "polyak_coef": 0.5}
    agent, env = build(policy_delay=delay, training_iter=1, training_frequency=3, net=net)
    algorithm = algorithm_of(agent)
    watched = {"actor": algorithm.actor_trainer.flat, "actor_target": algorithm.actor_target.flat}
    assert algorithm.target is not None
    watched["target"] = algorithm.target.flat
    drive(agent, env, 4)
    for step in range(algorithm.critic_steps + 1, algorithm.critic_steps + 7):
        before, critics = {name: flat.param.clone() for name, flat in watched.items()}, algorithm.trainer.flat.param.clone()
        agent.update()
        assert algorithm.critic_steps == step
        assert not torch.equal(critics, algorithm.trainer.flat.param)
        for name, flat in watched.items():
            assert torch.equal(before[name], flat.param) is (step % delay > 0), name
        if step % delay == 0:
            half = 0.5 * (before["actor_target"] + algorithm.actor_trainer.flat.param)
            torch.testing.assert_close(algorithm.actor_target.flat.param, half)


def test_exploration_is_gaussian_noise_within_the_bounds() -> None:
    agent, _ = build(explore_var_spec={"name": "no_decay", "start_val": 0.25})
    agent.policy.rng = np.random.default_rng(0)
    obs = np.repeat(np.random.default_rng(1).standard_normal((1, 4)).astype(np.float32), 4000, axis=0)
    action = agent.act(obs).action_N
    mode = agent.policy.act(obs, deterministic=True).action_N
    assert (mode == mode[0]).all()
    with torch.no_grad():
        np.testing.assert_allclose(mode[0], torch.tanh(agent.algorithm.net.actor(torch.from_numpy(obs[:1])))[0], rtol=1e-5)
    inside = np.abs(action).max(1) < 1.0
    assert inside.mean() > 0.9
    assert (action - mode)[inside].std() == pytest.approx(0.25, rel=0.1)
    agent.policy.explore_var = 100.0
    wild = agent.policy.act(obs).action_N
    assert wild.dtype == np.float32
    assert np.abs(wild).max() == 1.0
    assert agent.explore_var == 0.25


def test_the_tanh_gradient() -> None:
    params = torch.randn(5, 2, requires_grad=True)
    distribution = Deterministic(CONTINUOUS)
    action, grad = distribution.mode(params), torch.randn(5, 2)
    (expected,) = torch.autograd.grad(action, params, grad)
    torch.testing.assert_close(distribution.parameter_gradient(action.detach(), grad), expected)


def test_state_has_the_target_actor() -> None:
    one, env = build(training_iter=2)
    drive(one, env, 6)
    other, _ = build(training_iter=2)
    other.load_state_dict(one.state_dict())
    theirs, ours = (with_parts(agent) for agent in (one, other))
    assert theirs.keys() == {"trainer", "target", "actor_trainer", "actor_target"}
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def with_parts(agent: Agent) -> dict[str, Tensor]:
    return {name: part.flat.param for name, part in agent.algorithm.parts().items()}  # type: ignore[attr-defined]


def test_huber_loss_of_a_critic_net() -> None:
    huber = {**MLP, "loss_spec": {"name": "SmoothL1Loss"}}
    algorithm = algorithm_of(build(critic_net=huber)[0])
    q, target = torch.tensor([[0.0, 3.0], [1.0, -1.0]]), torch.tensor([0.5, 1.0])
    _, loss, _ = algorithm.critic_loss(transitions(torch.zeros(2, 2)), q, target)
    assert float(loss) == pytest.approx(sum(F.smooth_l1_loss(row, target).item() for row in q))


@pytest.mark.parametrize("name", ["TD3", "DDPG"])
def test_discrete_actions_are_an_error(name: str) -> None:
    with pytest.raises(SpecError, match=rf"agent\.algorithm\.name: '{name}' requires bounded continuous actions; this env has discrete"):
        build(name, DISCRETE)
