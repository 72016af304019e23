"""Tests of the diagnostics that updates report, and of the switches of the fast paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent
from slm_lab.agent.net.passes import direct
from slm_lab.agent.ops import objective
from slm_lab.agent.ops.objective import explained_variance, ratio_diagnostics, value_diagnostics
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy import policy as acting
from slm_lab.lib.clock import Clock
from slm_lab.lib.rng import session_seeds
from tests.agent.helpers import ToyEnv, agent_of, drive
from tests.contract.combinations import Case, cases

PLAIN = list({case.algorithm: case for case in cases() if case.net == "MLPNet"}.values())


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_every_update_reports_the_same_columns(case: Case) -> None:
    agent = agent_of(case.spec(), case.info())
    metrics = drive(agent, ToyEnv(case.info(), 1), 40)
    columns = [name for name in metrics[-1].extra if not name.startswith("sil_")]
    assert set(columns) == set(agent.diagnostics)
    for one in metrics:
        assert set(agent.diagnostics) <= set(one.extra)
        assert all(np.isfinite(one.extra[name]) for name in agent.diagnostics)


def test_explained_variance_by_hand() -> None:
    value, returns = torch.randn(6, 3), torch.randn(6, 3)
    valid = torch.ones(6, 3, dtype=torch.bool)
    expected = 1.0 - float((returns - value).var() / returns.var())
    assert explained_variance(value, returns, valid) == pytest.approx(expected, rel=1e-5)
    valid[4:] = False
    value[4:] = torch.nan
    expected = 1.0 - float((returns - value)[:4].var() / returns[:4].var())
    assert explained_variance(value, returns, valid) == pytest.approx(expected, rel=1e-5)
    assert explained_variance(value, torch.ones(6, 3), valid) == 0.0
    for constant, count in ((0.1, 100), (0.1, 128), (3.7, 100), (100.3, 128)):  # the float32 mean has a rounding error
        values, equal = np.linspace(0.0, 1.0, count, dtype=np.float32), np.full(count, constant, np.float32)
        assert explained_variance(values, equal, np.ones(count, np.bool_)) == 0.0
    assert explained_variance(value, returns, torch.zeros_like(valid)) == 0.0


def test_ratio_and_value_diagnostics_by_hand() -> None:
    logp, old = torch.randn(10), torch.randn(10)
    ratio = (logp - old).exp()
    kl, clipped = ratio_diagnostics([logp[:4], logp[4:]], [old[:4], old[4:]], 0.2)
    assert kl == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-4)
    assert clipped == pytest.approx(float(((ratio - 1).abs() > 0.2).float().mean()))
    td_error, q_mean = value_diagnostics(logp.clone().requires_grad_(), old)
    assert td_error == pytest.approx(float((logp - old).abs().mean()), rel=1e-5)
    assert q_mean == pytest.approx(float(logp.mean()), rel=1e-5)


def test_a_policy_that_has_not_changed_has_no_divergence() -> None:
    case = Case("PPO", "OnPolicyBatchReplay", "MLPNet")
    agent = agent_of(case.spec(2, {"optim_spec": {"name": "SGD", "lr": 1e-30}}), case.info())
    (metrics, *_) = drive(agent, ToyEnv(case.info(), 1), 10)
    assert metrics.extra["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics.extra["clip_fraction"] == 0.0


# ---- fast paths


def graph_free_passes(agent: Agent) -> list[Any]:
    """Return the graph-free chains of each net that learns, or None for a net without them."""
    trainers = [part for part in agent.algorithm.parts().values() if isinstance(part, Trainer)]
    return [trainer.flat.module.direct.fast for trainer in trainers]  # type: ignore[union-attr]


def weights_after(case: Case, steps: int) -> tuple[torch.Tensor, Agent]:
    agent = build_agent(case.spec(2, {"hid_layers_activation": "relu"}), case.info(), session_seeds(0, 0, 0), Clock())
    drive(agent, ToyEnv(case.info(), 1), steps)
    trainer = agent.algorithm.trainer
    return trainer.flat.param.clone(), agent


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("module", "switch", "case"),
    [
        (acting, "NUMPY_ACTING", Case("PPO", "OnPolicyBatchReplay", "MLPNet")),
        (acting, "NUMPY_ACTING", Case("DQN", "Replay", "MLPNet")),
        *((direct, "DIRECT", case) for case in PLAIN),
        (direct, "DIRECT", Case("SoftActorCritic", "PrioritizedReplay", "MLPNet")),
        (direct, "DIRECT", Case("SoftActorCritic", "Replay", "MLPNet", continuous=True)),
        (direct, "DIRECT", Case("DQN", "PrioritizedReplay", "MLPNet")),
        (direct, "DIRECT", Case("DoubleDQN", "Replay", "DuelingMLPNet")),
        (objective, "CLOSED_FORM", Case("PPO", "OnPolicyBatchReplay", "MLPNet")),
        (objective, "CLOSED_FORM", Case("PPO", "OnPolicyBatchReplay", "MLPNet", continuous=True)),
        (objective, "CLOSED_FORM", Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_fast_paths_agree_with_plain_torch(module: Any, switch: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, fast_agent = weights_after(case, 30)
    monkeypatch.setattr(module, switch, False)
    plain, agent = weights_after(case, 30)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    if switch == "NUMPY_ACTING":
        assert agent.policy._numpy_actor is None
    elif switch == "DIRECT":
        through_graph = case.algorithm in ("SARSA", "Random") or case.net == "DuelingMLPNet"
        assert any(graph_free_passes(fast_agent)) != through_graph
        assert not any(graph_free_passes(agent))
    else:
        assert agent.algorithm.closed_form is None  # type: ignore[attr-defined]
