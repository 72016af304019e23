"""Forward and backward pass of fully connected nets without an autograd graph.

Activations and their derivatives are computed in place, and gradients of weights are accumulated in `Parameter.grad`. Small matrix products
and small activations are computed in numpy, which has less overhead per call than torch; large matrix products and large activations are
computed in torch.

This module supports only sequences of linear layers, normalisation layers and activations. Other nets, and nets that a user has modified
(see validity.py), compute gradients by autograd, through the same interface (see ops/autograd.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.arc import ArcGraph
from slm_lab.agent.net.layers import LeadingColumns
from slm_lab.agent.net.passes.direct_layers import (
    ALL,
    Activation,
    AnyLayer,
    GraphFreeLinear,
    array_activation,
    is_supported,
    make_graph_free_layer,
)
from slm_lab.agent.net.passes.validity import FastPass, ParameterVector
from slm_lab.agent.ops.arrays import as_array
from slm_lab.agent.ops.linear import FLOAT32, MatmulMode

DIRECT = True
"""Whether fully connected nets compute gradients without an autograd graph. If `DIRECT` is False, autograd is always used."""


def flatten_sequential(module: nn.Module) -> list[nn.Module]:
    """Return the modules that a Sequential or ArcGraph runs in sequence, or [module] if `module` is of any other class."""
    if isinstance(module, ArcGraph) and module.is_chain:
        return [part for name, _ in module.order for part in flatten_sequential(module.nodes[name])]
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [part for child in module for part in flatten_sequential(child)]
    return [module]


class GraphFreeSequence:
    """Forward and backward pass of linear and normalisation layers in sequence, each optionally followed by an activation.

    The gradients are computed without autograd. Call the methods of a GraphFreeSequence inside `ignore_float_errors()`.

    Args: single: whether to return a single output as [B] instead of [B, 1]. inputs: number of leading input columns to use, or None to use
    all columns. trunk: sequence whose outputs are the inputs of `layers`, or None. Several GraphFreeSequences may have the same trunk.
    `outputs` includes the trunk; `forward` and `backward` do not.
    """

    def __init__(
        self,
        layers: Sequence[tuple[AnyLayer, Activation | None]],
        single: bool = False,
        inputs: int | None = None,
        trunk: GraphFreeSequence | None = None,
    ) -> None:
        self.layers, self.single, self.inputs, self.trunk = [layer for layer, _ in layers], single, inputs, trunk
        self._forward = [(layer.forward, None if activation is None else activation.forward) for layer, activation in layers]
        self.outputs = self._make_outputs_function()
        """Function that maps inputs, float32 [B, I], to outputs [B, O]. If there is a trunk, the inputs are those of the trunk."""
        self._backward = [None if activation is None else activation.backward for _, activation in layers]
        self.learns: bool = (trunk is None or trunk.learns) and all(
            layer.grads and (activation is None or activation.backward) for layer, activation in layers
        )
        """Whether `backward` can be called. `backward` requires that FlatParams holds the parameters, and that the derivative of each
        activation is a function of its output."""

    @staticmethod
    def from_modules(
        modules: Sequence[nn.Module],
        matmul_mode: MatmulMode,
        single: bool = False,
        trunk: GraphFreeSequence | None = None,
        last_is_hidden: bool = False,
    ) -> GraphFreeSequence | None:
        """Build a GraphFreeSequence from modules that run in sequence. Return None if one of the modules is not supported.

        Args: matmul_mode: mode in which the hidden layers compute matrix products. The output layer always computes in float32. single,
        trunk: see the class. last_is_hidden: whether the last layer is not an output layer, but also a hidden layer.
        """
        inputs = modules[0].size if modules and isinstance(modules[0], LeadingColumns) else None
        pairs: list[tuple[nn.Module, Activation | None]] = []
        for module in modules if inputs is None else modules[1:]:
            if is_supported(module):
                pairs.append((module, None))
            elif (activation := array_activation(module)) and pairs and pairs[-1][1] is None:
                pairs[-1] = (pairs[-1][0], activation)
            else:
                return None
        layers: list[tuple[AnyLayer, Activation | None]] = []
        for index, (module, activation) in enumerate(pairs):
            layer = make_graph_free_layer(module, matmul_mode if last_is_hidden or index < len(pairs) - 1 else FLOAT32)
            if layer is None:
                return None
            layers.append((layer, activation))
        return GraphFreeSequence(layers, single, inputs, trunk) if layers else None

    def _make_outputs_function(self) -> Callable[[np.ndarray], np.ndarray]:
        steps, single, inputs, trunk, max_numpy_rows = self._forward, self.single, self.inputs, self.trunk, -1
        arrays = [(layer.weight_t, layer.bias) for layer in self.layers if isinstance(layer, GraphFreeLinear) and not layer.is_stack]
        if len(arrays) == len(steps):
            max_numpy_rows = min(layer.numpy_forward_rows for layer in self.layers if isinstance(layer, GraphFreeLinear))
        numpy_steps = [(*weight_and_bias, activate) for weight_and_bias, (_, activate) in zip(arrays, steps, strict=False)]

        def outputs(x: np.ndarray) -> np.ndarray:
            if trunk is not None:
                x = trunk.outputs(x)
            if inputs is not None:
                x = x[:, :inputs]
            if len(x) <= max_numpy_rows:  # same computation as below, without a function call for each layer
                for weight_t, bias, activate in numpy_steps:
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
        """Return a list of the inputs of all layers and, as the last element, the outputs [B, O]. The trunk is not computed.

        Args: x: inputs of the first layer, float32 [B, I].
        """
        if self.inputs is not None:
            x = x[:, : self.inputs]
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
        """Backpropagate `grad`, the gradient with respect to the outputs [B, O].

        Return the gradient with respect to those columns of the inputs x [B, I] that `columns` selects.

        `grad` is modified in place.

        Args: values: result of `GraphFreeSequence.forward`. weights: whether to accumulate the gradients of the parameters. columns:
        columns of x whose gradient is returned, or None if no gradient is to be returned.
        """
        grad_out: np.ndarray | None = grad
        for index in range(len(self.layers) - 1, -1, -1):
            assert grad_out is not None
            if (derivative := self._backward[index]) is not None:
                derivative(grad_out, values[index + 1])
            grad_out = self.layers[index].backward(grad_out, values[index], weights, ALL if index else columns)
        return grad_out


class GraphFreePass:
    """Forward pass of several GraphFreeSequences on the same inputs, with one output for each GraphFreeSequence.

    All GraphFreeSequences have the same trunk, or none has a trunk. This class implements `ops.autograd.ForwardPass` with numpy arrays.
    """

    def __init__(self, sequences: Sequence[GraphFreeSequence], x: np.ndarray) -> None:
        self._sequences, self._trunk = sequences, sequences[0].trunk
        self._rows: Any = None
        """Indices of the input rows to which the rows of `values` belong, or None if `values` has all rows."""
        self._trunk_values = [x] if self._trunk is None else self._trunk.forward(x)
        self._values = [sequence.forward(self._trunk_values[-1]) for sequence in sequences]
        self.values: tuple[Any, ...] = tuple(
            values[-1][..., 0] if sequence.single else values[-1] for sequence, values in zip(sequences, self._values, strict=True)
        )

    def select_rows(self, rows: Any) -> GraphFreePass:
        selected = object.__new__(GraphFreePass)
        vars(selected).update(vars(self))  # this takes a fifth of the time of copy.copy
        selected._rows = rows if self._rows is None else np.arange(len(self._values[0][0]))[self._rows][rows]
        selected.values = tuple(value[rows] for value in self.values)
        return selected

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        total: np.ndarray | None = None  # gradient with respect to the outputs of the trunk
        for sequence, values, grad in zip(self._sequences, self._values, grads, strict=False):
            if grad is None:
                continue
            if self._rows is None:
                grad_out = as_array(grad).reshape(values[-1].shape)
            else:
                grad_out = np.zeros_like(values[-1])
                grad_out[self._rows] = as_array(grad).reshape(-1, *grad_out.shape[1:])
            grad_features = sequence.backward(values, grad_out, columns=None if self._trunk is None else ALL)
            if grad_features is not None:
                total = grad_features if total is None else np.add(total, grad_features, out=total)
        if self._trunk is not None and total is not None:
            self._trunk.backward(self._trunk_values, total)


class DuelingPass:
    """Forward pass of a dueling net. The output is Q = V + A − mean(A) for each of Z atoms (arXiv:1511.06581, equation 9).

    This class implements `ops.autograd.ForwardPass` with arrays.

    Args: inner: pass whose outputs are the advantages [B, A · Z] and the outputs for the state [B, Z]. number: Z.
    """

    def __init__(self, inner: GraphFreePass, number: int = 1) -> None:
        self._inner, self._number = inner, number
        advantage_BX, state_BZ = inner.values
        advantage_BAZ = advantage_BX.reshape(len(advantage_BX), advantage_BX.shape[1] // number, number)
        q_BAZ = advantage_BAZ + (state_BZ - advantage_BAZ.mean(1))[:, None]
        self.values: tuple[Any, ...] = (q_BAZ.reshape(advantage_BX.shape),)

    def select_rows(self, rows: Any) -> DuelingPass:
        return DuelingPass(self._inner.select_rows(rows), self._number)

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        (grad,) = grads
        assert grad is not None
        grad_BX = as_array(grad)
        grad_BAZ = grad_BX.reshape(len(grad_BX), grad_BX.shape[1] // self._number, self._number)
        state_BZ = grad_BAZ.sum(1)
        advantage_BAZ = grad_BAZ - (state_BZ / grad_BAZ.shape[1])[:, None]
        self._inner.backward(advantage_BAZ.reshape(grad_BX.shape), state_BZ)


class GraphFreeNet(nn.Module):
    """Base class of nets that can learn without an autograd graph.

    A net uses autograd if it contains modules that GraphFreeSequence does not support, or if a user has modified the net.
    """

    def __init__(self) -> None:
        super().__init__()
        self.direct: FastPass[Sequence[GraphFreeSequence]] = FastPass()

    def build_graph_free_sequences(self) -> Sequence[GraphFreeSequence] | None:
        """Return a GraphFreeSequence for each output of the net, or None if a module of the net is not supported."""
        return None

    def enable_graph_free_pass(self, vector: ParameterVector, data: bool = False, others: Iterable[nn.Module] = ()) -> None:
        """Use the GraphFreeSequences that `build_graph_free_sequences` returns, if there are any and all can learn.

        These sequences compute the net as long as the user does not modify the net's modules.

        Args: vector: the parameters of the net. data: see ModuleMonitor. others: modules that the GraphFreeSequences replace and that
        `modules()` does not list.
        """
        sequences = self.build_graph_free_sequences() if DIRECT else None
        if sequences is not None and not all(sequence.learns for sequence in sequences):
            sequences = None
        assert sequences is None or all(sequence.trunk is sequences[0].trunk for sequence in sequences)
        self.direct = FastPass(sequences, [*self.modules(), *others], vector, data)


SEPARATE_CRITICS_SIZE = 2**22
"""If the number of rows × the number of weights of the largest layer reaches this number, critics are computed one after the other instead
of as a stack (one batched product per layer). At this size, the overhead of additional calls no longer matters, and the backward pass of a
separate critic skips the rows whose gradient is 0."""


class CriticsPass(GraphFreePass):
    """Forward pass of C critics. The output is a tensor [C, B] if `single` is true, otherwise [C, B, O] with all O outputs of each critic.

    Args: sequences: one GraphFreeSequence per critic, or a single GraphFreeSequence for a stack of all critics. x: inputs [B, I], or [C, B,
    I] for a stack. actions: number of columns at the end of x that contain the action.
    """

    def __init__(self, sequences: Sequence[GraphFreeSequence], x: np.ndarray, actions: int, single: bool) -> None:
        super().__init__(sequences, x)
        self._is_stack, self._columns = x.ndim == 3, slice(x.shape[-1] - actions, x.shape[-1])
        out = self.values[0] if self._is_stack else np.stack(self.values)
        self.values = (torch.from_numpy(out[..., 0] if single else out),)

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        (grad,) = grads
        assert grad is not None
        super().backward(*((grad,) if self._is_stack else grad))

    def input_grad(self, grad: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the actions [B, D], given `grad`, the gradient with respect to the output.

        Call this method instead of `backward`. Gradients of parameters are not computed.
        """
        if self._is_stack:
            grad_CBD = self._sequences[0].backward(self._values[0], grad.numpy().reshape(self._values[0][-1].shape), False, self._columns)
            assert grad_CBD is not None
            return torch.from_numpy(grad_CBD).sum(0)
        total_BD = np.zeros_like(self._values[0][0][:, self._columns])
        grad_CBO = grad.numpy().reshape(len(self._sequences), len(total_BD), -1)
        for sequence, values, grad_BO in zip(self._sequences, self._values, grad_CBO, strict=True):
            row_K = np.flatnonzero(grad_BO.any(1))  # with the minimum of two critics, only one critic has a gradient in each row
            if not len(row_K):
                continue
            selected = values if len(row_K) == len(grad_BO) else [value.take(row_K, axis=0) for value in values]
            grad_KD = sequence.backward(selected, grad_BO[row_K], False, self._columns)
            assert grad_KD is not None
            total_BD[row_K] += grad_KD
        return torch.from_numpy(total_BD)
