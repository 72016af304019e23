"""Envs with action masks, which raise an error for an invalid action, and an env with an entry for the critic only."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Forbidding(gym.Env[Any, Any]):
    """Two of 40 actions are valid in each step; the reward is 1 for the one that the observation indicates (the lower or the higher).

    The observation is a Dict of a vector and the mask. If `where` is "info", it is the vector alone, and the mask is in info. With `pixels`
    an image replaces the vector. With `silent_end` the info of the last step of an episode is empty.
    """

    ACTIONS = 40

    def __init__(
        self,
        where: str = "obs",
        pixels: bool = False,
        key: str = "action_mask",
        length: int = 20,
        empty_after: int = 0,
        silent_end: bool = False,
    ) -> None:
        self._where, self._pixels, self._key, self._length, self._empty_after = where, pixels, key, length, empty_after
        self._silent_end = silent_end
        self.action_space = spaces.Discrete(self.ACTIONS)
        seen: Any = spaces.Box(0, 255, (3, 12, 12), np.uint8) if pixels else spaces.Box(-1, 1, (2,), np.float32)
        mask = spaces.Box(0, 1, (self.ACTIONS,), np.int8)
        self.observation_space = spaces.Dict({"seen": seen, key: mask}) if where == "obs" else seen

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        self._valid = self.np_random.choice(self.ACTIONS, 2, replace=False)
        self._best = int(self.np_random.integers(2))
        mask = np.zeros(self.ACTIONS, np.int8)
        if not self._empty_after or self._steps < self._empty_after:
            mask[np.sort(self._valid)] = 1
        sign = 1 if np.sort(self._valid)[0] == self._valid[self._best] else -1  # 1: the lower valid action is right; −1: the higher
        seen = np.full((3, 12, 12), 255 if sign > 0 else 0, np.uint8) if self._pixels else np.array([sign, 0.5], np.float32)
        if self._where == "obs":
            return {"seen": seen, self._key: mask}, {}
        return seen, {self._key: mask.astype(bool)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if int(action) not in self._valid.tolist():
            raise RuntimeError(f"invalid action {action}; valid: {self._valid}")
        reward = float(int(action) == self._valid[self._best])
        self._steps += 1
        obs, info = self._observe()
        over = self._steps >= self._length
        return obs, reward, over, False, {} if over and self._silent_end else info


class Components(gym.Env[Any, Any]):
    """Multi-discrete actions with 3 and 4 choices; the mask has one entry per choice, or one per combination if `joint`."""

    NVEC = (3, 4)

    def __init__(self, joint: bool = False) -> None:
        self._joint = joint
        self.action_space = spaces.MultiDiscrete(self.NVEC)
        shape = self.NVEC if joint else (sum(self.NVEC),)
        self.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(shape), "seen": spaces.Box(-1, 1, (2,), np.float32)})

    def _observe(self) -> dict[str, Any]:
        allowed = self.np_random.random(self.NVEC) < 0.5 if self._joint else np.outer(*(self._some(n) for n in self.NVEC))
        if not allowed.any():
            allowed[1, 2] = True
        self._allowed = allowed
        mask = allowed if self._joint else np.concatenate([allowed.any(1), allowed.any(0)])
        return {"action_mask": mask.astype(np.int8), "seen": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def _some(self, n: int) -> np.ndarray:
        some = self.np_random.random(n) < 0.5
        some[self.np_random.integers(n)] = True
        return some

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self._allowed[tuple(action)]:
            raise RuntimeError(f"invalid action {action}")
        self._steps += 1
        return self._observe(), float(action[0] == 0), self._steps >= 15, False, {}


class Privileged(gym.Env[Any, Any]):
    """Random observations with the entries "secret" (for the critic) and "state"; the reward is the first number of the action."""

    def __init__(self) -> None:
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        box = spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = spaces.Dict({"secret": box, "state": spaces.Box(-1, 1, (2,), np.float32)})

    def _observe(self) -> dict[str, Any]:
        return {key: self.np_random.uniform(-1, 1, space.shape).astype(np.float32) for key, space in self.observation_space.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observe(), float(action[0]), self._steps >= 20, False, {}


gym.register("Forbidding-v0", entry_point="tests.env.masked:Forbidding")


def vector(num_envs: int, where: str = "info", **kwargs: Any) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Return Forbidding as a vector env with the masks in its infos or in its observations."""
    return gym.vector.SyncVectorEnv([lambda: Forbidding(where=where)] * num_envs)


gym.register("ForbiddingVector-v0", vector_entry_point="tests.env.masked:vector")
gym.register("Components-v0", entry_point="tests.env.masked:Components")
gym.register("Privileged-v0", entry_point="tests.env.masked:Privileged")
