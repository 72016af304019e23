"""Numpy twins of small feed-forward nets, for acting and for learning.

Their weights are views of the net's own memory, so they are always the net as it stands. One step of 8 envs through two
hidden layers costs about a fifth of what torch's dispatch costs; outputs and gradients of 132 transitions, for two nets of
64 × 64, cost half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic import ActorCriticNet, ActorHead
from slm_lab.agent.net.arc import ArcGraph
from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.q_net import QNet

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
"""Activations with default arguments that have a numpy twin; a net with another one acts through torch."""

Layer = tuple[np.ndarray, np.ndarray, list[InPlace]]
"""Weight, bias, and what follows in place."""


def _chain(module: nn.Module) -> list[nn.Module]:
    """The modules that run one after the other inside `module`, or itself."""
    if isinstance(module, ArcGraph) and module.is_chain:
        return [part for name, _ in module.order for part in _chain(module.nodes[name])]
    if isinstance(module, nn.Sequential):
        return [part for child in module for part in _chain(child)]
    return [module]


def _actor_chain(body: Body, head: ActorHead) -> list[nn.Module]:
    tail = _chain(head.tail) if head.tail is not None else []
    return [*_chain(body.layers), *tail, head.linear, *([head.activation] if head.activation is not None else [])]


def _layers(modules: list[nn.Module]) -> list[Layer] | None:
    layers: list[Layer] = []
    for module in modules:
        if type(module) is nn.Linear and module.bias is not None:
            layers.append((module.weight.detach().numpy().T, module.bias.detach().numpy(), []))
        elif type(module) in ACTIVATIONS and layers and repr(module) in _PLAIN:
            layers[-1][2].append(ACTIVATIONS[type(module)])
        elif type(module) is nn.LayerNorm and layers and len(module.normalized_shape) == 1 and module.bias is not None:
            layers[-1][2].append(_layer_norm(module))
        else:
            return None
    return layers


def _layer_norm(module: nn.LayerNorm) -> InPlace:
    weight, bias, eps = module.weight.detach().numpy(), module.bias.detach().numpy(), np.float32(module.eps)
    size = np.float32(len(weight))

    def normalise(x: np.ndarray) -> None:
        x -= np.add.reduce(x, axis=1, keepdims=True) / size
        x *= 1.0 / np.sqrt(np.add.reduce(x * x, axis=1, keepdims=True) / size + eps)
        x *= weight
        x += bias

    return normalise


_PLAIN = {repr(kind()) for kind in ACTIVATIONS} | {repr(kind(inplace=True)) for kind in (nn.ReLU, nn.ELU, nn.SELU, nn.SiLU)}


def fast_actor(body: Body, head: ActorHead) -> Callable[[np.ndarray], np.ndarray] | None:
    """obs_N float32 [N, D] → distribution parameters float32 [N, P], or None where the net has no numpy twin."""
    if isinstance(body, RecurrentBody) or any(p.is_cuda for p in head.parameters()):
        return None
    layers = _layers(_actor_chain(body, head))
    if not layers:
        return None

    def act(obs_N: np.ndarray) -> np.ndarray:
        x = obs_N
        for weight, bias, then in layers:
            x = x.dot(weight)  # two thirds of the time of @
            x += bias
            for change in then:
                change(x)
        return x

    return act


SMALL = 64**3
"""Multiplications of a layer below which numpy's lighter calls beat torch's faster kernels; numpy's also stay in one thread."""


def widest(net: nn.Module) -> int:
    """Numbers in the largest parameter of a net."""
    return max(parameter.numel() for parameter in net.parameters())


def fast_values(net: QNet, batch_size: int) -> Callable[[Tensor], Tensor]:
    """obs_B [B, *shape] → action values [B, A], without gradients: by the numpy twin where net and batch are small, else by the net."""
    small = widest(net) * batch_size <= SMALL
    act = fast_actor(net.actor_body, net.actor_head) if net.value_head is None and small else None
    if act is None:
        return torch.no_grad()(net.critic)
    return lambda obs_B: torch.from_numpy(act(obs_B.numpy()))


Slope = Callable[[np.ndarray, np.ndarray], object]

