"""Bit flipping, the goal env of hindsight experience replay (arXiv:1707.01495, section 3.1): `slm_lab.env.bit_flip:BitFlip-v0`.

An action flips one of n bits. The reward is 0 if all bits equal the bits of the goal, else −1. With many bits, an agent that explores at
random almost never reaches the goal and therefore receives no reward other than −1.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class BitFlip(gym.Env[dict[str, np.ndarray], int]):
    """Env with a state of n bits and a goal of n bits, both drawn uniformly at random. An episode terminates at the goal, and is truncated
    after n steps.

    An observation is a Dict of three arrays int8 [n]: `observation` and `achieved_goal`, which both contain the state, and `desired_goal`.
    `info["is_success"]` says whether the state equals the goal.
    """

    def __init__(self, n: int = 15) -> None:
        bits = gym.spaces.MultiBinary(n)
        self.observation_space: Any = gym.spaces.Dict({"achieved_goal": bits, "desired_goal": bits, "observation": bits})
        self.action_space: Any = gym.spaces.Discrete(n)
        self.n = n

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.goal = (self.np_random.integers(0, 2, self.n, np.int8) for _ in range(2))
        self.steps = 0
        return self._observation(), {"is_success": False}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.state = self.state.copy()
        self.state[action] ^= 1
        self.steps += 1
        reached = bool(self.compute_terminated(self.state, self.goal, {}))
        return self._observation(), float(reached) - 1.0, reached, not reached and self.steps >= self.n, {"is_success": reached}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Return the rewards, float32 [...], for achieved and desired goals [..., n]: 0 where the achieved goal equals the desired goal,
        else −1."""
        return np.asarray(self.compute_terminated(achieved_goal, desired_goal, info) - 1.0, np.float32)

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Return whether each achieved goal equals its desired goal, bool [...], for achieved and desired goals [..., n]."""
        return np.asarray((achieved_goal == desired_goal).all(-1))

    def _observation(self) -> dict[str, np.ndarray]:
        return {"achieved_goal": self.state, "desired_goal": self.goal, "observation": self.state}


gym.register(id="BitFlip-v0", entry_point=f"{__name__}:BitFlip")
