"""An env with 40 actions, two of which are valid, for comparisons of masked PPO: `bench.masked_env:TwoOf40-v0`.

This module needs only Gymnasium.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

ACTIONS, LENGTH = 40, 200
_ROWS = 4096


class TwoOf40(gym.Env[Any, Any]):
    """Observations are float32 [4]. The reward is 1 for one of the two valid actions. A step costs as little as possible in Python.

    The mask, bool [40], is in info["action_mask"]. The method `action_masks` returns the mask for libraries that call this method.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        pairs = np.sort(rng.permuted(np.tile(np.arange(ACTIONS), (_ROWS, 1)), axis=1)[:, :2], axis=1)
        self._masks = np.zeros((_ROWS, ACTIONS), np.bool_)
        self._masks[np.arange(_ROWS)[:, None], pairs] = True
        self._obs = rng.uniform(-1.0, 1.0, (_ROWS, 4)).astype(np.float32)
        self._best = pairs[np.arange(_ROWS), (self._obs[:, 0] > 0).astype(int)].tolist()
        self._at = self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._at, self._steps = int(self.np_random.integers(_ROWS)), 0
        return self._obs[self._at], {"action_mask": self._masks[self._at]}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not self._masks[self._at, action]:
            raise ValueError(f"invalid action {action}")
        reward = float(action == self._best[self._at])
        self._at, self._steps = (self._at + 1) % _ROWS, self._steps + 1
        return self._obs[self._at], reward, False, self._steps >= LENGTH, {"action_mask": self._masks[self._at]}

    def action_masks(self) -> np.ndarray:
        """Return the mask of the current observation."""
        mask: np.ndarray = self._masks[self._at]
        return mask


gym.register("TwoOf40-v0", entry_point="bench.masked_env:TwoOf40")
