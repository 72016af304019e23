"""Replay buffers of sequences, for recurrent nets (R2D2, Kapturowski et al., 2019, "Recurrent experience replay in distributed RL")."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.device import upload
from slm_lab.agent.replay.frames import FrameStore, load_rows
from slm_lab.agent.replay.replay import PrioritizedReplay, Replay, as_tensor, tensors_on_device
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.spec.models.memory import PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.report import Problem, SpecError


class SequenceNet(Protocol):
    """Interface of a recurrent net that learns from replayed sequences."""

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return action outputs [T, N, P], values [T, N, …] and the hidden state [N, S] after the last step."""


class SequenceBatch(NamedTuple):
    """A batch of M sequences, each of which consists of burn_in steps without a loss and L transitions with a loss.

    In total, the batch contains B = L × M transitions, ordered by step. The transitions are divided into C segments. A segment ends where
    its episode or its sequence ends, and is followed by the true next observation of the segment's last transition. The next observation of
    a transition is one step later in the same segment, even if the episode is truncated, or is cut by the end of the sequence. The hidden
    state before the next observation is the same as during acting. All segments are padded to a length of P transitions.
    """

    burn_in_obs_TM: Tensor
    """[burn_in, M, *shape]: observations of the burn-in, in the env's dtype."""
    burn_in_first_TM: Tensor
    """bool [burn_in, M]: whether the observation of the burn-in begins an episode. This tensor is always on the CPU."""
    state_MS: Tensor
    """float32 [M, S]: hidden state of the acting policy before the first step of each sequence."""
    obs_PC: Tensor
    """[P + 1, C, *shape]: observations of the segments, where P is the number of transitions of the longest segment."""
    sequence_C: Tensor
    """int64 [C]: index of each segment's sequence."""
    starts_episode_C: Tensor
    """bool [C]: whether the segment begins an episode. Other segments continue the burn-in of their sequence."""
    flat_index_B: Tensor
    """int64 [B]: indices of the transitions in the flattened steps of all segments, (P + 1) × C."""
    action_B: Tensor
    """int64 [B] or [B, D], or float32 [B, D]."""
    reward_B: Tensor
    """float32 [B]."""
    terminated_B: Tensor
    """float32 [B], 0 or 1: whether the episode terminated, so that its value is not bootstrapped."""
    weight_B: Tensor | None
    """float32 [B]: importance weight of each transition's sequence, or None if all weights are 1."""
    sampled_rows: np.ndarray
    """int64 [M]: indices of the sequences in the buffer, as `update_priorities` expects them."""
    row_B: np.ndarray
    """int64 [B]: rows of the transitions in the buffer."""
    reward_KB: Tensor | None = None
    """With n-step returns, float32 [n, B]: rewards of the n steps that begin with each transition, and 0 for steps after the end of the
    segment. With n-step returns, `terminated_B` belongs to the last step within the segment. The field is None with one-step returns."""
    steps_B: Tensor | None = None
    """With n-step returns, float32 [B]: the number of steps within the segment, from 1 to n."""

    def to(self, device: str) -> SequenceBatch:
        """Return the batch on `device`."""
        return self._replace(**(tensors_on_device(self._asdict(), device) | {"burn_in_first_TM": self.burn_in_first_TM}))

    @property
    def obs_B(self) -> Tensor:
        """Observations [B, *shape] of the transitions."""
        return self.current_outputs(self.obs_PC.flatten(0, 1))

    @property
    def next_obs_B(self) -> Tensor:
        """True next observations [B, *shape] of the transitions."""
        return self.next_outputs(self.obs_PC.flatten(0, 1))

    def unroll(self, net: SequenceNet, state_MS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run a net over all steps of all segments, and return the net's action outputs and values, both [(P + 1) × C, …].

        The methods `current_outputs` and `next_outputs` select rows of the returned tensors. The steps of the burn-in have no gradient.

        Args: state_MS: hidden state before the first step of each sequence, or None for the stored hidden state of the acting policy.
        """
        state_MS = self.state_MS if state_MS is None else state_MS
        if len(self.burn_in_obs_TM):
            with torch.no_grad():
                *_, state_MS = net.unroll(self.burn_in_obs_TM, self.burn_in_first_TM, state_MS)
        state_CS = torch.where(self.starts_episode_C.unsqueeze(1), 0.0, state_MS.index_select(0, self.sequence_C))
        params, values, _ = net.unroll(self.obs_PC, torch.zeros(self.obs_PC.shape[:2], dtype=torch.bool), state_CS)
        return params.flatten(0, 1), values.flatten(0, 1)

    def current_outputs(self, outputs: Tensor) -> Tensor:
        """Select from outputs of `unroll` the outputs [B, …] for the observations of the transitions."""
        return outputs.index_select(0, self.flat_index_B)

    def next_outputs(self, outputs: Tensor) -> Tensor:
        """Select from outputs of `unroll` the outputs [B, …] for the true next observations of the transitions.

        With n-step returns, the outputs are for the observations after n steps, or after fewer steps at the end of a segment.
        """
        steps: Tensor | int = 1 if self.steps_B is None else self.steps_B.long()
        return outputs.index_select(0, self.flat_index_B + steps * len(self.sequence_C))


class SequenceReplay(Replay):
    """Replay buffer whose transitions are sampled in sequences, with the policy's hidden state at the beginning of each sequence.

    A sequence consists of burn_in + seq_len consecutive transitions of one env. Successive sequences of an env begin seq_len // 2
    transitions apart, so that sequences overlap by half of seq_len, as in the R2D2 paper. A sequence may contain ends of episodes, because
    hidden states are reset at the start of each episode. Each env has its own ring of capacity / num_envs rows, so that the env and the
    first transition of a sequence determine the rows of the sequence.

    Args:
        spec, info, arguments, keywords: see Replay.
        state_size: size S of the hidden state.
        seq_len: number of transitions of a sequence that contribute to the loss.

    Raises SpecError if the capacity is less than one sequence of each env.
    """

    def __init__(
        self, spec: ReplaySpec | PrioritizedReplaySpec, info: EnvInfo, *arguments: Any, state_size: int, seq_len: int, **keywords: Any
    ) -> None:
        self.state_size, self.seq_len = state_size, seq_len
        self.burn_in, self.window, self.stride = spec.sequence_layout(seq_len)
        super().__init__(spec, info, *arguments, **keywords)
        self.num_envs, self.steps = info.num_envs, self.capacity // info.num_envs
        self.state_KS = np.zeros((self.max_items, state_size), np.float32)
        """Hidden state before the first step of each sequence."""
        self.columns["first"] = np.zeros(self.capacity, np.bool_)
        """Whether the observation begins an episode."""
        self.count_N = np.zeros(info.num_envs, np.int64)
        """Number of transitions of each env that were added so far."""
        self.begin_N = np.zeros(info.num_envs, np.int64)
        """Number of the transition with which the oldest sequence of each env begins. Transitions are counted separately for each env."""

    @property
    def _needs_links(self) -> bool:
        return False  # the successive transitions of an env are in successive rows of its ring

    def _capacity(self, max_rows: int, num_envs: int) -> int:
        steps = max_rows // num_envs // self.stride * self.stride
        if steps < self.window:
            needed = -(-self.window // self.stride) * self.stride * num_envs
            each = f"sequences of burn_in + seq_len = {self.burn_in} + {self.seq_len} transitions for each of {num_envs} envs"
            message = f"{max_rows:,} transitions are too few for {each}; at least {needed:,}"
            raise SpecError("agent", [Problem("agent.memory.max_size", message)])
        return steps * num_envs

    def _nbytes(self, info: EnvInfo) -> int:
        return super()._nbytes(info) + self.capacity + self.max_items * (4 * self.state_size + 8)

    @property
    def max_items(self) -> int:
        """Maximum number of sequences in the buffer.

        The env and the first transition of a sequence determine the index of the sequence, which is less than the maximum number of
        sequences.
        """
        return self.capacity // self.stride

    @property
    def has_batch(self) -> bool:
        """Whether at least batch_size sequences have been completed so far."""
        return self.size > 0 and int(np.maximum((self.count_N - self.window) // self.stride + 1, 0).sum()) >= self.batch_size

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store the transitions of one vector step. Entries of `step` that are not transitions are ignored.

        Args: state_N: hidden state [N, S] before obs_N.
        """
        assert state_N is not None, "a recurrent policy has a hidden state"
        env_K = np.flatnonzero(step.valid_N)
        count_K = self.count_N[env_K]
        row_K = count_K % self.steps * self.num_envs + env_K
        self._write_transitions(row_K, env_K, obs_N, first_N, out, step)
        self.columns["first"][row_K] = first_N[env_K]
        begins_K = count_K % self.stride == 0
        if begins_K.any():  # the new sequence replaces the sequence whose first transition has just been overwritten
            env_J = env_K[begins_K]
            place_J = self._sequence_indices(count_K[begins_K], env_J)
            self._on_sequences_dropped(place_J)
            self.state_KS[place_J] = np.where(first_N[env_J, None], np.float32(0.0), state_N[env_J])
        self.count_N[env_K] = count_K + 1
        self.begin_N = np.maximum(self.begin_N, -(-(self.count_N - self.steps) // self.stride) * self.stride)
        start_K = count_K + 1 - self.window
        ended_K = (start_K >= self.begin_N[env_K]) & (start_K % self.stride == 0)
        if ended_K.any():
            self._on_added(self._sequence_indices(start_K[ended_K], env_K[ended_K]))
        if isinstance(self.store, FrameStore):
            self._drop_lost_sequences()
        before, self.seen = self.seen, self.seen + len(env_K)
        self.size = int(self._sequence_counts_N().sum())
        self.ready = self.has_batch and self.seen >= self.start and self.seen // self.frequency > before // self.frequency

    def _sequence_indices(self, start_K: np.ndarray, env_K: np.ndarray) -> np.ndarray:
        """Return the indices of sequences in the buffer (see `max_items`).

        Args: start_K: number of each sequence's first transition (see `begin_N`). env_K: env of each sequence.
        """
        places: np.ndarray = start_K % self.steps // self.stride * self.num_envs + env_K
        return places

    def _on_sequences_dropped(self, place_K: np.ndarray) -> None:
        """Hook for subclasses, called with the indices of sequences that can no longer be sampled."""

    def _drop_lost_sequences(self) -> None:
        """Drop the sequences that contain overwritten images."""
        for n in range(self.num_envs):
            while (begin := self.begin_N[n]) < self.count_N[n] and self.store.has_lost_frames(int(begin % self.steps * self.num_envs + n)):
                self._on_sequences_dropped(self._sequence_indices(self.begin_N[n : n + 1], np.array([n])))
                self.begin_N[n] += self.stride

    def _sequence_counts_N(self) -> np.ndarray:
        """Return the number of sequences of each env that can be sampled."""
        number_N: np.ndarray = np.maximum((self.count_N - self.window - self.begin_N) // self.stride + 1, 0)
        return number_N

    def _draw_rows(self) -> np.ndarray:
        """Draw the indices of batch_size sequences at random, each sequence with the same probability."""
        number_N = self._sequence_counts_N()
        last_N = number_N.cumsum()
        which_M = self.rng.integers(0, last_N[-1], self.batch_size)
        env_M = np.searchsorted(last_N, which_M, side="right")
        start_M = self.begin_N[env_M] + (which_M - last_N[env_M] + number_N[env_M]) * self.stride
        return self._sequence_indices(start_M, env_M)

    def _newest_sequence(self) -> int:
        """Return the index of the sequence that was completed last.

        If several envs completed a sequence in the same step, the sequence of the env with the lowest index is returned.
        """
        start_N = (self.count_N - self.window) // self.stride * self.stride
        n = int(np.argmin(np.where(self._sequence_counts_N() > 0, self.count_N - self.window - start_N, self.steps)))
        return int(self._sequence_indices(start_N[n : n + 1], np.array([n]))[0])

    def sample(self) -> SequenceBatch:  # type: ignore[override]  # an algorithm knows which kind of buffer it uses
        """Sample a batch of batch_size sequences."""
        place_M = self._draw_rows()
        if self.use_cer:
            place_M[-1] = self._newest_sequence()
        return self.batch(place_M, self._importance_weights(place_M))

    def batch(self, place_M: np.ndarray, weight_M: np.ndarray | None = None) -> SequenceBatch:
        """Return a batch of the sequences with the indices place_M [M]."""
        env_M, begin_M = place_M % self.num_envs, place_M // self.num_envs * self.stride
        row_WM = (begin_M + np.arange(self.window)[:, None]) % self.steps * self.num_envs + env_M
        early_TM, row_LM = row_WM[: self.burn_in], row_WM[self.burn_in :]
        first_LM = self.columns["first"].take(row_LM)
        obs_PC, segments = self._split_into_segments(row_LM, first_LM)
        burn_in = self._observations(early_TM.reshape(-1)).reshape(*early_TM.shape, *obs_PC.shape[2:])
        row_B = row_LM.reshape(-1)
        action_B, terminated_B = (as_tensor(self.columns[name].take(row_B, axis=0)) for name in ("action", "terminated"))
        weight_B = None if weight_M is None else torch.from_numpy(np.tile(weight_M, self.seq_len))
        n_step_columns: list[Tensor] = []
        if self.num_steps > 1:
            terminated_B, *n_step_columns = self._n_step_columns(row_LM, first_LM)
        return SequenceBatch(
            burn_in,
            torch.from_numpy(self.columns["first"].take(early_TM)),
            torch.from_numpy(self.state_KS.take(place_M, axis=0)),
            obs_PC,
            *segments,
            action_B,
            self._rewards(row_B),
            terminated_B,
            weight_B,
            place_M,
            row_B,
            *n_step_columns,
        )

    def _n_step_columns(self, row_LM: np.ndarray, first_LM: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return terminated_B, reward_KB and steps_B of SequenceBatch, for n-step returns within the segments."""
        L, M = row_LM.shape
        step_LM, column_M = np.repeat(np.arange(L)[:, None], M, axis=1), np.arange(M)
        exists, steps = [np.ones((L, M), np.bool_)], [step_LM]
        for number in range(1, self.num_steps):
            after_LM = np.minimum(step_LM + number, L - 1)
            exists.append(exists[-1] & (step_LM + number < L) & ~first_LM[after_LM, column_M])
            steps.append(np.where(exists[-1], after_LM, steps[-1]))
        row_KB, exists_KB = (np.stack(rows).reshape(self.num_steps, -1) for rows in ([row_LM[t, column_M] for t in steps], exists))
        reward_KB = self._rewards(row_KB.reshape(-1)).view(row_KB.shape)
        reward_KB = torch.where(upload(torch.from_numpy(exists_KB), reward_KB.device), reward_KB, 0.0)
        terminated_B = as_tensor(self.columns["terminated"].take(row_KB[-1], axis=0))
        return terminated_B, reward_KB, torch.from_numpy(exists_KB.sum(axis=0, dtype=np.float32))

    def _split_into_segments(self, row_LM: np.ndarray, first_LM: np.ndarray) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Divide the transitions in rows row_LM into segments.

        Returns (obs_PC, (sequence_C, starts_episode_C, flat_index_B)), which are fields of SequenceBatch.
        """
        L, M = row_LM.shape
        begins_ML = first_LM.T.copy()
        begins_ML[:, 0] = True
        sequence_C, begin_C = np.nonzero(begins_ML)
        end_C = np.append(np.where(sequence_C[1:] == sequence_C[:-1], begin_C[1:], L), L)
        length_C, C = end_C - begin_C, len(begin_C)
        column_LM = begins_ML.reshape(-1).cumsum().reshape(M, L).T - 1
        step_LM = np.arange(L)[:, None] - begin_C[column_LM]
        flat_index_B = torch.from_numpy((step_LM * C + column_LM).reshape(-1))
        obs_B = self._observations(row_LM.reshape(-1))
        last_C = self._next_observations(row_LM[end_C - 1, sequence_C])
        steps = int(length_C.max()) + 1
        obs = obs_B.new_zeros(steps * C, *obs_B.shape[1:])
        obs[upload(flat_index_B, obs.device)] = obs_B
        obs[upload(torch.from_numpy(length_C * C + np.arange(C)), obs.device)] = last_C
        starts_episode_C = first_LM[begin_C, sequence_C]
        segments = (torch.from_numpy(sequence_C), torch.from_numpy(starts_episode_C), flat_index_B)
        return obs.unflatten(0, (steps, C)), segments

    def _num_written_rows(self) -> int:
        return int(min(self.count_N.max(), self.steps)) * self.num_envs

    def _num_written_items(self) -> int:
        return -(-self._num_written_rows() // (self.stride * self.num_envs)) * self.num_envs

    def contents(self) -> dict[str, Any]:
        counts = {"count_N": self.count_N.tolist(), "begin_N": self.begin_N.tolist(), "stride": self.stride, "window": self.window}
        return {**super().contents(), **counts, "state_KS": torch.from_numpy(self.state_KS[: self._num_written_items()].copy())}

    def load_contents(self, state: dict[str, Any]) -> None:
        if "state_KS" not in state or (state["stride"], state["window"]) != (self.stride, self.window):
            lengths = f"stride {self.stride} and {self.window} steps"
            raise ValueError(f"incompatible replay buffer: expected sequences with {lengths}, of the same seq_len and burn_in")
        if state["capacity"] != self.capacity and max(state["count_N"]) > min(state["capacity"], self.capacity) // self.num_envs:
            raise ValueError(f"incompatible replay buffer: {state['capacity']} transitions; expected {self.capacity}")
        load_rows("state_KS", self.state_KS, state["state_KS"].numpy())
        self.count_N, self.begin_N = np.array(state["count_N"]), np.array(state["begin_N"])
        super().load_contents(state | {"capacity": self.capacity})


class PrioritizedSequenceReplay(PrioritizedReplay, SequenceReplay):
    """Replay buffer whose sequences are sampled in proportion to their priorities (arXiv:1511.05952).

    The error of a sequence is η max |δ| + (1 − η) mean |δ|, where δ are the errors of the sequence's transitions (as in R2D2).
    """

    def __init__(self, spec: PrioritizedReplaySpec, *arguments: Any, **keywords: Any) -> None:
        super().__init__(spec, *arguments, **keywords)
        self.eta = spec.eta

    def _on_sequences_dropped(self, place_K: np.ndarray) -> None:
        self.tree.set(place_K, 0.0)

    def update_priorities(self, row_B: np.ndarray, error_B: Tensor) -> None:
        """Set the priorities of M sequences from the errors of their transitions, [L × M]. Errors that are not finite count as 0.

        Args: row_B: indices [M] of the sequences.
        """
        size_LM = error_B.detach().abs().reshape(-1, len(row_B)).double()
        size_LM = torch.where(size_LM.isfinite(), size_LM, 0.0)
        super().update_priorities(row_B, self.eta * size_LM.amax(0) + (1.0 - self.eta) * size_LM.mean(0))


SEQUENCE_REPLAYS: dict[type[ReplaySpec] | type[PrioritizedReplaySpec], type[SequenceReplay]] = {
    ReplaySpec: SequenceReplay,
    PrioritizedReplaySpec: PrioritizedSequenceReplay,
}
