"""Tests of LinearFunction and StackedCritics: outputs and gradients equal those of torch's modules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slm_lab.agent.net.passes.direct_layers import ACTIVATIONS
from slm_lab.agent.ops.linear import FLOAT32, LinearFunction, _LinearLayers
from slm_lab.lib.records import ActionSpace

CONTINUOUS = ActionSpace("continuous", dim=3)


def chain_of(kind: type[nn.Module], sizes: list[int]) -> nn.Sequential:
    """Return a chain of layers of these sizes. Narrowing and widening layers use different branches of `ops.linear`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), kind()]
    return nn.Sequential(*layers)


def run(net: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a net whose linear layers are LinearFunctions."""
    with _LinearLayers(FLOAT32):
        return net(x)


def all_grads(compute: Any, x: Tensor, params: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = compute(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *params], grad)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", [[3, 64, 2], [64, 5, 40, 40]], ids=str)
def test_outputs_and_gradients_are_those_of_the_modules(sizes: list[int]) -> None:
    net = chain_of(nn.Tanh, sizes)
    x, grad = torch.randn(9, sizes[0], requires_grad=True), torch.randn(9, sizes[-1])
    before = grad.clone()
    params = list(net.parameters())
    assert_equal(all_grads(lambda x: run(net, x), x, params, grad), all_grads(net, x, params, grad))
    assert torch.equal(grad, before), "backward must not modify the gradient of the outputs"
    with _LinearLayers(FLOAT32):
        assert type(net[0](x).grad_fn).__name__ == "LinearFunctionBackward"


@pytest.mark.parametrize("rows", [9, 3000])
@pytest.mark.parametrize("kind", [kind for kind, one in ACTIVATIONS.items() if one.backward], ids=lambda kind: kind.__name__)
def test_activations_in_place_are_the_modules(kind: type[nn.Module], rows: int) -> None:
    """In-place activations equal torch's modules, in numpy and, for large arrays, in torch."""
    torch.manual_seed(0)
    x, grad, own = torch.randn(rows, 7, requires_grad=True), torch.randn(rows, 7), ACTIVATIONS[kind]
    expected = kind()(x)
    out, ours = x.detach().numpy().copy(), grad.numpy().copy()
    own.forward(out, out)
    assert own.backward is not None
    own.backward(ours, out)
    (theirs,) = torch.autograd.grad(expected, x, grad)
    assert_equal([torch.from_numpy(out), torch.from_numpy(ours)], [expected.detach(), theirs])


def test_tanh_over_its_whole_range() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -200.0, 0.0, 1e-6, 200.0, 1e30])])
    ours = x.clone()
    ACTIVATIONS[nn.Tanh].forward(ours.numpy(), ours.numpy())
    assert (ours - torch.tanh(x)).abs().max() < 3e-7
    nan = torch.tensor([float("nan"), float("inf"), float("-inf")])
    ACTIVATIONS[nn.Tanh].forward(nan.numpy(), nan.numpy())
    assert bool(nan[0].isnan())
    assert nan[1:].tolist() == [1.0, -1.0]


def test_only_what_is_needed_is_computed() -> None:
    """Frozen parameters have no gradient; the gradients of the other parameters, below and above them, are unchanged."""
    net = chain_of(nn.Tanh, [4, 8, 8, 2])
    x = torch.randn(6, 4)
    net[2].requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    ours = torch.autograd.grad(run(net, x).sum(), trained)
    assert_equal(list(ours), list(torch.autograd.grad(net(x).sum(), trained)))
    net.requires_grad_(False)
    assert not run(net, x).requires_grad
    x.requires_grad_()
    (grad_input,) = torch.autograd.grad(run(net, x).sum(), x)  # as in the actor's step, with frozen critics
    assert_equal([grad_input], list(torch.autograd.grad(net(x).sum(), x)))
    assert all(p.grad is None for p in net.parameters())


def test_used_twice_in_a_graph_and_traversed_twice() -> None:
    net = chain_of(nn.ReLU, [4, 16, 4])
    x = torch.randn(5, 4)
    loss = run(net, run(net, x)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    (2.0 * net(net(x)).square().sum()).backward()
    assert_equal(ours, [p.grad for p in net.parameters() if p.grad is not None])


def test_second_derivatives() -> None:
    """The gradient of a penalty on the input gradient equals that of torch's modules for every parameter."""
    net = chain_of(nn.Tanh, [4, 8, 1])
    x = torch.randn(3, 4, requires_grad=True)
    params, grads = list(net.parameters())[:-1], []  # the last bias does not affect the input gradient
    for compute in (run, nn.Module.__call__):
        (first,) = torch.autograd.grad(compute(net, x).sum(), x, create_graph=True)
        grads.append(list(torch.autograd.grad(first.square().sum(), params)))
    assert_equal(*grads)


def test_hooks_are_called_and_a_layer_that_is_replaced_computes() -> None:
    net, x, called = chain_of(nn.Tanh, [4, 8, 2]), torch.randn(3, 4), list[int]()
    net[0].register_forward_hook(lambda *_: called.append(1))
    net[2].weight = nn.Parameter(torch.zeros(2, 8))
    torch.testing.assert_close(run(net, x), net(x))
    assert called == [1, 1]


def test_a_stack_of_one_input_for_all_nets() -> None:
    """If one input is expanded over all nets, its gradient is the sum over the nets."""
    weight, bias = torch.randn(2, 6, 4, requires_grad=True), torch.randn(2, 1, 6, requires_grad=True)
    x_BI = torch.randn(5, 4, requires_grad=True)
    out: Tensor = LinearFunction.apply(x_BI.expand(2, -1, -1), weight, bias, FLOAT32)
    expected = torch.einsum("bi,coi->cbo", x_BI, weight) + bias
    grad = torch.randn(2, 5, 6)
    inputs = [x_BI, weight, bias]
    assert_equal(list(torch.autograd.grad(out, inputs, grad)), list(torch.autograd.grad(expected, inputs, grad)))
