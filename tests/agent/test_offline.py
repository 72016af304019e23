"""Tests of learning from recorded episodes: behaviour cloning, implicit Q-learning, and batches of recorded and own steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent
from slm_lab.agent.ops.losses import expectile_loss
from slm_lab.agent.replay.demonstration_replay import build_demonstration_replay
from slm_lab.lib.clock import Clock
from slm_lab.lib.demonstrations import Demonstrations
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, ObservationSpace, VecStep
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

ACTIONS = {"discrete": ActionSpace("discrete", (3,)), "continuous": ActionSpace("continuous", dim=2)}


def recorded(action: ActionSpace, rows: int = 40, obs: ObservationSpace | None = None) -> Demonstrations:
    """Return random episodes of 10 steps that are alternately terminated and truncated."""
    rng, shape = np.random.default_rng(1), (obs or ObservationSpace((4,))).shape
    ends = np.arange(rows) % 10 == 9
    terminated = ends & (np.arange(rows) % 20 == 9)
    actions = rng.integers(3, size=rows) if action.kind == "discrete" else rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    values: Any = (lambda n: rng.integers(0, 256, (n, *shape), np.uint8)) if obs else lambda n: rng.standard_normal((n, *shape), np.float32)
    rewards = rng.standard_normal(rows).astype(np.float32)
    return Demonstrations(values(rows), actions, rewards, terminated, ends & ~terminated, values(rows // 10))


def agent(kind: str, algorithm: dict[str, Any], net: dict[str, Any] | None = None, **memory: Any) -> Agent:
    own = {"name": "MLPNet", "hid_layers": [8], "hid_layers_activation": "tanh", "optim_spec": {"name": "SGD", "lr": 0.1}}
    own |= {"update_type": "polyak", "polyak_coef": 0.25, **(net or {})}
    raw = {"algorithm": algorithm, "memory": {"name": "Replay", "batch_size": 8, **memory}, "net": own}
    spec = Spec.model_validate({"name": "a", "agent": raw, "env": {"name": "CartPole-v1", "max_frame": 1000}})
    found = build_agent(spec, EnvInfo(2, ObservationSpace((4,)), ACTIONS[kind], max_frame=1000), session_seeds(0, 0, 0), Clock())
    return found


# ---- formulas


def test_expectile_loss_by_hand() -> None:
    loss, slope = expectile_loss(np.array([2.0, -3.0, 0.0]), 0.75)
    np.testing.assert_allclose(loss, [0.75 * 4, 0.25 * 9, 0.0])
    np.testing.assert_allclose(slope, [0.75 * 4, -0.25 * 6, 0.0])


def test_the_expectile_of_two_values_is_where_its_weighted_errors_balance() -> None:
    """For the values 0 and 1 the τ-expectile is τ, where the weighted errors balance: τ (1 − τ) = (1 − τ) τ."""
    for tau in (0.5, 0.7, 0.9):
        _, slope = expectile_loss(torch.tensor([0.0, 1.0]) - tau, tau)
        assert abs(float(slope.sum())) < 1e-6


@pytest.mark.parametrize(
    ("kind", "log_std", "pdtype"),
    [
        *product(("discrete", "continuous"), (None, -0.5), ("default",)),
        ("continuous", None, "Beta"),  # without a closed form of the gradient
        ("continuous", None, "MultivariateNormal"),
    ],
)
def test_an_update_of_iql_is_that_of_autograd_on_the_papers_losses(kind: str, log_std: float | None, pdtype: str) -> None:
    """An update equals plain gradient steps on the losses of eqs. 5 to 7, with the batch that the agent draws."""
    algorithm = {"name": "IQL", "action_pdtype": pdtype, "expectile": 0.8, "beta": 2.0, "gamma": 0.9}
    found = agent(kind, algorithm, {"log_std_init": log_std})
    found.algorithm.use_demonstrations(recorded(ACTIONS[kind]))
    iql: Any = found.algorithm
    found.update()  # so that the target net differs from the critics
    state = iql.memory.state_dict()
    batch = iql.memory.sample()
    iql.memory.load_state_dict(state)
    discrete, nets = kind == "discrete", {"net": iql.net, "critics": iql.critics, "value": iql.value, "target": iql.target.net}

    def q(net: Any) -> torch.Tensor:
        if discrete:
            return net(batch.obs_B, None).gather(2, batch.action_B.expand(2, -1)[..., None])[..., 0]
        return net(batch.obs_B, batch.action_B)

    v_B = iql.value(batch.obs_B, None)[0, :, 0]
    advantage_B = q(iql.target.net).min(0)[0].detach() - v_B
    weight_B = torch.where(advantage_B < 0, 0.2, 0.8)
    value_loss = (weight_B * advantage_B**2).mean()
    logp_B, _ = iql.distribution.evaluate(iql.net(batch.obs_B)[0], batch.action_B)
    actor_loss = -((2.0 * advantage_B.detach()).exp().clamp(max=100) * logp_B).mean()
    before = {name: [p.detach().clone() for p in net.parameters()] for name, net in nets.items()}
    expected = {}
    for name, loss in (("value", value_loss), ("net", actor_loss)):
        grads = torch.autograd.grad(loss, list(nets[name].parameters()), allow_unused=True)
        expected[name] = [p if g is None else p - 0.1 * g for p, g in zip(before[name], grads, strict=True)]
    with torch.no_grad():  # Q learns from V after the step of V
        for p, new in zip(iql.value.parameters(), expected["value"], strict=True):
            p.copy_(new)
        next_B = iql.value(batch.next_obs_B, None)[0, :, 0]
        target_B = batch.reward_B + 0.9 * (1 - batch.terminated_B) * next_B
        for p, old in zip(iql.value.parameters(), before["value"], strict=True):
            p.copy_(old)
    grads = torch.autograd.grad(((q(iql.critics) - target_B) ** 2).mean(1).sum(), list(iql.critics.parameters()))
    expected["critics"] = [p - 0.1 * g for p, g in zip(before["critics"], grads, strict=True)]
    expected["target"] = [0.75 * t + 0.25 * c for t, c in zip(before["target"], expected["critics"], strict=True)]
    metrics = found.update()
    assert metrics.extra["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert metrics.extra["actor_loss"] == pytest.approx(actor_loss.item(), rel=1e-4)
    for name, net in nets.items():
        for p, new in zip(net.parameters(), expected[name], strict=True):
            torch.testing.assert_close(p.detach(), new, rtol=1e-4, atol=1e-6, msg=name)


def test_cloning_finds_a_linear_policy_and_its_noise() -> None:
    data = recorded(ACTIONS["continuous"], 2000)
    noise = 0.1 * np.random.default_rng(0).standard_normal((2000, 2))
    data = replace(data, action_K=(0.3 * data.obs_K[:, :2] + noise).astype(np.float32))
    net = {"hid_layers": [], "optim_spec": {"name": "Adam", "lr": 0.02}, "log_std_init": 0.0}
    found = agent("continuous", {"name": "BC"}, net, batch_size=256)
    found.algorithm.use_demonstrations(data)
    losses = [found.update().loss for _ in range(300)]
    weight = found.weights()["actor_head.linear.weight"]
    torch.testing.assert_close(weight, torch.tensor([[0.3, 0, 0, 0], [0, 0.3, 0, 0]]), atol=0.02, rtol=0)
    assert np.exp(found.weights()["actor_head.log_std"].numpy()) == pytest.approx(0.1, rel=0.15)
    assert losses[-1] < losses[0] - 3.0


def test_actions_before_tanh_cannot_be_recorded() -> None:
    with pytest.raises(SpecError, match=r"agent\.algorithm\.action_pdtype: 'NormalTanh' learns from samples before tanh"):
        agent("continuous", {"name": "BC", "action_pdtype": "NormalTanh"})


# ---- recorded and own steps in one batch


def drive(found: Agent, steps: int, reward: float = 5.0) -> None:
    """Act and observe for `steps` steps of two envs. Each step has the reward `reward`, which no recorded step has."""
    obs, none, all_N = np.zeros((2, 4), np.float32), np.zeros(2, np.bool_), np.ones(2, np.bool_)
    for _ in range(steps):
        out = found.act(obs)
        step = VecStep(np.full(2, reward, np.float32), none, none, obs, obs, none, all_N, [])
        found.clock.tick(2)
        found.algorithm.observe(obs, none, None, ActOut(out.action_N, out.logp_N), step)


@pytest.mark.parametrize(("share", "count"), [(None, 4), (0.25, 2), (0.01, 1), (0.99, 7)])
def test_a_batch_has_its_share_of_recorded_steps(share: float | None, count: int) -> None:
    found = agent("discrete", {"name": "DQN"}, demonstration_fraction=share)
    data = recorded(ACTIONS["discrete"])
    found.algorithm.use_demonstrations(data)
    drive(found, 10)
    memory: Any = found.algorithm.memory
    rows = []
    for _ in range(100):
        batch = memory.sample()
        assert len(batch.obs_B) == 8
        assert (batch.reward_B[: 8 - count] == 5.0).all()
        assert (batch.reward_B[8 - count :] != 5.0).all()
        rows += [np.flatnonzero((data.obs_K == obs).all(1)).item() for obs in batch.obs_B.numpy()[8 - count :]]
        row = rows[-1]
        following = data.steps(0, 40)[4].last_obs_N[row]
        assert batch.next_obs_B[-1].numpy().tolist() == following.tolist()
        assert (batch.action_B[-1], batch.terminated_B[-1]) == (data.action_K[row], data.terminated_K[row])
    assert len(set(rows)) > 35 or count < 3
    assert np.isfinite(found.update().loss)


def test_recorded_images_are_stored_whole() -> None:
    """Both observations of each row of stacked frames are stored.

    This includes short episodes, whose first frames need more space.
    """
    space = ObservationSpace((2, 7, 7), "uint8", stack=2)
    data = recorded(ACTIONS["discrete"], 40, space)
    info = EnvInfo(2, space, ACTIONS["discrete"])
    obs = data.obs_K.copy()
    obs[1:, 0] = np.where(data.first_K[1:, None, None], obs[1:, 0], obs[:-1, 1])  # the older frame of a stack is the frame before
    last = np.stack([np.stack([obs[end, 1], final[1]]) for end, final in zip(data.end_E, data.last_obs_E, strict=True)])
    data = replace(data, obs_K=obs, last_obs_E=last)
    found = build_demonstration_replay(data, info, 8, Clock(), np.random.default_rng(0))
    assert found.size == 40
    stored, following = found.store.observations(np.arange(40)), found.store.next_observations(np.arange(40))
    np.testing.assert_array_equal(stored, data.obs_K)
    np.testing.assert_array_equal(following, data.steps(0, 40)[4].last_obs_N)
