"""The net of the value-based algorithms: a value for each action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic_net import ActorHead, actor_chain
from slm_lab.agent.net.body import Body, RecurrentBody, build_body
from slm_lab.agent.net.layers import init_output
from slm_lab.agent.net.passes.direct import DirectChain, DirectPass, PassNet
from slm_lab.agent.ops.arrays import array, tensor
from slm_lab.agent.ops.autograd import GraphPass, Pass
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import DuelingConvNetSpec, DuelingMLPNetSpec, NetSpec


class QNet(PassNet):
    """Q(s, ·): a body and a head, dueling or plain.

    For a multi-discrete action, the values of each component (`nvec[i]` choices) are concatenated.

    Dueling (arXiv:1511.06581, eq. 9): one head gives advantages, another the state's value. Actions are chosen by the advantages alone:
    the value is the same for all actions, so neither the greedy action nor a Boltzmann distribution depends on it. With several actions
    each has advantages of its own, and they share the value (arXiv:1711.08946, eq. 1).
    """

    def __init__(self, spec: NetSpec, obs: ObservationSpace, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.nvec = nvec
        self.actor_body: Body = build_body(spec, obs, "actor")
        self.actor_head = ActorHead(self.actor_body.features, sum(nvec), spec)
        self.value_head: nn.Linear | None = None
        if isinstance(spec, (DuelingMLPNetSpec, DuelingConvNetSpec)):
            self.value_head = nn.Linear(self.actor_body.features, 1)
            init_output(self.value_head, spec, spec.critic_init_std)

    @property
    def state_size(self) -> int:
        """Size of the hidden state; 0: feed-forward."""
        return self.actor_body.state_size

    def actor(self, obs_B: Tensor) -> Tensor:
        """Return the outputs to act on [B, A]: values, or advantages if dueling; feed-forward nets only."""
        return self.actor_head(self.actor_body(obs_B))

    def critic(self, obs_B: Tensor) -> Tensor:
        """Return action values [B, A]; feed-forward nets only."""
        return self._values(self.actor_body(obs_B))

    def chains(self) -> Sequence[DirectChain] | None:
        """Return the chain of the action values."""
        actor = actor_chain(self.actor_body, self.actor_head) if self.value_head is None else None
        return None if actor is None else [actor]

    def forward_pass(self, obs_B: Tensor | np.ndarray, learn: bool = True) -> Pass:
        """Return the pass whose output is action values [B, A]; feed-forward nets only. Args: learn: gradients are needed."""
        chains = self.direct.get(learn)
        if chains is not None:
            return DirectPass(chains, array(obs_B))
        with torch.set_grad_enabled(learn):
            return GraphPass(self.critic(tensor(obs_B)))

    def values(self, obs_B: Tensor) -> Tensor | np.ndarray:
        """Return action values [B, A], without gradients; feed-forward nets only. To be called inside `silent()`."""
        chains = self.direct.get(learn=False)
        if chains is None:
            with torch.no_grad():
                return self.critic(obs_B)
        return chains[0].outputs(obs_B.numpy())

    def forward(self, obs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return action values [B, A], twice, as the outputs to act on and as values; feed-forward nets only."""
        q_BA = self.critic(obs_B)
        return q_BA, q_BA

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return action values [T, N, A], twice, and the state after the last step [N, S]; recurrent nets only."""
        assert isinstance(self.actor_body, RecurrentBody)
        features_TN, state_NS = self.actor_body.unroll(obs_TN, first_TN, state_NS)
        q_TNA = self._values(features_TN.flatten(0, 1)).unflatten(0, features_TN.shape[:2])
        return q_TNA, q_TNA, state_NS

    def _values(self, features_BF: Tensor) -> Tensor:
        q_BA = self.actor_head(features_BF)
        if self.value_head is None:
            return q_BA
        centred = [part - part.mean(dim=1, keepdim=True) for part in (q_BA.split(self.nvec, dim=1) if len(self.nvec) > 1 else (q_BA,))]
        return torch.add(self.value_head(features_BF), centred[0] if len(centred) == 1 else torch.cat(centred, dim=1))
