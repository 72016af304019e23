"""Forward and backward pass of fully connected nets without an autograd graph.

An algorithm whose loss has a known gradient needs no graph: it computes the outputs of a net and propagates the gradient with respect to
them back. Activations and their derivatives are computed in place, and gradients of weights are accumulated in `Parameter.grad`. Small
products and activations are computed in numpy, whose calls cost less than torch's, large ones in torch.

Only sequences of linear layers, norms and activations are supported. Other nets learn through autograd, with the same interface: see
ops.passes.GraphPass. So do nets that a user has changed: see validity.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic_net import ActorCriticNet, ActorHead, actor_chain
from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.passes.direct_layers import ALL, AnyLayer, direct_layer, is_supported
from slm_lab.agent.net.passes.fused import ACTIVATIONS, Activation, chain
from slm_lab.agent.ops.arrays import array
from slm_lab.agent.ops.linear import FLOAT32, Products

DIRECT = True
"""Whether fully connected nets learn without a graph; False: through autograd."""


class DirectMLP:
    """Linear layers with norms and activations, and their gradients. To be used inside `silent()`. Args: layers: see DirectLayer."""

    def __init__(self, layers: Sequence[AnyLayer]) -> None:
        self.layers = layers

    @staticmethod
    def from_modules(modules: Sequence[nn.Module], products: Products) -> DirectMLP | None:
        """Return the pass through modules that run in sequence, or None if one of them is not supported.

        Args: products: of the hidden layers; the last one, which gives outputs, computes in float32.
        """
        found: list[tuple[nn.Module, Activation | None]] = []
        for module in modules:
            if is_supported(module):
                found.append((module, None))
            elif type(module) in ACTIVATIONS and found and found[-1][1] is None:
                found[-1] = (found[-1][0], ACTIVATIONS[type(module)])
            else:
                return None
        layers: list[AnyLayer] = []
        for index, (module, activation) in enumerate(found):
            layer = direct_layer(module, activation, products if index < len(found) - 1 else FLOAT32)
            if layer is None:
                return None
            layers.append(layer)
        return DirectMLP(layers) if layers else None

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, the first of which is x float32 [B, I], and the outputs [B, O]."""
        values = [x]
        for layer in self.layers:
            x = layer.forward(x)
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
            grad_out = self.layers[index].backward(grad_out, values[index], values[index + 1], weights, ALL if index else columns)
        return grad_out


def direct_actor(body: Body, head: ActorHead) -> DirectMLP | None:
    """Return a body and the head on it, of action values for example; None if they need autograd."""
    if not DIRECT or isinstance(body, RecurrentBody):
        return None
    return DirectMLP.from_modules(actor_chain(body, head), body.products)


class DirectPass:
    """A forward pass of actor and critic, whose gradient can be propagated once. Args: critic: None if there is none; values are 0."""

    def __init__(self, actor: DirectMLP, critic: DirectMLP | None, obs_BD: np.ndarray) -> None:
        self._nets = (actor,) if critic is None else (actor, critic)
        self._rows: slice | np.ndarray | None = None
        self._values = [net.forward(obs_BD) for net in self._nets]
        value_B = np.zeros(len(obs_BD), np.float32) if critic is None else self._values[1][-1][:, 0]
        self.values = self._values[0][-1], value_B
        """Distribution parameters [B, P] and state values [B]."""

    def select(self, rows: slice | np.ndarray) -> DirectPass:
        """Return the same pass with the outputs of some rows. The gradient of the others is 0."""
        one = copy(self)
        if self._rows is None:
            one._rows = rows
        else:
            own = np.arange(len(self._values[0][0]))[self._rows] if isinstance(self._rows, slice) else self._rows
            one._rows = own[rows]
        one.values = self.values[0][rows], self.values[1][rows]
        return one

    def backward(self, grad_params_BP: np.ndarray, grad_value_B: np.ndarray) -> None:
        """Add the gradients of weights and biases, given those of the outputs, which are modified."""
        for net, values, grad in zip(self._nets, self._values, (grad_params_BP, grad_value_B[:, None]), strict=False):
            if self._rows is not None:
                some, grad = grad, np.zeros_like(values[-1])
                grad[self._rows] = some
            net.backward(values, grad)


class DirectActorCritic:
    """Actor and critic without shared layers. Args: critic: None if there is none."""

    def __init__(self, actor: DirectMLP, critic: DirectMLP | None) -> None:
        self.actor, self.critic = actor, critic

    @staticmethod
    def of(net: ActorCriticNet) -> DirectActorCritic | None:
        """Return the passes of a net; None if it needs autograd."""
        actor = direct_actor(net.actor_body, net.actor_head)
        if actor is None:
            return None
        if net.critic_head is None:
            return DirectActorCritic(actor, None)
        if net.critic_body is None:
            return None
        modules = [*chain(net.critic_body.layers), *chain(net.critic_head)]
        critic = DirectMLP.from_modules(modules, net.critic_body.products)
        return None if critic is None else DirectActorCritic(actor, critic)

    def record(self, obs_BD: np.ndarray) -> DirectPass:
        """Return the pass over observations."""
        return DirectPass(self.actor, self.critic, obs_BD)

    def values(self, obs_B: Tensor) -> Tensor:
        """Return the critic's values [B]."""
        assert self.critic is not None
        return torch.from_numpy(self.critic.forward(obs_B.numpy())[-1][:, 0])


class DirectOutputs:
    """Outputs [B, O] of a DirectMLP."""

    def __init__(self, net: DirectMLP, x_BI: Tensor) -> None:
        self._net, self._values = net, net.forward(x_BI.numpy())
        self.values: tuple[Tensor | np.ndarray] = (self._values[-1],)

    def backward(self, grad: Tensor | np.ndarray) -> None:
        self._net.backward(self._values, array(grad))


class DirectActionValues(DirectOutputs):
    """The outputs [B] of a DirectMLP for the actions taken, int64 [B]."""

    def __init__(self, net: DirectMLP, obs_BD: Tensor, action_B: Tensor) -> None:
        super().__init__(net, obs_BD)
        self._place = np.arange(len(obs_BD)), action_B.numpy()
        self.values = (self._values[-1][self._place],)

    def backward(self, grad: Tensor | np.ndarray) -> None:
        grad_q_BA = np.zeros_like(self._values[-1])
        grad_q_BA[self._place] = array(grad)
        self._net.backward(self._values, grad_q_BA)
