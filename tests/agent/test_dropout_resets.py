"""Tests of DroQ's dropout in critics (arXiv:2110.02034), and of resets of nets and optimizers (arXiv:2205.07802)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.net.layers import CriticDropout
from slm_lab.agent.net.passes import direct
from slm_lab.agent.net.passes.direct import CriticsPass
from slm_lab.agent.net.q_nets import SeparateCritics, build_critics
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import MLPNetSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report
from slm_lab.spec.rules.check import check_rules
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, agent_of, drive, info, reloaded, spec
from tests.agent.test_algorithms import PPO

SAC = {"name": "SoftActorCritic", "training_iter": 2, "training_start_step": 12}
CROSSQ = {**SAC, "name": "CrossQ"}
DQN = {"name": "DQN", "training_iter": 2, "training_frequency": 4, "training_start_step": 12, "explore_var_spec": None}
DROQ = {**MLP, "hid_layers": [8, 8], "hid_layers_activation": "relu", "layer_norm": True, "dropout": 0.3, "update_type": "polyak"}


def toy(algorithm: dict[str, Any], net: dict[str, Any], **meta: Any) -> Spec:
    agent = {"algorithm": algorithm, "memory": {"name": "Replay", "batch_size": 8, "max_size": 60}, "net": net}
    if algorithm["name"] == "DQN":
        algorithm["explore_var_spec"] = {"name": "no_decay", "start_val": 0.1}
    env = {"name": "Toy-v0", "num_envs": 3, "max_frame": 1000}
    return Spec.model_validate({"name": "toy", "agent": agent, "env": env, "meta": meta})


def built(algorithm: dict[str, Any], net: dict[str, Any], action: ActionSpace, seed: int = 0) -> Any:
    return agent_of(toy(dict(algorithm), net), info(3, action), seed)


# ---- dropout


def critics(rate: float = 0.3) -> tuple[SeparateCritics, FlatParams]:
    torch.manual_seed(0)
    keys = {"name": "MLPNet", "hid_layers": [40, 40], "hid_layers_activation": "relu", "layer_norm": True, "dropout": rate}
    net = build_critics(MLPNetSpec.model_validate(keys), ObservationSpace((5,)), CONTINUOUS)
    assert isinstance(net, SeparateCritics)
    flat = FlatParams(net)
    net.enable_graph_free_pass(flat)
    return net, flat


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer = CriticDropout(0.25).eval()
    out = layer(torch.ones(200, 500))
    assert float((out == 0.0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(out[out != 0.0], torch.full_like(out[out != 0.0], 1.0 / 0.75))


def test_it_stands_before_the_norm_of_critics_only() -> None:
    agent = built(SAC, DROQ, CONTINUOUS)
    algorithm = agent.algorithm
    kinds = [type(layer).__name__ for layer in algorithm.critics.critics[0].body.layers]
    assert kinds == ["Linear", "CriticDropout", "LayerNorm", "ReLU"] * 2
    assert any(isinstance(module, CriticDropout) for module in algorithm.target.net.modules())
    assert not any(isinstance(module, CriticDropout) for module in algorithm.net.modules())
    obs, action = torch.randn(4, 4), torch.rand(4, 2)
    assert not torch.equal(algorithm.critics(obs, action), algorithm.critics(obs, action))
    assert not torch.equal(algorithm.target.net(obs, action), algorithm.target.net(obs, action))


def test_passes_without_a_graph_draw_the_same_numbers() -> None:
    net, flat = critics()
    obs, action, grad = torch.randn(30, 5), torch.rand(30, 2, requires_grad=True), torch.randn(2, 30)
    grad[0, ::2] = 0.0  # so that only some rows of the first critic have a gradient
    torch.manual_seed(1)
    values = net(obs, action)
    values.backward(grad)
    expected = flat.grad.clone()
    flat.grad.zero_()
    torch.manual_seed(1)
    with ignore_float_errors():
        found = net.forward_pass(obs, action.detach())
        assert isinstance(found, CriticsPass)
        np.testing.assert_allclose(found.values[0], values.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.input_grad(grad.clone()), action.grad, rtol=1e-3, atol=1e-5)
        found.backward(grad.clone())
    np.testing.assert_allclose(flat.grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("algorithm", [SAC, CROSSQ], ids=lambda keys: keys["name"])
@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=lambda action: action.kind)
def test_updates_are_those_of_autograd(algorithm: dict[str, Any], action: ActionSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    after = []
    for on in (True, False):
        monkeypatch.setattr(direct, "DIRECT", on)
        agent = built(algorithm, DROQ, action)
        losses = [metrics.loss for metrics in drive(agent, ToyEnv(info(3, action), 4), 9)]
        after.append((losses, agent.algorithm.trainer.flat.param.clone()))
    assert len(after[0][0]) > 2
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-3)
    torch.testing.assert_close(after[0][1], after[1][1], rtol=1e-3, atol=1e-4)


# ---- resets


@pytest.mark.parametrize(
    ("algorithm", "action"), [(SAC, CONTINUOUS), (SAC, DISCRETE), (CROSSQ, CONTINUOUS), (DQN, DISCRETE)], ids=lambda value: str(value)[:25]
)
def test_a_reset_agent_is_a_new_one_with_its_replay_buffer(algorithm: dict[str, Any], action: ActionSpace) -> None:
    net = {**MLP, "update_type": "polyak"} if algorithm is not CROSSQ else MLP
    agent = built({**algorithm, "reset_frequency": 6}, net, action)
    states: list[dict[str, Any]] = []
    reset = agent.algorithm.reset

    def spy() -> None:
        torch.manual_seed(7)
        assert agent.clock.opt_step % 6 == 0
        reset()
        states.append(reloaded(agent.algorithm.state_dict()))

    agent.algorithm.reset = spy
    env, steps = ToyEnv(info(3, action), 4), 0
    while not states:
        drive(agent, env, 4)
        steps += 1
    first = agent.clock.opt_step
    assert 6 <= first <= 12
    torch.manual_seed(7)
    fresh = built(algorithm, net, action)
    torch.manual_seed(7)
    other = agent_of_state(fresh)
    found = {name: states[0][name] for name in other}
    for name, part in other.items():
        assert flattened(found[name]) == flattened(part), name
    assert agent.replay.size > 12
    drive(agent, env, 20)
    assert len(states) >= 2


def agent_of_state(agent: Any) -> dict[str, Any]:
    """Return the states of the parts of a new agent, whose nets are built again in the same order as in a reset."""
    agent.algorithm.reset()
    return {name: reloaded(part.state_dict()) for name, part in agent.algorithm.parts().items() if name != "target"}


def flattened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: flattened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flattened(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_resets_are_due_after_each_multiple() -> None:
    """With four gradient steps per update and a reset every six steps, resets take place after 8, 12 and 20 steps."""
    agent = built({**SAC, "training_iter": 4, "reset_frequency": 6}, MLP, CONTINUOUS)
    found: list[int] = []
    agent.algorithm.reset = lambda: found.append(agent.clock.opt_step)
    env = ToyEnv(info(3, CONTINUOUS), 4)
    drive(agent, env, 4 + 4)
    assert agent.clock.opt_step == 20
    assert found == [8, 12, 20]


@pytest.mark.parametrize(("algorithm", "action"), [(SAC, CONTINUOUS), (DQN, DISCRETE)], ids=lambda value: str(value)[:25])
def test_what_a_reset_does(algorithm: dict[str, Any], action: ActionSpace) -> None:
    agent = built(algorithm, {**MLP, "update_type": "polyak"}, action)
    drive(agent, ToyEnv(info(3, action), 4), 12)
    algorithm_, before = agent.algorithm, {name: value.clone() for name, value in agent.weights().items()}
    optimizers = [group.optimizer for trainer in agent._trainers for group in trainer.groups]
    assert all(float(optimizer.statistics["step"]) > 0.0 for optimizer in optimizers)
    algorithm_.reset()
    optimizers = [group.optimizer for trainer in agent._trainers for group in trainer.groups]
    assert all(not statistic.any() for optimizer in optimizers for statistic in optimizer.statistics.values())
    assert torch.equal(algorithm_.target.flat.param, algorithm_.trainer.flat.param)
    assert all(not torch.equal(value, before[name]) for name, value in agent.weights().items())
    if algorithm is SAC:
        assert float(algorithm_.temperature.log_alpha) == 0.0
        assert not algorithm_.temperature.optimizer.statistics["first"].any()
        assert not torch.equal(*(one.head.weight for one in critics_of(algorithm_)))
    losses = [metrics.loss for metrics in drive(agent, ToyEnv(info(3, action), 5), 12)]
    assert losses
    assert np.isfinite(losses).all()


def critics_of(algorithm: Any) -> Any:
    """Return each critic separately, also for a stack of critics."""
    if isinstance(algorithm.critics, SeparateCritics):
        return algorithm.critics.critics
    weight = algorithm.critics.layer_parameters[-1][0]
    return [type("One", (), {"head": type("Head", (), {"weight": one})}) for one in weight]


def test_a_saved_state_resets_at_the_same_step() -> None:
    keys = {**SAC, "reset_frequency": 8}
    agent, other = built(keys, DROQ, CONTINUOUS), built(keys, DROQ, CONTINUOUS, seed=3)
    env = ToyEnv(info(3, CONTINUOUS), 4)
    drive(agent, env, 6)
    assert agent.clock.opt_step % 8 != 0
    other.load_state_dict(reloaded(agent.state_dict()))
    other.clock.load_state_dict(agent.clock.state_dict())
    other.replay.load_contents(agent.replay.contents())
    traces, resets = [], []
    for one in (agent, other):
        torch.manual_seed(0)  # a Session saves the state of torch's generator
        reset = one.algorithm.reset
        one.algorithm.reset = lambda own=reset, clock=one.clock: (resets.append(clock.opt_step), own())
        losses = [metrics.loss for metrics in drive(one, ToyEnv(info(3, CONTINUOUS), 5), 12)]
        traces.append((losses, one.algorithm.trainer.flat.param.tolist()))
    assert traces[0] == traces[1]
    assert len(resets) >= 2
    assert resets[: len(resets) // 2] == resets[len(resets) // 2 :]


# ---- rules


def test_dropout_is_for_soft_critics() -> None:
    report = Report()
    check_rules(spec(dict(PPO), {**MLP, "dropout": 0.1}), report)
    messages = {problem.path: problem.message for problem in report.problems}
    assert "SoftActorCritic, CrossQ" in messages["agent.net.dropout"]


def test_several_sessions_cannot_reset_one_net() -> None:
    report = Report()
    check_rules(toy({**SAC, "reset_frequency": 100}, MLP, distributed="synced", max_session=2), report)
    assert "agent.algorithm.reset_frequency" in [problem.path for problem in report.problems]
