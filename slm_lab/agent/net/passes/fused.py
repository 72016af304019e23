"""Fully connected nets as one node of the autograd graph.

Autograd alone has a node and new tensors for each product, bias and activation, forward and backward. Here a chain of linear layers and
activations is one torch.autograd.Function, whose activations and their derivatives are in place. Frozen parameters,
`torch.autograd.grad`, several uses in one graph and second derivatives work as in any other graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.arc import ArcGraph
from slm_lab.agent.net.passes.in_place import IN_PLACE, InPlace
from slm_lab.agent.net.passes.validity import Watch
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.linear import FLOAT32, Products, bias_grad

FUSED = True
"""Whether chains of linear layers are computed in one node; False: module by module."""
FEWEST = 2**20
"""Least product of rows and weights of the largest layer: below, torch's own nodes cost less than one in Python. (DQN with 64 × 64 and
batches of 64 is a tenth faster without.)"""


class Activation(NamedTuple):
    """An activation whose derivative follows from its output."""

    plain: Callable[[Tensor], Tensor]
    """Applies it, with autograd."""
    forward_: Callable[[Tensor], object]
    """Applies it to a tensor in place."""
    backward_: Callable[[Tensor, Tensor], object]
    """Multiplies a gradient, in place, by the derivative at an output."""
    array_forward_: InPlace
    """The same for arrays."""
    array_backward_: Callable[[np.ndarray, np.ndarray], object]


def _tanh_(x: Tensor) -> None:
    """Apply tanh in place. On the CPU numpy takes a seventh of torch's time on AMD with AVX-512, and less than half with AVX2."""
    if is_asynchronous(x) or x.dtype != torch.float32:
        torch.tanh_(x)
    else:
        out = x.detach().numpy()
        np.tanh(out, out=out)


_aten: Any = torch.ops.aten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: Activation(
        torch.tanh,
        _tanh_,
        lambda grad, out: _aten.tanh_backward.grad_input(grad, out, grad_input=grad),
        IN_PLACE[nn.Tanh],
        lambda grad, out: np.multiply(grad, 1.0 - out * out, out=grad),
    ),
    nn.ReLU: Activation(
        torch.relu,
        torch.relu_,
        lambda grad, out: _aten.threshold_backward.grad_input(grad, out, 0.0, grad_input=grad),
        IN_PLACE[nn.ReLU],
        lambda grad, out: np.multiply(grad, out > 0.0, out=grad),
    ),
    nn.Sigmoid: Activation(
        torch.sigmoid,
        torch.sigmoid_,
        lambda grad, out: _aten.sigmoid_backward.grad_input(grad, out, grad_input=grad),
        IN_PLACE[nn.Sigmoid],
        lambda grad, out: np.multiply(grad, out * (1.0 - out), out=grad),
    ),
}
"""Those with default arguments; a chain with another one is computed module by module."""


def chain(module: nn.Module) -> list[nn.Module]:
    """Return the modules that run in sequence inside `module`, or the module itself."""
    if isinstance(module, ArcGraph) and module.is_chain:
        return [part for name, _ in module.order for part in chain(module.nodes[name])]
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [part for child in module for part in chain(child)]
    return [module]


class Layer(NamedTuple):
    """What follows a linear layer, and how its products are computed."""

    activation: Activation | None
    products: Products


