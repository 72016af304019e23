"""Numpy forward pass of small feed-forward nets, for acting.

Weights are views of the net's own flat vectors (see FlatParams), so they are always current. One step of 8 envs through two hidden layers
takes about a fifth of the time of torch's dispatch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic import ActorHead, actor_chain
from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.in_place import IN_PLACE, InPlace
from slm_lab.agent.net.q_net import QNet
from slm_lab.agent.ops.device import is_asynchronous

NUMPY_ACTING = True
"""Whether small nets act through numpy; False: always through torch."""

Layer = tuple[np.ndarray, np.ndarray, list[InPlace]]
"""Weight [in, out], bias [1, out] (added to one row without broadcasting, in half the time), and the operations that follow in place."""


def _layers(modules: list[nn.Module]) -> list[Layer] | None:
    layers: list[Layer] = []
    for module in modules:
        if type(module) is nn.Linear and module.bias is not None:
            layers.append((module.weight.detach().numpy().T, module.bias.detach().numpy()[None], []))
        elif type(module) in IN_PLACE and layers and repr(module) in _PLAIN:
            layers[-1][2].append(IN_PLACE[type(module)])
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


_PLAIN = {repr(kind()) for kind in IN_PLACE} | {repr(kind(inplace=True)) for kind in (nn.ReLU, nn.ELU, nn.SELU, nn.SiLU)}


def fast_actor(body: Body, head: ActorHead) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function obs_N float32 [N, D] → distribution parameters float32 [N, P], or None if it has no numpy implementation."""
    if not NUMPY_ACTING or isinstance(body, RecurrentBody) or is_asynchronous(head.linear.weight) or body.products.bfloat16:
        return None
    layers = _layers(actor_chain(body, head))
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
"""Multiplications in a layer up to which batches of action values are computed in numpy."""
SMALL_ACTING = 2**22
"""The same for acting, where torch's calls weigh more: with two layers of 64 × 64 numpy takes 0.3 of torch's time for 128 environments, 0.8
for 1,024; with 256 × 256 0.7 for 16, 0.9 for 128, 1.4 for 512."""


def max_parameter_size(net: nn.Module) -> int:
    """Return the size of the largest parameter of a net."""
    return max(parameter.numel() for parameter in net.parameters())


def fast_values(net: QNet, batch_size: int) -> Callable[[Tensor], Tensor | np.ndarray]:
    """Return the function obs_B [B, *shape] → action values [B, A], without gradients: an array if net and batch are small."""
    small = max_parameter_size(net) * batch_size <= SMALL
    act = fast_actor(net.actor_body, net.actor_head) if net.value_head is None and small else None
    if act is None:
        return torch.no_grad()(net.critic)
    return lambda obs_B: act(obs_B.numpy())
