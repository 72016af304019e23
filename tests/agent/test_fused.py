"""FusedMLP and StackedCritics compute the same outputs and gradients as their modules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slm_lab.agent.net import fused
from slm_lab.agent.net.body import Body, build_body
from slm_lab.agent.net.fused import ACTIVATIONS, FEWEST, FusedChain, FusedMLP, Layer
from slm_lab.agent.net.q_critics import QCritic, SeparateCritics, StackedCritics, build_critics
from slm_lab.agent.ops.linear import FLOAT32
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import MLPNetSpec, TorchArcNetSpec

CONTINUOUS = ActionSpace("continuous", dim=3)


def chain_of(kind: type[nn.Module], sizes: list[int]) -> nn.Sequential:
    """Layers of these sizes. Layers that narrow and layers that widen take different branches of `ops.linear`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), kind()]
    return nn.Sequential(*layers)


def all_grads(run: Any, x: Tensor, params: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *params], grad)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", list(ACTIVATIONS), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sizes", [[3, 64, 2], [64, 5, 40, 40]], ids=str)
def test_outputs_and_gradients_are_those_of_the_modules(kind: type[nn.Module], sizes: list[int]) -> None:
    for net in (chain_of(kind, sizes), chain_of(kind, sizes)[:-1]):  # the last layer with and without an activation
        mlp = FusedMLP.from_module(net)
        assert mlp is not None
        x, grad = torch.randn(9, sizes[0], requires_grad=True), torch.randn(9, sizes[-1])
        before = grad.clone()
        assert_equal(all_grads(mlp, x, list(net.parameters()), grad), all_grads(net, x, list(net.parameters()), grad))
        assert torch.equal(grad, before), "backward must not modify the gradient of the outputs"


def test_tanh_over_its_whole_range() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -200.0, 0.0, 1e-6, 200.0, 1e30])])
    ours = x.clone()
    ACTIVATIONS[nn.Tanh].forward_(ours)
    assert (ours - torch.tanh(x)).abs().max() < 3e-7
    nan = torch.tensor([float("nan"), float("inf"), float("-inf")])
    ACTIVATIONS[nn.Tanh].forward_(nan)
    assert bool(nan[0].isnan())
    assert nan[1:].tolist() == [1.0, -1.0]


def test_only_what_is_needed_is_computed() -> None:
    """Frozen parameters have no gradient; the others, below and above them, the same as before."""
    net = chain_of(nn.Tanh, [4, 8, 8, 2])
    mlp = FusedMLP.from_module(net)
    assert mlp is not None
    x = torch.randn(6, 4)
    net[2].requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    ours = torch.autograd.grad(mlp(x).sum(), trained)
    assert_equal(list(ours), list(torch.autograd.grad(net(x).sum(), trained)))
    net.requires_grad_(False)
    assert not mlp(x).requires_grad
    x.requires_grad_()
    (grad_input,) = torch.autograd.grad(mlp(x).sum(), x)  # as the actor learns through frozen critics
    assert_equal([grad_input], list(torch.autograd.grad(net(x).sum(), x)))
    assert all(p.grad is None for p in net.parameters())


def test_used_twice_in_a_graph_and_traversed_twice() -> None:
    net = chain_of(nn.ReLU, [4, 16, 4])
    mlp = FusedMLP.from_module(net)
    assert mlp is not None
    x = torch.randn(5, 4)
    loss = mlp(mlp(x)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    (2.0 * net(net(x)).square().sum()).backward()
    assert_equal(ours, [p.grad for p in net.parameters() if p.grad is not None])


def test_second_derivatives() -> None:
    """A penalty on the gradient of the input, of which every parameter has a gradient."""
    net = chain_of(nn.Tanh, [4, 8, 1])
    mlp, x = FusedMLP.from_module(net), torch.randn(3, 4, requires_grad=True)
    assert mlp is not None
    params, grads = list(net.parameters())[:-1], []  # the last bias is in no gradient
    for run in (mlp, net):
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        grads.append(list(torch.autograd.grad(first.square().sum(), params)))
    assert_equal(*grads)


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.ELU(alpha=0.5), nn.Dropout(0.5), nn.Linear(8, 8, bias=False)], ids=str)
def test_other_modules_are_not_fused(layer: nn.Module) -> None:
    assert FusedMLP.from_module(nn.Sequential(nn.Linear(4, 8), layer)) is None
    assert FusedMLP.from_module(nn.Sequential(nn.Tanh(), nn.Linear(4, 8))) is None


