"""Forward and backward pass of fully connected nets without an autograd graph.

An algorithm whose loss has a known gradient needs no graph: it takes the outputs of a net, and passes the gradient by these outputs back.
Activations and their derivatives are in place, and the gradients of weights are added up where they belong. Small products and activations
are computed in numpy, whose calls cost less than torch's, large ones in torch.

Nets that are not plain chains of linear layers, layer norms and activations learn through autograd; the classes `Graph…` give them the same
interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic import ActorCriticNet, ActorHead
from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.fused import ACTIVATIONS, chain, hooks_of
from slm_lab.agent.net.in_place import IN_PLACE, SLOPES, actor_chain
from slm_lab.agent.net.q_critics import QCritic, QCritics, SeparateCritics, StackedCritics
from slm_lab.agent.ops.arrays import array
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.linear import FLOAT32, Products, bias_grad

DIRECT = True
"""Whether fully connected nets learn without a graph; False: through autograd."""
SMALL, SMALL_ROWS = 64 * 64 * 512, 512
"""Largest product of rows and weights of a layer, and most rows, for which numpy is faster than torch. With layers of 64 × 64 an
update of PPO takes 0.92 of torch's time for 256 rows, one of A2C 0.85 for 32."""


class DirectLayer:
    """A linear layer and the activation after it, whose memory is that of the flat vectors of its net (see FlatParams).

    Shapes: x [B, I], weight [O, I], bias [O]; of a stack of C layers x [C, B, I], weight [C, O, I], bias [C, 1, O].

    Args: params, grads: weight and bias, and their gradients. kind: type of the activation, one of ACTIVATIONS; None: none follows.
    products: how products are computed that are not small.
    """

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], kind: type[nn.Module] | None, products: Products) -> None:
        self.params, self.grads, self.kind, self.products = [one.detach() for one in params], grads, kind, products
        self.weight, self.bias = (one.numpy() for one in self.params)
        self.of_weight, self.of_bias = (one.numpy() for one in grads)
        self.weight_t = self.weight.swapaxes(-1, -2)
        self.small_rows = 0 if products.bfloat16 else min(SMALL_ROWS, SMALL // self.weight.size)
        """Most rows that are computed in numpy."""
        self.activation = None if kind is None else ACTIVATIONS[kind]
        self.in_place = None if kind is None else IN_PLACE[kind]
        self.slope = None if kind is None else SLOPES[kind]

    def critic(self, index: int) -> DirectLayer:
        """Return one layer of a stack."""
        params, grads = ((weight[index], bias[index, 0]) for weight, bias in (self.params, self.grads))
        return DirectLayer(params, grads, self.kind, self.products)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs, in a new array."""
        if x.shape[-2] <= self.small_rows:
            out = _product(x, self.weight_t)
            out += self.bias
            if self.in_place is not None:
                self.in_place(out)
            return out
        outputs = self.products.linear(torch.from_numpy(x), *self.params)
        if self.activation is not None:
            self.activation.forward_(outputs)
        return outputs.numpy()

    def through_activation(self, grad: np.ndarray, out: np.ndarray) -> None:
        """Multiply the gradient of the outputs, in place, by the derivative of the activation."""
        if self.slope is None or self.activation is None:
            return
        if grad.shape[-2] <= self.small_rows:
            self.slope(grad, out)
        else:
            self.activation.backward_(torch.from_numpy(grad), torch.from_numpy(out))

    def add_grads(self, grad: np.ndarray, x: np.ndarray) -> None:
        """Add the gradients of weight and bias, given that of what the activation takes."""
        if grad.shape[-2] <= self.small_rows:
            self.of_weight += _product(grad.swapaxes(-1, -2), x)
            self.of_bias += np.add.reduce(grad, axis=0) if grad.ndim == 2 else np.add.reduce(grad, axis=1, keepdims=True)
        else:
            of_out, (weight_grad, of_bias) = torch.from_numpy(grad), self.grads
            self.products.add_weight_grad(weight_grad, of_out, torch.from_numpy(x))
            of_bias += bias_grad(of_out)

    def input_grad(self, grad: np.ndarray, x: np.ndarray, columns: slice | None = None) -> np.ndarray:
        """Return the gradient of the input x, or of some of its columns, given that of what the activation takes."""
        if grad.shape[-2] <= self.small_rows:
            return _product(grad, self.weight if columns is None else self.weight[..., columns])
        weight = self.params[0]
        return self.products.input_grad(torch.from_numpy(grad), weight if columns is None else weight[..., columns]).numpy()


class DirectNorm:
    """Layer normalisation (arXiv:1607.06450) and the activation after it, with the interface of DirectLayer."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], kind: type[nn.Module] | None, eps: float) -> None:
        weight, bias = params
        self.params, self.grads, self.eps = (weight.detach(), bias.detach()), grads, eps
        self.shape, self.activation = list(self.params[0].shape), None if kind is None else ACTIVATIONS[kind]

    def forward(self, x: np.ndarray) -> np.ndarray:
        out = torch.native_layer_norm(torch.from_numpy(x), self.shape, *self.params, self.eps)[0]
        if self.activation is not None:
            self.activation.forward_(out)
        return out.numpy()

    def through_activation(self, grad: np.ndarray, out: np.ndarray) -> None:
        if self.activation is not None:
            self.activation.backward_(torch.from_numpy(grad), torch.from_numpy(out))

    def add_grads(self, grad: np.ndarray, x: np.ndarray) -> None:
        for total, own in zip(self.grads, self._backward(grad, x, [False, True, True])[1:], strict=True):
            total += own

    def input_grad(self, grad: np.ndarray, x: np.ndarray, columns: slice | None = None) -> np.ndarray:
        of_x: np.ndarray = self._backward(grad, x, [True, False, False])[0].numpy()
        return of_x if columns is None else of_x[:, columns]

    def _backward(self, grad: np.ndarray, x: np.ndarray, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        inputs = torch.from_numpy(x)
        _, mean, rstd = torch.native_layer_norm(inputs, self.shape, *self.params, self.eps)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
            torch.from_numpy(grad), inputs, self.shape, mean, rstd, *self.params, wanted
        )
        return found


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product: np.ndarray = a.dot(b) if a.ndim == 2 else np.matmul(a, b)  # dot takes two thirds of the time of matmul
    return product


class DirectMLP:
    """Linear layers with norms and activations, and their gradients. To be used inside `silent()`.

    Args: modules: those that the layers were made of.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[DirectLayer | DirectNorm]) -> None:
        self.modules, self.layers = modules, layers
        self._params = [parameter for module in modules for parameter in module.parameters()]
        self._hooks = [hooks for module in modules for hooks in hooks_of(module)]

    @property
    def usable(self) -> bool:
        """Whether all layers are trained, and none has hooks, which are called when it computes by itself."""
        return not any(self._hooks) and all([parameter.requires_grad for parameter in self._params])  # noqa: C419  # a third of the time

    @staticmethod
    def from_modules(modules: Sequence[nn.Module], products: Products) -> DirectMLP | None:
        """Return the pass of modules that run in sequence; None if one of them has to compute by itself.

        Args: products: of the hidden layers; the last one, which gives outputs, computes in float32.
        """
        found: list[tuple[nn.Linear | nn.LayerNorm, type[nn.Module] | None]] = []
        for module in modules:
            if (type(module) is nn.Linear and module.bias is not None) or _is_plain_norm(module):
                assert isinstance(module, nn.Linear | nn.LayerNorm)
                found.append((module, None))
            elif type(module) in ACTIVATIONS and found and found[-1][1] is None:
                found[-1] = (found[-1][0], type(module))
            else:
                return None
        layers: list[DirectLayer | DirectNorm] = []
        for index, (module, kind) in enumerate(found):
            params = module.weight, module.bias
            grads = _grads(params)
            if grads is None:
                return None
            if isinstance(module, nn.LayerNorm):
                layers.append(DirectNorm(params, grads, kind, module.eps))
            else:
                layers.append(DirectLayer(params, grads, kind, products if index < len(found) - 1 else FLOAT32))
        return DirectMLP(modules, layers) if layers else None

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, the first of which is x float32 [B, I], and the outputs [B, O]."""
        values = [x]
        for layer in self.layers:
            x = layer.forward(x)
            values.append(x)
        return values

    def backward(self, values: Sequence[np.ndarray], grad: np.ndarray) -> None:
        """Add the gradients of weights and biases. Args: values: from `forward`. grad: of the outputs [B, O]; it is modified."""
        for index in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[index]
            layer.through_activation(grad, values[index + 1])
            layer.add_grads(grad, values[index])
            if index:
                grad = layer.input_grad(grad, values[index])

    def input_grad(self, values: Sequence[np.ndarray], grad: np.ndarray, columns: slice) -> np.ndarray:
        """Return the gradient of some columns of the input. Args: as of `backward`."""
        for index in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[index]
            layer.through_activation(grad, values[index + 1])
            grad = layer.input_grad(grad, values[index], None if index else columns)
        return grad


def _grads(params: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the gradients of parameters; None if these are not flattened, or not on the CPU."""
    grads = [parameter.grad for parameter in params if not is_asynchronous(parameter)]
    complete = [grad for grad in grads if grad is not None]
    return complete if len(complete) == len(params) else None


def _is_plain_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.elementwise_affine and module.bias is not None


def direct_actor(body: Body, head: ActorHead) -> DirectMLP | None:
    """Return a body and the head on it, of action values for example; None if they take a graph."""
    if not DIRECT or isinstance(body, RecurrentBody):
        return None
    return DirectMLP.from_modules(actor_chain(body, head), body.products)


class DirectPass:
    """A forward pass of actor and critic, whose gradient can be propagated once."""

    def __init__(self, actor: DirectMLP, critic: DirectMLP | None, obs_BD: np.ndarray) -> None:
        self._nets = (actor,) if critic is None else (actor, critic)
        self._rows: np.ndarray | None = None
        self._values = [net.forward(obs_BD) for net in self._nets]
        self.params_BP = self._values[0][-1]
        self.value_B = np.zeros(len(obs_BD), np.float32) if critic is None else self._values[1][-1][:, 0]
        """Distribution parameters and state values."""

    def select(self, rows: slice | np.ndarray) -> DirectPass:
        """Return the same pass with the outputs of some rows. The gradient of the others is 0."""
        one = copy(self)
        one._rows = np.arange(len(self._values[0][0]))[rows] if self._rows is None else self._rows[rows]
        one.params_BP, one.value_B = self.params_BP[rows], self.value_B[rows]
        return one

    def backward(self, of_params_BP: np.ndarray, of_value_B: np.ndarray) -> None:
        """Add the gradients of weights and biases, given those of the outputs, which are modified."""
        for net, values, grad in zip(self._nets, self._values, (of_params_BP, of_value_B[:, None]), strict=False):
            if self._rows is not None:
                some, grad = grad, np.zeros_like(values[-1])
                grad[self._rows] = some
            net.backward(values, grad)


class DirectActorCritic:
    """Actor and critic that are apart. Args: critic: None if there is none, and values are 0."""

    def __init__(self, actor: DirectMLP, critic: DirectMLP | None) -> None:
        self.actor, self.critic = actor, critic

    @staticmethod
    def of(net: ActorCriticNet) -> DirectActorCritic | None:
        """Return actor and critic; None unless they are apart, fully connected, flattened and on the CPU."""
        actor = direct_actor(net.actor_body, net.actor_head)
        if actor is None or net.critic_head is None:
            return None if actor is None else DirectActorCritic(actor, None)
        if net.critic_body is None:
            return None
        critic = DirectMLP.from_modules([*chain(net.critic_body.layers), *chain(net.critic_head)], net.critic_body.products)
        return None if critic is None else DirectActorCritic(actor, critic)

    def record(self, obs_BD: np.ndarray) -> DirectPass | None:
        """Return the pass over observations; None if it takes a graph now."""
        usable = self.actor.usable and (self.critic is None or self.critic.usable)
        return DirectPass(self.actor, self.critic, obs_BD) if usable else None


class Outputs(Protocol):
    """Outputs of a forward pass."""

    out: Tensor | np.ndarray
    """Without a graph."""

    def backward(self, grad: Tensor | np.ndarray, /) -> None:
        """Add the gradients of the weights, given those of the outputs, which may be modified. Once."""


class GraphOutputs:
    """Outputs of an autograd graph."""

    def __init__(self, out: Tensor) -> None:
        self._graph = out
        self.out: Tensor | np.ndarray = out.detach()

    def backward(self, grad: Tensor | np.ndarray) -> None:
        assert isinstance(grad, Tensor)
        _with_gradient(self._graph, grad).backward()


def _with_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Return a scalar whose gradient by x is `grad`. (Given an explicit gradient, torch loads sympy to check it, which takes 0.5 s.)"""
    return torch.dot(x.reshape(-1), grad.reshape(-1))


class DirectOutputs:
    """Outputs [B, O] of a DirectMLP."""

    def __init__(self, net: DirectMLP, x_BI: Tensor) -> None:
        self._net, self._values = net, net.forward(x_BI.numpy())
        self.out: Tensor | np.ndarray = self._values[-1]

    def backward(self, grad: Tensor | np.ndarray) -> None:
        self._net.backward(self._values, array(grad))


class DirectActionValues(DirectOutputs):
    """The outputs [B] of a DirectMLP for the actions taken, int64 [B]."""

    def __init__(self, net: DirectMLP, obs_BD: Tensor, action_B: Tensor) -> None:
        super().__init__(net, obs_BD)
        self._place = np.arange(len(obs_BD)), action_B.numpy()
        self.out = self._values[-1][self._place]

    def backward(self, grad: Tensor | np.ndarray) -> None:
        of_q_BA = np.zeros_like(self._values[-1])
        of_q_BA[self._place] = array(grad)
        self._net.backward(self._values, of_q_BA)


class CriticOutputs(Outputs, Protocol):
    """Values of C critics: [C, B] of actions, [C, B, A] without any."""

    def action_grad(self, grad: Tensor, /) -> Tensor:
        """Return the gradient of the actions [B, D], given that of the values [C, B]. Once, for `record(…, of_actions=True)`."""


class GraphCritics:
    """Critics that learn through autograd."""

    def __init__(self, critics: QCritics) -> None:
        self.critics, self._params = critics, list(critics.parameters())

    def record(self, obs_B: Tensor, action_B: Tensor | None, of_actions: bool = False) -> GraphCriticOutputs:
        """Compute values. Args: of_actions: prepare `action_grad` in place of `backward`."""
        if not of_actions:
            return GraphCriticOutputs(self.critics(obs_B, action_B), None)
        assert action_B is not None
        leaf_B = action_B.detach().requires_grad_()
        trained = [parameter for parameter in self._params if parameter.requires_grad]
        for parameter in trained:  # their gradients are not computed
            parameter.requires_grad_(False)
        values = self.critics(obs_B, leaf_B)
        for parameter in trained:
            parameter.requires_grad_()
        return GraphCriticOutputs(values, leaf_B)


class GraphCriticOutputs(GraphOutputs):
    """Values of critics, with their graph."""

    def __init__(self, values: Tensor, action_B: Tensor | None) -> None:
        super().__init__(values)
        self._action_B = action_B

    def action_grad(self, grad: Tensor) -> Tensor:
        assert self._action_B is not None
        return torch.autograd.grad(_with_gradient(self._graph, grad), self._action_B)[0]


APART = 2**22
"""Product of rows and weights of the largest layer from which critics are computed one after the other, not as a stack: the calls that a
stack saves no longer count then, and each critic takes the rows of the batch that concern it."""


class DirectCritics:
    """Critics without a graph: as a stack, which takes a third of the calls, or one after the other.

    Args: stack: None if the critics cannot be stacked. each: the critics on their own.
    """

    def __init__(self, stack: DirectMLP | None, each: Sequence[DirectMLP]) -> None:
        self.stack, self.each = stack, each
        self.apart_rows = 0 if stack is None else -(-APART // max(layer.params[0].numel() for layer in each[0].layers))

    @property
    def usable(self) -> bool:
        """As of DirectMLP."""
        return self.stack.usable if self.stack is not None else all(net.usable for net in self.each)

    def record(self, obs_B: Tensor, action_B: Tensor | None, of_actions: bool = False) -> StackedOutputs | SeparateOutputs:
        """Compute values."""
        obs_BD = obs_B.flatten(1)
        x_BI = obs_BD if action_B is None else torch.cat((obs_BD, action_B), dim=1)
        actions = 0 if action_B is None else action_B.shape[1]
        if self.stack is not None and len(x_BI) < self.apart_rows:
            return StackedOutputs(self.stack, x_BI.expand(len(self.each), -1, -1), actions)
        return SeparateOutputs(self.each, x_BI, actions)

    @staticmethod
    def of(critics: QCritics) -> DirectCritics | None:
        """Return the passes of critics; None if they take a graph."""
        if not DIRECT:
            return None
        if isinstance(critics, StackedCritics):
            return _stacked(critics)
        each = [_separate(critics, index) for index in range(len(critics.critics))]
        complete = [net for net in each if net is not None]
        return DirectCritics(None, complete) if len(complete) == len(each) else None


def _stacked(critics: StackedCritics) -> DirectCritics | None:
    kinds = [type(module) for module in critics.activations]
    if not all(kind in ACTIVATIONS for kind in kinds):
        return None
    how = [*((kind, critics.products) for kind in kinds), (None, FLOAT32)]
    layers: list[DirectLayer] = []
    for params, (kind, products) in zip(critics.layers, how, strict=True):
        grads = _grads(params)
        if grads is None:
            return None
        layers.append(DirectLayer(params, grads, kind, products))
    each = [DirectMLP([], [layer.critic(index) for layer in layers]) for index in range(len(layers[0].params[0]))]
    return DirectCritics(DirectMLP([critics], layers), each)


def _separate(critics: SeparateCritics, index: int) -> DirectMLP | None:
    critic = critics.critics[index]
    assert isinstance(critic, QCritic)
    return None if critic.late else DirectMLP.from_modules([*chain(critic.body.layers), critic.head], critic.body.products)


class StackedOutputs:
    """Values of a stack of critics."""

    def __init__(self, stack: DirectMLP, x_CBI: Tensor, actions: int) -> None:
        self._net, self._actions = stack, actions
        self._values = stack.forward(x_CBI.numpy())
        out_CBA = torch.from_numpy(self._values[-1])
        self.out: Tensor | np.ndarray = out_CBA.squeeze(2) if actions else out_CBA

    def backward(self, grad: Tensor | np.ndarray) -> None:
        self._net.backward(self._values, array(grad).reshape(self._values[-1].shape))

    def action_grad(self, grad_CB: Tensor) -> Tensor:
        size = self._values[0].shape[-1]
        of_action_CBD = self._net.input_grad(self._values, grad_CB.numpy()[:, :, None], slice(size - self._actions, size))
        return torch.from_numpy(of_action_CBD).sum(0)


class SeparateOutputs:
    """Values of critics that were computed one after the other."""

    def __init__(self, nets: Sequence[DirectMLP], x_BI: Tensor, actions: int) -> None:
        self._nets, self._actions = nets, actions
        self._values = [net.forward(x_BI.numpy()) for net in nets]
        out_CBA = torch.from_numpy(np.stack([values[-1] for values in self._values]))
        self.out: Tensor | np.ndarray = out_CBA.squeeze(2) if actions else out_CBA

    def backward(self, grad: Tensor | np.ndarray) -> None:
        for net, values, own in zip(self._nets, self._values, array(grad), strict=True):
            net.backward(values, own.reshape(values[-1].shape))

    def action_grad(self, grad_CB: Tensor) -> Tensor:
        x_BI = self._values[0][0]
        columns = slice(x_BI.shape[1] - self._actions, x_BI.shape[1])
        total_BD = np.zeros((len(x_BI), self._actions), np.float32)
        for net, values, grad_B in zip(self._nets, self._values, grad_CB.numpy(), strict=True):
            row_K = np.flatnonzero(grad_B)  # with the least value of two critics each row concerns one of them
            if len(row_K) == len(grad_B):
                total_BD += net.input_grad(values, grad_B[:, None], columns)
            elif len(row_K):
                some = [values[0], *(value.take(row_K, axis=0) for value in values[1:])]
                total_BD[row_K] += net.input_grad(some, grad_B[row_K, None], columns)
        return torch.from_numpy(total_BD)
