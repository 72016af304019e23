"""CartPole whose first step in a process creates a file, for bench.startup."""

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class Marked(CartPoleEnv):
    """CartPole whose first step creates a file in `folder`, with the process id as its name."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self._mark: Path | None = Path(folder) / str(os.getpid())

    def step(self, action: Any) -> Any:
        if self._mark is not None:
            self._mark.touch()
            self._mark = None
        return super().step(action)  # type: ignore[no-untyped-call]  # Gymnasium leaves it untyped


gym.register("Marked-v0", entry_point="bench.startup_env:Marked", max_episode_steps=500)
