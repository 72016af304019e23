"""Tests of V-trace against the published sum, without lag, and on experience of an old policy."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.on_policy import log_ratio
from slm_lab.agent.ops.returns import VTrace, discounted_returns, gae, vtrace
from slm_lab.agent.rollout.minibatch import compute_critic_outputs
from slm_lab.agent.rollout.rollout import Rollout, Truncations
from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, RNN, agent_of, gathered, spec
from tests.agent.test_algorithms import ACTOR_CRITIC, ENTROPY, PPO
from tests.agent.test_returns import random_rollout

GAMMA, LAM = 0.9, 0.8
RHO_BAR, C_BAR = 1.3, 0.7
NSTEP = {"name": "ActorCritic", "num_step_returns": 10}
ZERO = {"name": "no_decay", "start_val": 0.0}
SGD = {"optim_spec": {"name": "SGD", "lr": 0.1}}


def stale_rollout(seed: int, T: int, N: int) -> dict[str, torch.Tensor]:
    """Return a `random_rollout` with a log ratio. Within an episode, V of the next observation is the V of the next row."""
    r = random_rollout(seed, T, N)
    r["next_value"][:-1] = torch.where(r["done"][:-1], r["next_value"][:-1], r["value"][1:])
    r["log_ratio"] = torch.randn(T, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return r


def run(r: dict[str, torch.Tensor], lam: float = LAM, rho_bar: float = RHO_BAR, c_bar: float = C_BAR) -> VTrace:
    rows = (r["reward"], r["value"], r["next_value"], r["terminated"], r["done"])
    return vtrace(r["log_ratio"], *rows, GAMMA, lam, rho_bar, c_bar)


def brute_target(r: dict[str, torch.Tensor], s: int, n: int, lam: float) -> float:
    """Return V(x_s) + Σ_t γ^{t−s} (Π_{i<t} c_i) δ_t V up to the end of the episode or the rollout, eq. 1 of arXiv:1802.01561."""
    total, weight = float(r["value"][s, n]), 1.0
    for t in range(s, len(r["reward"])):
        ratio = math.exp(float(r["log_ratio"][t, n]))
        bootstrap = 0.0 if r["terminated"][t, n] else float(r["next_value"][t, n])
        total += weight * min(RHO_BAR, ratio) * (float(r["reward"][t, n]) + GAMMA * bootstrap - float(r["value"][t, n]))
        weight *= GAMMA * lam * min(C_BAR, ratio)
        if r["done"][t, n]:
            break
    return total


def brute_advantage(r: dict[str, torch.Tensor], t: int, n: int, lam: float) -> float:
    """Return r + γ [(1 − λ) V + λ vs] − V, with V in place of vs after the last recorded step, and 0 for both after a termination."""
    following = 0.0 if r["terminated"][t, n] else float(r["next_value"][t, n])
    if not r["done"][t, n] and t < len(r["reward"]) - 1:
        following = (1 - lam) * following + lam * brute_target(r, t + 1, n, lam)
    return float(r["reward"][t, n]) + GAMMA * following - float(r["value"][t, n])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), T=st.integers(1, 20), N=st.integers(1, 3), lam=st.sampled_from([0.0, LAM, 1.0]))
def test_against_brute_force(seed: int, T: int, N: int, lam: float) -> None:
    r = stale_rollout(seed, T, N)
    trace = run(r, lam)
    for t in range(T):
        for n in range(N):
            assert float(trace.target_TN[t, n]) == pytest.approx(brute_target(r, t, n, lam))
            assert float(trace.advantage_TN[t, n]) == pytest.approx(brute_advantage(r, t, n, lam))
            assert float(trace.rho_TN[t, n]) == pytest.approx(min(RHO_BAR, math.exp(float(r["log_ratio"][t, n]))))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), T=st.integers(1, 20), lam=st.sampled_from([0.0, LAM, 1.0]))
def test_without_lag(seed: int, T: int, lam: float) -> None:
    """With a ratio of 1, advantages are GAE(λ) and targets are V + GAE(λ), which are the returns for λ = 1."""
    r = stale_rollout(seed, T, 2)
    r["log_ratio"].zero_()
    trace = run(r, lam, 1.0, 1.0)
    expected = gae(r["reward"], r["value"], r["next_value"], r["terminated"], r["done"], GAMMA, lam)
    assert torch.allclose(trace.advantage_TN, expected)
    assert torch.allclose(trace.target_TN, expected + r["value"])
    assert bool((trace.rho_TN == 1.0).all())
    if lam == 1.0:
        returns = discounted_returns(r["reward"], r["next_value"], r["terminated"], r["done"], GAMMA)
        assert torch.allclose(trace.target_TN, returns)


def test_impossible_and_certain_actions_are_bounded() -> None:
    r = stale_rollout(0, 6, 1)
    r["log_ratio"][2], r["log_ratio"][4] = math.inf, -math.inf
    assert all(bool(x.isfinite().all()) for x in run(r))
    assert run(r).rho_TN[[2, 4]].flatten().tolist() == [RHO_BAR, 0.0]


def test_shapes_are_checked() -> None:
    no = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="the same shape"):
        vtrace(no[:2], no, no, no, no.bool(), no.bool(), GAMMA, LAM, 1.0, 1.0)


def with_rollout(algorithm: dict[str, Any], **how: Any) -> tuple[Agent, Rollout]:
    """Return an agent and a rollout that it has gathered."""
    agent = gathered(algorithm, **how)
    return agent, agent.algorithm.memory.rollout()


LOG_STD = {**MLP, **SGD, "log_std_init": 0.0}
ON_POLICY: list[tuple[dict[str, Any], dict[str, Any], ActionSpace]] = [
    (ACTOR_CRITIC, {**MLP, **SGD}, DISCRETE),
    (ACTOR_CRITIC, {**RNN, **SGD}, CONTINUOUS),
    ({**ACTOR_CRITIC, "normalize_v_targets": True}, {**MLP, **SGD, "shared": True}, DISCRETE),
    (NSTEP, {**MLP, **SGD}, DISCRETE),
    (NSTEP, {**RNN, **SGD}, ActionSpace("multi_discrete", (2, 3), 2)),
    ({"name": "ActorCritic", "training_frequency": 10}, LOG_STD, CONTINUOUS),
    (PPO, {**MLP, **SGD}, DISCRETE),
    (PPO, {**RNN, **SGD}, DISCRETE),
    ({**PPO, "symlog": True, "normalize_advantages": "percentile"}, LOG_STD, CONTINUOUS),
    ({**PPO, "normalize_v_targets": True, "clip_vloss": True}, {**RNN, **SGD, "shared": True}, ActionSpace("multi_binary", (), 2)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize(("algorithm", "net", "action"), ON_POLICY)
def test_its_own_rollouts_are_learned_from_as_ever(
    algorithm: dict[str, Any], net: dict[str, Any], action: ActionSpace, next_step: bool
) -> None:
    """On rollouts of the current policy, an update with V-trace equals the update without V-trace."""
    weights, losses = [], []
    for with_vtrace in (False, True):
        agent, rollout = with_rollout({**algorithm, "with_vtrace": with_vtrace}, net=net, action=action, next_step=next_step)
        before = {name: weight.clone() for name, weight in agent.weights().items()}
        losses.append(agent.algorithm.learn(rollout).loss)
        weights.append(agent.weights())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-5), name
        assert not torch.equal(weight, before[name])


@pytest.mark.parametrize("algorithm", [ACTOR_CRITIC, NSTEP, PPO])
@pytest.mark.parametrize("key", ["rho_bar", "c_bar"])
def test_bounds_have_an_effect(algorithm: dict[str, Any], key: str) -> None:
    losses = []
    for bound in (0.1, 1.0):
        agent, rollout = with_rollout({**algorithm, "with_vtrace": True, key: bound})
        losses.append(agent.algorithm.learn(rollout).loss)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("net", [MLP, {**MLP, "shared": True}, RNN])
def test_log_ratio_is_the_present_policy_to_the_one_that_acted(net: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The log ratio is computed in microbatches and chunks of seq_len, from the stored hidden state, and only if it is requested."""
    agent, rollout = with_rollout({**ACTOR_CRITIC, "with_vtrace": True}, net=net, next_step=True)
    agent.update()
    algorithm, actor = agent.algorithm, agent.policy.net
    passes: list[int] = []
    with actor.actor_head.register_forward_hook(lambda *_: passes.append(1)):
        assert compute_critic_outputs(actor, rollout, algorithm.seq_len).params_TNP is None
    assert bool(passes) == (net is RNN)  # a recurrent unroll always computes the actor too
    monkeypatch.setattr("slm_lab.agent.rollout.minibatch.MICROBATCH_BYTES", 5 * 16)  # of 33 observations of 16 bytes
    ratio_TN = log_ratio(algorithm.distribution, rollout, compute_critic_outputs(actor, rollout, algorithm.seq_len, actor=True))
    with torch.no_grad():
        if net is RNN:
            logits, _, _ = actor.unroll(rollout.obs_TN[:-1], rollout.first_TN[:-1], rollout.state_NS)
        else:
            logits = actor.actor(rollout.obs_TN[:-1].flatten(0, 1)).view(10, 3, 3)
    expected = torch.distributions.Categorical(logits=logits).log_prob(rollout.action_TN) - rollout.logp_TN
    assert torch.allclose(ratio_TN, expected, atol=1e-5)
    assert expected.abs().max() > 0.01
    # corrections still use the ratio of a transition that a sampler masks because of its lag
    masked = replace(rollout, valid_TN=torch.zeros_like(rollout.valid_TN))
    assert torch.equal(
        log_ratio(algorithm.distribution, masked, compute_critic_outputs(actor, masked, algorithm.seq_len, actor=True)), ratio_TN
    )


