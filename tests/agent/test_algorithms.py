"""Tests of algorithms: one update against the same update computed with plain torch, and the effects of keys."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from slm_lab.agent.build import build_agent, resolve_device
from slm_lab.agent.ops.distributions import LOG_STD_MAX, LOG_STD_MIN
from slm_lab.agent.ops.returns import discounted_returns
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, RNN, ToyEnv, agent_of, drive, gathered, info, spec

MULTI_DISCRETE, MULTI_BINARY = ActionSpace("multi_discrete", (2, 3), 2), ActionSpace("multi_binary", (), 2)
ENTROPY = {"name": "no_decay", "start_val": 0.01}
ACTOR_CRITIC = {"name": "ActorCritic", "lam": 0.9, "training_frequency": 10, "entropy_coef_spec": ENTROPY, "val_loss_coef": 0.5}
PPO = {"name": "PPO", "time_horizon": 10, "minibatch_size": 15, "training_epoch": 2, "entropy_coef_spec": ENTROPY, "val_loss_coef": 0.5}
REINFORCE = {"name": "Reinforce", "training_frequency": 4, "entropy_coef_spec": ENTROPY}
CASES: list[tuple[dict[str, Any], str]] = [
    (ACTOR_CRITIC, "OnPolicyBatchReplay"),
    (PPO, "OnPolicyBatchReplay"),
    (REINFORCE, "OnPolicyReplay"),
    (ACTOR_CRITIC, "OnPolicyReplay"),
]


def log_pi(net: Any, obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dist = torch.distributions.Categorical(logits=net.actor(obs))
    return dist.log_prob(action), dist.entropy().mean()


@pytest.mark.parametrize("next_step", [False, True])
def test_actor_critic_update_by_hand(next_step: bool) -> None:
    agent = gathered(ACTOR_CRITIC, "OnPolicyBatchReplay", next_step)
    net, rollout = agent.policy.net, agent.algorithm.memory.rollout()
    valid = rollout.valid_TN
    with torch.no_grad():
        value = net.critic(rollout.obs_TN.flatten(0, 1)).view(11, 3)
        following = value[1:].clone()
        cut = rollout.truncations
        following[cut.t_K, cut.n_K] = net.critic(cut.obs_K)
    advantage, running = torch.zeros(10, 3), torch.zeros(3)
    for t in reversed(range(10)):
        delta = rollout.reward_TN[t] + 0.99 * following[t] * ~rollout.terminated_TN[t] - value[t]
        running = delta + 0.99 * 0.9 * running * ~rollout.done_TN[t]
        advantage[t] = running
    target = (advantage + value[:-1])[valid]
    standard = (advantage[valid] - advantage[valid].mean()) / (advantage[valid].std() + 1e-8)
    obs = rollout.obs_TN[:-1][valid]
    logp, entropy = log_pi(net, obs, rollout.action_TN[valid])
    loss = -(logp * standard).mean() + 0.5 * (net.critic(obs) - target).square().mean() - 0.01 * entropy
    metrics = agent.update()
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-4)
    assert metrics.entropy == pytest.approx(entropy.item(), rel=1e-4)
    assert agent.clock.opt_step == 1


@pytest.mark.parametrize("algorithm", [ACTOR_CRITIC, {**ACTOR_CRITIC, "with_vtrace": True}, {**ACTOR_CRITIC, "lam": None}])
@pytest.mark.parametrize("next_step", [False, True])
def test_one_pass_learns_as_two_do(algorithm: dict[str, Any], next_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is the same if values come from the differentiated pass or from a separate forward pass."""
    weights = []
    for passes in (1, 2):
        agent = gathered(algorithm, "OnPolicyBatchReplay", next_step)
        if passes == 2:
            monkeypatch.setattr("slm_lab.agent.algorithm.actor_critic.single_pass_outputs", lambda *_, **__: None)
        agent.update()
        weights.append(agent.algorithm.trainer.flat.param.clone())
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_an_observation_that_is_no_transition_spreads_nothing(garbage: float) -> None:
    """Observations that belong to no transition do not affect an update.

    These are the observations of dummy rows, and the observation after a last row that terminated. An env may terminate because its state
    is not finite, so they may contain NaN or infinity.
    """
    n_step = {**ACTOR_CRITIC, "lam": None, "num_step_returns": 10, "training_frequency": 10}
    weights = []
    for spoiled in (False, True):
        agent = gathered(n_step, "OnPolicyBatchReplay", next_step=True)
        rollout = agent.algorithm.memory.rollout()
        assert not bool(rollout.valid_TN.all())
        rollout.terminated_TN[-1], rollout.truncated_TN[-1] = True, False
        if spoiled:
            rollout.obs_TN[:-1][~rollout.valid_TN] = garbage
            rollout.obs_TN[-1] = garbage
        agent.algorithm.learn(rollout)
        weights.append(agent.algorithm.trainer.flat.param.clone())
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


