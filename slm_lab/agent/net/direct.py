"""Forward and backward pass of actor and critic without an autograd graph, in torch, for nets that are too large for numpy.

With the objective in closed form (ops.objective) nothing else is left for a graph. Activations and their derivatives are in place, and the
gradients of weights are added up where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.body import RecurrentBody
from slm_lab.agent.net.fused import ACTIVATIONS, Activation, chain, has_hooks
from slm_lab.agent.net.numpy_mlp import actor_chain
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
        """Add the gradients of weights and biases. Args: values: from `forward`. grad: of the outputs [B, O]; it is modified."""
        for index in reversed(range(len(self.layers))):
            weight, _, weight_grad, bias_grad, activation = self.layers[index]
            if activation is not None:
                activation.backward_(grad, values[index + 1])
            self.products.add_weight_grad(weight_grad, grad, values[index])
            bias_grad += grad.sum(0)
            if index:
                grad = self.products.input_grad(grad, weight)


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
        """Add the gradients of weights and biases, given those of the outputs, which are modified."""
        for net, values, grad in zip(self._nets, self._values, (of_params_BP, of_value_B[:, None]), strict=True):
            if self._rows is not None:
                some, grad = grad, np.zeros(tuple(values[-1].shape), np.float32)
                grad[self._rows] = some
            net.backward(values, torch.from_numpy(grad))


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
