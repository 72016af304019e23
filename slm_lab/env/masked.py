"""CartPole with hidden velocities, a partially observable env for recurrent policies: `slm_lab.env.masked:MaskedCartPole-v1`.

A policy without memory observes one position and one angle, and cannot infer in which direction the pole falls.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

POSITIONS = [0, 2]
"""Indices of cart position (m) and pole angle (rad) in CartPole's four observations."""


class MaskedCartPole(CartPoleEnv):
    """CartPole with observations float32 [2]: cart position and pole angle. Dynamics, rewards and terminations are CartPole-v1's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # twice the termination limits, as in CartPole, so that the last observation is within the bounds
        bounds = 2 * np.array([self.x_threshold, self.theta_threshold_radians], dtype=np.float32)
        self.observation_space = gym.spaces.Box(-bounds, bounds)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[POSITIONS], info

    def step(self, action: int | np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]  # Gymnasium leaves it untyped
        return obs[POSITIONS], reward, terminated, truncated, info


gym.register(id="MaskedCartPole-v1", entry_point=MaskedCartPole, max_episode_steps=500, reward_threshold=475.0)