def test_a_row_that_is_no_transition_spreads_nothing() -> None:
    clean, rollout = with_rollout({**ACTOR_CRITIC, "with_vtrace": True}, next_step=True)
    loss = clean.algorithm.learn(rollout).loss
    for garbage in (math.nan, math.inf, -math.inf):
        agent, rollout = with_rollout({**ACTOR_CRITIC, "with_vtrace": True}, next_step=True)
        assert not bool(rollout.valid_TN.all())
        rollout.logp_TN[~rollout.valid_TN] = garbage
        assert agent.algorithm.learn(rollout).loss == loss


def test_actor_critic_weighs_after_standardising() -> None:
    """On a rollout of an older policy, the loss is −mean ρ Â log π with Â standardised."""
    agent, rollout = with_rollout({**ACTOR_CRITIC, "with_vtrace": True, "val_loss_coef": 0.0, "entropy_coef_spec": ZERO})
    rollout.logp_TN[:] += torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    trace, logp = by_hand(agent, rollout, 0.9)
    standard = (trace.advantage_TN - trace.advantage_TN.mean()) / trace.advantage_TN.std()
    assert agent.algorithm.learn(rollout).loss == pytest.approx(-float((trace.rho_TN * standard * logp).mean()), rel=1e-4)


def test_ppo_weighs_by_the_ratio_once() -> None:
    """The ratio of the surrogate refers to the policy that acted, so the loss must not be multiplied by ρ as well."""
    keys = {"training_epoch": 1, "minibatch_size": 1000, "val_loss_coef": 0.0, "entropy_coef_spec": ZERO, "normalize_advantages": False}
    agent, rollout = with_rollout({**PPO, **keys, "with_vtrace": True, "lam": 0.9})
    rollout.logp_TN[:] += torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    trace, logp = by_hand(agent, rollout, 0.9)
    ratio = (logp - rollout.logp_TN).exp()
    surrogate = torch.min(ratio * trace.advantage_TN, ratio.clamp(0.8, 1.2) * trace.advantage_TN)
    assert agent.algorithm.learn(rollout).loss == pytest.approx(-float(surrogate.mean()), rel=1e-4)


