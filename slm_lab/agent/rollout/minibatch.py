"""From a rollout to minibatches: values, then transitions or sequences side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.rollout.rollout import Rollout, Truncations
from slm_lab.agent.net.actor_critic import ActorCriticNet
from slm_lab.agent.net.q_net import QNet

PIECE_BYTES = 32 * 2**20
"""Observations that go through a net at once, at most: a convolution needs some twenty times that for its gradient."""


def piece_length(obs: Tensor, batch_dims: int) -> int:
    """Items of the last of `batch_dims` leading axes that fit PIECE_BYTES, at least one."""
    item = obs.element_size() * obs.shape[batch_dims:].numel() * obs.shape[: batch_dims - 1].numel()
    return max(1, PIECE_BYTES // max(item, 1))


@dataclass(frozen=True)
class Values:
    """The critic's outputs over a rollout, as it was when they were computed."""

    output_TN: Tensor
    """float32 [T, N]: of each observation; of a Q-net [T, N, A], as next_output_TN."""
    next_output_TN: Tensor
    """float32 [T, N]: of the true next observation (after a termination meaningless)."""
    state_CNS: Tensor
    """float32 [C, N, S]: hidden state before each chunk of seq_len steps; C = 1 for feed-forward nets."""
    params_TNP: Tensor | None
    """float32 [T, N, P]: the actor's outputs, where there are any."""
    learnable: tuple[Tensor, Tensor] | None = None
    """(distribution parameters [T N, P], values [T N]) with gradients: `outputs_to_learn`'s."""


def outputs_to_learn(net: ActorCriticNet, rollout: Rollout) -> Values | None:
    """Actor and critic in one pass, whose gradients serve the one step that is taken on a rollout; None where that is not possible.

    A recurrent net learns in sequences, and many images learn in pieces. Rows that no loss sees go through too, and have the gradient 0;
    but 0 times what is not finite is NaN, and an env may end for just that.
    """
    obs_B = rollout.obs_TN.flatten(0, 1)
    if net.state_size or len(obs_B) > piece_length(obs_B, 1) or (obs_B.is_floating_point() and not math.isfinite(float(obs_B.sum()))):
        return None
    rows = rollout.reward_TN.numel()
    params_BP, value_B = net(obs_B)
    output_TN = value_B.detach().view(rollout.obs_TN.shape[:2])
    with torch.no_grad():
        next_TN = _next_outputs(net, rollout, output_TN)
    params_TNP = params_BP.detach()[:rows].view(*rollout.reward_TN.shape, -1)
    return Values(output_TN[:-1], next_TN, rollout.state_NS.unsqueeze(0), params_TNP, (params_BP[:rows], value_B[:rows]))


@torch.no_grad()
def critic_outputs(net: ActorCriticNet | QNet, rollout: Rollout, seq_len: int, actor: bool = False) -> Values:
    """Run the critic over a rollout on its own device, truncated ends included; with `actor` the actor in the same pass."""
    pairs: list[tuple[Tensor | None, Tensor]] = []  # the actor's and the critic's outputs
    if net.state_size == 0:
        obs_B = rollout.obs_TN.flatten(0, 1)
        pairs += [net(piece) if actor else (None, net.critic(piece)) for piece in obs_B.split(piece_length(obs_B, 1))]
        output_TN = torch.cat([output_B for _, output_B in pairs]).unflatten(0, rollout.obs_TN.shape[:2])
        states = [rollout.state_NS]
    else:
        state_NS, states = rollout.state_NS, []
        T = len(rollout.reward_TN)
        for t in range(0, T, seq_len):  # the last chunk takes the extra row too
            end = t + seq_len if t + seq_len < T else T + 1
            states.append(state_NS)
            params_LNP, value_LN, state_NS = net.unroll(rollout.obs_TN[t:end], rollout.first_TN[t:end], state_NS)
            pairs.append((params_LNP, value_LN))
        output_TN = torch.cat([value_LN for _, value_LN in pairs])
    next_TN = _next_outputs(net, rollout, output_TN)
    params_TNP = torch.cat([params for params, _ in pairs if params is not None]).view(*output_TN.shape[:2], -1)[:-1] if actor else None
    return Values(output_TN[:-1], next_TN, torch.stack(states), params_TNP)


def _next_outputs(net: ActorCriticNet | QNet, rollout: Rollout, output_TN: Tensor) -> Tensor:
    """Of the true next observations, given those of the rows [T + 1, N]."""
    next_TN, cut = output_TN[1:], rollout.truncations
    if len(cut.t_K):
        next_TN = next_TN.clone()
        next_TN[cut.t_K, cut.n_K] = _cut_values(net, cut)
    return next_TN


def _cut_values(net: ActorCriticNet | QNet, cut: Truncations) -> Tensor:
    """The critic's outputs [K] for the last observations of truncated episodes."""
    if net.state_size == 0:
        return net.critic(cut.obs_K)
    going_on = torch.zeros(1, len(cut.t_K), dtype=torch.bool, device=cut.t_K.device)
    value: Tensor = net.unroll(cut.obs_K.unsqueeze(0), going_on, cut.state_KS)[1][0]
    return value


