"""Tests of PPO keys (off by default): target_kl, adaptive_lr, normalize_values, recompute_advantages, bounds_loss_coef, dual_clip."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.algorithm.adaptive_lr import AdaptiveLearningRate
from slm_lab.agent.algorithm.ppo import MinibatchLogProbs
from slm_lab.agent.algorithm.value_scale import ValueNormalizer
from slm_lab.agent.ops import objective
from slm_lab.lib.records import ActionSpace
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.spec.models.algorithm import AdaptiveLR
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report, SpecError
from slm_lab.spec.rules.check import check_rules
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, agent_of, drive, gathered, info, reloaded, spec
from tests.agent.test_algorithms import PPO

FAST = {**MLP, "optim_spec": {"name": "Adam", "lr": 0.05}}
ALL = {
    **PPO,
    "adaptive_lr": {"kl_target": 0.005},
    "normalize_values": True,
    "recompute_advantages": True,
    "target_kl": 0.05,
    "bounds_loss_coef": 0.1,
    "dual_clip": 3.0,
}


def weights(agent: Any) -> torch.Tensor:
    flat: torch.Tensor = agent.algorithm.trainer.flat.param.clone()
    return flat


def rewarded(algorithm: dict[str, Any], factor: float, **keys: Any) -> Any:
    agent = gathered(algorithm, **keys)
    agent.algorithm.memory.slabs["reward"] *= factor
    return agent


# ---- target_kl


@pytest.mark.parametrize("closed_form", [True, False])
def test_target_kl_stops_before_the_step_of_the_first_minibatch_beyond_it(closed_form: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CLOSED_FORM", closed_form)
    keys = {**PPO, "minibatch_size": 7, "training_epoch": 5}
    plain, stopped = gathered(keys, net=FAST), gathered({**keys, "target_kl": 0.02}, net=FAST)
    before: list[torch.Tensor] = []
    divergences: list[float] = []
    add = MinibatchLogProbs.add

    def spy(steps: MinibatchLogProbs, logp_B: torch.Tensor, old_logp_B: torch.Tensor) -> None:
        log_ratio = logp_B - old_logp_B
        before.append(weights(plain))
        divergences.append(float((log_ratio.exp() - 1.0 - log_ratio).mean()))
        add(steps, logp_B, old_logp_B)

    with monkeypatch.context() as patch:
        patch.setattr(MinibatchLogProbs, "add", spy)
        plain.update()
    first = next(index for index, kl in enumerate(divergences) if index and kl > 1.5 * 0.02)
    assert 0 < first < len(divergences) - 1
    metrics = stopped.update()
    assert stopped.clock.opt_step == first
    assert torch.equal(weights(stopped), before[first])
    assert not stopped.algorithm.trainer.flat.grad.any()
    assert metrics.extra["approx_kl"] == pytest.approx(np.mean(divergences[: first + 1]), rel=0.1)  # minibatches of 7 or 8


def test_the_first_step_is_always_taken() -> None:
    """The first step is taken even if the old policy already differs by more than target_kl."""
    agent = gathered({**PPO, "target_kl": 1e-9}, net=FAST)
    agent.algorithm.memory.slabs["logp"] -= 1.0
    before = weights(agent)
    metrics = agent.update()
    assert agent.clock.opt_step == 1
    assert np.isfinite(metrics.loss)
    assert not torch.equal(weights(agent), before)


# ---- adaptive_lr


def test_the_rate_follows_the_divergence() -> None:
    rate = AdaptiveLearningRate(AdaptiveLR(kl_target=0.01, factor=2.0, min_lr=2e-4, max_lr=3e-3), 1e-3)
    found = []
    for kl in (0.021, 0.019, 0.03, 0.03, 0.03, 0.0049, 0.0, 0.0, 0.0, 0.0, float("nan"), 0.005):
        rate.adapt_lr(kl)
        found.append(float(rate.numbers[0]))
    halved = [5e-4, 5e-4, 2.5e-4, 2e-4, 2e-4]
    assert found == pytest.approx([*halved, 4e-4, 8e-4, 1.6e-3, 3e-3, 3e-3, 3e-3, 3e-3])
    assert rate.factor == pytest.approx(3.0)


@pytest.mark.parametrize(("kl", "moved"), [(0.2, 0.1), (0.0, 0.01)])
def test_a_rate_outside_the_bounds_never_moves_the_wrong_way(kl: float, moved: float) -> None:
    rate = AdaptiveLearningRate(AdaptiveLR(kl_target=0.01, min_lr=0.2, max_lr=0.005, factor=2.0), moved)
    rate.adapt_lr(kl)
    assert float(rate.numbers[0]) == moved


def test_the_next_update_uses_the_rate_of_the_last_epoch() -> None:
    keys = {**PPO, "training_epoch": 3, "minibatch_size": 7}
    free, agent = gathered(keys, net=FAST), gathered({**keys, "adaptive_lr": {"kl_target": 1e-4}}, net=FAST)
    free.update()
    metrics = agent.update()
    assert torch.equal(weights(free), weights(agent))  # the first update uses the optimizer's rate
    assert agent.algorithm.lr == 0.05
    assert metrics.extra["approx_kl"] > 2e-4
    drive(agent, ToyEnv(info()), 10)
    assert agent.algorithm.lr == pytest.approx(0.05 / 1.5)


def test_a_single_gradient_step_leaves_the_rate() -> None:
    """The divergence is measured before each gradient step, and is 0 before the first."""
    agent = gathered({**PPO, "training_epoch": 1, "minibatch_size": 1000, "adaptive_lr": {"max_lr": 1.0}}, net=FAST)
    agent.update()
    assert agent.algorithm.rate.factor == 1.0


def test_the_rate_is_multiplied_by_the_factor_of_a_schedule() -> None:
    keys = {**PPO, "training_epoch": 3, "minibatch_size": 7, "adaptive_lr": {"kl_target": 1e-4}}
    agent = gathered(keys, net={**FAST, "lr_scheduler_spec": {"name": "LinearToZero", "frame": 1000}})
    first = agent.clock.global_frame
    agent.update()
    assert agent.algorithm.lr == pytest.approx(0.05 * (1.0 - first / 1000))
    drive(agent, ToyEnv(info()), 10)
    assert agent.clock.global_frame > first
    assert agent.algorithm.lr == pytest.approx(0.05 / 1.5 * (1.0 - agent.clock.global_frame / 1000))


def test_the_last_epoch_counts() -> None:
    """The divergence of the last epoch alone adapts the rate.

    The mean over all epochs would be below half the target, because the first changes are small, and would raise the rate.
    """
    agent = gathered({**PPO, "training_epoch": 4, "minibatch_size": 1000, "adaptive_lr": {}}, net=FAST)
    seen: list[float] = []
    agent.algorithm.rate.adapt_lr = seen.append
    steps: list[MinibatchLogProbs] = []
    add = MinibatchLogProbs.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MinibatchLogProbs, "add", lambda own, *rows: (steps.append(own), add(own, *rows)))
        metrics = agent.update()
    log_ratio = steps[-1].logps[-1] - steps[-1].old_logps[-1]
    assert seen == [pytest.approx(float((log_ratio.exp() - 1.0 - log_ratio).mean()), rel=1e-4)]
    assert seen[0] > 1.5 * metrics.extra["approx_kl"]


# ---- normalize_values


def test_values_are_normalised_by_all_targets() -> None:
    scale, rng = ValueNormalizer(), np.random.default_rng(0)
    assert scale.denormalize(torch.tensor([3.0])).tolist() == [3.0]
    parts = [rng.normal(50.0, 9.0, size=n).astype(np.float32) for n in (30, 70)]
    for part in parts:
        scale.update(torch.from_numpy(part))
    targets = np.concatenate(parts).astype(np.float64)
    normalized = scale.normalize(torch.from_numpy(targets))
    np.testing.assert_allclose(normalized, (targets - targets.mean()) / targets.std(), atol=1e-5)
    np.testing.assert_allclose(scale.denormalize(normalized), targets, rtol=1e-5)


def test_the_critic_learns_normalised_returns() -> None:
    """Advantages, targets and old values equal those computed in plain numpy, also for the second rollout."""
    agent = rewarded({**PPO, "normalize_values": True, "lam": 0.9}, 50.0)
    algorithm, net = agent.algorithm, agent.policy.net
    mean, std, seen = 0.0, 1.0, np.zeros(0)
    for _ in range(2):
        rollout = algorithm.memory.rollout()
        with torch.no_grad():
            value = (net.critic(rollout.obs_TN.flatten(0, 1)).view(11, 3) * std + mean).numpy()
            following, cut = value[1:].copy(), rollout.truncations
            following[cut.t_K, cut.n_K] = net.critic(cut.obs_K).numpy() * std + mean
        advantage, running = np.zeros((10, 3)), np.zeros(3)
        for t in reversed(range(10)):
            ended, done = rollout.terminated_TN[t].numpy(), rollout.done_TN[t].numpy()
            delta = rollout.reward_TN[t].numpy() + 0.99 * following[t] * ~ended - value[t]
            running = advantage[t] = delta + 0.99 * 0.9 * running * ~done
        target = advantage + value[:-1]
        batch, _ = algorithm._batch_with_advantages(rollout)
        seen = np.append(seen, target)
        mean, std = seen.mean(), seen.std()
        minibatch = next(batch.microbatches())[0]
        np.testing.assert_allclose(minibatch.advantage_B, advantage.flatten(), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(minibatch.target_B, (target.flatten() - mean) / std, atol=1e-3)
        np.testing.assert_allclose(minibatch.value_B, (value[:-1].flatten() - mean) / std, atol=1e-3)
    assert std > 10.0


def test_the_loss_compares_outputs_with_normalised_targets() -> None:
    agent = rewarded({**PPO, "normalize_values": True, "training_epoch": 1, "minibatch_size": 1000}, 50.0)
    twin = deepcopy(agent)
    minibatch = next(twin.algorithm._batch_with_advantages(twin.algorithm.memory.rollout())[0].microbatches())[0]
    expected = (twin.policy.net.critic(minibatch.inputs) - minibatch.target_B).square().mean()
    assert agent.update().extra["value_loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert 0.3 < float(expected.detach()) < 3.0


# ---- recompute_advantages


@pytest.mark.parametrize("normalize", [False, True])
def test_each_epoch_has_the_advantages_of_the_present_critic(normalize: bool) -> None:
    """Two epochs equal two updates of one epoch on the same rollout, except that the returns enter the statistics once."""
    keys = {**PPO, "minibatch_size": 1000, "normalize_values": normalize}
    agent = rewarded({**keys, "training_epoch": 2, "recompute_advantages": True}, 5.0, net=FAST)
    once, fixed = rewarded({**keys, "training_epoch": 1}, 5.0, net=FAST), rewarded({**keys, "training_epoch": 2}, 5.0, net=FAST)
    rollout = once.algorithm.memory.rollout()
    once.algorithm.learn(rollout)
    if normalize:
        once.algorithm.value_statistics.update = lambda target_B: None
    once.algorithm.learn(rollout)
    agent.update()
    fixed.update()
    assert torch.equal(weights(agent), weights(once))
    assert not torch.allclose(weights(agent), weights(fixed))


# ---- bounds_loss_coef


@pytest.mark.parametrize("closed_form", [True, False])
@pytest.mark.parametrize("log_std", [None, 0.0])
def test_means_outside_the_bounds_are_penalised(closed_form: bool, log_std: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients with and without the penalty differ by the gradient of the penalty, computed by autograd."""
    monkeypatch.setattr(objective, "CLOSED_FORM", closed_form)
    net = {**MLP, "optim_spec": {"name": "SGD", "lr": 1.0}, "log_std_init": log_std}
    keys = {**PPO, "training_epoch": 1, "minibatch_size": 1000}
    moved = []
    for coef in (0.0, 0.3):
        torch.manual_seed(0)
        agent = gathered({**keys, "bounds_loss_coef": coef}, net=net, action=CONTINUOUS)
        with torch.no_grad():
            agent.policy.net.actor_head.linear.weight[:2] *= 20.0
        start, obs = weights(agent), agent.algorithm.memory.rollout().obs_TN[:-1].flatten(0, 1)
        mean = agent.policy.net.actor(obs)[:, :2]
        penalty = 0.3 * ((mean.abs() - 1.1).clamp(min=0.0) ** 2).sum(1).mean()
        grads = torch.autograd.grad(penalty, [*agent.policy.net.actor_parameters()], allow_unused=True)
        metrics = agent.update()
        moved.append(start - weights(agent))
    assert penalty > 0.01
    assert metrics.extra["bounds_loss"] == pytest.approx(float(penalty.detach()) / 0.3, rel=1e-4)
    flat = agent.algorithm.trainer.flat
    for parameter, grad in zip(agent.policy.net.actor_parameters(), grads, strict=True):
        difference = (moved[1] - moved[0])[flat.param_slice([parameter])].view_as(parameter)
        assert torch.allclose(difference, torch.zeros(()) if grad is None else grad, atol=1e-4)


