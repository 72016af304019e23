"""Forward and backward pass of fully connected nets without an autograd graph.

Activations and their derivatives are computed in place, and gradients of weights are accumulated in `Parameter.grad`. Small products and
activations are computed in numpy, whose calls cost less than torch's, large ones in torch.

Only sequences of linear layers, norms and activations are supported. Other nets, and nets that a user has changed (see validity.py), learn
through autograd, with the same interface: see ops/autograd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from slm_lab.agent.net.arc import ArcGraph
from slm_lab.agent.net.passes.activations import Activation, array_activation
from slm_lab.agent.net.passes.direct_layers import ALL, AnyLayer, DirectLayer, direct_layer, is_supported
from slm_lab.agent.net.passes.validity import FastPass, Vector
from slm_lab.agent.ops.arrays import array
from slm_lab.agent.ops.linear import FLOAT32, Products

DIRECT = True
"""Whether fully connected nets learn without a graph; False: through autograd."""


def chain(module: nn.Module) -> list[nn.Module]:
    """Return the modules that run in sequence inside `module`, or the module itself."""
    if isinstance(module, ArcGraph) and module.is_chain:
        return [part for name, _ in module.order for part in chain(module.nodes[name])]
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [part for child in module for part in chain(child)]
    return [module]


class DirectChain:
    """Linear layers and norms, each with an activation or none after it, and their gradients. To be used inside `silent()`.

    Args: single: the only output is given without its axis: [B] in place of [B, 1].
    """

    def __init__(self, layers: Sequence[tuple[AnyLayer, Activation | None]], single: bool = False) -> None:
        self.layers, self.single = [layer for layer, _ in layers], single
        self._forward = [(layer.forward, None if activation is None else activation.forward) for layer, activation in layers]
        self.outputs = self._outputs()
        """The function x float32 [B, I] → outputs [B, O]."""
        self._backward = [None if activation is None else activation.backward for _, activation in layers]
        self.learns = all(layer.grads and (activation is None or activation.backward) for layer, activation in layers)
        """Whether gradients can be propagated: parameters are flattened, and the derivatives of activations follow from their outputs."""

    @staticmethod
    def from_modules(modules: Sequence[nn.Module], products: Products, single: bool = False) -> DirectChain | None:
        """Return the chain of modules that run in sequence, or None if one of them is not supported.

        Args: products: of the hidden layers; the last one, which gives outputs, computes in float32.
        """
        found: list[tuple[nn.Module, Activation | None]] = []
        for module in modules:
            if is_supported(module):
                found.append((module, None))
            elif (activation := array_activation(module)) and found and found[-1][1] is None:
                found[-1] = (found[-1][0], activation)
            else:
                return None
        layers: list[tuple[AnyLayer, Activation | None]] = []
        for index, (module, activation) in enumerate(found):
            layer = direct_layer(module, products if index < len(found) - 1 else FLOAT32)
            if layer is None:
                return None
            layers.append((layer, activation))
        return DirectChain(layers, single) if layers else None

    def _outputs(self) -> Callable[[np.ndarray], np.ndarray]:
        steps, single, most = self._forward, self.single, -1
        small = [(layer.weight_t, layer.bias) for layer in self.layers if isinstance(layer, DirectLayer) and not layer.is_stack]
        if len(small) == len(steps):
            most = min(layer.small_forward_rows for layer in self.layers if isinstance(layer, DirectLayer))
        plain = [(*arrays, activate) for arrays, (_, activate) in zip(small, steps, strict=False)]

        def outputs(x: np.ndarray) -> np.ndarray:
            if len(x) <= most:  # as below, without a call per layer
                for weight_t, bias, activate in plain:
                    x = x.dot(weight_t)
                    x += bias
                    if activate is not None:
                        activate(x, x)
            else:
                for forward, activate in steps:
                    x = forward(x)
                    if activate is not None:
                        activate(x, x)
            return x[..., 0] if single else x

        return outputs

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, the first of which is x float32 [B, I], and the outputs [B, O]."""
        values = [x]
        for forward, activate in self._forward:
            x = forward(x)
            if activate is not None:
                activate(x, x)
            values.append(x)
        return values

    def backward(
        self, values: Sequence[np.ndarray], grad: np.ndarray, weights: bool = True, columns: slice | None = None
    ) -> np.ndarray | None:
        """Propagate the gradient with respect to the outputs [B, O], which is modified.

        Args: values: from `forward`. weights, columns: as of DirectLayer.backward, the columns of x.
        """
        grad_out: np.ndarray | None = grad
        for index in range(len(self.layers) - 1, -1, -1):
            assert grad_out is not None
            if (derivative := self._backward[index]) is not None:
                derivative(grad_out, values[index + 1])
            grad_out = self.layers[index].backward(grad_out, values[index], weights, ALL if index else columns)
        return grad_out


class DirectPass:
    """A pass of several chains over the same inputs, each of which gives one output. Implements `ops.autograd.Pass`, with arrays."""

    def __init__(self, chains: Sequence[DirectChain], x: np.ndarray) -> None:
        self._chains = chains
        self._rows: Any = None
        """Rows of the inputs whose outputs `values` holds; None: all."""
        self._values = [one.forward(x) for one in chains]
        self.values: tuple[Any, ...] = tuple(
            values[-1][..., 0] if one.single else values[-1] for one, values in zip(chains, self._values, strict=True)
        )

    def select(self, rows: Any) -> DirectPass:
        one = object.__new__(DirectPass)
        vars(one).update(vars(self))  # a fifth of the time of copy.copy
        one._rows = rows if self._rows is None else np.arange(len(self._values[0][0]))[self._rows][rows]
        one.values = tuple(value[rows] for value in self.values)
        return one

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        for one, values, grad in zip(self._chains, self._values, grads, strict=False):
            if grad is None:
                continue
            if self._rows is None:
                grad_out = array(grad).reshape(values[-1].shape)
            else:
                grad_out = np.zeros_like(values[-1])
                grad_out[self._rows] = array(grad).reshape(-1, *grad_out.shape[1:])
            one.backward(values, grad_out)


class PassNet(nn.Module):
    """A net whose passes need no graph where it consists of `chains`, and as long as a user has not changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: FastPass[Sequence[DirectChain]] = FastPass()

    def chains(self) -> Sequence[DirectChain] | None:
        """Return the chains that compute the outputs; None if the modules are needed."""
        return None

    def use_direct(self, vector: Vector, data: bool = False, others: Iterable[nn.Module] = ()) -> None:
        """Compute by `chains` from now on, while this is valid. Args: others: modules that compute, and are not among `modules()`."""
        chains = self.chains() if DIRECT else None
        if chains is not None and not all(one.learns for one in chains):
            chains = None
        self.direct = FastPass(chains, [*self.modules(), *others], vector, data)