@torch.no_grad()
def by_hand(agent: Agent, rollout: Rollout, lam: float) -> tuple[VTrace, torch.Tensor]:
    """Return V-trace of a feed-forward net's rollout, and the net's log π(a|s) [T, N]."""
    net, cut = agent.policy.net, rollout.truncations
    params, value = net(rollout.obs_TN.flatten(0, 1))  # type: ignore[misc]
    value = value.view(11, 3)
    following = value[1:].clone()
    following[cut.t_K, cut.n_K] = net.critic(cut.obs_K)  # type: ignore[union-attr]
    logp = torch.distributions.Categorical(logits=params.view(11, 3, 3)[:-1]).log_prob(rollout.action_TN)
    rows = (rollout.reward_TN, value[:-1], following, rollout.terminated_TN, rollout.done_TN)
    return vtrace(logp - rollout.logp_TN, *rows, 0.99, lam, 1.0, 1.0), logp


# In the first state, action 0 ends the episode with reward ½, action 1 leads to the second state, where action 0 gives 0, action 1 gives 1.
# The old policy takes both actions of the first state; in the second it takes action 1 with probability ¼, so its value is below ½.
SAFE, WRONG, RIGHT = 4, 3, 1
"""Numbers of episodes of each kind, in the proportions of the old policy."""


