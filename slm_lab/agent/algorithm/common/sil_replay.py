"""The replay buffer of self-imitation: past transitions with their returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.returns import discounted_returns
from slm_lab.agent.replay.frames import FrameStore
from slm_lab.agent.replay.replay import REPLAYS, Transitions
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.rollout.storage import OnPolicyReplay
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.spec.memory import PrioritizedReplaySpec, ReplaySpec


class SILReplay:
    """Finished episodes in a replay memory whose rewards are discounted returns (arXiv:1806.05635, Algorithm 1).

    Unfinished episodes are collected separately, in a rollout storage. The return of a truncated episode is bootstrapped with the present V
    of its true last observation each time it is sampled: bootstrapped only once, returns from a time when V was too high would be imitated
    for ever (A2C on Acrobot after 40,000 frames: −406 that way, −137 this way).

    Args:
        spec: of the replay memory, uniform or prioritised.
        gamma: discount of the returns.
        value: obs_K [K, *shape] → V [K] float32 in reward units, on the CPU.

    Raises SpecError if it does not fit this machine.
    """

    def __init__(
        self,
        spec: ReplaySpec | PrioritizedReplaySpec,
        info: EnvInfo,
        clock: Clock,
        rng: np.random.Generator,
        gamma: float,
        value: Callable[[Tensor], Tensor],
    ) -> None:
        self.gamma, self.value = gamma, value
        self.episodes = OnPolicyReplay(info, length=1, state_size=0)
        # whole episodes come one after the other, as from one env
        self.ring = REPLAYS[type(spec)](spec, replace(info, num_envs=1), clock, rng)
        self.ring.columns |= {"bootstrap": np.zeros(self.ring.capacity, np.float32), "episode": np.zeros(self.ring.capacity, np.int64)}
        self.count = 0
        """Episodes ever added."""
        self.last_obs: dict[int, np.ndarray] = {}
        """True last observations of truncated episodes, by their number."""
        self.chunk = 1 if isinstance(self.ring.store, FrameStore) else self.ring.capacity
        """Transitions added to the ring in one call: frames of images only in order."""

    @property
    def capacity(self) -> int:
        """Maximum number of transitions."""
        return self.ring.capacity

    device = None
    """The transitions are in the memory of the host."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, without unfinished episodes."""
        return self.ring.nbytes + sum(self.ring.columns[name].nbytes for name in ("bootstrap", "episode"))

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store one step; it can be sampled once its episode has ended and `add_finished_episodes` was called."""
        self.episodes.add(obs_N, first_N, state_N, out, step)

    def add_finished_episodes(self) -> None:
        """Make finished episodes available to `sample`."""
        if not self.episodes.ready:
            return
        rollout = self.episodes.rollout()
        reward_TN, ends = rollout.reward_TN, (rollout.terminated_TN, rollout.done_TN)
        return_TN = discounted_returns(reward_TN, torch.zeros_like(reward_TN), *ends, self.gamma)  # without the bootstrap
        last_obs = dict(zip(rollout.truncations.n_K.tolist(), rollout.truncations.obs_K.numpy(), strict=True))
        for episode, length in enumerate(rollout.valid_TN.sum(dim=0).tolist()):
            if episode in last_obs:
                self.last_obs[self.count] = last_obs[episode].copy()
            self._put(rollout, return_TN, episode, length)
            self.count += 1
        self._forget()

    def _put(self, rollout: Rollout, return_TN: Tensor, episode: int, length: int) -> None:
        """Append the transitions of one episode to the ring, as steps of so many envs."""
        columns, discount = self.ring.columns, self.gamma if self.count in self.last_obs else 0.0
        for begin in range(0, length, self.chunk):
            end = min(begin + self.chunk, length)
            row = slice(begin, end)
            # the successor of the last row has no meaning: it is sampled too, and never used
            next_obs = rollout.obs_TN[begin + 1 : end + 1, episode].numpy()
            out = ActOut(rollout.action_TN[row, episode].numpy(), rollout.logp_TN[row, episode].numpy())
            ends = rollout.terminated_TN[row, episode].numpy(), rollout.truncated_TN[row, episode].numpy()
            all_valid, first = np.ones(end - begin, np.bool_), np.arange(begin, end) == 0
            step = VecStep(return_TN[row, episode].numpy(), *ends, next_obs, next_obs, ends[0] | ends[1], all_valid, [])
            self.ring.add(rollout.obs_TN[row, episode].numpy(), first, None, out, step)
            row_L = (self.ring.seen + np.arange(begin - end, 0)) % self.ring.capacity
            columns["bootstrap"][row_L], columns["episode"][row_L] = discount ** np.arange(length - begin, length - end, -1), self.count

    def _forget(self) -> None:
        """Drop the last observations of episodes that have left the ring."""
        oldest = int(self.ring.columns["episode"][(self.ring.seen - self.ring.size) % self.ring.capacity])
        for number in [number for number in self.last_obs if number < oldest]:
            del self.last_obs[number]

    @property
    def ready(self) -> bool:
        """Whether there is enough for one batch."""
        return self.ring.size > 0 and self.ring.seen >= self.ring.batch_size

    def sample(self) -> Transitions:
        """Sample a batch; its reward_B are returns, its next_obs_B have no meaning."""
        batch = self.ring.sample()
        return batch._replace(reward_B=torch.from_numpy(self.returns(batch.row_B)))

    def returns(self, row_B: np.ndarray) -> np.ndarray:
        """Return R of rows, float32 [B], with the present V: Σ γ^k r, and γ^n V(s_n) if the episode was truncated."""
        return_B, bootstrap_B, episode_B = (self.ring.columns[name].take(row_B) for name in ("reward", "bootstrap", "episode"))
        cut_K = np.flatnonzero(bootstrap_B)
        if len(cut_K):
            numbers, which_K = np.unique(episode_B[cut_K], return_inverse=True)
            value = self.value(torch.from_numpy(np.stack([self.last_obs[int(number)] for number in numbers]))).numpy()
            return_B[cut_K] += bootstrap_B[cut_K] * value[which_K]
        return return_B

    def update_priorities(self, row_B: np.ndarray, error_B: Tensor) -> None:
        """Set the priorities of rows by their errors [B]."""
        self.ring.update_priorities(row_B, error_B)

    def state_dict(self) -> dict[str, Any]:
        """Return the random stream; not the transitions (see `contents`)."""
        return self.ring.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.ring.load_state_dict(state)

    def contents(self) -> dict[str, Any]:
        """Return the transitions of finished episodes, as tensors and numbers."""
        last_obs = {number: torch.from_numpy(obs) for number, obs in self.last_obs.items()}
        return {"ring": self.ring.contents(), "count": self.count, "last_obs": last_obs}

    def load_contents(self, state: dict[str, Any]) -> None:
        """Load what `contents` returned."""
        self.ring.load_contents(state["ring"])
        self.count, self.last_obs = int(state["count"]), {number: obs.numpy().copy() for number, obs in state["last_obs"].items()}
