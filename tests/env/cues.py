"""Env with a known best return, `tests.env.cues:Cue-v0`; the argument `form` chooses the observation space that shows the cue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEPS = 8
"""Steps of an episode, and its best return; the mean return of random actions is 8 / 3."""


def _rows(shape: tuple[int, ...], dtype: Any, high: float, axis: int = 0, channel: int | None = None) -> Callable[[int], np.ndarray]:
    """Return a function that draws cue 0, 1 or 2 by filling one third of an axis, in one channel (of the last axis) or in all."""

    def draw(cue: int) -> np.ndarray:
        array = np.zeros(shape, dtype)
        place: list[Any] = [slice(None)] * len(shape)
        third = shape[axis] // 3
        place[axis] = slice(third * cue, third * cue + third)
        if channel is not None:
            place[-1] = channel
        array[tuple(place)] = high
        return array

    return draw


def _planes(cue: int) -> np.ndarray:
    planes = np.zeros((8, 8, 12), np.uint8)
    planes[0, :, cue] = 1
    return planes


def _form(shape: tuple[int, ...], dtype: Any, high: float, **where: Any) -> tuple[spaces.Space[Any], Callable[[int], Any]]:
    return spaces.Box(0, high, shape, dtype), _rows(shape, dtype, high, **where)


FORMS: dict[str, tuple[spaces.Space[Any], Callable[[int], Any]]] = {
    "vector": (spaces.Box(0.0, 1.0, (3,), np.float32), lambda cue: np.eye(3, dtype=np.float32)[cue]),
    "image": _form((24, 24, 3), np.uint8, 255),
    "grey": _form((24, 20), np.uint8, 255),
    "board": _form((3, 3), np.uint8, 2),
    "board_int": _form((3, 3), np.int64, 2),
    "planes": (spaces.Box(0, 1, (8, 8, 12), np.uint8), _planes),
    "codes": _form((9, 9, 3), np.int64, 10),
    "channels_2": _form((20, 24, 2), np.uint8, 255, channel=0),
    "channels_6": _form((20, 24, 6), np.uint8, 255, channel=0),
    "channels_12": _form((20, 24, 12), np.uint8, 255, channel=0),
    "floats": _form((24, 24, 3), np.float32, 1.0),
    "floats_255": _form((24, 24, 3), np.float32, 255.0),
    "ram": _form((128,), np.uint8, 255),
}


class Cue(gym.Env[Any, int]):
    """The reward is 1 if the action is the number that the observation shows."""

    def __init__(self, form: str = "vector") -> None:
        self.observation_space, self._draw = FORMS[form]
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._cue = 0, int(self.np_random.integers(3))
        return self._draw(self._cue), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(int(action) == self._cue)
        self._t, self._cue = self._t + 1, int(self.np_random.integers(3))
        return self._draw(self._cue), reward, self._t >= STEPS, False, {}


gym.register(id="Cue-v0", entry_point=Cue)
