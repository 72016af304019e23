"""Forward and backward passes of actors and critics without an autograd graph, in torch, for nets that are too large for numpy.

Activations and their derivatives are in place, and the gradients of weights are added up where they belong. With the objective of on-policy
algorithms in closed form (ops.objective) nothing else is left for a graph. The critics of soft actor-critic run one after the other, each
backward right after forward, while its outputs are in the cache: with 256 × 256 and batches of 256 that takes 1.35 ms, as a graph over
batched products 1.8 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.body import RecurrentBody
from slm_lab.agent.net.fused import ACTIVATIONS, Activation, chain, has_hooks
from slm_lab.agent.net.numpy_mlp import actor_chain
from slm_lab.agent.net.q_critics import QCritics, StackedCritics
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.linear import Products

DIRECT = True
"""Whether fully connected actor-critics learn without a graph; False: through autograd."""


class DirectLayer(NamedTuple):
    """A linear layer as views of the flat vectors of its net (see FlatParams), and what follows it."""

    weight: Tensor
    bias: Tensor
    weight_grad: Tensor
    bias_grad: Tensor
    activation: Activation | None


class DirectMLP:
    """Linear layers with activations, and their gradients."""

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[DirectLayer], products: Products) -> None:
        self.modules, self.layers, self.products = modules, layers, products
        self.params = [parameter for module in modules for parameter in module.parameters()]

    @property
    def usable(self) -> bool:
        """Whether all layers are trained, and none has hooks, which are called when it computes by itself."""
        return all(parameter.requires_grad for parameter in self.params) and not any(map(has_hooks, self.modules))

    @staticmethod
    def from_modules(modules: Sequence[nn.Module], products: Products) -> DirectMLP | None:
        """Return the pass of modules that run in sequence; None if one of them has to compute by itself."""
        layers: list[DirectLayer] = []
        for module in modules:
            if type(module) is nn.Linear and module.bias is not None:
                weight_grad, bias_grad = module.weight.grad, module.bias.grad
                if weight_grad is None or bias_grad is None or is_asynchronous(module.weight):
                    return None
                layers.append(DirectLayer(module.weight.detach(), module.bias.detach(), weight_grad, bias_grad, None))
            elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
                layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(module)])
            else:
                return None
        return DirectMLP(modules, layers, products) if layers else None

    def forward(self, x_BI: Tensor) -> list[Tensor]:
        """Return the input of each layer, the first of which is x float32 [B, I], and the outputs [B, O]."""
        values = [x_BI]
        for weight, bias, _, _, activation in self.layers:
            out = self.products.linear(values[-1], weight, bias)
            if activation is not None:
                activation.forward_(out)
            values.append(out)
        return values

    def backward(self, values: Sequence[Tensor], grad: Tensor) -> None:
        """Add the gradients of weights and biases. Args: values: from `forward`. grad: of the outputs [B, O]."""
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            grad = self._before_activation(index, grad, values)
            self.products.add_weight_grad(layer.weight_grad, grad, values[index])
            layer.bias_grad.add_(grad.sum(0))
            if index:
                grad = self.products.input_grad(grad, layer.weight)

    def input_grad(self, values: Sequence[Tensor], grad: Tensor, last: int) -> Tensor:
        """Return the gradient of the last inputs [B, last] of x, given that of the outputs [B, O]."""
        for index in reversed(range(len(self.layers))):
            grad = self._before_activation(index, grad, values)
            weight = self.layers[index].weight
            grad = self.products.input_grad(grad, weight) if index else torch.mm(grad, weight[:, -last:])
        return grad

    def _before_activation(self, index: int, grad: Tensor, values: Sequence[Tensor]) -> Tensor:
        activation = self.layers[index].activation
        if activation is not None:
            if index == len(self.layers) - 1:
                grad = grad.clone()  # the caller's
            activation.backward_(grad, values[index + 1])
        return grad

    def __call__(self, x_BI: Tensor) -> Tensor:
        """Return the outputs [B, O], at which a graph begins: `backward()` adds to the gradients of weights and biases."""
        values = self.forward(x_BI)
        out = values[-1].detach()  # not the tensor that its own hook refers to: such a cycle is freed late
        if torch.is_grad_enabled():
            out.requires_grad_().register_hook(lambda grad: self.backward(values, grad))
        return out


class DirectPass:
    """A forward pass of actor and critic, whose gradient can be propagated once."""

    def __init__(self, actor: DirectMLP, critic: DirectMLP, obs_BD: Tensor) -> None:
        self._nets = (actor, critic)
        self._rows: np.ndarray | None = None
        self._values = (actor.forward(obs_BD), critic.forward(obs_BD))
        self.params_BP, self.value_B = self._values[0][-1].numpy(), self._values[1][-1].numpy()[:, 0]
        """Distribution parameters and state values."""

    def select(self, rows: slice | np.ndarray) -> DirectPass:
        """Return the same pass with the outputs of some rows. The gradient of the others is 0."""
        one = copy(self)
        one._rows = np.arange(len(self._values[0][0]))[rows] if self._rows is None else self._rows[rows]
        one.params_BP, one.value_B = self.params_BP[rows], self.value_B[rows]
        return one

    def backward(self, of_params_BP: np.ndarray, of_value_B: np.ndarray) -> None:
        """Add the gradients of weights and biases, given those of the outputs."""
        for net, values, grad in zip(self._nets, self._values, (of_params_BP, of_value_B[:, None]), strict=True):
            if self._rows is not None:
                some, grad = grad, np.zeros(tuple(values[-1].shape), np.float32)
                grad[self._rows] = some
            net.backward(values, torch.from_numpy(grad))


class DirectCritics:
    """Critics Q(s, a) that run one after the other. Args: mlps: of each."""

    def __init__(self, mlps: Sequence[DirectMLP]) -> None:
        self.mlps = mlps

    def __call__(self, obs_BD: Tensor, action_BD: Tensor) -> Tensor:
        """Return Q [C, B], without gradients."""
        x_BI = torch.cat((obs_BD.flatten(1), action_BD), dim=1)
        return torch.stack([mlp.forward(x_BI)[-1][:, 0] for mlp in self.mlps])

    def fit(self, obs_BD: Tensor, action_BD: Tensor, target_B: Tensor, weight_B: Tensor | None) -> tuple[float, Tensor]:
        """Add the gradients of the sum of mean squared errors, weighted if `weight_B`, to the weights'. Return the sum, and Q [C, B]."""
        x_BI = torch.cat((obs_BD.flatten(1), action_BD), dim=1)
        losses, q_CB = zip(*(_fit(mlp, x_BI, target_B, weight_B) for mlp in self.mlps), strict=True)
        return sum(losses), torch.stack(q_CB)

    def of_actions(self, obs_BD: Tensor, action_BD: Tensor) -> Tensor:
        """Return Q [C, B] with gradients in the actions only."""
        q_CB: Tensor = _ActionValues.apply(action_BD, obs_BD, self.mlps)
        return q_CB


