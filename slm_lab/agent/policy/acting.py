"""Numpy forward pass of small feed-forward nets, for acting.

Weights are views of the net's own flat vectors (see FlatParams), so they are always current. One step of 8 envs through two hidden layers
takes about a fifth of the time of torch's dispatch. A net that a user has changed acts through its modules (see validity.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slm_lab.agent.net.actor_critic_net import ActorHead, actor_chain
from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.passes.in_place import IN_PLACE, InPlace
from slm_lab.agent.net.passes.validity import FastPass, Guard, Watch
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

    def normalise(x: np.ndarray, out: np.ndarray) -> None:
        x -= np.add.reduce(x, axis=1, keepdims=True) / size
        x *= 1.0 / np.sqrt(np.add.reduce(x * x, axis=1, keepdims=True) / size + eps)
        x *= weight
        x += bias

    return normalise


_PLAIN = {repr(kind()) for kind in IN_PLACE} | {repr(kind(inplace=True)) for kind in (nn.ReLU, nn.ELU, nn.SELU, nn.SiLU)}


CHECK_EVERY = 16
"""Steps after which the net is checked completely, which takes a quarter of the time of a step of one env."""


def _through(layers: list[Layer]) -> Callable[[np.ndarray], np.ndarray]:
    single = [(weight, bias, _in_turn(then)) for weight, bias, then in layers]

    def compute(obs_N: np.ndarray) -> np.ndarray:
        x = obs_N
        for weight, bias, change in single:
            x = x.dot(weight)  # two thirds of the time of @
            x += bias
            if change is not None:
                change(x, x)
        return x

    return compute


def _in_turn(changes: list[InPlace]) -> InPlace | None:
    """Return several operations as one; None for none. (Of one only, a loop would take a tenth of an activation's time.)"""
    if len(changes) < 2:
        return changes[0] if changes else None

    def all_of(x: np.ndarray, out: np.ndarray) -> None:
        for change in changes:
            change(x, out)

    return all_of


class NumpyActor:
    """The function obs_N float32 [N, D] → distribution parameters float32 [N, P] of a body and the head on it.

    It calls their modules while these compute something else than the layers it was built from.
    """

    def __init__(self, body: Body, head: ActorHead, layers: list[Layer]) -> None:
        self._body, self._head = body, head
        self.layers = _through(layers)
        """The same function by the layers it was built from, whatever the modules compute."""
        self._watch = Watch([*body.modules(), *head.modules()], data=True)
        self._left = 0

    def __call__(self, obs_N: np.ndarray, exact: bool = True) -> np.ndarray:
        """Compute the parameters.

        Args: exact: whether every change of the modules is noticed at once; else only hooks that were added are, and other changes after
        CHECK_EVERY calls at the latest.
        """
        self._left -= 1
        if exact or self._left < 0 or RemovableHandle.next_id != self._watch.handles:
            held = self._watch.holds()
            self._left = CHECK_EVERY if held else 0
            if not held:
                return self._by_modules(obs_N)
        return self.layers(obs_N)

    @torch.inference_mode()
    def _by_modules(self, obs_N: np.ndarray) -> np.ndarray:
        params_NP: np.ndarray = self._head(self._body(torch.from_numpy(obs_N))).numpy()
        return params_NP


def fast_actor(body: Body, head: ActorHead) -> NumpyActor | None:
    """Return the actor of a body and the head on it in numpy, or None if they have no numpy implementation."""
    if not NUMPY_ACTING or isinstance(body, RecurrentBody) or body.products.bfloat16:
        return None
    if any(is_asynchronous(parameter) for parameter in head.parameters()):
        return None
    layers = _layers(actor_chain(body, head))
    return NumpyActor(body, head, layers) if layers else None


SMALL = 64**3
"""Multiplications in a layer up to which batches of action values are computed in numpy."""
SMALL_ACTING = 2**22
"""The same for acting, where torch's calls weigh more: with two layers of 64 × 64 numpy takes 0.3 of torch's time for 128 environments, 0.8
for 1,024; with 256 × 256 0.7 for 16, 0.9 for 128, 1.4 for 512."""


def max_parameter_size(net: nn.Module) -> int:
    """Return the size of the largest parameter of a net."""
    return max(parameter.numel() for parameter in net.parameters())


def fast_values(net: QNet, batch_size: int, guard: Guard) -> Callable[[Tensor], Tensor | np.ndarray]:
    """Return the function obs_B [B, *shape] → action values [B, A], without gradients: an array if net and batch are small.

    Args: guard: of the net's modules.
    """
    small = max_parameter_size(net) * batch_size <= SMALL
    actor = fast_actor(net.actor_body, net.actor_head) if net.value_head is None and small else None
    fast, by_modules = FastPass(actor, guard), torch.no_grad()(net.critic)

    def values(obs_B: Tensor) -> Tensor | np.ndarray:
        numpy = fast.get(learn=False)
        return by_modules(obs_B) if numpy is None else numpy.layers(obs_B.numpy())

    return values