def old_episodes() -> Rollout:
    """Return a rollout of all outcomes of the old policy: eight parallel episodes of one or two steps."""
    N = SAFE + WRONG + RIGHT
    safe = torch.arange(N) < SAFE
    right = torch.arange(N) >= SAFE + WRONG
    obs = torch.zeros(3, N, 2)
    obs[0, :, 0] = obs[1, :, 1] = 1.0
    first = torch.zeros(3, N, dtype=torch.bool)
    first[0] = True
    none = torch.zeros(0, dtype=torch.int64)
    return Rollout(
        obs_TN=obs,
        first_TN=first,
        action_TN=torch.stack([~safe, right]).long(),
        logp_TN=torch.stack([torch.full((N,), 0.5), torch.where(right, 0.25, 0.75)]).log(),
        version_TN=torch.zeros(2, N, dtype=torch.int64),
        reward_TN=torch.stack([0.5 * safe, right.float()]),
        terminated_TN=torch.stack([safe, ~safe]),
        truncated_TN=torch.zeros(2, N, dtype=torch.bool),
        valid_TN=torch.stack([torch.ones_like(safe), ~safe]),
        state_NS=torch.zeros(N, 0),
        truncations=Truncations(none, none, torch.zeros(0, 2), torch.zeros(0, 0)),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lam", [None, 0.9])
def test_learns_from_what_an_old_policy_did(lam: float | None) -> None:
    """Without V-trace the second state has its value under the old policy, ¼, and the agent learns the wrong first action."""
    optimizers = {"actor_optim_spec": {"name": "Adam", "lr": 0.02}, "critic_optim_spec": {"name": "SGD", "lr": 0.4}}
    env_info = EnvInfo(8, ObservationSpace((2,), "float32"), ActionSpace("discrete", (2,), 1))
    risky, values = [], []
    for with_vtrace in (False, True):
        algorithm = {"name": "ActorCritic", "lam": lam, "gamma": 1.0, "with_vtrace": with_vtrace, "entropy_coef_spec": ENTROPY}
        agent = agent_of(spec(algorithm, {**MLP, "use_same_optim": False, **optimizers}, num_envs=8), env_info)
        for _ in range(100):
            agent.algorithm.learn(old_episodes())
        with torch.no_grad():
            logits, value = agent.policy.net(torch.eye(2))  # type: ignore[misc]
        risky.append(float(logits.softmax(1)[0, 1]))
        values.append(value.tolist())
    assert risky[0] < 0.1
    assert risky[1] > 0.9
    assert values[0] == pytest.approx([(0.5 + 0.25) / 2, 0.25], abs=0.05)
    assert values[1] == pytest.approx([1.0, 1.0], abs=0.05)