def _fit(mlp: DirectMLP, x_BI: Tensor, target_B: Tensor, weight_B: Tensor | None) -> tuple[float, Tensor]:
    """Return loss and Q [B] of one critic, see `DirectCritics.fit`. (A function, so that the next one finds its memory free.)"""
    values = mlp.forward(x_BI)
    error_B = values[-1][:, 0] - target_B
    weighted_B = error_B if weight_B is None else weight_B * error_B
    mlp.backward(values, (weighted_B * (2.0 / len(error_B)))[:, None])
    return torch.dot(weighted_B, error_B).item() / len(error_B), values[-1][:, 0]


def _slope(mlp: DirectMLP, x_BI: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Return Q [B] of one critic, and its derivative by the last inputs [B, last]."""
    values = mlp.forward(x_BI)
    return values[-1][:, 0], mlp.input_grad(values, x_BI.new_ones(len(x_BI), 1), last)


class _ActionValues(torch.autograd.Function):
    """Actions [B, D], observations and critics → Q [C, B]. Each number depends on one action, so that its derivative is known at once."""

    @staticmethod
    def forward(ctx: Any, action_BD: Tensor, obs_BD: Tensor, mlps: Sequence[DirectMLP]) -> Tensor:
        x_BI = torch.cat((obs_BD.flatten(1), action_BD), dim=1)
        q_CB, slopes = zip(*(_slope(mlp, x_BI, action_BD.shape[1]) for mlp in mlps), strict=True)
        ctx.save_for_backward(*slopes)
        return torch.stack(q_CB)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CB: Tensor) -> tuple[Tensor, None, None]:
        first, *others = (slope_BD * grad_B[:, None] for slope_BD, grad_B in zip(ctx.saved_tensors, grad_CB, strict=True))
        return sum(others, first), None, None


LEAST = 2**22
"""Least product of rows and weights of the largest layer for which critics run one after the other: smaller ones fit the cache together."""


def direct_critics(critics: QCritics, rows: int) -> DirectCritics | None:
    """Return critics that run one after the other; None unless they are stacked, and large with so many rows."""
    if not DIRECT or not isinstance(critics, StackedCritics) or not critics.fused or critics.products.bfloat16:
        return None
    if is_asynchronous(critics.layers[0][0]) or rows * max(weight[0].numel() for weight, _ in critics.layers) < LEAST:
        return None
    mlps = []
    for c in range(len(critics.layers[0][0])):
        layers = []
        for (weight, bias), layer in zip(critics.layers, critics.fused, strict=True):
            assert weight.grad is not None
            assert bias.grad is not None
            views = (weight.detach()[c], bias.detach()[c, 0], weight.grad[c], bias.grad[c, 0])
            layers.append(DirectLayer(*views, layer.activation))
        mlps.append(DirectMLP([critics], layers, critics.products))
    return DirectCritics(mlps)


def direct_actor(net: ActorCriticNet, rows: int) -> DirectMLP | None:
    """Return the actor as a function of observations; None if it is not fully connected, or small with so many rows."""
    if not DIRECT or isinstance(net.actor_body, RecurrentBody) or net.actor_body.products.bfloat16:
        return None
    if rows * max(parameter.numel() for parameter in net.actor_parameters()) < LEAST:
        return None
    return DirectMLP.from_modules(actor_chain(net.actor_body, net.actor_head), net.actor_body.products)


def direct_mlps(net: ActorCriticNet) -> tuple[DirectMLP, DirectMLP] | None:
    """Return actor and critic, for `direct_pass`; None unless both are apart, fully connected, flattened, on the CPU and in float32."""
    critic_body, critic_head = net.critic_body, net.critic_head
    if not DIRECT or critic_body is None or critic_head is None or isinstance(net.actor_body, RecurrentBody):
        return None
    if net.actor_body.products.bfloat16:
        return None
    actor = DirectMLP.from_modules(actor_chain(net.actor_body, net.actor_head), net.actor_body.products)
    critic = DirectMLP.from_modules([*chain(critic_body.layers), *chain(critic_head)], critic_body.products)
    return None if actor is None or critic is None else (actor, critic)


def direct_pass(mlps: tuple[DirectMLP, DirectMLP] | None, obs_BD: Tensor) -> DirectPass | None:
    """Return the pass of actor and critic over observations; None if that takes a graph."""
    if mlps is None or not (mlps[0].usable and mlps[1].usable):
        return None
    return DirectPass(*mlps, obs_BD)
