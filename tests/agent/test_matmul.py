"""Tests of matrix products: the choice of the library by processor, products by oneDNN, and products in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slm_lab.agent import build, torch_settings
from slm_lab.agent.agent import Agent
from slm_lab.agent.build import check_matmul_settings
from slm_lab.agent.net.body import Body, build_body
from slm_lab.agent.net.q_nets import SeparateCritics, StackedCritics, build_critics
from slm_lab.agent.ops import linear
from slm_lab.agent.ops.linear import FLOAT32, MatmulMode
from slm_lab.agent.torch_settings import ONEDNN_MIN_SIZE, has_bfloat16, onednn_min_size, prefers_onednn, resolve_matmul_library
from slm_lab.lib.limits import processor_description
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.net import ConvNetSpec, MLPNetSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, ToyEnv, agent_of, changed, drive, info, spec
from tests.agent.test_linear import all_grads, chain_of

ONEDNN, BFLOAT16 = MatmulMode(onednn=ONEDNN_MIN_SIZE), MatmulMode(bfloat16=True)
SIDE = 128
"""A product of SIDE × SIDE × SIDE is just large enough for oneDNN."""
PPO = {"name": "PPO", "time_horizon": 16, "minibatch_size": 24, "training_epoch": 2}
SAC = {"name": "SoftActorCritic", "training_frequency": 3, "training_start_step": 30, "training_iter": 1}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which the sizes of the products computed by oneDNN are appended."""
    sizes: list[tuple[int, ...]] = []
    real = linear._onednn_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() == 2:
            sizes.append((len(x), x.shape[1], len(weight)))
        return real(x, weight, bias)

    monkeypatch.setattr(linear, "_onednn_linear", counted)
    monkeypatch.setattr(torch_settings, "onednn_min_size", lambda *_: ONEDNN_MIN_SIZE)
    return sizes


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Assert equality up to the rounding errors of sums of several hundred terms."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


# ---- the choice


