"""Env `tests.agent.both_parts:BothParts-v0`: only a policy that uses both the image and the vector of the observation can solve it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class BothParts(gym.Env[Any, Any]):
    """Env of 32 steps, each with a reward of at most 1. The image encodes one bit, the vector another bit.

    The first bit decides which half of the image is bright, the second bit decides the sign of the first entry of the vector. The correct
    action is the exclusive or of both bits. With `multi` there are two actions with a reward of 0.5 each: the exclusive or, and whether
    both bits are set. A policy that uses one of the bits or none has a mean return of at most 16 (with `multi` 20).
    """

    STEPS = 32

    def __init__(self, multi: bool = False) -> None:
        self.observation_space = spaces.Dict({"screen": spaces.Box(0, 255, (9, 8, 1), np.uint8), "signs": spaces.Box(-1, 1, (2,))})
        self.multi = multi
        self.action_space: spaces.Space[Any] = spaces.MultiDiscrete([2, 2]) if multi else spaces.Discrete(2)
        self.bits = np.zeros(2, np.int64)
        self.t = 0

    def _observe(self) -> dict[str, np.ndarray]:
        self.bits = self.np_random.integers(2, size=2)
        screen = self.np_random.integers(100, size=(9, 8, 1), dtype=np.uint8)
        screen[:, 4 * self.bits[0] :][:, :4] += 100
        sign, other = 2.0 * self.bits[1] - 1.0, self.np_random.uniform(-1.0, 1.0)
        return {"screen": screen, "signs": np.array([sign * self.np_random.uniform(0.2, 1.0), other], np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        one, other = self.bits
        right = np.array([one ^ other, one & other])[: 2 if self.multi else 1]
        self.t += 1
        return self._observe(), float(np.mean(np.asarray(action).reshape(-1) == right)), self.t == self.STEPS, False, {}


gym.register("BothParts-v0", entry_point="tests.agent.both_parts:BothParts")
