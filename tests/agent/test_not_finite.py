"""Tests with observations, rewards and gradients that are not finite, which must never change weights or statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic, Temperature
from slm_lab.agent.algorithm.value_scale import PercentileScale, ValueTargetDeviation
from slm_lab.agent.replay.replay import SumTree
from slm_lab.lib.records import VecStep
from tests.agent.helpers import ToyEnv, agent_of, changed, drive
from tests.contract.combinations import Case

ARC = {"modules": {"body": {"Sequential": [{"LazyBatchRenorm1d": {}}, {"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}}}
CASES: dict[str, tuple[Case, dict[str, Any], dict[str, Any]]] = {
    "reinforce": (Case("Reinforce", "OnPolicyReplay", "MLPNet"), {}, {}),
    "a2c": (Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet"), {"normalize_v_targets": True}, {"batch_norm": True}),
    "ppo": (Case("PPO", "OnPolicyBatchReplay", "MLPNet"), {"normalize_v_targets": True, "normalize_advantages": "percentile"}, {}),
    "sil": (Case("SIL", "OnPolicyBatchReplay", "MLPNet"), {}, {}),
    "sarsa": (Case("SARSA", "OnPolicyBatchReplay", "MLPNet"), {}, {}),
    "per": (Case("DoubleDQN", "PrioritizedReplay", "MLPNet"), {}, {}),
    "sac": (Case("SoftActorCritic", "Replay", "MLPNet", continuous=True), {}, {}),
    "discrete sac": (Case("SoftActorCritic", "Replay", "MLPNet"), {"entropy_penalty_coef": 0.5}, {}),
    "crossq": (Case("CrossQ", "Replay", "TorchArcNet"), {}, {"arc": ARC}),
}


def spoiled(env: ToyEnv, what: str) -> ToyEnv:
    """Change an env so that every step has a reward or an observation that is not finite."""
    step = env.step

    def bad(action_N: np.ndarray) -> VecStep:
        out = step(action_N)
        if what == "rewards":
            return out._replace(reward_N=np.full_like(out.reward_N, np.nan))
        return out._replace(obs_N=np.full_like(out.obs_N, np.inf), last_obs_N=np.full_like(out.obs_N, np.nan))

    env.step = bad  # type: ignore[method-assign]
    return env


def numbers(state: Any) -> Iterator[np.ndarray]:
    """Yield all numbers of a state."""
    if isinstance(state, dict):
        for value in state.values():
            yield from numbers(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from numbers(value)
    elif isinstance(state, torch.Tensor | float):
        yield np.asarray(state, np.float64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", ["rewards", "observations"])
@pytest.mark.parametrize("name", CASES)
def test_a_lone_agent_stays_finite(name: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    case, algorithm, net = CASES[name]
    agent = agent_of(changed(case.spec(2, net), algorithm=algorithm), case.info())
    learned = drive(agent, ToyEnv(case.info(), 1), 40)
    before = agent.weights()
    with np.errstate(all="ignore"):
        drive(agent, spoiled(ToyEnv(case.info(), 2), what), 60)
    assert learned
    assert agent.algorithm.skipped_steps > 2
    assert len([record for record in caplog.records if "not finite" in record.getMessage()]) <= 2  # one message per trainer
    state = agent.state_dict()["algorithm"]
    state.pop("actor_report", None)  # metrics that are only reported
    assert all(np.isfinite(value).all() for value in numbers(state)), "weights, buffers and statistics of optimizers and scales"
    if case.memory.startswith("OnPolicy") and name != "sil":
        assert all(torch.equal(value, before[key]) for key, value in agent.weights().items() if "batches" not in key)
    if case.memory.startswith("OnPolicy"):
        assert np.isfinite(drive(agent, ToyEnv(case.info(), 3), 100)[-1].loss)


@pytest.mark.parametrize("name", ["reinforce", "a2c", "ppo", "per", "sac"])
def test_updates_are_silent(name: str) -> None:
    """numpy emits no warnings during updates, because the trainer itself reports numbers that are not finite."""
    case, _, net = CASES[name]
    agent, modes = agent_of(case.spec(2, net), case.info()), []
    meter: Any = agent.algorithm.meter  # type: ignore[attr-defined]
    step = meter.step
    meter.step = lambda: (modes.append(np.geterr()), step())
    drive(agent, ToyEnv(case.info(), 1), 40)
    assert modes
    assert all(set(mode.values()) == {"ignore"} for mode in modes)
    assert np.geterr()["over"] != "ignore"


def test_reports_are_weighted_and_averaged_over_steps() -> None:
    case = CASES["a2c"][0]
    meter: Any = agent_of(case.spec(), case.info()).algorithm.meter  # type: ignore[attr-defined]
    meter.begin()
    for numbers_of_step in ((2.0, 6.0), (torch.tensor(4.0), torch.tensor(8.0))):
        for weight, number in zip((0.25, 0.75), numbers_of_step, strict=True):
            meter.report_loss(number, weight, entropy=number)
        meter.step()
    metrics = meter.end()
    assert (metrics.loss, metrics.entropy) == (6.0, 6.0)


@pytest.mark.parametrize("make", [ValueTargetDeviation, PercentileScale])
def test_scales_go_on_where_they_were_saved(make: Callable[[], Any]) -> None:
    scale, other = make(), make()
    scale.update(torch.randn(8)) if isinstance(scale, ValueTargetDeviation) else scale(torch.randn(8))
    assert scale.state_dict() != other.state_dict()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()


@pytest.mark.parametrize("make", [ValueTargetDeviation, PercentileScale])
def test_scales_ignore_returns_that_are_not_finite(make: Callable[[], Any]) -> None:
    scale = make()

    def update(returns: torch.Tensor) -> str:
        scale.update(returns) if isinstance(scale, ValueTargetDeviation) else scale(returns)
        return str(scale.state_dict())

    before = update(torch.randn(8))
    for bad in (torch.nan, torch.inf, -torch.inf):
        returns = torch.randn(8)
        returns[:2] = bad
        assert update(returns) == before


def test_a_sum_tree_ignores_weights_that_are_not_finite() -> None:
    tree = SumTree(100)
    tree.set(np.arange(100), 1.0)
    tree.set(np.array([3, 4, 5]), np.array([np.nan, 2.0, np.inf]))
    tree.set(np.array([6]), float("nan"))
    assert tree.total == 101.0
    assert tree.get(np.array([3, 4, 5, 6])).tolist() == [1.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("entropy", [float("nan"), float("inf"), -1e30, 1e20])
def test_the_temperature_ignores_an_entropy_that_is_not_finite_or_overflows(entropy: float) -> None:
    agent: Agent = agent_of(Case("SoftActorCritic", "Replay", "MLPNet").spec(), Case("SoftActorCritic", "Replay", "MLPNet").info())
    assert isinstance(agent.algorithm, SoftActorCritic)
    temperature: Temperature = agent.algorithm.temperature
    temperature.step(0.5, 0)
    before = str(temperature.state_dict())
    temperature.step(entropy, 0)
    assert str(temperature.state_dict()) == before
    assert all(np.isfinite(value).all() for value in numbers(temperature.state_dict()))
