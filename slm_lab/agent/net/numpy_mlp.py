"""Forward and backward pass of small feed-forward nets in numpy.

Weights and gradients are views of the flat vectors of the net (see FlatParams), so they are always current. With 132 transitions and two
nets of 64 × 64, forward and backward pass take half of torch's time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic import ActorCriticNet, ActorHead
from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.fused import chain
from slm_lab.agent.ops.arrays import silent
from slm_lab.agent.ops.device import is_asynchronous

NUMPY_LEARNING = True
"""Whether small nets learn in numpy; False: always in torch."""
InPlace = Callable[[np.ndarray], object]


def _elu(x: np.ndarray) -> None:
    np.copyto(x, np.expm1(np.minimum(x, 0.0)), where=x < 0)


def _selu(x: np.ndarray) -> None:
    np.copyto(x, 1.6732632423543772 * np.expm1(np.minimum(x, 0.0)), where=x < 0)
    np.multiply(x, 1.0507009873554805, out=x)


def _silu(x: np.ndarray) -> None:
    np.divide(x, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)  # no overflow


ACTIVATIONS: dict[type[nn.Module], InPlace] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
    nn.ELU: _elu,
    nn.SELU: _selu,
    nn.SiLU: _silu,
}
"""In-place numpy implementations of activations with default arguments; a net with another activation computes in torch."""


def actor_chain(body: Body, head: ActorHead) -> list[nn.Module]:
    """Return the modules from observation to distribution parameters."""
    tail = chain(head.tail) if head.tail is not None else []
    return [*chain(body.layers), *tail, head.linear, *([head.activation] if head.activation is not None else [])]


Slope = Callable[[np.ndarray, np.ndarray], object]

LEARNING_SMALL, LEARNING_ROWS = 64 * 64 * 512, 512
"""Largest product of batch size and weights of the largest layer, and largest batch, for which numpy is faster than torch. With layers of
64 × 64 it takes 0.7 of torch's time for 256 rows, and the same time for 1,024."""

SLOPES: dict[type[nn.Module], Slope] = {
    nn.Tanh: lambda grad, out: np.multiply(grad, 1.0 - out * out, out=grad),
    nn.ReLU: lambda grad, out: np.multiply(grad, out > 0.0, out=grad),
}
"""Multiply a gradient in place by the derivative of an activation, given its output."""


