"""Replay buffer of self-imitation learning. The buffer contains past transitions with their returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.returns import discounted_returns
from slm_lab.agent.replay.frames import FrameStore
from slm_lab.agent.replay.replay import Replay, Transitions
from slm_lab.agent.replay.sequences import SEQUENCE_REPLAYS, SequenceBatch, SequenceReplay
from slm_lab.agent.rollout.rollout import OnPolicyReplay, Rollout
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.spec.models.memory import PrioritizedReplaySpec, ReplaySpec


class EpisodeStorageWithStates(OnPolicyReplay):
    """Rollout storage of complete episodes, which also stores the hidden state before each step."""

    state_TES: np.ndarray
    """float32 [T, E, S]: hidden states before the T steps of the E episodes in the last rollout."""

    def _allocate(self, rows: int) -> dict[str, np.ndarray]:
        return {**super()._allocate(rows), "state": np.zeros((rows, self.info.num_envs, self.state_size), np.float32)}

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        super().add(obs_N, first_N, state_N, out, step)
        self.slabs["state"][self.t - 1] = 0.0 if state_N is None else state_N

    def rollout(self) -> Rollout:
        rollout = super().rollout()
        self.state_TES = np.zeros((*rollout.reward_TN.shape, self.state_size), np.float32)
        for column, (n, begin, end) in enumerate(self._episodes_to_train_on()):
            rows = self._transition_rows(n, begin, end)
            self.state_TES[: len(rows), column] = self.slabs["state"][rows, n]
        return rollout


class SILReplay:
    """Replay buffer of finished episodes, with discounted returns in place of rewards (arXiv:1806.05635, Algorithm 1).

    Unfinished episodes are collected separately, in a rollout storage. Whenever a transition of a truncated episode is sampled, the
    transition's return is bootstrapped with the current V of the episode's true last observation. If returns were bootstrapped only once,
    returns computed while V was too high would be imitated forever. On Acrobot, A2C with self-imitation reached a return of −406 after
    40,000 frames if returns were bootstrapped once, and of −137 if returns were bootstrapped whenever they were sampled.

    For a recurrent net, the buffer stores sequences with the hidden states of the behaviour policy. A sequence may span several episodes.

    Args:
        spec: spec of the replay buffer, which is uniform or prioritised.
        gamma: discount factor of the returns.
        value: function (observations [K, *shape], hidden states [K, S] before these observations) → V, float32 [K], on the CPU and in
            reward units.
        state_size: size S of the hidden state.
        seq_len: number of transitions of a sequence that contribute to the loss.

    Raises SpecError if the buffer does not fit into this machine's memory.
    """

    def __init__(
        self,
        spec: ReplaySpec | PrioritizedReplaySpec,
        info: EnvInfo,
        clock: Clock,
        rng: np.random.Generator,
        gamma: float,
        value: Callable[[Tensor, Tensor], Tensor],
        state_size: int = 0,
        seq_len: int = 1,
    ) -> None:
        self.gamma, self.value, self.state_size = gamma, value, state_size
        self.episodes = (EpisodeStorageWithStates if state_size else OnPolicyReplay)(info, 1, state_size)
        # complete episodes are added one after the other, as if they came from one env
        one_env = replace(info, num_envs=1, max_frame=info.max_transitions, agents=())
        self.ring: Replay | SequenceReplay
        if state_size:
            self.ring = SEQUENCE_REPLAYS[type(spec)](spec, one_env, clock, rng, state_size=state_size, seq_len=seq_len)
        else:
            self.ring = type(spec).implementation()(spec, one_env, clock, rng)
        self.ring.columns |= {"bootstrap": np.zeros(self.ring.capacity, np.float32), "episode": np.zeros(self.ring.capacity, np.int64)}
        self.count = 0
        """Number of episodes added so far."""
        self.last_obs: dict[int, np.ndarray] = {}
        """True last observations of truncated episodes, by episode number."""
        self.last_state: dict[int, np.ndarray] = {}
        """Hidden states [S] before the last observations of truncated episodes, by episode number."""
        self.chunk = 1 if state_size or isinstance(self.ring.store, FrameStore) else self.ring.capacity
        """Maximum number of transitions per call of `ring.add`: 1 for image frames and sequences, which must be added in order."""

    @property
    def capacity(self) -> int:
        """Maximum number of transitions in the buffer."""
        return self.ring.capacity

    device = None
    """Device of the transitions, where None means host memory."""

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes, without unfinished episodes."""
        return self.ring.nbytes + sum(self.ring.columns[name].nbytes for name in ("bootstrap", "episode"))

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store one vector step. A transition can be sampled after its episode has ended and `add_finished_episodes` was called."""
        self.episodes.add(obs_N, first_N, state_N, out, step)

    def add_finished_episodes(self) -> None:
        """Make finished episodes available to `sample`."""
        if not self.episodes.ready:
            return
        rollout = self.episodes.rollout()
        reward_TN, ends = rollout.reward_TN, (rollout.terminated_TN, rollout.done_TN)
        return_TN = discounted_returns(reward_TN, torch.zeros_like(reward_TN), *ends, self.gamma)  # without the bootstrap
        cut = rollout.truncations
        last = {
            n: (obs.copy(), state.copy()) for n, obs, state in zip(cut.n_K.tolist(), cut.obs_K.numpy(), cut.state_KS.numpy(), strict=True)
        }
        for episode, length in enumerate(rollout.valid_TN.sum(dim=0).tolist()):
            if episode in last:
                self.last_obs[self.count], self.last_state[self.count] = last[episode]
            self._add_episode(rollout, return_TN, episode, length)
            self.count += 1
        self._drop_expired_observations()

    def _add_episode(self, rollout: Rollout, return_TN: Tensor, episode: int, length: int) -> None:
        """Append the transitions of one episode to the ring buffer, at most `chunk` transitions at a time."""
        columns, discount = self.ring.columns, self.gamma if self.count in self.last_obs else 0.0
        for begin in range(0, length, self.chunk):
            end = min(begin + self.chunk, length)
            row = slice(begin, end)
            # the next observation of the last row is meaningless: it is sampled but never used
            next_obs = rollout.obs_TN[begin + 1 : end + 1, episode].numpy()
            out = ActOut(rollout.action_TN[row, episode].numpy(), rollout.logp_TN[row, episode].numpy())
            ends = rollout.terminated_TN[row, episode].numpy(), rollout.truncated_TN[row, episode].numpy()
            all_valid, first = np.ones(end - begin, np.bool_), np.arange(begin, end) == 0
            step = VecStep(return_TN[row, episode].numpy(), *ends, next_obs, next_obs, ends[0] | ends[1], all_valid, [])
            state = self.episodes.state_TES[row, episode] if isinstance(self.episodes, EpisodeStorageWithStates) else None
            self.ring.add(rollout.obs_TN[row, episode].numpy(), first, state, out, step)
            row_L = (self.ring.seen + np.arange(begin - end, 0)) % self.ring.capacity
            columns["bootstrap"][row_L], columns["episode"][row_L] = discount ** np.arange(length - begin, length - end, -1), self.count

    def _drop_expired_observations(self) -> None:
        """Drop the last observations of episodes whose transitions are no longer in the ring buffer."""
        rows = min(self.ring.seen, self.ring.capacity) if self.state_size else self.ring.size
        oldest = int(self.ring.columns["episode"][(self.ring.seen - rows) % self.ring.capacity])
        for number in [number for number in self.last_obs if number < oldest]:
            del self.last_obs[number], self.last_state[number]

    @property
    def ready(self) -> bool:
        """Whether enough transitions are stored for one batch."""
        return self.ring.has_batch

    def sample(self) -> Transitions | SequenceBatch:
        """Sample a batch whose `reward_B` contains returns and whose `next_obs_B` is meaningless."""
        batch = self.ring.sample()
        return batch._replace(reward_B=torch.from_numpy(self.bootstrapped_returns(batch.row_B)))

    def bootstrapped_returns(self, row_B: np.ndarray) -> np.ndarray:
        """Return the returns R of the transitions in rows row_B, float32 [B].

        The return R is Σ γ^k r, plus γ^n V(s_n) with the current V if the episode was truncated after n more steps.
        """
        return_B, bootstrap_B, episode_B = (self.ring.columns[name].take(row_B) for name in ("reward", "bootstrap", "episode"))
        cut_K = np.flatnonzero(bootstrap_B)
        if len(cut_K):
            numbers, which_K = np.unique(episode_B[cut_K], return_inverse=True)
            last = (torch.from_numpy(np.stack([items[int(number)] for number in numbers])) for items in (self.last_obs, self.last_state))
            return_B[cut_K] += bootstrap_B[cut_K] * self.value(*last).numpy()[which_K]
        return return_B

    def update_priorities(self, sampled_rows: np.ndarray, error_B: Tensor) -> None:
        """Set the priorities of sampled transitions or sequences from the errors [B] of the transitions.

        Args: sampled_rows: attribute `sampled_rows` of the sampled batch.
        """
        self.ring.update_priorities(sampled_rows, error_B)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random stream. The stored transitions are returned by `contents` instead."""
        return self.ring.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ring.load_state_dict(state)

    def contents(self) -> dict[str, Any]:
        """Return the transitions of finished episodes, as tensors and numbers."""
        last_obs = {number: torch.from_numpy(obs) for number, obs in self.last_obs.items()}
        last_state = {number: torch.from_numpy(state) for number, state in self.last_state.items()} if self.state_size else {}
        return {"ring": self.ring.contents(), "count": self.count, "last_obs": last_obs, "last_state": last_state}

    def load_contents(self, state: dict[str, Any]) -> None:
        self.ring.load_contents(state["ring"])
        self.count, self.last_obs = int(state["count"]), {number: obs.numpy().copy() for number, obs in state["last_obs"].items()}
        states = state.get("last_state", {})
        self.last_state = {
            number: states[number].numpy().copy() if number in states else np.zeros(0, np.float32) for number in self.last_obs
        }