class Chain:
    """Linear layers with an activation or none after each, computed by `FusedChain`."""

    def __init__(self) -> None:
        self.linears: list[nn.Linear] = []
        self.layers: list[Layer] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [B, O] of float32 x [B, I]."""
        params = [tensor for linear in self.linears for tensor in (linear.weight, linear.bias)]
        out: Tensor = FusedChain.apply(x, self.layers, *params)
        return out


class FusedMLP:
    """A net whose linear layers are computed by `FusedChain`, with the activations after them where it supports these.

    Other modules between them, such as a norm, compute by themselves. With such modules it is slower than calling the modules one by one,
    unless `products` uses oneDNN or bfloat16.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Chain | nn.Module], products: Products) -> None:
        self.parts, self.products = parts, products
        self._watch = Watch(module.modules())
        sizes = [linear.weight.shape for part in parts if isinstance(part, Chain) for linear in part.linears]
        self.fewest_rows = FEWEST / max(size.numel() for size in sizes)
        """Least number of rows for which it is faster than the modules, or for which it must be used."""
        if products.bfloat16:
            self.fewest_rows = 0
        elif len(parts) > 1:
            least = products.onednn
            self.fewest_rows = least if any(0 < least <= min(size) for size in sizes) else math.inf

    @staticmethod
    def from_module(module: nn.Module, products: Products = FLOAT32) -> FusedMLP | None:
        """Return the FusedMLP of a module; None if the module is to compute by itself."""
        parts: list[Chain | nn.Module] = []
        for part in chain(module):
            last = parts[-1] if parts else None
            if type(part) is nn.Linear and part.bias is not None:
                if not isinstance(last, Chain):
                    last = Chain()
                    parts.append(last)
                last.linears.append(part)
                last.layers.append(Layer(None, products))
            elif type(part) in ACTIVATIONS and isinstance(last, Chain) and last.layers[-1].activation is None:
                last.layers[-1] = Layer(ACTIVATIONS[type(part)], products)
            else:
                parts.append(part)
        if not FUSED or not any(isinstance(part, Chain) for part in parts) or (len(parts) > 1 and products == FLOAT32):
            return None
        return FusedMLP(module, parts, products)

    def holds(self) -> bool:
        """Return whether it computes what the module does."""
        return self._watch.holds()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [B, O] of float32 x [B, *shape]."""
        for part in self.parts:
            x = part(x) if isinstance(part, Chain) else self.products.run(part, x)
        return x


class FusedChain(torch.autograd.Function):
    """x [B, I], a Layer for each layer, and weight and bias of each layer in turn → [B, O]; stacks as in `ops.linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[Layer], *params: Tensor) -> Tensor:
        inputs, out = [], x
        for index, (act, products) in enumerate(layers):
            inputs.append(out)
            out = products.linear(out, params[2 * index], params[2 * index + 1])
            if act is not None:
                act.forward_(out)
        ctx.layers = layers
        # without an activation the outputs are not needed again, and a module that follows may modify them
        ctx.save_for_backward(*inputs, None if layers[-1].activation is None else out, *params)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers = len(ctx.layers)
        values, params = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        needs_x, _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph
            return _differentiable(values[0], ctx.layers, params, grad, [needs_x, *needs])
        grads: list[Tensor | None] = [None] * len(needs)
        for index in reversed(range(layers)):
            act, products = ctx.layers[index]
            if act is not None:
                if index == layers - 1:
                    grad = grad.clone()  # the gradient of the outputs must not be modified: other nodes may use it
                act.backward_(grad, values[index + 1])
            if needs[2 * index]:
                grads[2 * index] = products.weight_grad(grad, values[index])
            if needs[2 * index + 1]:
                grads[2 * index + 1] = bias_grad(grad)
            if not (needs_x or any(needs[: 2 * index])):
                return (None, None, *grads)
            grad = products.input_grad(grad, params[2 * index])
        return (grad, None, *grads)


def _differentiable(
    x: Tensor, layers: Sequence[Layer], params: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of FusedChain as functions that can be differentiated again."""
    out = x
    for index, (act, products) in enumerate(layers):
        out = products.run(torch.matmul, out, params[2 * index].mT) + params[2 * index + 1]
        out = out if act is None else act.plain(out)
    wanted = [tensor for tensor, needed in zip((x, *params), needs, strict=True) if needed]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    grad_x, *grads = [next(found) if needed else None for needed in needs]
    return (grad_x, None, *grads)
