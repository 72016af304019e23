"""Tests of the gradients of soft actor-critic and Q-learning against autograd of the losses written out in this file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.algorithm.dqn import QLearning
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.agent.net.passes import direct
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.replay.replay import Transitions
from slm_lab.agent.replay.sequences import SequenceBatch
from slm_lab.lib.records import ActionSpace
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, RNN, ToyEnv, agent_of, drive, info
from tests.agent.test_dqn import batch_of, q_agent
from tests.agent.test_multi_q import HYDRA, MULTI, multi_spec
from tests.agent.test_soft_actor_critic import CONV, algorithm_of, build, move_target, transitions, with_alpha

ALPHA, GAMMA, ROWS = 0.3, 0.9, 12


def step_gradient(trainer: Trainer, step: Any) -> Tensor:
    """Return the gradient with which `step` steps a trainer; the weights do not change."""
    seen: list[Tensor] = []

    def stepped() -> float:
        seen.append(trainer.flat.grad.clone())
        trainer.flat.grad.zero_()
        return 0.0

    real, trainer.step = trainer.step, stepped  # type: ignore[method-assign]
    try:
        step()
    finally:
        trainer.step = real  # type: ignore[method-assign]
    (grad,) = seen
    return grad


def autograd(trainer: Trainer, loss: Tensor) -> Tensor:
    """Return the gradient of a loss with respect to a trainer's parameters, in their order."""
    params = trainer.flat.params
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(params, grads, strict=True)])


