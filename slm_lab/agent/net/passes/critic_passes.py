"""Passes of the critics of soft actor-critic: with an autograd graph, or without one where critics are fully connected (see direct.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.net.passes import direct
from slm_lab.agent.net.passes.direct import DirectMLP
from slm_lab.agent.net.passes.direct_layers import DirectLayer, gradients
from slm_lab.agent.net.passes.fused import ACTIVATIONS, chain
from slm_lab.agent.net.passes.validity import FastPass, Guard, Vector
from slm_lab.agent.net.q_critics import QCritic, QCritics, SeparateCritics, StackedCritics
from slm_lab.agent.ops.arrays import array
from slm_lab.agent.ops.linear import FLOAT32
from slm_lab.agent.ops.passes import GraphPass, Pass, with_gradients


class CriticPass(Pass, Protocol):
    """Values of C critics: [C, B] of actions, [C, B, A] without any."""

    def action_grad(self, grad: Tensor, /) -> Tensor:
        """Return the gradient of the actions [B, D], given that of the values [C, B]; after `record` with for_action_grad, at most once."""


class GraphCritics:
    """Critics that learn through autograd."""

    def __init__(self, critics: QCritics) -> None:
        self.critics, self._params = critics, list(critics.parameters())

    def record(self, obs_B: Tensor, action_B: Tensor | None, for_action_grad: bool = False) -> GraphCriticPass:
        """Compute values. Args: for_action_grad: prepare `action_grad` in place of `backward`."""
        if not for_action_grad:
            return GraphCriticPass(self.critics(obs_B, action_B), None)
        assert action_B is not None
        leaf_B = action_B.detach().requires_grad_()
        trained = [parameter for parameter in self._params if parameter.requires_grad]
        for parameter in trained:  # their gradients are not computed
            parameter.requires_grad_(False)
        values = self.critics(obs_B, leaf_B)
        for parameter in trained:
            parameter.requires_grad_()
        return GraphCriticPass(values, leaf_B)


class GraphCriticPass(GraphPass):
    """Values of critics, with their graph."""

    def __init__(self, values: Tensor, action_B: Tensor | None) -> None:
        super().__init__(values)
        self._action_B = action_B

    def action_grad(self, grad: Tensor) -> Tensor:
        assert self._action_B is not None
        return torch.autograd.grad(with_gradients(self.graph, [grad]), self._action_B)[0]


APART = 2**22
"""Number of rows × weights of the largest layer from which critics are computed one after the other, not as a stack: the calls that a stack
saves no longer matter, and each critic then computes only the rows it has a gradient for."""


class DirectCritics:
    """Critics without a graph: as a stack, which takes a third of the calls, or one after the other.

    Args: stack: None if the critics cannot be stacked. each: the critics on their own.
    """

    def __init__(self, stack: DirectMLP | None, each: Sequence[DirectMLP]) -> None:
        self.stack, self.each = stack, each
        self.apart_rows = 0 if stack is None else -(-APART // max(layer.params[0].numel() for layer in each[0].layers))

    def record(self, obs_B: Tensor, action_B: Tensor | None, for_action_grad: bool = False) -> StackedPass | SeparatePass:
        """Compute values."""
        obs_BD = obs_B.flatten(1)
        x_BI = obs_BD if action_B is None else torch.cat((obs_BD, action_B), dim=1)
        actions = 0 if action_B is None else action_B.shape[1]
        if self.stack is not None and len(x_BI) < self.apart_rows:
            return StackedPass(self.stack, x_BI.expand(len(self.each), -1, -1), actions)
        return SeparatePass(self.each, x_BI, actions)

    @staticmethod
    def of(critics: QCritics) -> DirectCritics | None:
        """Return the passes of critics; None if they need autograd."""
        if not direct.DIRECT:
            return None
        if isinstance(critics, StackedCritics):
            return _stacked(critics)
        each = [_separate(critics, index) for index in range(len(critics.critics))]
        complete = [net for net in each if net is not None]
        return DirectCritics(None, complete) if len(complete) == len(each) else None


def direct_critics(critics: QCritics, vector: Vector, data: bool = False) -> FastPass[DirectCritics]:
    """Return the passes of critics without a graph, to be used while they compute what the critics do. Args: as of Guard."""
    activations = critics.activations if isinstance(critics, StackedCritics) else []
    return FastPass(DirectCritics.of(critics), Guard([*critics.modules(), *activations], vector, data))


def _stacked(critics: StackedCritics) -> DirectCritics | None:
    kinds = [type(module) for module in critics.activations]
    if not all(kind in ACTIVATIONS for kind in kinds):
        return None
    how = [*((ACTIVATIONS[kind], critics.products) for kind in kinds), (None, FLOAT32)]
    layers: list[DirectLayer] = []
    for params, (activation, products) in zip(critics.layers, how, strict=True):
        grads = gradients(params)
        if grads is None:
            return None
        layers.append(DirectLayer(params, grads, activation, products))
    each = [DirectMLP([layer.of_critic(index) for layer in layers]) for index in range(len(layers[0].params[0]))]
    return DirectCritics(DirectMLP(layers), each)


def _separate(critics: SeparateCritics, index: int) -> DirectMLP | None:
    critic = critics.critics[index]
    assert isinstance(critic, QCritic)
    if critic.action_after_body:
        return None
    return DirectMLP.from_modules([*chain(critic.body.layers), critic.head], critic.body.products)


class StackedPass:
    """Values of critics that are computed as one stack."""

    def __init__(self, stack: DirectMLP, x_CBI: Tensor, actions: int) -> None:
        self._net, self._actions = stack, actions
        self._values = stack.forward(x_CBI.numpy())
        out_CBA = torch.from_numpy(self._values[-1])
        self.values: tuple[Tensor | np.ndarray] = (out_CBA.squeeze(2) if actions else out_CBA,)

    def backward(self, grad: Tensor | np.ndarray) -> None:
        self._net.backward(self._values, array(grad).reshape(self._values[-1].shape))

    def action_grad(self, grad_CB: Tensor) -> Tensor:
        size = self._values[0].shape[-1]
        grad_action_CBD = self._net.backward(self._values, grad_CB.numpy()[:, :, None], False, slice(size - self._actions, size))
        assert grad_action_CBD is not None
        return torch.from_numpy(grad_action_CBD).sum(0)


class SeparatePass:
    """Values of critics that were computed one after the other."""

    def __init__(self, nets: Sequence[DirectMLP], x_BI: Tensor, actions: int) -> None:
        self._nets, self._actions = nets, actions
        self._values = [net.forward(x_BI.numpy()) for net in nets]
        out_CBA = torch.from_numpy(np.stack([values[-1] for values in self._values]))
        self.values: tuple[Tensor | np.ndarray] = (out_CBA.squeeze(2) if actions else out_CBA,)

    def backward(self, grad: Tensor | np.ndarray) -> None:
        for net, values, own in zip(self._nets, self._values, array(grad), strict=True):
            net.backward(values, own.reshape(values[-1].shape))

    def action_grad(self, grad_CB: Tensor) -> Tensor:
        x_BI = self._values[0][0]
        columns = slice(x_BI.shape[1] - self._actions, x_BI.shape[1])
        total_BD = np.zeros((len(x_BI), self._actions), np.float32)
        for net, values, grad_B in zip(self._nets, self._values, grad_CB.numpy(), strict=True):
            row_K = np.flatnonzero(grad_B)  # with the minimum of two critics, each row has a gradient for one of them
            if not len(row_K):
                continue
            some = values if len(row_K) == len(grad_B) else [value.take(row_K, axis=0) for value in values]
            grad_action_KD = net.backward(some, grad_B[row_K, None], False, columns)
            assert grad_action_KD is not None
            total_BD[row_K] += grad_action_KD
        return torch.from_numpy(total_BD)
