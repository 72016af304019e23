"""Env with nested actions of several kinds: a move, its strength and two switches."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Hybrid(gym.Env[Any, Any]):
    """The observation shows a move (of 3), a strength (0 to 4) and two switches; the reward is 1 if the action repeats all of them.

    The reward is the mean of the rewards for each part of the action. With `mask` two of the three moves are valid, and an invalid move
    raises an error. `kinds` lists the parts of the action. With `hidden` the move stays the same during an episode and is shown only in
    its first observation.
    """

    def __init__(self, mask: bool = False, kinds: str = "move strength switches", hidden: bool = False, length: int = 10) -> None:
        self._mask, self._kinds, self._hidden, self._length = mask, kinds.split(), hidden, length
        aim = spaces.Dict({"strength": spaces.Box(0.0, 4.0, (1,), np.float32), "switches": spaces.MultiBinary(2)})
        every: dict[str, spaces.Space[Any]] = {"aim": spaces.Tuple((aim["strength"], aim["switches"])), "move": spaces.Discrete(3, start=1)}
        if self._kinds != ["move", "strength", "switches"]:
            every = {kind: every["move"] if kind == "move" else aim[kind] for kind in self._kinds}
        self.action_space = spaces.Dict(every)
        seen = spaces.Box(0.0, 4.0, (6,), np.float32)
        self.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "seen": seen}) if mask else seen

    def _observe(self, begins: bool) -> Any:
        if begins or not self._hidden:
            self._move = int(self.np_random.integers(3))
        self._strength = np.float32(self.np_random.uniform(0, 4))
        self._switches = self.np_random.integers(2, size=2)
        one_hot = np.eye(3)[self._move] * (begins or not self._hidden)
        seen = np.concatenate([one_hot, [self._strength], self._switches]).astype(np.float32)
        if not self._mask:
            return seen
        self._valid = np.ones(3, np.int8)
        self._valid[(self._move + 1) % 3] = 0
        return {"seen": seen, "action_mask": self._valid}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(True), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        strength, switches = action["aim"] if "aim" in action else (action.get("strength"), action.get("switches"))
        rewards = []
        if "move" in action:
            if self._mask and not self._valid[action["move"] - 1]:
                raise RuntimeError(f"the invalid move {action['move']}")
            rewards.append(float(action["move"] - 1 == self._move))
        if strength is not None:
            rewards.append(1.0 - abs(float(strength[0]) - float(self._strength)) / 4.0)
        if switches is not None:
            rewards.append(float(np.mean(switches == self._switches)))
        self._steps += 1
        return self._observe(False), float(np.mean(rewards)), False, self._steps >= self._length, {}


gym.register(id="Hybrid-v0", entry_point=Hybrid)
