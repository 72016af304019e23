"""Numpy forward pass of small feed-forward nets, for acting.

Weights are views of the net's own flat vectors (see FlatParams), so they are always current. One step of 8 envs through two hidden layers
takes about a fifth of the time of torch's dispatch. A net that a user has changed acts through its modules (see validity.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from slm_lab.agent.net.actor_critic_net import ActorHead, actor_chain
from slm_lab.agent.net.body import Body
from slm_lab.agent.net.passes.direct import DirectChain
from slm_lab.agent.net.passes.validity import Watch

NUMPY_ACTING = True
"""Whether small nets act through numpy; False: always through torch."""

CHECK_EVERY = 16
"""Steps after which the net is checked completely, which takes a quarter of the time of a step of one env."""

RARELY = 1024
"""The same while `Agent.check_rarely` is set."""


class NumpyActor:
    """The function obs_N float32 [N, D] → distribution parameters float32 [N, P] of a body and the head on it.

    It calls their modules while these compute something else than the layers it was built from.
    """

    def __init__(self, body: Body, head: ActorHead, chain: DirectChain) -> None:
        self._body, self._head, self.layers = body, head, chain.outputs
        """layers: the same function, whatever the modules compute now."""
        self._watch = Watch([*body.modules(), *head.modules()], data=True)
        self._left, self.check_every = 0, CHECK_EVERY

    def __call__(self, obs_N: np.ndarray, exact: bool = True) -> np.ndarray:
        """Compute the parameters.

        Args: exact: whether every change of the modules is noticed at once; else only hooks that were added are, and other changes after
        `check_every` calls at the latest.
        """
        self._left -= 1
        if exact or self._left < 0 or RemovableHandle.next_id != self._watch.handles:
            held = self._watch.holds()
            self._left = self.check_every if held else 0
            if not held:
                return self._by_modules(obs_N)
        return self.layers(obs_N)

    @torch.inference_mode()
    def _by_modules(self, obs_N: np.ndarray) -> np.ndarray:
        params_NP: np.ndarray = self._head(self._body(torch.from_numpy(obs_N))).numpy()
        return params_NP


def fast_actor(body: Body, head: ActorHead) -> NumpyActor | None:
    """Return the actor of a body and the head on it in numpy, or None if they have no numpy implementation."""
    if not NUMPY_ACTING or body.products.bfloat16:
        return None
    chain = actor_chain(body, head)
    return None if chain is None else NumpyActor(body, head, chain)
