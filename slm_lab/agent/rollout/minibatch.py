"""Prepare a rollout for learning: compute values of its observations, and divide the rollout into minibatches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import A, as_tensor, as_type_of, copy, flatten_time_and_envs, where_true
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.device import upload
from slm_lab.agent.rollout.rollout import Rollout

MICROBATCH_BYTES = 32 * 2**20
"""Maximum number of bytes of observations in one forward pass with gradients. A convolution needs about twenty times as much memory for its
gradient."""
VALUE_BYTES = 8 * 2**20
"""Maximum number of bytes of observations in one forward pass without gradients. Images of 32 MiB take 60 % longer in one pass than in
four, because memory for tensors of more than 32 MiB is newly allocated each time."""


class RolloutNet(Protocol):
    """Interface of a net that learns from rollouts. The outputs are distribution parameters and values.

    A Q-net returns its action values [..., A] as distribution parameters and as values.
    """

    @property
    def state_size(self) -> int:
        """Size of the hidden state, or 0 for a feed-forward net."""

    def __call__(self, obs_B: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return distribution parameters [B, P] and values [B]. Only feed-forward nets support this method."""

    def forward_pass(self, obs_B: Tensor | np.ndarray, /, learn: bool = True) -> ForwardPass:
        """Return a ForwardPass with the outputs of `__call__`. If possible, the ForwardPass has no autograd graph."""

    def values(self, obs_B: Tensor, /) -> Tensor | np.ndarray:
        """Return values [B], without gradients. Only feed-forward nets support this method."""

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return distribution parameters [T, N, P], values [T, N] and the hidden state [N, S] after the last step.

        Only recurrent nets support this method.
        """


def microbatch_length(obs: Tensor, batch_dims: int, gradients: bool = True) -> int:
    """Return the number of items (transitions or sequences) in a microbatch: as many as fit into MICROBATCH_BYTES, but at least 1.

    If `gradients` is False, the limit is VALUE_BYTES instead of MICROBATCH_BYTES.

    Args: batch_dims: number of leading batch axes of `obs`. Items are counted along the last batch axis of `obs`.
    """
    item = obs.element_size() * obs.shape[batch_dims:].numel() * obs.shape[: batch_dims - 1].numel()
    return max(1, (MICROBATCH_BYTES if gradients else VALUE_BYTES) // max(item, 1))


@dataclass(frozen=True)
class RolloutOutputs(Generic[A]):
    """Outputs of actor and critic for the observations of a rollout, computed before the update."""

    output_TN: A
    """float32 [T, N]: the critic's output for each observation. For a Q-net, output_TN and next_output_TN are [T, N, A]."""
    next_output_TN: A
    """float32 [T, N]: the critic's output for the true next observation, which is meaningless after a termination."""
    state_CNS: A
    """float32 [C, N, S]: hidden state before each chunk of seq_len steps. C is 1 for feed-forward nets."""
    params_TNP: A | None
    """float32 [T, N, P]: the actor's outputs, or None if they were not computed."""
    outputs: ForwardPass | None = None
    """Forward pass over the T · N observations if the gradient step uses the same pass (see `single_pass_outputs`), else None."""


