"""Tests of updates of on-policy algorithms against plain autograd, with nets called step by step and distributions of torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn

from slm_lab.agent.agent import Agent
from slm_lab.lib.records import EnvInfo
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, RNN, ToyEnv, agent_of, info, spec, steps_of
from tests.agent.test_distributions import reference
from tests.agent.test_packed import CONV, KNOWN, PackedEnv

GAMMA, LAM, CLIP, VALUE, ENTROPY, SEQ_LEN, STEPS = 0.9, 0.8, 0.2, 0.5, 0.03, 4, 10
COMMON = {"gamma": GAMMA, "lam": LAM, "val_loss_coef": VALUE, "entropy_coef_spec": {"name": "no_decay", "start_val": ENTROPY}}
PPO = {"name": "PPO", "time_horizon": STEPS, "minibatch_size": 1000, "training_epoch": 1, "normalize_advantages": False, **COMMON}
A2C = {"name": "ActorCritic", "training_frequency": STEPS, "normalize_advantages": False, **COMMON}
SGD = {"optim_spec": {"name": "SGD", "lr": 1.0}, "clip_grad_val": None}
SEPARATE = {
    **MLP,
    "use_same_optim": False,
    "actor_optim_spec": {"name": "SGD", "lr": 1.0},
    "critic_optim_spec": {"name": "SGD", "lr": 0.25},
}

Case = tuple[dict[str, Any], dict[str, Any], str]
CASES: dict[str, Case] = {
    "PPO, LSTM": (PPO, {**RNN, "cell_type": "LSTM", "seq_len": SEQ_LEN}, ""),
    "PPO, GRU of Normal": (PPO, {**RNN, "cell_type": "GRU", "seq_len": SEQ_LEN, "rnn_num_layers": 2}, "Normal"),
    "A2C, RNN": (A2C, {**RNN, "cell_type": "RNN", "seq_len": SEQ_LEN}, ""),
    "PPO, Dict": (PPO, {"name": "ConvNet", **CONV}, "packed"),
    "A2C, Dict": (A2C, MLP, "packed"),
    "PPO, Beta": (PPO, MLP, "Beta"),
    "A2C, Beta": (A2C, MLP, "Beta"),
    "PPO, MultivariateNormal": (PPO, MLP, "MultivariateNormal"),
    "A2C, MultivariateNormal": (A2C, MLP, "MultivariateNormal"),
    "PPO, NormalTanh": (PPO, MLP, "NormalTanh"),
    "A2C, NormalTanh": (A2C, MLP, "NormalTanh"),
    "PPO, two optimizers": (PPO, SEPARATE, ""),
    "A2C, two optimizers": (A2C, SEPARATE, "Normal"),
}


def gathered(case: Case) -> tuple[Agent, Any]:
    algorithm, net, kind = case
    continuous = kind not in ("", "packed")
    env_info = EnvInfo(3, KNOWN, DISCRETE) if kind == "packed" else info(3, CONTINUOUS if continuous else DISCRETE)
    pdf = {"action_pdtype": kind} if continuous else {}
    agent = agent_of(spec({**algorithm, **pdf}, {**net, **SGD}), env_info)
    env = (PackedEnv if kind == "packed" else ToyEnv)(env_info)
    next(None for _ in steps_of(agent, env) if agent.ready())
    return agent, agent.algorithm.memory.rollout()  # type: ignore[union-attr]


def features(body: Any, obs_N: Tensor, first_N: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Run one step of a body, with a state that is set to zero where an episode begins."""
    x = body.layers(obs_N)
    if not hasattr(body, "cell"):
        return x, None
    keep = (~first_N).float()[None, :, None]
    if state is not None:
        state = tuple(one * keep for one in state) if isinstance(state, tuple) else state * keep
    out, state = body.cell(x[None], state)
    return out[0], state