LEARNING_SMALL, LEARNING_ROWS = 64 * 64 * 256, 512
"""As SMALL, for a pass forward and back, and most rows: with 64 × 64 and 256 rows numpy takes 0.7 of torch's time, with 1,024 rows as
much; narrower nets gain less from few rows, and lose with many."""

SLOPES: dict[type[nn.Module], Slope] = {
    nn.Tanh: lambda grad, out: np.multiply(grad, 1.0 - out * out, out=grad),
    nn.ReLU: lambda grad, out: np.multiply(grad, out > 0.0, out=grad),
}
"""Activations whose derivative their output tells; what multiplies a gradient by it in place."""


class LearningTwin:
    """Linear layers with activations between them: outputs as the modules give, whose gradient goes on into the modules' own.

    Torch's graph begins at the outputs. Their gradient is handed to a hook, which takes it back through the layers and adds it to the
    gradients of weights and biases, as `backward()` would. These must be there already, and stay where they are (see FlatParams).
    """

    def __init__(self, layers: list[tuple[nn.Linear, type[nn.Module] | None]]) -> None:
        self.layers = [
            (linear.weight.detach().numpy(), linear.bias.detach().numpy(), _grad(linear.weight), _grad(linear.bias), kind)
            for linear, kind in layers
        ]
        self.most_rows = min(LEARNING_ROWS, LEARNING_SMALL // max(linear.weight.numel() for linear, _ in layers))
        """Of a batch, up to which it is the faster one."""

    @staticmethod
    def of(modules: list[nn.Module]) -> LearningTwin | None:
        """The twin of modules that run one after the other, or None where there is none."""
        layers: list[tuple[nn.Linear, type[nn.Module] | None]] = []
        for module in modules:
            if type(module) is nn.Linear and module.bias is not None and all(map(_learns_here, module.parameters())):
                layers.append((module, None))
            elif type(module) in SLOPES and layers and layers[-1][1] is None:
                layers[-1] = (layers[-1][0], type(module))
            else:
                return None
        return LearningTwin(layers) if layers else None

    def __call__(self, x_BD: Tensor) -> Tensor:
        """x float32 [B, D] → outputs [B, F]."""
        x, inputs = x_BD.numpy(), []
        with np.errstate(all="ignore"):  # as torch: what diverges is told elsewhere
            for weight, bias, _, _, kind in self.layers:
                inputs.append(x)
                x = x.dot(weight.T)
                x += bias
                if kind is not None:
                    ACTIVATIONS[kind](x)
        out_BF = torch.from_numpy(x)
        if torch.is_grad_enabled():
            out_BF.requires_grad_()
            out_BF.register_hook(partial(self._backward, [*inputs, x]))
        return out_BF

    def _backward(self, values: list[np.ndarray], grad_BF: Tensor) -> None:
        """`values`: the input of each layer, and the output of the last."""
        grad = grad_BF.numpy()
        with np.errstate(all="ignore"):
            for index in range(len(self.layers) - 1, -1, -1):
                weight, _, weight_grad, bias_grad, kind = self.layers[index]
                if kind is not None:
                    if index == len(self.layers) - 1:
                        grad = grad.copy()  # the outputs' is torch's own
                    SLOPES[kind](grad, values[index + 1])
                weight_grad += grad.T.dot(values[index])
                bias_grad += grad.sum(0)
                if index:
                    grad = grad.dot(weight)


def _learns_here(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None and not parameter.is_cuda


def _grad(parameter: Tensor) -> np.ndarray:
    assert parameter.grad is not None
    return parameter.grad.numpy()


def add_learning_twins(net: ActorCriticNet) -> None:
    """Let actor and critic learn through numpy where they are small; once the net's parameters lie where they stay."""
    if isinstance(net.actor_body, RecurrentBody) or (net.critic_head is not None and net.critic_body is None):
        return  # over time, or with a body in common
    net.actor_twin = LearningTwin.of(_actor_chain(net.actor_body, net.actor_head))
    if net.critic_body is not None and net.critic_head is not None:
        net.critic_twin = LearningTwin.of([*_chain(net.critic_body.layers), *_chain(net.critic_head)])
