"""CartPole and Pendulum with hidden velocities, partially observable envs for recurrent policies.

In `slm_lab.env.masked:MaskedCartPole-v1`, the cart position and pole angle alone do not show the direction in which the pole falls. In
`slm_lab.env.masked:MaskedPendulum-v1`, the angle alone does not show the direction in which the pendulum swings. A policy without memory
cannot infer these directions.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv

POSITIONS = [0, 2]
"""Indices of cart position (m) and pole angle (rad) among the four numbers of CartPole's observation."""


class MaskedCartPole(CartPoleEnv):
    """CartPole with observations float32 [2]: cart position and pole angle. MaskedCartPole has the dynamics, rewards and terminations of
    CartPole-v1."""

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


class MaskedPendulum(PendulumEnv):
    """Pendulum with observations float32 [2]: cosine and sine of the angle. MaskedPendulum has the dynamics and rewards of Pendulum-v1."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[:2], info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]  # Gymnasium leaves it untyped
        return obs[:2], reward, terminated, truncated, info


gym.register(id="MaskedPendulum-v1", entry_point=MaskedPendulum, max_episode_steps=200)
gym.register(id="MaskedCartPole-v1", entry_point=MaskedCartPole, max_episode_steps=500, reward_threshold=475.0)
