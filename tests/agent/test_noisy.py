"""Tests of noisy nets: the layer against its definition, where noise is drawn, and runs that repeat and continue byte for byte."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.dqn import DeepQLearning
from slm_lab.agent.net.distributional import build_q_net
from slm_lab.agent.net.noisy import ONE_PRODUCT_ROWS, NoiseSource, NoisyLinear
from slm_lab.agent.net.passes.validity import FastPass
from slm_lab.agent.ops.arrays import as_array
from slm_lab.agent.ops.autograd import GraphPass
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.records import EnvInfo, ObservationSpace
from slm_lab.spec.models.net import Net
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report
from slm_lab.spec.rules.check import check_rules
from tests.agent.helpers import MLP, RNN, ToyEnv, agent_of, info, spec
from tests.contract.test_algorithms import Beat, assert_equal, bundle, drive

NETS: dict[str, dict[str, Any]] = {"mlp": MLP, "dueling": {**MLP, "name": "DuelingMLPNet"}, "rnn": {**RNN, "fc_hid_layers": [6]}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "DoubleDQN": {"training_frequency": 6, "training_start_step": 12},
    "C51": {"training_frequency": 6, "training_start_step": 12, "num_atoms": 5, "num_step_returns": 3, "double_q": True},
    "PQN": {"lam": 0.5, "time_horizon": 10, "minibatch_size": 6, "training_epoch": 2},
}


def noisy_spec(algorithm: str, net: str = "mlp", num_envs: int = 3, **keys: Any) -> Spec:
    memory = "OnPolicyBatchReplay" if algorithm == "PQN" else "PrioritizedReplay"
    toy = spec({"name": algorithm, **ALGORITHMS[algorithm]}, NETS[net] | {"noisy": True} | keys, memory, num_envs).model_dump()
    if algorithm != "PQN":
        toy["agent"]["memory"] |= {"batch_size": 8, "max_size": 90, "beta": 0.4, "initial_error": "greatest"}
    return Spec.model_validate(toy)


def noisy_agent(algorithm: str, net: str = "mlp", seed: int = 0, env_info: EnvInfo | None = None) -> Agent:
    return agent_of(noisy_spec(algorithm, net), env_info or info(), seed)


def test_layer_by_hand() -> None:
    torch.manual_seed(0)
    layer = NoisyLinear(3, 2, 0.5)
    assert torch.allclose(layer.weight_sigma, torch.full((2, 3), 0.5 / math.sqrt(3)))
    assert float(layer.weight.detach().abs().max()) <= 1 / math.sqrt(3)
    x_BI = torch.randn(4, 3)
    without = layer(x_BI)
    assert torch.equal(without, torch.nn.functional.linear(x_BI, layer.weight, layer.bias))
    source = NoiseSource(layer)
    source.draw(np.random.default_rng(5))
    x = np.random.default_rng(5).standard_normal(5, dtype=np.float32)
    f = torch.from_numpy(np.sign(x) * np.sqrt(np.abs(x)))
    weight = layer.weight + layer.weight_sigma * torch.outer(f[3:], f[:3])
    bias = layer.bias + layer.bias_sigma * f[3:]
    assert torch.allclose(layer(x_BI), x_BI @ weight.T + bias, atol=1e-6)
    many_BI = x_BI.repeat(ONE_PRODUCT_ROWS, 1)  # with many rows, one product with the sum of the weights
    assert torch.allclose(layer(many_BI), many_BI @ weight.T + bias, atol=1e-6)
    source.remove()
    assert torch.equal(layer(x_BI), without)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("rows", [3, 60])
@pytest.mark.parametrize("distribution", [None, ("categorical", {"number": 5, "low": -1.0, "high": 1.0})], ids=["q", "c51"])
@pytest.mark.parametrize("name", ["MLPNet", "DuelingMLPNet"])
def test_passes_without_a_graph_are_those_of_autograd(
    name: str, distribution: tuple[str, dict[str, Any]] | None, rows: int, noisy: bool
) -> None:
    """Passes without a graph equal those of autograd, also for some rows, with new noise after a backward pass, and without noise."""
    torch.manual_seed(0)
    spec = TypeAdapter(Net).validate_python({"name": name, "hid_layers": [24, 20], "layer_norm": True, "noisy": noisy})
    net = build_q_net(spec, ObservationSpace((5,)), (3,), distribution)
    flat, source, rng, obs = FlatParams(net), NoiseSource(net), np.random.default_rng(0), torch.randn(rows, 5)
    net.enable_graph_free_pass(flat)
    some = np.array([0, 2])
    for noise in (True, True, False):
        source.draw(rng) if noise else source.remove()
        passed, part = net.forward_pass(obs), net.forward_pass(obs).select_rows(some)
        assert not isinstance(passed, GraphPass)
        net.direct, direct = FastPass(), net.direct
        expected, expected_part = net.forward_pass(obs), net.forward_pass(obs).select_rows(some)
        assert isinstance(expected, GraphPass)
        plain = net.values(obs)
        net.direct = direct
        np.testing.assert_allclose(as_array(net.values(obs)), as_array(plain), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(passed.values[0], expected.values[0], rtol=1e-4, atol=1e-5)
        grad = torch.randn(expected.values[0].shape)
        found = []
        for one, grad_out in ((expected, grad), (passed, grad), (expected_part, grad[some]), (part, grad[some])):
            flat.grad.zero_()
            one.backward(grad_out.clone())
            found.append(flat.grad.clone())
        np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[3], found[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MLPNet", "DuelingMLPNet"])
def test_passes_in_bfloat16_are_near_those_in_float32(name: str) -> None:
    """Hidden layers compute in bfloat16, which has 8 bits of mantissa, with or without a graph. Values and gradients are float32."""
    values, grads = [], []
    for dtype, graph in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        torch.manual_seed(0)
        spec = TypeAdapter(Net).validate_python({"name": name, "hid_layers": [64, 64], "noisy": True, "dtype": dtype})
        net = build_q_net(spec, ObservationSpace((5,)), (3,), None)
        flat = FlatParams(net)
        NoiseSource(net).draw(np.random.default_rng(0))
        if not graph:
            net.enable_graph_free_pass(flat)
        passed = net.forward_pass(torch.randn(60, 5))
        assert isinstance(passed, GraphPass) == graph
        passed.backward(torch.randn(60, 3))
        values.append(torch.as_tensor(passed.values[0]).detach())
        grads.append(flat.grad.clone())
    for index in (1, 2):
        assert 1e-4 < float((values[index] - values[0]).norm() / values[0].norm()) < 2e-2
        assert 1e-4 < float((grads[index] - grads[0]).norm() / grads[0].norm()) < 5e-2


def test_new_noise_between_forward_and_backward_pass_is_refused() -> None:
    spec = TypeAdapter(Net).validate_python({"name": "MLPNet", "hid_layers": [8], "noisy": True})
    net = build_q_net(spec, ObservationSpace((5,)), (3,), None)
    flat, source, rng = FlatParams(net), NoiseSource(net), np.random.default_rng(0)
    net.enable_graph_free_pass(flat)
    source.draw(rng)
    passed = net.forward_pass(torch.randn(4, 5))
    source.draw(rng)
    with pytest.raises(RuntimeError, match="new noise"):
        passed.backward(np.ones((4, 3), np.float32))


def test_dueling_nets_with_several_action_components_take_a_graph() -> None:
    spec = TypeAdapter(Net).validate_python({"name": "DuelingMLPNet", "hid_layers": [8]})
    net = build_q_net(spec, ObservationSpace((5,)), (3, 2), None)
    net.enable_graph_free_pass(FlatParams(net))
    assert net.direct.fast is None


def test_every_linear_layer_is_noisy() -> None:
    for net in NETS:
        modules = list(noisy_agent("DoubleDQN", net).algorithm.net.modules())
        linear = [module for module in modules if isinstance(module, torch.nn.Linear)]
        assert len(linear) == (3 if net == "dueling" else 2)
        assert all(isinstance(module, NoisyLinear) for module in linear)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_repeats_continues_and_moves_every_weight(algorithm: str, net: str) -> None:
    agent, again, twin = noisy_agent(algorithm, net), noisy_agent(algorithm, net), noisy_agent(algorithm, net, seed=9)
    before = agent.weights()
    trace = drive(agent, Beat(info(), 3), 20)
    assert drive(again, Beat(info(), 3), 20) == trace
    moved = {name: not torch.equal(value, before[name]) for name, value in agent.weights().items()}
    assert all(moved.values()), [name for name, did in moved.items() if not did]
    saved = bundle(agent)
    drive(twin, Beat(info(), 8), 10)
    twin.clock.load_state_dict(saved["clock"])
    twin.load_state_dict(saved["agent"])
    if agent.replay is not None:
        twin.replay.load_contents(saved["replay"])  # type: ignore[union-attr]  # it has one too
    traces = [drive(one, Beat(info(), 5), 20) for one in (agent, twin)]
    assert traces[0] == traces[1]
    assert_equal(agent.weights(), twin.weights())


@pytest.mark.parametrize("net", NETS)
def test_noise_explores_and_is_absent_from_evaluation(net: str) -> None:
    agent = noisy_agent("DoubleDQN", net)
    policy, obs_N = agent.policy, np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert agent.explore_var == 0.0
    state_N = policy.initial_state(3)
    noisy = [policy.forward(obs_N, state_N)[0].tobytes() for _ in range(5)]
    plain = [policy.forward(obs_N, state_N, deterministic=True)[0].tobytes() for _ in range(5)]
    assert len(set(noisy)) == 5
    assert len({*plain, *noisy}) == 6
    rng = str(policy.rng.bit_generator.state)
    acting = agent.action_function()
    action_N = acting(obs_N, np.ones(3, bool))
    q_NA = np.frombuffer(plain[0], np.float32).reshape(3, 3)
    assert action_N.tolist() == q_NA.argmax(1).tolist()
    assert str(policy.rng.bit_generator.state) == rng, "an evaluation draws from its own stream"


def test_each_gradient_step_has_its_own_noise() -> None:
    agent = noisy_agent("DoubleDQN")
    algorithm = agent.algorithm
    assert isinstance(algorithm, DeepQLearning)
    assert algorithm.target is not None
    drawn: list[tuple[bytes, ...]] = []
    step = algorithm._step

    def spy(batch: Any) -> None:
        layers = algorithm.noise.layers
        drawn.append(tuple(layer.noise[0].numpy().tobytes() for layer in layers if layer.noise is not None))
        step(batch)

    algorithm._step = spy  # type: ignore[method-assign]  # a spy
    drive(agent, ToyEnv(info(), 3), 20)
    assert len(drawn) > 4
    assert len(set(drawn)) == len(drawn)
    assert all(len(one) == len(set(one)) == 4 for one in drawn), "net and target net have different noise"


def test_rules() -> None:
    def problems(raw: Spec) -> dict[str, str]:
        report = Report()
        check_rules(raw, report)
        return {problem.path: problem.message for problem in report.problems}

    found = problems(spec({"name": "PPO"}, {**MLP, "noisy": True}))
    assert found["agent.net.noisy"].startswith("true is not supported by PPO; allowed with ")
    assert found["agent.net.noisy"].endswith("PQN")
    assert "noisy" in problems(noisy_spec("DoubleDQN", noisy=False, noisy_sigma=0.1))["agent.net.noisy_sigma"]
    assert not [path for path in problems(noisy_spec("DoubleDQN")) if path != "env.name"]
