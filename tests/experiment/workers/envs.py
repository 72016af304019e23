"""Envs with faults. Importing this module registers them: `tests.experiment.workers.envs:Blocking-v0`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from tests.env.toys import Toy

Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]
SIMULATOR = [sys.executable, "-c", "import time; time.sleep(600)"]


class Blocking(Toy):
    """Blocks in `where` ("constructor", "reset" or "step") in the first `times` processes that get there.

    `folder` holds a file for each process that has blocked.
    """

    def __init__(self, folder: str, where: str, times: int = 1000, at_step: int = 20) -> None:
        super().__init__()
        self.folder, self.where, self.times, self.left = Path(folder), where, times, at_step
        self._block("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._block("reset")
        return super().reset(seed=seed)

    def step(self, action: int) -> Step:
        self.left -= 1
        if self.left < 0:
            self._block("step")
        return super().step(action)

    def _block(self, where: str) -> None:
        if where == self.where and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            while True:
                try:
                    time.sleep(600)
                except Exception:  # simulates code that catches all exceptions
                    continue


class RunsSimulator(Toy):
    """Starts a simulator, ends it with terminate(), waits for it, and starts another one, which close() ends if `tidy`.

    `folder` holds a file named after the process id of each simulator.
    """

    def __init__(self, folder: str, tidy: bool = True) -> None:
        super().__init__()
        self.folder, self.tidy = Path(folder), tidy
        self.simulator = self._start()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:  # true only for the first reset
            self._end()
            self.simulator = self._start()
        return super().reset(seed=seed)

    def close(self) -> None:
        if self.tidy:
            self._end()
            (self.folder / f"{self.simulator.pid}.closed").touch()

    def _start(self) -> subprocess.Popen[bytes]:
        simulator = subprocess.Popen(SIMULATOR)
        (self.folder / str(simulator.pid)).touch()
        return simulator

    def _end(self) -> None:
        self.simulator.terminate()
        self.simulator.wait()


class NotFinite(Toy):
    """Observations contain an infinite number at random, with probability `rate`, or NaN, with probability `nan`."""

    def __init__(self, rate: float, nan: float = 0.0) -> None:
        super().__init__(reuse=False)
        self.rate, self.nan = rate, nan

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return self._spoiled(obs), info

    def step(self, action: int) -> Step:
        obs, *rest = super().step(action)
        return self._spoiled(obs), *rest  # type: ignore[return-value]

    def _spoiled(self, obs: np.ndarray) -> np.ndarray:
        if self.np_random.random() < self.rate:
            obs[1] = self.np_random.choice([np.inf, -np.inf])
        if self.np_random.random() < self.nan:
            obs[1] = np.nan
        return obs


for kind in (Blocking, RunsSimulator, NotFinite):
    gym.register(f"{kind.__name__}-v0", entry_point=f"{__name__}:{kind.__name__}", max_episode_steps=50)