def single_pass_outputs(net: RolloutNet, rollout: Rollout, graph: bool) -> tuple[Rollout[Any], RolloutOutputs[Any]] | None:
    """Run actor and critic over a rollout once. The values and the gradient step on the rollout use the same forward pass.

    Returns the rollout and the outputs of the pass, as numpy arrays if the pass has no autograd graph. Returns None if a single pass is not
    possible: for recurrent nets (which learn from sequences), for many images (which are split into microbatches), and for observations
    that are not finite. (Rows without a loss have a gradient of 0, but 0 · NaN is NaN.)

    Args: graph: whether the loss needs tensors with an autograd graph.
    """
    steps: Rollout[Any] = rollout if graph or not rollout.obs_TN.is_cpu else rollout.as_numpy
    obs_B = flatten_time_and_envs(steps.obs_TN)
    is_float = obs_B.dtype.kind == "f" if isinstance(obs_B, np.ndarray) else obs_B.is_floating_point()
    if net.state_size or obs_B.nbytes > MICROBATCH_BYTES or (is_float and not _is_finite(obs_B)):
        return None
    outputs = GraphPass(*net(obs_B)) if graph else net.forward_pass(obs_B)
    params_BP, value_B = outputs.values
    if not is_float and not _is_finite(value_B):  # observations packed into bytes can contain NaN or infinity
        return None
    if isinstance(value_B, Tensor):
        steps = rollout
    shape = steps.reward_TN.shape
    output_TN, rows = value_B.reshape(steps.obs_TN.shape[:2]), slice(math.prod(shape))
    next_TN = _next_outputs(net, steps, output_TN)
    params_TNP = params_BP[rows].reshape(*shape, -1)
    return steps, RolloutOutputs(output_TN[:-1], next_TN, steps.state_NS[None], params_TNP, outputs.select_rows(rows))


def _is_finite(x: Tensor | np.ndarray) -> bool:
    """Return whether the sum of all elements is finite. If an element is not finite, the sum is not finite."""
    return math.isfinite(np.add.reduce(x, axis=None) if isinstance(x, np.ndarray) else x.sum())


@torch.no_grad()
def compute_critic_outputs(net: RolloutNet, rollout: Rollout, seq_len: int, actor: bool = False) -> RolloutOutputs:
    """Run the critic over the observations of a rollout and over the last observations of truncated episodes.

    Args: actor: whether to run the actor together with the critic.
    """
    pairs: list[tuple[Tensor | None, Tensor]] = []  # the actor's and the critic's outputs
    if net.state_size == 0:
        obs_B = rollout.obs_TN.flatten(0, 1)
        for part in obs_B.split(microbatch_length(obs_B, 1, gradients=False)):
            outputs = net.forward_pass(part, learn=False).values if actor else (None, net.values(part))
            pairs.append((None if outputs[0] is None else as_tensor(outputs[0]), as_tensor(outputs[1])))
        output_TN = torch.cat([output_B for _, output_B in pairs]).unflatten(0, rollout.obs_TN.shape[:2])
        states = [rollout.state_NS]
    else:
        state_NS, states = rollout.state_NS, []
        T = len(rollout.reward_TN)
        for t in range(0, T, seq_len):  # the last chunk includes the extra row
            end = t + seq_len if t + seq_len < T else T + 1
            states.append(state_NS)
            params_LNP, value_LN, state_NS = net.unroll(rollout.obs_TN[t:end], rollout.first_TN[t:end], state_NS)
            pairs.append((params_LNP, value_LN))
        output_TN = torch.cat([value_LN for _, value_LN in pairs])
    next_TN = _next_outputs(net, rollout, output_TN)
    params_TNP = torch.cat([params for params, _ in pairs if params is not None]).view(*output_TN.shape[:2], -1)[:-1] if actor else None
    return RolloutOutputs(output_TN[:-1], next_TN, torch.stack(states), params_TNP)


def _next_outputs(net: RolloutNet, rollout: Rollout[A], output_TN: A) -> A:
    """Return the critic's outputs [T, N] for the true next observations, given the critic's outputs [T + 1, N] for all observations."""
    next_TN, cut = output_TN[1:], rollout.truncations
    if len(cut.t_K):
        next_TN = copy(next_TN)
        next_TN[cut.t_K, cut.n_K] = as_type_of(next_TN, last_observation_values(net, as_tensor(cut.obs_K), as_tensor(cut.state_KS)))
    return next_TN