class Sequences(NamedTuple):
    """M sequences of L steps."""

    obs_LM: Tensor
    first_LM: Tensor
    state_MS: Tensor
    """Hidden state before each sequence."""
    valid_LM: Tensor


@dataclass(frozen=True)
class Minibatch:
    """Valid transitions [B], and what to run the net on for them."""

    inputs: Tensor | Sequences
    """obs_B [B, *shape] for feed-forward nets, else the sequences that hold the transitions."""
    action_B: Tensor
    logp_B: Tensor
    advantage_B: Tensor
    target_B: Tensor
    """What the critic's output should be."""
    value_B: Tensor
    """What it was."""
    learnable: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    """What `forward` gives, where it is there already."""

    def forward(self, net: ActorCriticNet | QNet) -> tuple[Tensor, Tensor]:
        """Distribution parameters [B, P] and values [B] of the transitions, with gradients; of a Q-net its values [B, A], twice."""
        if self.learnable is not None:
            return self.learnable
        if isinstance(self.inputs, Tensor):
            return net(self.inputs)
        inputs = self.inputs
        params_LMP, value_LM, _ = net.unroll(inputs.obs_LM, inputs.first_LM, inputs.state_MS)
        return params_LMP[inputs.valid_LM], value_LM[inputs.valid_LM]


class Batch:
    """A rollout with advantages and targets, cut into minibatches. Sequences are split over envs, never inside."""

    def __init__(self, rollout: Rollout, values: Values, advantage_TN: Tensor, target_TN: Tensor, seq_len: int) -> None:
        columns = [rollout.action_TN, rollout.logp_TN, advantage_TN, target_TN, values.output_TN]
        self.recurrent = rollout.state_NS.shape[1] > 0
        self.seq_len, self.learnable = seq_len, values.learnable
        if self.recurrent:
            inputs = [rollout.obs_TN[:-1], rollout.first_TN[:-1], rollout.valid_TN]
            chunks = [_chunk(x, seq_len) for x in [*inputs, *columns]]
            some_M = chunks[2].any(dim=0)  # a sequence of nothing but padding and dummy rows is none
            self.columns = [x[:, some_M] for x in chunks]
            self.state_MS = values.state_CNS.flatten(0, 1)[some_M]
            self.size = self.columns[0].shape[1]
            self.transitions = int(self.columns[2].sum())
        else:
            flat = [x.flatten(0, 1) for x in [rollout.obs_TN[:-1], *columns]]
            valid_B = rollout.valid_TN.flatten()
            if not bool(valid_B.all()):
                row_B = valid_B.nonzero().squeeze(1)  # once for all
                flat = [x.index_select(0, row_B) for x in flat]
                if self.learnable is not None:
                    self.learnable = (self.learnable[0].index_select(0, row_B), self.learnable[1].index_select(0, row_B))
            self.columns = flat
            self.size = self.transitions = len(self.columns[0])

    def pieces(self) -> Iterator[tuple[Minibatch, float]]:
        """All transitions in order, with each piece's share of them: one piece, unless they are many images.

        The shares weigh the pieces' mean losses, so that their gradients add up to that of the whole.
        """
        if self.learnable is not None:
            yield Minibatch(*self.columns, learnable=self.learnable), 1.0
            return
        obs = self.columns[0]
        items = piece_length(obs, 2 if self.recurrent else 1)
        for begin in range(0, self.size, items):
            if self.recurrent:
                piece = self._sequences(torch.arange(begin, min(begin + items, self.size), device=obs.device))
            else:
                piece = Minibatch(*(x[begin : begin + items] for x in self.columns))
            yield piece, len(piece.action_B) / self.transitions

    def epochs(self, epochs: int, minibatch_size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """Minibatches of about `minibatch_size` transitions, equal to within one, in fresh random order each epoch."""
        per_item = self.seq_len if self.recurrent else 1
        pieces = max(1, round(self.size * per_item / minibatch_size))
        bounds = np.linspace(0, self.size, min(pieces, self.size) + 1).astype(int).tolist()
        for _ in range(epochs):
            order = torch.from_numpy(rng.permutation(self.size)).to(self.columns[0].device)
            shuffled = [] if self.recurrent else [x.index_select(0, order) for x in self.columns]
            for begin, end in pairwise(bounds):
                if self.recurrent:
                    yield self._sequences(order[begin:end])
                else:
                    yield Minibatch(*(x[begin:end] for x in shuffled))

    def _sequences(self, index_M: Tensor) -> Minibatch:
        obs_LM, first_LM, valid_LM, *columns = [x[:, index_M] for x in self.columns]
        return Minibatch(Sequences(obs_LM, first_LM, self.state_MS[index_M], valid_LM), *(x[valid_LM] for x in columns))


def _chunk(x_TN: Tensor, length: int) -> Tensor:
    """[T, N, …] → [length, chunks · N, …], chunk-major, the last chunk padded with zeros (invalid rows)."""
    T = len(x_TN)
    chunks = -(-T // length)
    if chunks * length > T:
        x_TN = torch.cat([x_TN, x_TN.new_zeros(chunks * length - T, *x_TN.shape[1:])])
    return x_TN.unflatten(0, (chunks, length)).transpose(0, 1).flatten(1, 2)