@pytest.mark.parametrize("keys", [{}, {"center_return": True}, {"center_return": True, "normalize_advantages": False}])
def test_reinforce_update_by_hand(keys: dict[str, Any]) -> None:
    agent = gathered({**REINFORCE, **keys}, "OnPolicyReplay")
    net, rollout = agent.policy.net, agent.algorithm.memory.rollout()
    valid = rollout.valid_TN
    zero = torch.zeros_like(rollout.reward_TN)
    ret = discounted_returns(rollout.reward_TN, zero, rollout.terminated_TN, rollout.done_TN, 0.99)[valid]
    logp, entropy = log_pi(net, rollout.obs_TN[:-1][valid], rollout.action_TN[valid])
    centred = ret - ret.mean()
    advantage = centred if "normalize_advantages" in keys else centred / (ret.std() + 1e-8)
    loss = -(logp * advantage).mean() - 0.01 * entropy
    agent.algorithm.memory._taken = False
    assert agent.update().loss == pytest.approx(loss.item(), rel=1e-4)


SEPARATE = {**MLP, "use_same_optim": False, "critic_optim_spec": {"name": "RMSprop", "lr": 0.1}}
NETS, ACTIONS = [MLP, RNN, {**MLP, "shared": True}, SEPARATE], [DISCRETE, CONTINUOUS, MULTI_DISCRETE, MULTI_BINARY]
TOGETHER = [(*CASES[(i + i // 4) % 4], net, action, bool(i % 2)) for i, (net, action) in enumerate(product(NETS, ACTIONS))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("algorithm", "memory", "net", "action", "next_step"), TOGETHER)
def test_everything_trains_together(
    algorithm: dict[str, Any], memory: str, net: dict[str, Any], action: ActionSpace, next_step: bool
) -> None:
    agent = agent_of(spec(algorithm, net, memory), info(3, action))
    before = agent.weights()
    metrics = drive(agent, ToyEnv(info(3, action), 2, next_step), 45)
    assert len(metrics) >= 2
    assert all(np.isfinite([m.loss, m.grad_norm, m.entropy]).all() for m in metrics)
    after = agent.weights()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    still = {name for name in after if name not in moved and "critic" not in name}
    assert not still, still
    assert any("critic" in name for name in moved) == (algorithm["name"] != "Reinforce")


def test_explore_policies() -> None:
    schedule = {"name": "linear_decay", "start_val": 1.0, "end_val": 0.0, "start_step": 0, "end_step": 300}
    agent = agent_of(spec({**PPO, "action_policy": "epsilon_greedy", "explore_var_spec": schedule}), info(3))
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    greedy = agent.policy.net.actor(torch.from_numpy(obs)).argmax(1).numpy()  # type: ignore[union-attr]
    random_actions = [agent.act(obs) for _ in range(200)]
    assert not all(np.array_equal(out.action_N, greedy) for out in random_actions)
    assert all(np.allclose(out.logp_N, np.log(1 / 3)) for out in random_actions)  # ε = 1: uniform
    agent.clock.tick(150)
    half = [agent.act(obs) for _ in range(50)]
    for out in half:
        assert np.allclose(np.exp(out.logp_N), 0.5 / 3 + 0.5 * (out.action_N == greedy))
    agent.clock.tick(150)
    assert agent.explore_var == 0.0
    assert all(np.array_equal(agent.act(obs).action_N, greedy) for _ in range(20))


@pytest.mark.parametrize("algorithm", [ACTOR_CRITIC, PPO])
def test_log_probabilities_are_computed_for_those_who_learn_from_them(algorithm: dict[str, Any]) -> None:
    """Acting computes log-probabilities only if the algorithm uses them: A2C with V-trace only, PPO always. The actions are the same."""
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    bare, corrected = (agent_of(spec({**algorithm, "with_vtrace": on}), info(3)).act(obs) for on in (False, True))
    assert np.array_equal(bare.action_N, corrected.action_N)
    assert np.isfinite(corrected.logp_N).all()
    assert np.isnan(bare.logp_N).all() == (algorithm is ACTOR_CRITIC)


def test_boltzmann_divides_logits() -> None:
    hot = {"name": "no_decay", "start_val": 4.0}
    agent = agent_of(spec({**PPO, "action_policy": "boltzmann", "explore_var_spec": hot}), info(3))
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32) * 5
    out = agent.act(obs)
    logits = agent.policy.net.actor(torch.from_numpy(obs)) / 4.0  # type: ignore[union-attr]
    expected = torch.distributions.Categorical(logits=logits).log_prob(torch.from_numpy(out.action_N))
    assert np.allclose(out.logp_N, expected.detach().numpy(), atol=1e-5)


def test_random_agent() -> None:
    agent = agent_of(spec({"name": "Random"}), info(3))
    assert drive(agent, ToyEnv(info(3)), 20) == []
    assert agent.lr is None
    assert agent.weights() == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", [{**PPO, "time_horizon": 1, "minibatch_size": 1}, {"name": "ActorCritic", "num_step_returns": 1}])
@pytest.mark.parametrize("net", [MLP, RNN, {**MLP, "batch_norm": True}])
def test_rollouts_of_dummy_rows_only_are_skipped(algorithm: dict[str, Any], net: dict[str, Any]) -> None:
    agent = agent_of(spec(algorithm, net, num_envs=1), info(1))
    metrics = drive(agent, ToyEnv(info(1), 3, next_step=True), 60)
    assert 20 < len(metrics) < 60
    assert all(np.isfinite([m.loss, m.grad_norm]).all() for m in metrics)


def test_versions_count_updates() -> None:
    agent = gathered(PPO, "OnPolicyBatchReplay")
    agent.update()
    env = ToyEnv(info(3))
    drive(agent, env, 9)
    rollout = agent.algorithm.memory
    assert set(rollout.slabs["version"][: rollout.t].flatten().tolist()) == {1}


@pytest.mark.parametrize(("name", "fixed"), [("linear_decay", False), ("rate_decay", False), ("periodic_decay", False), ("no_decay", True)])
def test_evaluation_explores_as_the_schedule_ends(name: str, fixed: bool) -> None:
    """As in SLM Lab, evaluation uses the end value of the exploration schedule at any frame.

    Training continues with the value of its frame.
    """
    obs = np.zeros((3, 4), np.float32)
    for start, end in ((0.0, 1.0), (1.0, 0.0)):
        schedule = {"name": name, "start_val": start, "end_val": end, "start_step": 0, "end_step": 1000}
        algorithm = {**PPO, "action_policy": "epsilon_greedy", "explore_var_spec": schedule}
        agent = agent_of(spec(algorithm), info(3))
        act = agent.action_function()  # before the first call of act
        chosen = {tuple(act(obs, np.ones(3, bool))) for _ in range(50)}
        assert (len(chosen) > 1) == ((start if fixed else end) == 1.0)
        assert agent.explore_var == start
        assert (len({tuple(agent.act(obs).action_N) for _ in range(50)}) > 1) == (start == 1.0)


def test_a_rollout_that_does_not_fit_is_a_spec_error() -> None:
    with pytest.raises(
        SpecError, match=r"agent.algorithm.time_horizon: rollouts of 2000000000 steps of 3 envs need .* GiB; this machine has"
    ):
        agent_of(spec({**PPO, "time_horizon": 2_000_000_000}), info(3))
    with pytest.raises(SpecError, match=r"env.num_envs: rollouts of 32 steps"):  # the default frequency is not blamed
        agent_of(spec({"name": "ActorCritic"}), info(10**10))


@pytest.mark.parametrize("value", [2.0, 2.5, -5.0])
def test_a_log_std_that_could_not_be_learned_is_refused(value: float) -> None:
    """The distribution clips a log_std at or beyond its bounds, where the gradient is 0, so such an initial value is refused."""
    with pytest.raises(ValidationError, match="log_std_init"):
        spec(PPO, {**MLP, "log_std_init": value})
    near = (LOG_STD_MIN if value < 0 else LOG_STD_MAX) - math.copysign(0.01, value)
    agent = agent_of(spec(PPO, {**MLP, "log_std_init": near}), info(3, CONTINUOUS))
    drive(agent, ToyEnv(info(3, CONTINUOUS)), 40)
    assert all(not math.isclose(x, near, abs_tol=1e-6) for x in agent.weights()["actor_head.log_std"].tolist())


def test_log_std_init_has_no_effect_without_a_normal_distribution(caplog: pytest.LogCaptureFixture) -> None:
    agent = agent_of(spec(PPO, {**MLP, "log_std_init": 0.0}), info(3))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["agent.net.log_std_init"]
    assert agent.weights().keys() == agent_of(spec(PPO, MLP), info(3)).weights().keys()


def test_evaluator_carries_its_own_state() -> None:
    agent = agent_of(spec(PPO, RNN), info(3))
    act = agent.action_function()
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    outs = [act(obs, np.zeros(3, bool)) for _ in range(5)]
    assert all(out.shape == (3,) for out in outs)
    first, again = agent.action_function(), agent.action_function()
    assert np.array_equal(first(obs, np.ones(3, bool)), again(obs, np.ones(3, bool)))


@pytest.mark.parametrize(
    ("algorithm", "action", "part"),
    [
        ({**PPO, "action_pdtype": "Normal"}, DISCRETE, "Categorical"),
        ({**PPO, "action_pdtype": "Categorical"}, CONTINUOUS, "MultivariateNormal"),
        ({**PPO, "action_pdtype": "Beta"}, ActionSpace("continuous", (), 2, bounded=False), "unbounded"),
        ({**PPO, "action_policy": "epsilon_greedy", "explore_var_spec": ENTROPY}, CONTINUOUS, "continuous"),
    ],
)
def test_misfits_are_spec_errors(algorithm: dict[str, Any], action: ActionSpace, part: str) -> None:
    with pytest.raises(SpecError, match=part):
        build_agent(spec(algorithm), info(3, action), session_seeds(0, 0, 0), Clock())


def test_device(caplog: pytest.LogCaptureFixture) -> None:
    assert spec(PPO).agent.net.gpu == "auto"
    assert resolve_device(spec(PPO, {**MLP, "gpu": False})) == "cpu"
    if not torch.cuda.is_available():
        assert resolve_device(spec(PPO, {**MLP, "gpu": "auto"})) == "cpu"
        caplog.clear()
        assert resolve_device(spec(PPO, {**MLP, "gpu": True})) == "cpu"
        assert resolve_device(spec(PPO, {**MLP, "gpu": True}), 1) == "cpu"
        assert caplog.text.count("no CUDA device") == 1
