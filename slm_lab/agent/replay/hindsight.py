"""Hindsight experience replay (arXiv:1707.01495), in which a goal that was reached later replaces the desired goal of a transition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.replay.replay import Replay, Transitions, apply_transform, as_tensor
from slm_lab.lib.demonstrations import RecordedStep, join_episodes
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.spec.models.memory import HindsightReplaySpec
from slm_lab.spec.report import Problem, SpecError


class HindsightReplay(Replay):
    """Replay buffer of complete episodes, in which some sampled transitions get a new desired goal (arXiv:1707.01495).

    On average, k of k + 1 transitions of a batch get a new goal, where k is the spec key `goals`. The new goal was achieved in the same
    episode: after the transition (goal_strategy "future"), at the end of the episode ("final"), or at any time ("episode"). If the env has
    `compute_terminated`, the termination is recomputed for the new goal. If the env has no `compute_terminated`, the recorded termination
    is kept. All rewards of a batch, including rewards for original goals, are computed by one function of the achieved and the desired
    goal, so that all rewards have the same scale. An episode is stored when the episode ends, because only then are all achieved goals
    known.
    """

    def __init__(self, spec: HindsightReplaySpec, info: EnvInfo, *arguments: Any, **keywords: Any) -> None:
        super().__init__(spec, info, *arguments, **keywords)
        if info.observation.goals is None:
            message = "'HindsightReplay' needs a Dict observation with achieved_goal and desired_goal: Boxes of floats, or MultiBinary"
            raise SpecError("agent", [Problem("agent.memory.name", message)])
        self._achieved, self._desired = (slice(*columns) for columns in info.observation.goals)
        self.strategy, self.share, self.threshold = spec.goal_strategy, spec.goals / (spec.goals + 1.0), spec.goal_threshold
        self.columns |= {name: np.zeros(self.capacity, np.int64) for name in ("begin", "end")}
        self.goal_reward: Callable[[np.ndarray, np.ndarray], Any] | None = None
        """Function (achieved goals [K, G], desired goals [K, G]) → (reward_K, terminated_K), see slm_lab/env/goals.py. This function is set
        before the first batch is sampled."""
        self.observed = 0
        """Number of transitions so far, including transitions of unfinished episodes."""
        self._open: list[list[RecordedStep]] = [[] for _ in range(info.num_envs)]

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Keep the transitions of one vector step until their episodes end. Entries of `step` that are not transitions are ignored."""
        before, ended_N = self.observed, step.terminated_N | step.truncated_N
        for n in np.flatnonzero(step.valid_N).tolist():
            if first_N[n]:
                self._store_episode(n)  # the env was reset before the end of the episode
            flags = bool(step.terminated_N[n]), bool(step.truncated_N[n])
            row = RecordedStep(obs_N[n].copy(), out.action_N[n].copy(), float(step.reward_N[n]), *flags, step.last_obs_N[n].copy())
            self._open[n].append(row)
            self.observed += 1
            if ended_N[n]:
                self._store_episode(n)
        self.ready = self.observed >= self.start and self.size > 0 and self.observed // self.frequency > before // self.frequency

    def _store_episode(self, n: int) -> None:
        """Write the episode of env n into consecutive rows of the buffer."""
        episode, self._open[n] = self._open[n][-self.capacity :], []
        if not episode:
            return
        K = len(episode)
        row_K = (self.seen + np.arange(K)) % self.capacity
        obs_K, first_K, _, out, step = join_episodes([episode]).steps(0, K)
        self._write_transitions(row_K, np.arange(K), obs_K, first_K, out, step)
        self.columns["begin"][row_K], self.columns["end"][row_K] = self.seen, self.seen + K
        self.seen += K
        self.size = min(self.size + K, self.capacity)

    def sample(self) -> Transitions:
        """Sample a batch of batch_size transitions, some of which get a new desired goal."""
        batch = super().sample()
        changed_K = np.flatnonzero(self.rng.random(self.batch_size) < self.share)
        return self._relabel_goals(batch, changed_K, self._draw_goal_rows(batch.row_B[changed_K]))

    def _draw_goal_rows(self, row_K: np.ndarray) -> np.ndarray:
        """For each transition in the rows row_K [K], draw the row of a transition of the same episode.

        The new goal is the goal that was achieved after the transition in the drawn row.
        """
        # numbers of the transitions in order of addition, where row = number mod capacity
        number_K = self.seen - 1 - (self.seen - 1 - row_K) % self.capacity
        end_K = self.columns["end"][row_K]
        if self.strategy == "final":
            return (end_K - 1) % self.capacity
        oldest = self.seen - self.size
        first_K = number_K if self.strategy == "future" else np.maximum(self.columns["begin"][row_K], oldest)
        return self.rng.integers(first_K, end_K) % self.capacity

    def _observations(self, row_B: np.ndarray) -> Tensor:
        """Return raw observations, which are normalised after some have got a new goal."""
        return as_tensor(self.store.observations(row_B))

    def _next_observations(self, row_B: np.ndarray) -> Tensor:
        return as_tensor(self.store.next_observations(row_B))

    def _relabel_goals(self, batch: Transitions, changed_K: np.ndarray, goal_row_K: np.ndarray) -> Transitions:
        """Give the transitions changed_K [K] of a batch new desired goals, recompute the rewards, and return the batch.

        The new goals were achieved after the transitions in rows goal_row_K [K].
        """
        assert self.goal_reward is not None
        goal_KG = np.asarray(self.store.next_observations(goal_row_K))[:, self._achieved]
        obs_B, next_obs_B = batch.obs_B.numpy(), batch.next_obs_B.numpy()  # copies of the stored rows
        obs_B[changed_K, self._desired] = goal_KG
        next_obs_B[changed_K, self._desired] = goal_KG
        reward_B, terminated_B = self.goal_reward(next_obs_B[:, self._achieved], next_obs_B[:, self._desired])
        batch.reward_B.numpy()[:] = reward_B
        if terminated_B is not None:
            batch.terminated_B.numpy()[changed_K] = terminated_B[changed_K]
        if self.obs_normalizer is None:
            return batch
        return batch._replace(
            obs_B=apply_transform(self.obs_normalizer, obs_B), next_obs_B=apply_transform(self.obs_normalizer, next_obs_B)
        )

    def contents(self) -> dict[str, Any]:
        """Return the stored transitions, and the transitions of unfinished episodes."""
        rows = [(n, row) for n, episode in enumerate(self._open) for row in episode]
        fields = {name: torch.from_numpy(np.array([getattr(row, name) for _, row in rows])) for name in RecordedStep._fields}
        return {**super().contents(), "observed": self.observed, "open": {"env": [n for n, _ in rows], **fields}}

    def load_contents(self, state: dict[str, Any]) -> None:
        super().load_contents(state)
        self.observed, kept = int(state["observed"]), state["open"]
        self._open = [[] for _ in self._open]
        columns = [kept[name].numpy() for name in RecordedStep._fields]
        for n, obs, action, reward, terminated, truncated, next_obs in zip(kept["env"], *columns, strict=True):
            self._open[n].append(RecordedStep(obs, action, float(reward), bool(terminated), bool(truncated), next_obs))
