"""CartPole envs with faults: they block, leave a child process running, or change the working directory."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class Faulty(CartPoleEnv):
    """CartPole with faults.

    Args:
        folder: folder in which the env records its actions.
        blocks: "constructor", "reset", "step" or "close": the place where the env sleeps forever. after: number of steps before that.
        copies: number of copies that block, counted over all processes; the first ones to reach the place do.
        simulator: if not empty, the env starts a child process; it "ends" it in close() and waits for it, or "forgets" it.
        chdir: whether the env changes the working directory.
    """

    def __init__(
        self, folder: str, blocks: str = "", after: int = 0, copies: int = 1, simulator: str = "", chdir: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.folder, self.simulator, self.left = Path(folder), simulator, after
        self.blocks, self.copies = blocks, copies
        if simulator:
            self.process = subprocess.Popen(["sleep", "1000"])
            (self.folder / f"simulator_{self.process.pid}").touch()
        if chdir:
            os.chdir(self.folder / "elsewhere")
        self._block("constructor")

    def _first(self, copies: int) -> bool:
        for copy in range(copies):
            try:
                os.close(os.open(self.folder / f"copy_{copy}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False

    def _block(self, where: str) -> None:
        if self.blocks == where and self.left <= 0 and self._first(self.copies):
            (self.folder / "blocks").touch()
            while True:
                time.sleep(1000)

    def reset(self, **options: Any) -> Any:
        self._block("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.left -= 1
        self._block("step")
        return super().step(action)

    def close(self) -> None:
        self._block("close")
        if self.simulator == "ends":
            self.process.terminate()
            self.process.wait()


class Slow(CartPoleEnv):
    """CartPole without a known random baseline, which takes a while to measure."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


gym.register("Flawed-v0", entry_point=Faulty, max_episode_steps=500)
gym.register("Slow-v0", entry_point=Slow, max_episode_steps=20)