def outputs(net: Any, rollout: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters [T, N, P], values [T, N], and values of the true next observations [T, N].

    Gradients flow inside sequences.
    """
    T, cut = len(rollout.reward_TN), rollout.truncations
    states: list[Any] = [None, None]
    params, values, nexts = [], [], []
    for t in range(T + 1):
        if t % SEQ_LEN == 0 and t < T:
            states = [tuple(x.detach() for x in s) if isinstance(s, tuple) else s if s is None else s.detach() for s in states]
        before = states
        both = [features(body, rollout.obs_TN[t], rollout.first_TN[t], state) for body, state in zip(net.bodies, states, strict=True)]
        states = [state for _, state in both]
        params.append(net.actor_head.linear(both[0][0]))
        values.append(net.critic_head(both[-1][0])[:, 0])
        if t:
            nexts.append(values[t].detach().clone())
            for k in (cut.t_K == t - 1).nonzero().flatten().tolist():
                n = int(cut.n_K[k])
                obs_N = rollout.obs_TN[t].clone()
                obs_N[n] = cut.obs_K[k]
                out, _ = features(net.bodies[-1], obs_N, torch.zeros(obs_N.shape[0], dtype=torch.bool), before[-1])
                nexts[t - 1][n] = net.critic_head(out)[n, 0].detach()
    return torch.stack(params[:T]), torch.stack(values[:T]), torch.stack(nexts)


def entropy(kind: str, p: Tensor, dist: Any) -> Tensor:
    if kind == "Beta":
        shape = nn.functional.softplus(p) + 1.0
        return td.Beta(shape[:, :2], shape[:, 2:]).entropy().sum(1) + 2.0 * math.log(2.0)
    if kind == "NormalTanh":
        eps = torch.linspace(-6.0, 6.0, 2001)
        u = p[:, None, :2] + p[:, None, 2:].exp() * eps[None, :, None]
        slope = (4.0 / (u.exp() + (-u).exp()).square()).log().sum(2)
        density = torch.exp(-0.5 * eps.square()) / math.sqrt(2.0 * math.pi)
        return td.Normal(p[:, :2], p[:, 2:].exp()).entropy().sum(1) + torch.trapezoid(slope * density, eps, dim=1)
    found: Tensor = dist.entropy()
    return found


def loss_of(agent: Agent, rollout: Any, algorithm: dict[str, Any], kind: str) -> Tensor:
    params_TNP, value_TN, next_TN = outputs(agent.policy.net, rollout)
    T, old_TN = len(rollout.reward_TN), value_TN.detach()
    advantage_TN, following = torch.zeros_like(old_TN), torch.zeros(old_TN.shape[1])
    for t in reversed(range(T)):
        delta = rollout.reward_TN[t] + GAMMA * (~rollout.terminated_TN[t]).float() * next_TN[t] - old_TN[t]
        following = delta + GAMMA * LAM * (~rollout.done_TN[t]).float() * following
        advantage_TN[t] = following
    p_BP, advantage_B = params_TNP.flatten(0, 1), advantage_TN.flatten()
    dist = reference(kind if kind not in ("", "packed") else "Categorical", p_BP)
    action_B = rollout.action_TN.flatten(0, 1)
    logp_B = dist.log_prob(torch.tanh(action_B) if kind == "NormalTanh" else action_B)
    if algorithm is PPO:
        ratio_B = (logp_B - rollout.logp_TN.flatten()).exp()
        policy = -torch.min(ratio_B * advantage_B, ratio_B.clamp(1.0 - CLIP, 1.0 + CLIP) * advantage_B).mean()
    else:
        policy = -(logp_B * advantage_B).mean()
    value = (value_TN.flatten() - (advantage_TN + old_TN).flatten()).square().mean()
    return policy + VALUE * value - ENTROPY * entropy(kind, p_BP, dist).mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_plain_autograd(name: str) -> None:
    algorithm, net, kind = CASES[name]
    agent, rollout = gathered(CASES[name])
    assert len(rollout.truncations.t_K)
    assert bool(rollout.valid_TN.all())
    loss = loss_of(agent, rollout, algorithm, kind)
    module: Any = agent.policy.net
    grads = torch.autograd.grad(loss, list(module.parameters()))
    critic = {id(p) for p in module.critic_parameters()}
    rates = [0.25 if net is SEPARATE and id(p) in critic else 1.0 for p in module.parameters()]
    expected = [p.detach() - rate * grad for p, grad, rate in zip(module.parameters(), grads, rates, strict=True)]
    metrics = agent.algorithm.learn(rollout)
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    for ours, theirs, grad in zip(module.parameters(), expected, grads, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-3, atol=1e-3 * float(grad.abs().max()) + 1e-6)
    assert max(float(grad.abs().max()) for grad in grads) > 1e-3