def last_observation_values(net: RolloutNet, obs_K: Tensor, state_KS: Tensor) -> Tensor:
    """Return the critic's outputs [K] for the last observations of truncated episodes.

    Args: state_KS: hidden states before the last observations.
    """
    if net.state_size == 0:
        return as_tensor(net.values(obs_K))
    with torch.no_grad():
        not_first = torch.zeros(1, len(obs_K), dtype=torch.bool, device=obs_K.device)
        value: Tensor = net.unroll(obs_K.unsqueeze(0), not_first, state_KS)[1][0]
        return value


class SequenceInputs(NamedTuple):
    """Inputs of a recurrent net: M sequences of L steps."""

    obs_LM: Tensor
    first_LM: Tensor
    state_MS: Tensor
    """Hidden state before the first step of each sequence."""
    flat_index_B: Tensor
    """int64 [B]: indices of the transitions in the flattened L × M steps."""


@dataclass(frozen=True)
class Minibatch(Generic[A]):
    """B valid transitions, and the inputs of the net for these transitions."""

    inputs: A | SequenceInputs
    """Observations [B, *shape] for feed-forward nets, or the sequences that contain the transitions for recurrent nets."""
    action_B: A
    logp_B: A
    advantage_B: A
    target_B: A
    """Target of the critic's output."""
    value_B: A
    """The critic's output, computed before the update."""
    outputs: ForwardPass | None = field(default=None, kw_only=True)
    """Forward pass over the transitions if the pass was already computed, else None."""

    def forward_pass(self: Minibatch[Any], net: RolloutNet, graph: bool) -> ForwardPass:
        """Return the net's forward pass, which outputs distribution parameters [B, P] and values [B].

        Args: graph: whether the loss needs tensors with an autograd graph.
        """
        if self.outputs is not None:
            return self.outputs
        if graph or isinstance(self.inputs, SequenceInputs):
            return GraphPass(*self.forward(net))
        return net.forward_pass(self.inputs)

    def forward(self: Minibatch, net: RolloutNet) -> tuple[Tensor, Tensor]:
        """Return distribution parameters [B, P] and values [B], both with an autograd graph.

        A Q-net returns its action values [B, A] as distribution parameters and as values.
        """
        if isinstance(self.outputs, GraphPass):
            params_BP, value_B = self.outputs.outputs
            return params_BP, value_B
        if isinstance(self.inputs, Tensor):
            return net(self.inputs)
        inputs = self.inputs
        params_LMP, value_LM, _ = net.unroll(inputs.obs_LM, inputs.first_LM, inputs.state_MS)
        return params_LMP.flatten(0, 1).index_select(0, inputs.flat_index_B), value_LM.flatten(0, 1).index_select(0, inputs.flat_index_B)