@pytest.mark.parametrize(
    ("action", "keys"),
    [(DISCRETE, {}), (CONTINUOUS, {"action_pdtype": "NormalTanh"}), (ActionSpace("continuous", (), 2, bounded=False), {})],
    ids=str,
)
def test_the_penalty_needs_means_of_bounded_actions(action: ActionSpace, keys: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="bounds_loss_coef"):
        agent_of(spec({**PPO, **keys, "bounds_loss_coef": 0.1}), info(3, action))


# ---- together


def test_a_saved_state_goes_on() -> None:
    agent, other = (agent_of(spec(ALL, FAST), info(3, CONTINUOUS), seed) for seed in (0, 1))
    drive(agent, ToyEnv(info(3, CONTINUOUS), 4), 20)
    state = reloaded(agent.state_dict())
    assert agent.algorithm.rate.factor != 1.0
    other.load_state_dict(state)
    other.clock.load_state_dict(agent.clock.state_dict())
    traces = [[vars(metrics) for metrics in drive(one, ToyEnv(info(3, CONTINUOUS), 5), 20)] for one in (agent, other)]
    assert len(traces[0]) == 2
    assert traces[0] == traces[1]
    assert torch.equal(weights(agent), weights(other))
    assert agent.algorithm.rate.factor == other.algorithm.rate.factor