def arc_body() -> Body:
    modules = {"body": {"Sequential": [{"LazyLinear": {"out_features": 16}}, {"Tanh": None}, {"Linear": [16, 8]}, {"ReLU": None}]}}
    spec = TorchArcNetSpec.model_validate({"name": "TorchArcNet", "arc": {"modules": modules}})
    return build_body(spec, ObservationSpace((4,)), "actor")


def test_small_batches_are_computed_by_the_modules() -> None:
    body = arc_body()
    for rows, one_node in ((FEWEST // 128 - 1, False), (FEWEST // 128, True)):  # the largest weight is 16 × 8
        assert (type(body(torch.randn(rows, 4)).grad_fn).__name__ == "FusedChainBackward") == one_node


def test_bodies_of_graphs_are_fused_and_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FEWEST", 0)
    body, x, called = arc_body(), torch.randn(3, 4), list[int]()
    out = body(x)
    assert type(out.grad_fn).__name__ == "FusedChainBackward"
    torch.testing.assert_close(out, body.layers(x))
    last = next(module for module in body.modules() if isinstance(module, nn.ReLU))
    handle = last.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(body(x), out)
    assert called == [1]
    handle.remove()
    body(x)
    assert called == [1]


def test_a_layer_that_is_replaced_or_changed_is_the_one_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FEWEST", 0)
    spec = MLPNetSpec(name="MLPNet", hid_layers=[8, 8], hid_layers_activation="tanh")
    body, x = build_body(spec, ObservationSpace((4,)), "actor"), torch.randn(3, 4)
    body(x)
    first = body.layers[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(torch.zeros(8, 4))
    torch.testing.assert_close(body(x), body.layers(x))


@pytest.mark.parametrize("activation", ["relu", "tanh", "elu"])
def test_stacked_critics_are_separate_ones(activation: str) -> None:
    spec = MLPNetSpec(name="MLPNet", hid_layers=[32, 16], hid_layers_activation=activation)
    torch.manual_seed(0)
    stacked = build_critics(spec, ObservationSpace((5,)), CONTINUOUS)
    assert isinstance(stacked, StackedCritics)
    torch.manual_seed(0)
    separate = SeparateCritics([QCritic(spec, ObservationSpace((5,)), CONTINUOUS) for _ in range(2)])
    obs, action, grad = torch.randn(7, 5), torch.randn(7, 3, requires_grad=True), torch.randn(2, 7)
    ours, theirs = stacked(obs, action), separate(obs, action)
    assert bool(stacked.fused) == (activation != "elu")
    torch.testing.assert_close(ours, theirs)
    grad_params = torch.autograd.grad(ours, [action, *stacked.parameters()], grad)
    expected = torch.autograd.grad(theirs, [action, *separate.parameters()], grad)
    assert_equal([grad_params[0]], [expected[0]])
    layers = len(grad_params[1:])
    for index, grads in enumerate(grad_params[1:]):
        pair = expected[1 + index], expected[1 + layers + index]
        assert_equal([grads], [torch.stack(pair).view_as(grads)])


def test_a_stack_of_one_input_for_all_nets() -> None:
    """The gradient of an input that is expanded over the nets is the sum over the nets."""
    weight, bias = torch.randn(2, 6, 4, requires_grad=True), torch.randn(2, 1, 6, requires_grad=True)
    x_BI = torch.randn(5, 4, requires_grad=True)
    out: Tensor = FusedChain.apply(x_BI.expand(2, -1, -1), [Layer(None, FLOAT32)], weight, bias)
    expected = torch.einsum("bi,coi->cbo", x_BI, weight) + bias
    grad = torch.randn(2, 5, 6)
    inputs = [x_BI, weight, bias]
    assert_equal(list(torch.autograd.grad(out, inputs, grad)), list(torch.autograd.grad(expected, inputs, grad)))