class RolloutBatch:
    """A rollout with advantages and targets, which can be divided into minibatches.

    For a recurrent net, a minibatch consists of sequences of seq_len steps, which are never split.
    """

    def __init__(self, rollout: Rollout[Any], values: RolloutOutputs[Any], advantage_TN: Any, target_TN: Any, seq_len: int) -> None:
        columns = [rollout.action_TN, rollout.logp_TN, advantage_TN, target_TN, values.output_TN]
        self.recurrent = rollout.state_NS.shape[1] > 0
        self.seq_len, self.outputs = seq_len, values.outputs
        if self.recurrent:
            inputs = [rollout.obs_TN[:-1], rollout.first_TN[:-1], rollout.valid_TN.cpu()]  # values that determine shapes stay on the CPU
            chunks = [_split_into_chunks(x, seq_len) for x in [*inputs, *columns]]
            kept_M = chunks[2].any(dim=0).nonzero().squeeze(1)  # drop sequences that contain only padding and dummy rows
            self.columns = [x.index_select(1, upload(kept_M, x.device)) for x in chunks]
            self.state_MS = values.state_CNS.flatten(0, 1).index_select(0, upload(kept_M, values.state_CNS.device))
            self.size = self.columns[0].shape[1]
            self.transitions = int(self.columns[2].sum())
        else:
            self.columns, row_B = _select_valid(rollout.valid_TN, [rollout.obs_TN[:-1], *columns])
            if row_B is not None and self.outputs is not None:
                self.outputs = self.outputs.select_rows(row_B)
            self.size = self.transitions = len(self.columns[0])

    def microbatches(self) -> Iterator[tuple[Minibatch[Any], float]]:
        """Yield (microbatch, fraction of all transitions). Together, the microbatches contain all transitions, in order.

        There is a single microbatch, unless the observations are many images. If the gradient of the mean loss of each microbatch is
        multiplied by the fraction of the microbatch, the sum of these products is the gradient of the mean loss over all transitions.
        """
        if self.outputs is not None:
            yield Minibatch(*self.columns, outputs=self.outputs), 1.0
            return
        obs = self.columns[0]
        items = microbatch_length(obs, 2 if self.recurrent else 1)
        for begin in range(0, self.size, items):
            if self.recurrent:
                part: Minibatch[Any] = self._sequence_minibatch(torch.arange(begin, min(begin + items, self.size)))
            else:
                part = Minibatch(*(x[begin : begin + items] for x in self.columns))
            yield part, len(part.action_B) / self.transitions

    def epoch_minibatches(self, epochs: int, minibatch_size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """Yield minibatches of about `minibatch_size` transitions, in a new random order for each epoch.

        The sizes of the minibatches differ by at most one transition, or by at most one sequence for a recurrent net.
        """
        per_item = self.seq_len if self.recurrent else 1
        count = max(1, round(self.size * per_item / minibatch_size))
        bounds = np.linspace(0, self.size, min(count, self.size) + 1).astype(int).tolist()
        for _ in range(epochs):
            order = torch.from_numpy(rng.permutation(self.size))
            order_on_device = upload(order, self.columns[0].device)
            shuffled = [] if self.recurrent else [x.index_select(0, order_on_device) for x in self.columns]
            for begin, end in pairwise(bounds):
                if self.recurrent:
                    yield self._sequence_minibatch(order[begin:end])
                else:
                    yield Minibatch(*(x[begin:end] for x in shuffled))

    def _sequence_minibatch(self, index_M: Tensor) -> Minibatch:
        device_index_M = upload(index_M, self.state_MS.device)
        obs, first, valid, *columns = self.columns
        flat_index_B = upload(valid.index_select(1, index_M).flatten().nonzero().squeeze(1), self.state_MS.device)
        inputs = SequenceInputs(
            obs.index_select(1, device_index_M), first.index_select(1, index_M), self.state_MS.index_select(0, device_index_M), flat_index_B
        )
        return Minibatch(inputs, *(x.index_select(1, device_index_M).flatten(0, 1).index_select(0, flat_index_B) for x in columns))


def _select_valid(valid_TN: A, columns: list[A]) -> tuple[list[A], A | None]:
    """Return the valid entries [B, …] of arrays [T, N, …], and the indices of these entries in the flattened arrays [T · N, …].

    If every entry is valid, None is returned in place of the indices.
    """
    rows, valid_B = [flatten_time_and_envs(x) for x in columns], flatten_time_and_envs(valid_TN)
    if bool(valid_B.all()):
        return rows, None
    flat_index_B = where_true(valid_B)
    return [x[flat_index_B] for x in rows], flat_index_B


def _split_into_chunks(x_TN: Tensor, length: int) -> Tensor:
    """Divide x_TN [T, N, …] into chunks of `length` steps, and return the chunks as [length, chunks · N, …], ordered by chunk.

    The last chunk is padded with zeros, which are invalid rows.
    """
    T = len(x_TN)
    chunks = -(-T // length)
    if chunks * length > T:
        x_TN = torch.cat([x_TN, x_TN.new_zeros(chunks * length - T, *x_TN.shape[1:])])
    return x_TN.unflatten(0, (chunks, length)).transpose(0, 1).flatten(1, 2)