class NumpyMLP:
    """Forward and backward pass of linear layers with activations.

    Torch's autograd graph starts at the outputs. A hook there receives their gradient, propagates it back through the layers and adds to
    the gradients of weights and biases, as `backward()` would. Parameters and gradients must be flattened before (see FlatParams).
    """

    def __init__(self, layers: list[tuple[nn.Linear, type[nn.Module] | None]]) -> None:
        self.layers = [
            (linear.weight.detach().numpy(), linear.bias.detach().numpy(), _grad(linear.weight), _grad(linear.bias), kind)
            for linear, kind in layers
        ]
        self.most_rows = min(LEARNING_ROWS, LEARNING_SMALL // max(linear.weight.numel() for linear, _ in layers))
        """Largest batch for which numpy is faster than torch."""

    @staticmethod
    def from_modules(modules: list[nn.Module]) -> NumpyMLP | None:
        """Return the numpy implementation of modules that run in sequence; None if one of them is not supported."""
        layers: list[tuple[nn.Linear, type[nn.Module] | None]] = []
        for module in modules:
            if type(module) is nn.Linear and module.bias is not None and all(map(_is_trained_here, module.parameters())):
                layers.append((module, None))
            elif type(module) in SLOPES and layers and layers[-1][1] is None:
                layers[-1] = (layers[-1][0], type(module))
            else:
                return None
        return NumpyMLP(layers) if layers else None

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, the first of which is x [B, D], and the outputs [B, F]."""
        values = [x]
        for weight, bias, _, _, kind in self.layers:
            x = x.dot(weight.T)
            x += bias
            if kind is not None:
                ACTIVATIONS[kind](x)
            values.append(x)
        return values

    def __call__(self, x_BD: Tensor) -> Tensor:
        """Return the outputs [B, F] of x float32 [B, D]."""
        with silent():
            values = self.forward(x_BD.numpy())
        out_BF = torch.from_numpy(values[-1])
        if torch.is_grad_enabled():

            def propagate(grad_BF: Tensor) -> None:
                with silent():
                    self.backward(values, grad_BF.numpy())

            out_BF.requires_grad_()
            out_BF.register_hook(propagate)
        return out_BF

    def backward(self, values: list[np.ndarray], grad: np.ndarray) -> None:
        """Add the gradients of weights and biases. Args: values: from `forward`. grad: of the outputs [B, F]; it is not modified."""
        for index in range(len(self.layers) - 1, -1, -1):
            weight, _, weight_grad, bias_grad, kind = self.layers[index]
            if kind is not None:
                if index == len(self.layers) - 1:
                    grad = grad.copy()  # the gradient of the outputs must not be modified: other nodes may use it
                SLOPES[kind](grad, values[index + 1])
            weight_grad += grad.T.dot(values[index])
            bias_grad += np.add.reduce(grad, axis=0)  # without the detour of .sum()
            if index:
                grad = grad.dot(weight)


class NumpyPass:
    """A forward pass of actor and critic whose gradient is propagated without an autograd graph, which takes a fifth of A2C's update.

    To be used inside `silent()`.
    """

    def __init__(self, actor: NumpyMLP, critic: NumpyMLP, obs_BD: np.ndarray) -> None:
        self._nets = (actor, critic)
        self._rows: np.ndarray | None = None
        self._values = (actor.forward(obs_BD), critic.forward(obs_BD))
        self.params_BP, self.value_B = self._values[0][-1], self._values[1][-1][:, 0]
        """Distribution parameters and state values."""

    def select(self, rows: slice | np.ndarray) -> NumpyPass:
        """Return the same pass with the outputs of some rows. The gradient of the others is 0."""
        one = copy(self)
        one._rows = np.arange(len(self._values[0][0]))[rows] if self._rows is None else self._rows[rows]
        one.params_BP, one.value_B = self.params_BP[rows], self.value_B[rows]
        return one

    def backward(self, of_params_BP: np.ndarray, of_value_B: np.ndarray) -> None:
        """Add the gradients of weights and biases, given those of the outputs."""
        for net, values, grad in zip(self._nets, self._values, (of_params_BP, of_value_B[:, None]), strict=True):
            if self._rows is not None:
                some, grad = grad, np.zeros_like(values[-1])
                grad[self._rows] = some
            net.backward(values, grad)


def numpy_pass(net: ActorCriticNet, obs_BD: np.ndarray) -> NumpyPass | None:
    """Return the pass of actor and critic over observations; None if it is not computed in numpy."""
    actor, critic = net.actor_numpy, net.critic_numpy
    if not (isinstance(actor, NumpyMLP) and isinstance(critic, NumpyMLP)) or len(obs_BD) > min(actor.most_rows, critic.most_rows):
        return None
    return NumpyPass(actor, critic, obs_BD)


def _is_trained_here(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None and not is_asynchronous(parameter)


def _grad(parameter: Tensor) -> np.ndarray:
    assert parameter.grad is not None
    return parameter.grad.numpy()


def add_numpy_mlps(net: ActorCriticNet) -> None:
    """Add numpy implementations of actor and critic if their layers are supported. Call it after the parameters were flattened."""
    if not NUMPY_LEARNING or isinstance(net.actor_body, RecurrentBody) or (net.critic_head is not None and net.critic_body is None):
        return  # recurrent, or with a shared body
    if net.actor_body.products.bfloat16:
        return
    net.actor_numpy = NumpyMLP.from_modules(actor_chain(net.actor_body, net.actor_head))
    if net.critic_body is not None and net.critic_head is not None:
        net.critic_numpy = NumpyMLP.from_modules([*chain(net.critic_body.layers), *chain(net.critic_head)])