@pytest.mark.parametrize(
    ("maker", "capability", "onednn", "min_size"),
    [
        ("AuthenticAMD\ncpu family\t: 26", "AVX512", True, 2**21),
        ("AuthenticAMD\ncpu family\t: 25", "AVX512", True, 2**29),
        ("AuthenticAMD", "AVX512", True, 2**21),
        ("AuthenticAMD\ncpu family\t: 25", "AVX2", False, 2**21),
        ("GenuineIntel\ncpu family\t: 6", "AVX512", False, 2**21),
        ("GenuineIntel", "AVX2", False, 2**21),
        ("", "DEFAULT", False, 2**21),  # as on ARM
    ],
)
def test_the_choice_by_processor(
    maker: str, capability: str, onednn: bool, min_size: int, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--matmul") is not None:
        pytest.skip("an option of these tests chooses instead")
    described = f"processor\t: 0\nvendor_id\t: {maker}\nmodel name\t: X"
    assert prefers_onednn(described, capability) == onednn
    assert onednn_min_size(described, capability) == min_size
    monkeypatch.setattr(torch_settings, "processor_description", lambda: described)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (resolve_matmul_library("auto") == "onednn") == onednn
    assert resolve_matmul_library("auto", "cuda:0") == "torch"


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may be missing: torch's builds for ARM have no MKL, and other builds have no oneDNN."""
    monkeypatch.setattr(torch_settings, "prefers_onednn", lambda *_: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert resolve_matmul_library("auto") == resolve_matmul_library("mkl") == "mkl"
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert resolve_matmul_library("auto") == "torch"
    for asked in ("mkl", "onednn"):
        for device in ("cpu", "cuda:0"):
            with pytest.raises(SpecError, match=f"'{asked}'.*allowed: auto$") as caught:
                check_matmul_settings(with_matmul(spec(PPO), asked), device)
            assert [problem.path for problem in caught.value.problems] == ["meta.matmul"]


@pytest.mark.skipif(not has_feature("proc"), reason="without /proc, the name that Python reports is used")
def test_the_first_core_is_described(tmp_path: Any) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512_bf16\n\nprocessor\t: 1\nvendor_id\t: Other\n")
    assert processor_description(file) == "vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512_bf16"
    assert isinstance(processor_description(tmp_path / "none"), str)


def with_matmul(toy: Spec, asked: str) -> Spec:
    return toy.with_meta(matmul=asked)


# ---- oneDNN


@pytest.mark.parametrize("size", [SIDE, SIDE - 1])
def test_large_products_are_those_of_the_modules(size: int, products: list[tuple[int, ...]]) -> None:
    """Outputs and both gradients equal those of the modules. oneDNN computes them if rows × inputs × outputs is large enough."""
    net = chain_of(nn.Tanh, [size, 160, size, 24])
    mlp = partial(MatmulMode(onednn=200 * SIDE * 160).call_with_mode, net)
    x, grad = torch.randn(200, size, requires_grad=True), torch.randn(200, 24)
    assert_near(all_grads(mlp, x, list(net.parameters()), grad), all_grads(net, x, list(net.parameters()), grad))
    two_layers = 2 * [(200, size, 160), (200, 160, size), (size, 200, 160)]  # outputs and input gradients; weight gradients
    assert sorted(products) == sorted(two_layers if size == SIDE else [])


@pytest.mark.parametrize(("inputs", "outputs"), [(9, 300), (300, 9), (40, 40)], ids=str)
def test_products_with_a_small_dimension(inputs: int, outputs: int, products: list[tuple[int, ...]]) -> None:
    """oneDNN computes outputs and both gradients of layers with few inputs or few outputs if there are enough rows."""
    layer, few = nn.Linear(inputs, outputs), ONEDNN_MIN_SIZE // (inputs * outputs)
    for rows in (few, few + 1):
        x, grad = torch.randn(rows, inputs, requires_grad=True), torch.randn(rows, outputs)
        params = list(layer.parameters())
        assert_near(all_grads(partial(ONEDNN.call_with_mode, layer), x, params, grad), all_grads(layer, x, params, grad))
        assert len(products) == (3 if rows > few else 0)


def test_products_of_few_rows_are_left_to_torch(products: list[tuple[int, ...]]) -> None:
    """torch computes products of few rows, even if rows × inputs × outputs is large enough for oneDNN."""
    layer = nn.Linear(1024, 1024)
    for rows, expected in ((3, 0), (4, 1)):
        ONEDNN.call_with_mode(layer, torch.randn(rows, 1024))
        assert len(products) == expected


@pytest.mark.parametrize("kind", [nn.BatchNorm1d(160), nn.LayerNorm(160), nn.ELU(inplace=True)], ids=lambda kind: type(kind).__name__)
def test_linear_layers_between_other_modules(kind: nn.Module, products: list[tuple[int, ...]]) -> None:
    """oneDNN computes the linear layers of nets that torch would run module by module if MKL were chosen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(160, 160), kind, nn.ReLU(), nn.Linear(160, 160), nn.Tanh())
    body = Body(net, 160)
    body.matmul_mode = ONEDNN
    x, grad = torch.randn(200, 10, 16, requires_grad=True), torch.randn(200, 160)
    params = list(net.parameters())
    if isinstance(kind, nn.BatchNorm1d):
        del params[1]  # batch norm removes the first bias, so its gradient consists of rounding errors
    assert_near(all_grads(body, x, params, grad), all_grads(net, x, params, grad))
    assert len(products) == 6
    body(x[:81])  # 81 × 160 × 160 < 2^21
    assert len(products) == 6


@pytest.mark.parametrize("activation", ["relu", "elu"])
def test_critics(activation: str, products: list[tuple[int, ...]]) -> None:
    """oneDNN computes both critics of a stack and, through the first layer, the gradient of the actions."""
    net = MLPNetSpec(name="MLPNet", hid_layers=[SIDE, SIDE], hid_layers_activation=activation)
    torch.manual_seed(0)
    critics = build_critics(net, ObservationSpace((SIDE,)), CONTINUOUS)
    assert isinstance(critics, StackedCritics)
    obs, action, grad = torch.randn(SIDE, SIDE), torch.randn(SIDE, 2, requires_grad=True), torch.randn(2, SIDE)
    wanted = [action, *critics.parameters()]
    expected = torch.autograd.grad(critics(obs, action), wanted, grad)
    assert not products
    critics.matmul_mode = ONEDNN
    assert_near(torch.autograd.grad(critics(obs, action), wanted, grad), expected)
    assert len(products) == 2 * 2 * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("algorithm", "net", "memory", "action"),
    [
        (SAC, {}, "Replay", CONTINUOUS),
        ({**SAC, "name": "CrossQ"}, {"batch_norm": True}, "Replay", CONTINUOUS),
        ({"name": "DQN", "training_frequency": 3, "training_start_step": 30}, {}, "Replay", DISCRETE),
        ({**PPO, "time_horizon": 100, "minibatch_size": 300}, {}, "OnPolicyBatchReplay", DISCRETE),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) and "name" in value else None,
)
def test_agents_learn_the_same(
    algorithm: dict[str, Any], net: dict[str, Any], memory: str, action: ActionSpace, products: list[tuple[int, ...]]
) -> None:
    """Every net of an agent, including target nets, uses the library that meta.matmul names, with the same results."""
    env_info = info(3, action, (SIDE,))
    keys = {**MLP, "hid_layers": [SIDE, SIDE], "optim_spec": {"name": "SGD", "lr": 0.01}, **net}
    toy = changed(spec(algorithm, keys, memory), memory={"batch_size": SIDE, "max_size": 1000} if memory == "Replay" else {})
    weights = {}
    for asked in ("mkl", "onednn"):
        agent = agent_of(with_matmul(toy, asked), env_info)
        drive(agent, ToyEnv(env_info, 1), 20 if memory == "Replay" else 100)
        assert bool(products) == (asked == "onednn")
        assert all(module.matmul_mode == MatmulMode(onednn=ONEDNN_MIN_SIZE if asked == "onednn" else 0) for module in nets(agent))
        weights[asked] = [
            value.detach() for part in agent.algorithm.parts().values() if hasattr(part, "flat") for value in part.flat.params
        ]
    assert_near(weights["onednn"], weights["mkl"])


def nets(agent: Agent) -> list[Any]:
    """Return the bodies and critics of an agent, which each have their own mode for matrix products."""
    parts = [part.flat.module for part in agent.algorithm.parts().values() if hasattr(part, "flat")]
    found = [module for net in parts for module in net.modules() if isinstance(module, Body | StackedCritics)]
    assert found
    return found


# ---- bfloat16


def rounded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x.bfloat16() @ weight.bfloat16().mT).float() + bias


def test_products_are_rounded_and_all_else_is_float32() -> None:
    net = chain_of(nn.Tanh, [6, 16, 4])
    mlp = partial(BFLOAT16.call_with_mode, net)
    first, second = net[0], net[2]
    x, grad = torch.randn(9, 6, requires_grad=True), torch.randn(9, 4)
    ours = all_grads(mlp, x, list(net.parameters()), grad)
    assert {tensor.dtype for tensor in ours} == {torch.float32}
    hidden = torch.tanh(rounded(x, first.weight, first.bias))
    out = torch.tanh(rounded(hidden, second.weight, second.bias))
    torch.testing.assert_close(ours[0], out.detach(), rtol=0, atol=1e-6)
    before = grad * (1 - out**2)
    torch.testing.assert_close(ours[4], (before.bfloat16().mT @ hidden.bfloat16()).float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[5], before.sum(0))
    exact = all_grads(net, x, list(net.parameters()), grad)
    for one, other in zip(ours, exact, strict=True):
        assert 0 < (one - other).abs().max() < 0.03 * other.abs().max()


def test_second_derivatives() -> None:
    """The gradient of a penalty on the input gradient is close to that in float32."""
    net, grads = chain_of(nn.Tanh, [4, 16, 2]), []
    x = torch.randn(20, 4, requires_grad=True)
    for mode in (BFLOAT16, FLOAT32):
        (first,) = torch.autograd.grad(mode.call_with_mode(net, x).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), net[0].weight)[0])
    assert 0 < (grads[0] - grads[1]).abs().max() < 0.05 * grads[1].abs().max()


@pytest.mark.parametrize("changes", [{}, {"layer_norm": True}, {"batch_norm": True}, {"hid_layers_activation": "elu"}], ids=str)
def test_fully_connected_bodies(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers compute the same as `rounded`, other layers use float32, also if torch runs the layers one by one."""
    keys = {"name": "MLPNet", "hid_layers": [16, 8], "hid_layers_activation": "relu", "dtype": "bfloat16"}
    body = build_body(MLPNetSpec.model_validate({**keys, **changes}), ObservationSpace((3, 2)), "actor")
    x = torch.randn(12, 3, 2)
    expected = x
    for module in body.layers:
        expected = rounded(expected, module.weight, module.bias) if isinstance(module, nn.Linear) else module(expected)
    torch.testing.assert_close(body(x), expected, rtol=0, atol=1e-6)
    seen: list[torch.dtype] = []
    body.layers[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    out = body(x)
    assert (out.dtype, seen) == (torch.float32, [torch.float32])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_convolutions() -> None:
    keys = {"name": "ConvNet", "conv_hid_layers": [[4, 3, 2]], "fc_hid_layers": [8], "dtype": "bfloat16"}
    body = build_body(ConvNetSpec.model_validate(keys), ObservationSpace((1, 9, 9), "uint8"), "actor")
    x = torch.randint(0, 256, (5, 1, 9, 9), dtype=torch.uint8)
    expected = x
    for module in body.layers:
        if isinstance(module, nn.Conv2d):
            conv = module
            expected = conv._conv_forward(expected.bfloat16(), conv.weight.bfloat16(), conv.bias.bfloat16()).float()  # type: ignore[union-attr]
        else:
            expected = rounded(expected, module.weight, module.bias) if isinstance(module, nn.Linear) else module(expected)
    out = body(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    (grad,) = torch.autograd.grad(out.sum(), conv.weight)
    assert (out.dtype, grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("changes", [{}, {"layer_norm": True}, {"hid_layers_activation": "elu"}], ids=str)
def test_the_output_layer_of_critics_is_float32(changes: dict[str, Any]) -> None:
    """Action values are not rounded to the 8 bits of bfloat16."""
    keys = {"name": "MLPNet", "hid_layers": [16], "dtype": "bfloat16", **changes}
    critics = build_critics(MLPNetSpec.model_validate(keys), ObservationSpace((3,)), CONTINUOUS)
    assert isinstance(critics, SeparateCritics if "layer_norm" in changes else StackedCritics)
    bias = critics.layer_parameters[-1][1][1, 0] if isinstance(critics, StackedCritics) else critics.critics[1].head.bias
    product = (critics(torch.randn(20, 3), torch.randn(20, 2))[1] - bias).detach()
    assert product.dtype == torch.float32
    assert (product - product.bfloat16().float()).abs().max() > 1e-4 * product.abs().max()


def bfloat16_agent(algorithm: dict[str, Any], memory: str, action: ActionSpace, **keys: Any) -> Agent:
    return agent_of(spec(algorithm, {**MLP, "dtype": "bfloat16", **keys}, memory), info(3, action))


@pytest.mark.parametrize(
    ("algorithm", "memory", "action"),
    [
        (PPO, "OnPolicyBatchReplay", DISCRETE),
        ({"name": "DQN", "training_frequency": 3, "training_start_step": 40}, "Replay", DISCRETE),
        (SAC, "Replay", CONTINUOUS),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_agents_learn_and_act_in_bfloat16(algorithm: dict[str, Any], memory: str, action: ActionSpace) -> None:
    """Acting uses bfloat16 too: no numpy path computes in float32 instead. The learned parameters are float32."""
    agent = bfloat16_agent(algorithm, memory, action)
    before = agent.weights()
    assert drive(agent, ToyEnv(info(3, action), 1), 60)
    assert all(value.dtype == torch.float32 for value in agent.weights().values())
    assert any(not torch.equal(value, before[name]) for name, value in agent.weights().items())
    assert all(module.matmul_mode.bfloat16 for module in nets(agent))
    net: Any = agent.policy.net
    obs_N = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    layer = net.actor_body.layers[0]
    features = torch.tanh(rounded(torch.from_numpy(obs_N), layer.weight, layer.bias))
    params_NP = net.actor_head(features).detach()
    seen: list[Tensor] = []
    head = net.actor_head.forward
    net.actor_head.forward = lambda features: seen.append(head(features)) or seen[-1]
    agent.policy.act(obs_N)
    if algorithm is PPO:
        net.forward(torch.from_numpy(obs_N))
    else:
        agent.algorithm.net.actor(torch.from_numpy(obs_N))
    for params in seen:
        torch.testing.assert_close(params.detach(), params_NP, rtol=0, atol=1e-6)
    assert len(seen) == 2, "an actor in numpy does not call the head"


def test_a_net_and_that_of_the_critics_differ() -> None:
    toy = spec(SAC, MLP, "Replay")
    critic_net = toy.agent.net.model_copy(update={"dtype": "bfloat16"})  # type: ignore[union-attr]
    agent = agent_of(toy.model_copy(update={"agent": toy.agent.model_copy(update={"critic_net": critic_net})}), info(3, CONTINUOUS))
    assert [module.matmul_mode.bfloat16 for module in nets(agent)] == [True, True, False]  # critics, target critics, actor


@pytest.mark.parametrize(("key", "has", "notices"), [("net", False, 1), ("net", True, 0), ("critic_net", False, 1)])
def test_a_processor_without_bfloat16(
    key: str, has: bool, notices: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "has_bfloat16", lambda _: has)
    toy = spec(SAC, MLP, "Replay")
    net = toy.agent.net.model_copy(update={"dtype": "bfloat16"})  # type: ignore[union-attr]
    toy = toy.model_copy(update={"agent": toy.agent.model_copy(update={key: net})})
    check_matmul_settings(toy, "cpu")
    check_matmul_settings(toy, "cuda:0")
    check_matmul_settings(spec(SAC, MLP, "Replay"), "cpu")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == notices * [
        f"agent.{key}.dtype bfloat16: about ten times slower than float32 on this processor, which has no instructions for it"
    ]


@pytest.mark.parametrize(
    ("flags", "has"), [("flags\t: avx2 fma", False), ("flags\t: avx512f avx512_bf16", True), ("Features\t: fp bf16", True)]
)
def test_instructions_for_bfloat16(flags: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert has_bfloat16(flags) == has
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert has_bfloat16(flags)
