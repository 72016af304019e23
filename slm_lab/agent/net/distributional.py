"""Nets that learn a distribution of returns for each action: quantiles (QR-DQN), or probabilities of fixed atoms (C51)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.actor_critic_net import ActorHead, build_actor_sequence, build_sequences_with_trunk
from slm_lab.agent.net.body import RecurrentBody, build_body
from slm_lab.agent.net.layers import init_output, linear_layer
from slm_lab.agent.net.passes.direct import DuelingPass, GraphFreeNet, GraphFreePass, GraphFreeSequence
from slm_lab.agent.net.q_nets import QNet
from slm_lab.agent.ops.arrays import A, as_array, as_tensor
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.masks import ActionMask
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import NetSpec


class DistributionalHead(ActorHead):
    """Head that learns a distribution of returns for each action.

    The method `forward` returns the means of the distributions, which are the action values [B, A].

    The method `distribution_params` returns the parameters of the distributions. A dueling head has Z outputs for the state and A × Z
    advantages, which are combined separately for each of the Z atoms (as in Rainbow, arXiv:1710.02298).

    Args: number: Z, the number of outputs per action.
    """

    def __init__(self, features: int, actions: int, spec: NetSpec, number: int) -> None:
        super().__init__(features, actions * number, spec)
        self.actions, self.number = actions, number
        self.state: nn.Linear | None = None
        if spec.dueling:
            self.state = linear_layer(spec, features, number)
            init_output(self.state, spec, spec.critic_init_std)

    def forward(self, features_BF: Tensor) -> Tensor:
        return self.distribution_means(self.distribution_params(features_BF))

    def distribution_params(self, features_BF: Tensor) -> Tensor:
        """Return the parameters of the distributions [B, A · Z]: first the Z outputs for action 0, then the Z outputs for action 1, …"""
        atoms_BX = super().forward(features_BF)
        if self.state is None:
            return atoms_BX
        advantage_BAZ = atoms_BX.unflatten(1, (self.actions, self.number))
        centred_BAZ = advantage_BAZ - advantage_BAZ.mean(1, keepdim=True)
        return (self.state(features_BF).unsqueeze(1) + centred_BAZ).flatten(1)

    def distribution_means(self, atoms: A) -> A:
        """Return the means of the distributions [..., A], given their parameters [..., A · Z]."""
        raise NotImplementedError

    def _split_by_action(self, atoms: A) -> A:
        return atoms.reshape((*atoms.shape[:-1], self.actions, self.number))


class QuantileHead(DistributionalHead):
    """Head whose outputs for each action are N quantiles of the return, at the probabilities (2i + 1) / 2N (QR-DQN, arXiv:1710.10044)."""

    def distribution_means(self, atoms: A) -> A:
        return self._split_by_action(atoms).mean(-1)


class CategoricalHead(DistributionalHead):
    """Head whose outputs for each action are the logits of equidistant returns from `low` to `high` (C51, arXiv:1707.06887)."""

    def __init__(self, features: int, actions: int, spec: NetSpec, number: int, low: float, high: float) -> None:
        super().__init__(features, actions, spec, number)
        self.low, self.high = low, high

    def distribution_means(self, atoms: A) -> A:
        logits: Any = self._split_by_action(atoms)
        if isinstance(logits, np.ndarray):
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            mean: A = weights.dot(np.linspace(self.low, self.high, self.number, dtype=np.float32)) / weights.sum(-1)
            return mean
        return logits.softmax(-1) @ torch.linspace(self.low, self.high, self.number, device=logits.device)


HEADS: dict[str, type[DistributionalHead]] = {"quantiles": QuantileHead, "categorical": CategoricalHead}
"""Mapping from the kind of distribution that `AlgorithmSpec.value_distribution` returns to the class of the head."""


class DistributionalQNet(QNet):
    """Q-network that outputs the parameters of a distribution of returns for each action.

    The action values [..., A] are the means of the distributions. An action mask replaces the action values of invalid actions, but does
    not change the distributions of invalid actions.

    Args: kind: kind of distribution, a key of HEADS. keys: additional arguments of the head. (`AlgorithmSpec.value_distribution` returns
    `kind` and `keys`.)
    """

    actor_head: DistributionalHead

    def __init__(self, spec: NetSpec, obs: ObservationSpace, nvec: tuple[int, ...], kind: str, keys: dict[str, Any]) -> None:
        GraphFreeNet.__init__(self)
        self.nvec, self.mask = nvec, ActionMask.from_observation_space(obs)
        self.actor_body = build_body(spec, obs, "actor")
        self.actor_head = HEADS[kind](self.actor_body.features, sum(nvec), spec, **keys)
        self.value_head = None

    def build_graph_free_sequences(self) -> Sequence[GraphFreeSequence] | None:
        """Return one GraphFreeSequence for the distribution parameters or, for a dueling net, one for the advantages and one for the state.

        Returns None if GraphFreeSequence does not support a module of the net.
        """
        body, head = self.actor_body, self.actor_head
        if head.state is not None:
            return build_sequences_with_trunk(body, head.output_modules(), [head.state], single=False)
        actor = build_actor_sequence(body, head)
        return None if actor is None else [actor]

    def forward_pass(self, obs_B: Tensor | np.ndarray, learn: bool = True) -> ForwardPass:
        """Compute a forward pass whose output is the parameters of the distributions [B, A · Z]. The net must be feed-forward.

        Args: learn: whether gradients of the parameters are needed.
        """
        if (sequences := self.direct.get(learn)) is not None:
            return self._graph_free_pass(sequences, as_array(obs_B))
        with torch.set_grad_enabled(learn):
            return GraphPass(self.actor_head.distribution_params(self.actor_body(as_tensor(obs_B))))

    def _graph_free_pass(self, sequences: Sequence[GraphFreeSequence], obs_B: np.ndarray) -> ForwardPass:
        graph_free = GraphFreePass(sequences, obs_B)
        return graph_free if self.actor_head.state is None else DuelingPass(graph_free, self.actor_head.number)

    def distributions(self, obs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return action values [B, A] and parameters of the distributions [B, A · Z], without gradients. The net must be feed-forward."""
        sequences = self.direct.get(learn=False)
        if sequences is not None:
            atoms_BX = torch.from_numpy(self._graph_free_pass(sequences, obs_B.numpy()).values[0])
        else:
            with torch.no_grad():
                atoms_BX = self.actor_head.distribution_params(self.actor_body(obs_B))
        return self._mask_invalid_actions(self.actor_head.distribution_means(atoms_BX), obs_B), atoms_BX

    def values(self, obs_B: Tensor) -> Tensor:
        """Return action values [B, A] without gradients. The net must be feed-forward."""
        return self.distributions(obs_B)[0]

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a recurrent net over T steps.

        Return action values [T, N, A], parameters of the distributions [T, N, A · Z] and the hidden state [N, S] after the last step.
        """
        assert isinstance(self.actor_body, RecurrentBody)
        features_TN, state_NS = self.actor_body.unroll(obs_TN, first_TN, state_NS)
        atoms = self.actor_head.distribution_params(features_TN.flatten(0, 1)).unflatten(0, features_TN.shape[:2])
        return self._mask_invalid_actions(self.actor_head.distribution_means(atoms), obs_TN), atoms, state_NS

    def _values(self, features_BF: Tensor, obs_B: Tensor) -> Tensor:
        return self._mask_invalid_actions(self.actor_head(features_BF), obs_B)


def build_q_net(spec: NetSpec, obs: ObservationSpace, nvec: tuple[int, ...], distribution: tuple[str, dict[str, Any]] | None) -> QNet:
    """Build the net of a value-based algorithm, a QNet or DistributionalQNet.

    Args: distribution: result of `AlgorithmSpec.value_distribution`, which is None for algorithms that learn only the means of returns.
    """
    return QNet(spec, obs, nvec) if distribution is None else DistributionalQNet(spec, obs, nvec, *distribution)