def test_sessions_share_rate_and_moments() -> None:
    """One Session alone on shared arrays learns the same, with the same rate and moments, as without shared arrays."""
    net, trace = {**FAST, "optim_spec": {"name": "GlobalAdam", "lr": 0.05}}, []
    store = SharedArrays(create_shared_file(), synced=True, locked=True)
    for shared in (False, True):
        agent = agent_of(spec(ALL, net), info(3, CONTINUOUS))
        if shared:
            store.attach({"clock": agent.clock, "agent": agent})
        losses = [metrics.loss for metrics in drive(agent, ToyEnv(info(3, CONTINUOUS), 4), 30)]
        trace.append(
            (losses, weights(agent).tolist(), agent.algorithm.rate.numbers.tolist(), agent.algorithm.value_statistics.numbers.tolist())
        )
    assert trace[0] == trace[1]
    assert trace[1][2] != [0.05]
    os.close(store.fd)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"adaptive_lr": {"min_lr": 0.1}}, "agent.algorithm.adaptive_lr.min_lr"),
        ({"normalize_values": True, "symlog": True}, "agent.algorithm.symlog"),
        ({"normalize_values": True, "normalize_v_targets": True}, "agent.algorithm.normalize_v_targets"),
    ],
    ids=str,
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], path: str) -> None:
    report = Report()
    toy: Spec = spec({**PPO, **keys}, MLP)
    check_rules(toy, report)
    assert path in [problem.path for problem in report.problems]
