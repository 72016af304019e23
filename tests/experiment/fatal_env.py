"""CartPole envs that end the process in which they run, raise errors in it, or change its signal handlers or torch's settings."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import torch
from gymnasium.envs.classic_control import CartPoleEnv


def _throw(error: BaseException) -> NoReturn:
    raise error


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _set_torch() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)


DEEDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "KeyboardInterrupt": lambda: _throw(KeyboardInterrupt()),
    "GeneratorExit": lambda: _throw(GeneratorExit()),
    "ValueError": lambda: _throw(ValueError("the reason")),
    "ignores signals": _ignore_signals,
    "sets torch": _set_torch,
}


class Fatal(CartPoleEnv):
    """CartPole that executes the action named `does` at `where`: in its "constructor", in step number `after`, or in "close".

    Only copy number `copy` does so; the copies count themselves with files in `folder`. With folder "", every copy does so. Each Session
    builds two copies, the first one for its trial step.
    """

    def __init__(self, does: str, where: str = "step", after: int = 70, folder: str = "", copy: int = 0) -> None:
        super().__init__()
        own = not folder or self._number(Path(folder)) == copy
        self.does, self.where, self.left = DEEDS[does if own else "nothing"], where, after
        self._reach("constructor")

    def _number(self, folder: Path) -> int:
        """Return how many copies were made before this one, in all processes."""
        for number in count():
            try:
                (folder / f"copy_{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return number
        raise AssertionError

    def _reach(self, where: str) -> None:
        if where == self.where:
            self.does()

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self._reach("step")
        return super().step(action)

    def close(self) -> None:
        self._reach("close")


gym.register("Fatal-v0", entry_point=Fatal, max_episode_steps=500)
