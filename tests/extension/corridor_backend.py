"""A user's env backend in one file: all corridors are one numpy array, and walking right ends the episode with a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from slm_lab.env import Backend
from slm_lab.env.backend import EnvRequest, RawStep

LENGTH = 6


class Corridors(Backend):
    """Observation: position 0 … LENGTH as a one-hot vector. Action 1 moves right, 0 left. Reward: −0.1 per step, +1 at the end."""

    returns_new_arrays = True

    def __init__(self, target: EnvRequest) -> None:
        self.position_N = np.zeros(target.num_envs, np.int64)
        self.steps_N = np.zeros(target.num_envs, np.int64)
        self.limit = target.time_limit or 50
        self.observation_space = gym.spaces.Box(0.0, 1.0, (LENGTH + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self.position_N[:], self.steps_N[:] = 0, 0
        return self._obs()

    def step(self, action: np.ndarray) -> RawStep:
        self.position_N = np.maximum(self.position_N + np.where(action == 1, 1, -1), 0)
        self.steps_N += 1
        terminated_N = self.position_N == LENGTH
        truncated_N = (self.steps_N >= self.limit) & ~terminated_N
        reward_N = np.where(terminated_N, 1.0, -0.1)
        obs = self._obs()
        final = [(int(n), obs[n].copy()) for n in np.flatnonzero(terminated_N | truncated_N)]
        over_N = terminated_N | truncated_N
        self.position_N[over_N], self.steps_N[over_N] = 0, 0
        return RawStep(self._obs(), reward_N, terminated_N, truncated_N, final)

    def close(self) -> None: ...

    def _obs(self) -> np.ndarray:
        return np.eye(LENGTH + 1, dtype=np.float32)[self.position_N]
