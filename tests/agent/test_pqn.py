"""Tests of PQN: λ-returns and loss against values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.algorithm.pqn import PQN
from slm_lab.agent.ops.returns import discounted_returns, q_lambda_returns
from slm_lab.agent.rollout.rollout import Rollout
from tests.agent.helpers import MLP, RNN, ToyEnv, agent_of, drive, gathered, info, spec

KEYS = {"name": "PQN", "gamma": 0.9, "lam": 0.5, "time_horizon": 8, "minibatch_size": 6, "training_epoch": 2,
        "explore_var_spec": {"name": "no_decay", "start_val": 0.2}}  # fmt: skip


def test_returns_by_hand() -> None:
    """γ = λ = ½, V = max Q = 8, rewards 1, 2, 4. Three envs: no end, a termination in row 1, a truncation in row 1."""
    reward_TN = torch.tensor([[1.0] * 3, [2.0] * 3, [4.0] * 3])
    value_TN = torch.full((3, 3), 8.0)
    terminated_TN, done_TN = torch.zeros(3, 3, dtype=torch.bool), torch.zeros(3, 3, dtype=torch.bool)
    terminated_TN[1, 1] = done_TN[1, 1] = done_TN[1, 2] = True
    last = 4.0 + 0.5 * 8.0  # = 8, bootstrapped at the end of the rollout
    going = 2.0 + 0.5 * (0.5 * 8.0 + 0.5 * last)
    expected = [
        [1.0 + 0.5 * (4.0 + 0.5 * going), 1.0 + 0.5 * (4.0 + 0.5 * 2.0), 1.0 + 0.5 * (4.0 + 0.5 * 6.0)],
        [going, 2.0, 2.0 + 0.5 * 8.0],
        [last] * 3,
    ]
    rows = (reward_TN, value_TN, terminated_TN, done_TN)
    assert q_lambda_returns(*rows, 0.5, 0.5).tolist() == expected
    assert q_lambda_returns(*(row.numpy() for row in rows), 0.5, 0.5).tolist() == expected


def test_returns_with_lambda_at_its_ends() -> None:
    """λ = 1 gives returns to the end of the episode or rollout; λ = 0 gives one step of Q-learning."""
    rng = np.random.default_rng(0)
    reward, value = (rng.normal(size=(9, 4)).astype(np.float32) for _ in range(2))
    terminated = rng.random((9, 4)) < 0.2
    done = terminated | (rng.random((9, 4)) < 0.2)
    returns = discounted_returns(reward, value, terminated, done, 0.9)
    assert np.allclose(q_lambda_returns(reward, value, terminated, done, 0.9, 1.0), returns, atol=1e-6)
    assert np.allclose(q_lambda_returns(reward, value, terminated, done, 0.9, 0.0), reward + 0.9 * value * ~terminated, atol=1e-6)


@pytest.mark.parametrize("net", [MLP, {**MLP, "layer_norm": True}, {**MLP, "name": "DuelingMLPNet"}, RNN])
@pytest.mark.parametrize("next_step", [False, True])
def test_loss_is_the_error_of_the_returns(net: dict[str, Any], next_step: bool) -> None:
    """For one epoch of one minibatch, the loss is that of targets computed by a backward loop over each env.

    The data have both kinds of ends, which are bootstrapped from the true last observations.
    """
    keys = KEYS | {"minibatch_size": 24, "training_epoch": 1}
    agent = gathered(keys, net=net, next_step=next_step)
    algorithm = agent.algorithm
    assert isinstance(algorithm, PQN)
    rollout: Rollout = algorithm.memory.rollout()  # type: ignore[union-attr]  # a rollout storage
    q_TN, next_TN = values_by_hand(algorithm, rollout)
    errors = []
    for n in range(3):
        after = 0.0
        for t in reversed(range(8)):
            bootstrap = 0.0 if rollout.terminated_TN[t, n] else float(next_TN[t, n])
            cut = bool(rollout.done_TN[t, n]) or t == 7
            after = float(rollout.reward_TN[t, n]) + 0.9 * (bootstrap if cut else 0.5 * bootstrap + 0.5 * after)
            if rollout.valid_TN[t, n]:
                errors.append(after - float(q_TN[t, n]))
    metrics = algorithm.learn(rollout)
    assert metrics.loss == pytest.approx(np.square(errors).mean(), rel=1e-4)
    assert metrics.extra["td_error"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)


def values_by_hand(algorithm: PQN, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q(s, a) and max Q of the true next observation, both [T, N], computed step by step."""
    net, cut = algorithm.net, rollout.truncations
    recurrent, q_TN, next_TN = net.state_size > 0, torch.zeros(8, 3), torch.zeros(8, 3)

    def one(obs_N: torch.Tensor, first_N: torch.Tensor, state_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not recurrent:
            return net.critic(obs_N), state_NS
        q, _, state_NS = net.unroll(obs_N[None], first_N[None], state_NS)
        return q[0], state_NS

    state_NS = rollout.state_NS
    with torch.no_grad():
        for t in range(8):
            q_NA, state_NS = one(rollout.obs_TN[t], rollout.first_TN[t], state_NS)
            q_TN[t] = q_NA.gather(1, rollout.action_TN[t][:, None])[:, 0]
            next_TN[t] = one(rollout.obs_TN[t + 1], rollout.first_TN[t + 1], state_NS)[0].amax(1)
        for k in range(len(cut.t_K)):
            value = one(cut.obs_K[k : k + 1], torch.zeros(1, dtype=torch.bool), cut.state_KS[k : k + 1])[0].amax()
            next_TN[cut.t_K[k], cut.n_K[k]] = value
    return q_TN, next_TN


def test_gradient_steps_and_exploration() -> None:
    agent = agent_of(spec(KEYS, MLP), info())
    metrics = drive(agent, ToyEnv(info(), seed=0), 32)
    assert len(metrics) == 4
    assert agent.clock.opt_step == 4 * 2 * 4  # rollouts × epochs × minibatches
    default = spec({"name": "PQN"}).agent.algorithm.explore_var_spec
    assert default is not None
    assert (default.value(0), default.value(1000)) == (1.0, 0.05)