def symlog(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.log(x.abs() + 1.0)


ELEMENTWISE = {
    "MSELoss": lambda e: e**2,
    "SmoothL1Loss": lambda e: torch.where(e.abs() < 0.5, e**2 / 1.0, e.abs() - 0.25),  # beta 0.5
}


class Twin:
    """Losses of soft actor-critic as functions of the outputs of the nets."""

    def __init__(self, algorithm: SoftActorCritic, loss: str) -> None:
        self.a, self.each = algorithm, ELEMENTWISE[loss]
        self.free = getattr(algorithm.distribution, "log_std", None)

    def sample(self, obs: Tensor, noise: np.ndarray) -> tuple[Tensor, Tensor]:
        params = self.a.net.actor(obs)
        loc, log_std = params.chunk(2, dim=1) if self.free is None else (params, self.free)
        normal = torch.distributions.Normal(loc, log_std.clamp(-5.0, 2.0).exp())
        u = normal.loc + normal.scale * torch.from_numpy(noise)
        slope = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
        return torch.tanh(u), (normal.log_prob(u) - slope).sum(1)

    def one(self, q: Tensor) -> Tensor:
        return torch.minimum(q[0], q[1]) if self.a.reduction == "min" else q.mean(0)

    def critic_loss(self, batch: Transitions, noise: np.ndarray) -> Tensor:
        a, rows = self.a, len(batch.obs_B)
        with torch.no_grad():
            if a.discrete:
                logp = F.log_softmax(a.net.actor(batch.next_obs_B), dim=1)
                next_action = None
            else:
                next_action, logp = self.sample(batch.next_obs_B, noise)
        action = None if a.discrete else batch.action_B
        if a.target is None:
            both = None if action is None or next_action is None else torch.cat((action, next_action))
            q, next_q = a.critics(torch.cat((batch.obs_B, batch.next_obs_B)), both).split(rows, dim=1)
            next_q = next_q.detach()
        else:
            q = a.critics(batch.obs_B, action)
            with torch.no_grad():
                next_q = a.target.net(batch.next_obs_B, next_action)
        value = self.one(next_q)
        value = (logp.exp() * (value - ALPHA * logp)).sum(1) if a.discrete else value - ALPHA * logp
        target = batch.reward_B + GAMMA * (1.0 - batch.terminated_B) * value
        if a.discrete:
            q = q[:, torch.arange(rows), batch.action_B]
        q, target = (symlog(q), symlog(target)) if a.spec.symlog else (q, target)
        weight = torch.ones(rows) if batch.weight_B is None else batch.weight_B
        return sum((weight * self.each(q[c] - target)).sum() / rows for c in range(len(q)))  # type: ignore[return-value]

    def values(self, batch: Transitions) -> Tensor:
        """Return the values of states that the critics' step uses and, for discrete actions, the actor's step too."""
        a, rows = self.a, len(batch.obs_B)
        action = None if a.discrete else batch.action_B
        with torch.no_grad():
            if a.target is not None or not a.discrete:
                return a.critics(batch.obs_B, action)
            return a.critics(torch.cat((batch.obs_B, batch.next_obs_B)), None)[:, :rows]

    def actor_loss(self, batch: Transitions, noise: np.ndarray, mean_entropy: float | None, values: Tensor) -> Tensor:
        a = self.a
        if not a.discrete:
            action, logp = self.sample(batch.obs_B, noise)
            return (ALPHA * logp - self.one(a.critics(batch.obs_B, action))).mean()
        logp = F.log_softmax(a.net.actor(batch.obs_B), dim=1)
        q, p = self.one(values), logp.exp()
        entropy = -(p * logp).sum(1).mean()
        loss = -(p * q).sum(1).mean() - ALPHA * entropy
        if mean_entropy is not None:
            loss = loss + a.spec.entropy_penalty_coef * 0.5 * (mean_entropy - entropy) ** 2
        return loss


HUBER = {**MLP, "loss_spec": {"name": "SmoothL1Loss", "beta": 0.5}}
FIRST: list[dict[str, Any]] = [{"LayerNorm": {"normalized_shape": 6}}, {"LazyLinear": {"out_features": 8}}, {"ReLU": None}]
NORM_FIRST = {"modules": {"body": {"Sequential": FIRST}}}
NORM, DUELING = {**MLP, "layer_norm": True}, {**MLP, "name": "DuelingMLPNet"}
CASES: dict[str, dict[str, Any]] = {
    "min": {"critic_reduction": "min"},
    "mean": {"critic_reduction": "mean"},
    "symlog": {"symlog": True},
    "huber": {"net": HUBER},
    "layer norm": {"net": NORM},
    "batch norm": {"net": {**MLP, "batch_norm": True}},
    "layer norm first": {"critic_net": {"name": "TorchArcNet", "critic_arc": NORM_FIRST}},
    "spectral norm": {"spectral_norm": True},
    "free log_std": {"net": {**MLP, "log_std_init": 0.3}},
    "crossq": {"name": "CrossQ"},
    "crossq without norm": {"name": "CrossQ", "critic_net": MLP},
    "discrete": {"action": DISCRETE, "critic_reduction": "min"},
    "discrete, mean": {"action": DISCRETE},
    "discrete, symlog, huber": {"action": DISCRETE, "symlog": True, "net": HUBER},
    "discrete, penalty": {"action": DISCRETE, "entropy_penalty_coef": 0.5},
    "discrete crossq": {"action": DISCRETE, "name": "CrossQ"},
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("on", "apart", "weighted"),
    [(True, True, True), (True, False, False), (False, False, True)],
    ids=["direct, apart, weighted", "direct, stacked", "autograd, weighted"],
)
@pytest.mark.parametrize("name", CASES)
def test_soft_actor_critic(name: str, weighted: bool, apart: bool, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SEPARATE_CRITICS_SIZE", 0 if apart else 2**40)
    monkeypatch.setattr(direct, "DIRECT", on)
    keys = {"gamma": GAMMA, **CASES[name]}
    discrete = keys.get("action") is DISCRETE
    algorithm = algorithm_of(build(**keys)[0])
    if algorithm.target is not None:
        move_target(algorithm)
    torch.manual_seed(1)
    action = torch.randint(3, (ROWS,)) if discrete else torch.rand(ROWS, 2) - 0.5
    batch = transitions(action, weight_B=torch.rand(ROWS) if weighted else None)
    twin = Twin(algorithm, "SmoothL1Loss" if keys.get("net") is HUBER else "MSELoss")
    noise = np.random.default_rng(5).standard_normal((ROWS, 2), np.float32)
    buffers = algorithm.trainer.flat.buffer.clone()

    algorithm.meter.begin()  # layers in training mode
    values = twin.values(batch)
    algorithm.trainer.flat.buffer.copy_(buffers)
    algorithm.rng = np.random.default_rng(5)
    returned: list[Tensor] = []
    found = step_gradient(algorithm.trainer, lambda: returned.append(with_alpha(algorithm, ALPHA)._critic_step(batch)))
    algorithm.trainer.flat.buffer.copy_(buffers)
    loss = twin.critic_loss(batch, noise)
    assert algorithm.meter.end().loss == pytest.approx(loss.item(), rel=1e-4)
    expected = autograd(algorithm.trainer, loss)
    if discrete:
        torch.testing.assert_close(returned[0], values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.abs().max() > 1e-3

    algorithm.mean_entropy = torch.tensor(0.7)
    algorithm.rng = np.random.default_rng(5)
    steps: list[Any] = []
    found = step_gradient(algorithm.actor_trainer, lambda: steps.append(with_alpha(algorithm, ALPHA)._actor_step(batch, values)))
    algorithm.trainer.set_train_mode(False)  # as in the actor's step
    algorithm.actor_trainer.set_train_mode(True)
    penalty = 0.7 if algorithm.spec.entropy_penalty_coef else None
    loss = twin.actor_loss(batch, noise, penalty, values)
    assert steps[0][0] == pytest.approx(loss.item(), rel=1e-4)
    if penalty is not None:
        assert float(algorithm.mean_entropy) == pytest.approx(0.99 * 0.7 + 0.01 * steps[0][1])
    expected = autograd(algorithm.actor_trainer, loss)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.abs().max() > 1e-3


def test_soft_actor_critic_of_images() -> None:
    """Gradients for critics of images, whose actions enter after the convolutions."""
    algorithm = with_alpha(algorithm_of(build(shape=(3, 12, 12), dtype="uint8", net=CONV, gamma=GAMMA)[0]), ALPHA)
    images = torch.randint(0, 255, (2, ROWS, 3, 12, 12), dtype=torch.uint8)
    batch = transitions(torch.rand(ROWS, 2) - 0.5)._replace(obs_B=images[0], next_obs_B=images[1])
    twin, noise = Twin(algorithm, "MSELoss"), np.random.default_rng(5).standard_normal((ROWS, 2), np.float32)
    values = twin.values(batch)
    for trainer, step, loss in (
        (algorithm.trainer, lambda: algorithm._critic_step(batch), lambda: twin.critic_loss(batch, noise)),
        (algorithm.actor_trainer, lambda: algorithm._actor_step(batch, values), lambda: twin.actor_loss(batch, noise, None, values)),
    ):
        algorithm.rng = np.random.default_rng(5)
        found = step_gradient(trainer, step)
        torch.testing.assert_close(found, autograd(trainer, loss()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", ["critic", "actor"])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_a_step_whose_loss_is_not_finite_is_skipped(step: str, action: ActionSpace) -> None:
    algorithm = algorithm_of(build(action)[0])
    batch = transitions(torch.zeros(6, 2) if action is CONTINUOUS else torch.zeros(6, dtype=torch.int64))
    critic = step == "critic"
    trainer = algorithm.trainer if critic else algorithm.actor_trainer
    batch = batch._replace(reward_B=torch.full((6,), torch.inf)) if critic else batch._replace(obs_B=torch.full((6, 4), torch.nan))
    before = trainer.flat.param.clone()
    algorithm.meter.begin()
    with ignore_float_errors():
        if critic:
            with_alpha(algorithm, ALPHA)._critic_step(batch)
        else:
            with_alpha(algorithm, ALPHA)._actor_step(batch, torch.zeros(2, 6, 3))
    assert trainer.skipped == 1
    assert torch.equal(before, trainer.flat.param)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("on", [True, False], ids=["direct", "autograd"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize(
    "net", [MLP, HUBER, {**MLP, "layer_norm": True}, {**MLP, "name": "DuelingMLPNet"}], ids=["mlp", "huber", "norm", "dueling"]
)
@pytest.mark.parametrize("name", ["VanillaDQN", "DQN", "DoubleDQN"])
def test_q_learning(name: str, net: dict[str, Any], weighted: bool, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIRECT", on)
    _, algorithm = q_agent(name, net={**net, "update_type": "replace", "update_frequency": 12})
    other = algorithm.net
    if algorithm.target is not None:
        algorithm.target.flat.param.add_(torch.randn(len(algorithm.target.flat.param), generator=torch.Generator().manual_seed(0)))
        other = algorithm.target.net
    batch = batch_of(algorithm, [1.0, 0.5, 0.25, 0.1] if weighted else None)
    with torch.no_grad():
        online, valued = algorithm.net.critic(batch.next_obs_B), other.critic(batch.next_obs_B)
    value = valued.gather(1, online.argmax(1, keepdim=True)).squeeze(1) if name == "DoubleDQN" else valued.amax(1)
    target = batch.reward_B + GAMMA * (1.0 - batch.terminated_B) * value
    error = algorithm.net.critic(batch.obs_B)[torch.arange(4), batch.action_B] - target
    each = ELEMENTWISE["SmoothL1Loss" if net is HUBER else "MSELoss"](error)
    loss = (each * (torch.ones(4) if batch.weight_B is None else batch.weight_B)).mean()
    expected = autograd(algorithm.trainer, loss)
    algorithm.meter.begin()
    found = step_gradient(algorithm.trainer, lambda: algorithm._step(batch))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", [HYDRA, RNN], ids=["hydra", "recurrent"])
def test_q_learning_of_several_actions(net: dict[str, Any]) -> None:
    """The loss of a transition is the mean over its actions, multiplied once by the weight of the transition."""
    agent = agent_of(multi_spec("DQN", net, "PrioritizedReplay"), info(3, MULTI))
    algorithm: Any = agent.algorithm
    assert isinstance(algorithm, QLearning)
    drive(agent, ToyEnv(info(3, MULTI), 1), 30)
    batch: Any = algorithm.memory.sample()
    rows = len(batch.reward_B)
    batch = batch._replace(weight_B=torch.rand(rows))
    if isinstance(batch, SequenceBatch):
        q, after = batch.current_outputs(batch.unroll(algorithm.net)[1]), batch.next_outputs(batch.unroll(algorithm.target.net)[1])
    else:
        q, after = algorithm.net.critic(batch.obs_B), algorithm.target.net.critic(batch.next_obs_B)
    loss = torch.zeros(())
    for d, part in enumerate((slice(0, 2), slice(2, 5))):
        target = batch.reward_B + GAMMA * (1.0 - batch.terminated_B) * after[:, part].detach().amax(1)
        chosen = q[:, part].gather(1, batch.action_B[:, d : d + 1]).squeeze(1)
        loss = loss + 0.5 * (batch.weight_B * (chosen - target) ** 2).mean()
    expected = autograd(algorithm.trainer, loss)
    algorithm.meter.begin()
    found = step_gradient(algorithm.trainer, lambda: algorithm._step(batch))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
