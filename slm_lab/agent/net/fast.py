"""A numpy twin of a small feed-forward net, for acting.

Its weights are views of the net's own memory, so it is always the net as it stands. One step of 8 envs through two
hidden layers costs about a fifth of what torch's dispatch costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic import ActorHead
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
    tail = _chain(head.tail) if head.tail is not None else []
    layers = _layers([*_chain(body.layers), *tail, head.linear, *([head.activation] if head.activation is not None else [])])
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
