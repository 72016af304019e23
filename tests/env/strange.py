"""Envs with invalid return values of many kinds. Importing this module registers them: `tests.env.strange:Strange-v0`."""

from __future__ import annotations

import random
import threading
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from slm_lab.env import Backend, EnvRequest, RawStep

PREFIX = "tests.env.strange:"
SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "bytes": spaces.Box(0, 255, (3,), np.uint8),
    "discrete": spaces.Discrete(3, start=1),
    "multi": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(2),
    "dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2,), np.float32), "b": spaces.Discrete(3)}),
    "tuple": spaces.Tuple((spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3))),
}
GOOD: dict[str, Any] = {
    "box": np.zeros(3, np.float32),
    "bytes": np.zeros(3, np.uint8),
    "discrete": 1,
    "multi": np.array([1, 2]),
    "bits": np.array([0, 1], np.int8),
    "dict": {"a": np.zeros(2, np.float32), "b": 1},
    "tuple": (np.zeros(2, np.float32), 1),
}
ZEROS = np.zeros(3, np.float32)
OBSERVATIONS: dict[str, tuple[str, Any]] = {
    "another shape": ("box", np.zeros(4, np.float32)),
    "a column": ("box", np.zeros((3, 1), np.float32)),
    "one number": ("box", 0.5),
    "none": ("box", None),
    "text": ("box", "abc"),
    "texts": ("box", np.array(["a", "b", "c"])),
    "objects": ("box", np.array([None, 1, 2], object)),
    "complex": ("box", np.zeros(3, np.complex64)),
    "ragged": ("box", [0.0, [1.0, 2.0], 3.0]),
    "dict for a box": ("box", {"a": 1}),
    "too large for bytes": ("bytes", np.array([0, 1, 256])),
    "negative for bytes": ("bytes", np.array([0, 1, -1])),
    "fraction for bytes": ("bytes", np.array([0, 1, 0.5])),
    "below": ("discrete", 0),
    "above": ("discrete", 4),
    "far above": ("discrete", 10**30),
    "fraction": ("discrete", 1.5),
    "digit": ("discrete", "1"),
    "array for a number": ("discrete", np.array([1, 2])),
    "spill": ("multi", np.array([2, 0])),
    "negative": ("multi", np.array([0, -1])),
    "three": ("multi", np.array([0, 1, 1])),
    "two": ("bits", np.array([0, 2], np.int8)),
    "minus one": ("bits", np.array([0, -1], np.int8)),
    "part of another shape": ("dict", {"a": np.zeros(3, np.float32), "b": 1}),
    "part outside": ("dict", {"a": np.zeros(2, np.float32), "b": 3}),
    "no part": ("dict", {"a": np.zeros(2, np.float32)}),
    "array for a dict": ("dict", np.zeros(3, np.float32)),
    "short tuple": ("tuple", (np.zeros(2, np.float32),)),
    "item outside": ("tuple", (np.zeros(2, np.float32), -1)),
}
"""Name → space of the env, and an observation that is not in this space."""
FITTING: dict[str, tuple[str, Any]] = {
    "list": ("box", [0.25, 0.5, 0.75]),
    "tuple": ("box", (0.25, 0.5, 0.75)),
    "float64": ("box", np.array([0.25, 0.5, 0.75])),
    "ints": ("box", np.array([1, 2, 3])),
    "bools": ("box", np.array([True, False, True])),
    "outside of the bounds": ("box", np.array([9.0, -9.0, 1e6], np.float32)),
    "ints for bytes": ("bytes", np.array([0, 7, 255])),
    "whole floats for bytes": ("bytes", np.array([0.0, 7.0, 255.0])),
    "list of a dict": ("dict", {"a": [0.25, 0.5], "b": np.int32(2), "more": None}),
    "array of no dimension": ("discrete", np.array(2)),
    "list for a tuple": ("tuple", [np.zeros(2), np.int16(1)]),
}
STEPS: dict[str, Any] = {
    "four values": (ZEROS, 1.0, False, {}),
    "six values": (ZEROS, 1.0, False, False, {}, {}),
    "nothing": None,
    "an array": ZEROS,
    "text reward": (ZEROS, "1.0", False, False, {}),
    "no reward": (ZEROS, None, False, False, {}),
    "vector reward": (ZEROS, np.array([1.0, 2.0]), False, False, {}),
    "complex reward": (ZEROS, 1j, False, False, {}),
    "huge reward": (ZEROS, 10**400, False, False, {}),
    "text truncated": (ZEROS, 1.0, False, "yes", {}),
    "array terminated": (ZEROS, 1.0, np.array([True, False]), False, {}),
    "no terminated": (ZEROS, 1.0, None, False, {}),
    "no info": (ZEROS, 1.0, False, False, None),
    "list for info": (ZEROS, 1.0, False, False, []),
}
"""Name → invalid return value of step."""
FITTING_STEPS: dict[str, Any] = {
    "list": [ZEROS, 2.0, False, False, {}],
    "reward in an array": (ZEROS, np.array([2.0]), False, False, {}),
    "reward of no dimension": (ZEROS, np.array(2.0), False, False, {}),
    "numpy's numbers": (ZEROS, np.float32(2.0), np.bool_(False), np.bool_(False), {}),
    "whole number": (ZEROS, 2, 0, 0, {}),
    "flag in an array": (ZEROS, 2.0, np.array([False]), np.array(False), {}),
    "info that cannot be pickled": (ZEROS, 2.0, False, False, {"lock": threading.Lock()}),
}


class Strange(gym.Env[Any, Any]):
    """Returns the value named by `obs`, `step` or `reset` from step `at` on (0: from the first reset on), and valid values before."""

    action_space = spaces.Discrete(2)

    def __init__(self, obs: str = "", step: str = "", reset: str = "", at: int = 3, fault: str = "") -> None:
        self.space, self.strange = (OBSERVATIONS | FITTING).get(obs, ("box", None))
        self.observation_space = SPACES[self.space]
        self.obs, self.outcome, self.reset_kind, self.at, self.fault, self.n = obs, step, reset, at, fault, 0

    def observe(self) -> Any:
        return self.strange if self.obs and self.n >= self.at else GOOD[self.space]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if self.reset_kind and self.n >= self.at:
            return {"only the observation": ZEROS, "nothing": None, "no info": (ZEROS, None)}[self.reset_kind]
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.n += 1
        if self.fault == "step" and self.n >= self.at:
            raise ValueError("the robot fell over")
        if self.outcome and self.n >= self.at:
            return (STEPS | FITTING_STEPS)[self.outcome]
        return self.observe(), 1.0, bool(self.reset_kind) and self.n >= self.at, False, {}

    def close(self) -> None:
        if self.fault == "close":
            raise ValueError("it cannot be closed")


class NoSeed(Strange):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Drawing(Strange):
    """Draws rewards from the process-wide random generators of Python and numpy."""

    def step(self, action: Any) -> Any:
        return ZEROS, random.random() + np.random.random(), False, False, {}


class StrangeVector(VectorEnv[Any, Any, Any]):
    """A vector env with invalid return values; `fault` names the kind."""

    def __init__(self, num_envs: int, fault: str = "", max_episode_steps: int = 9) -> None:
        self.num_envs, self.kind, self.metadata = num_envs, fault, {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = SPACES["dict" if fault == "part" else "box"], Strange.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        obs = np.zeros((self.num_envs, 3), np.float32)
        return obs if self.kind == "reset" else (self._part(1) if self.kind == "part" else obs, {})

    def _part(self, number: int) -> dict[str, Any]:
        return {"a": np.zeros((self.num_envs, 2), np.float32), "b": np.full(self.num_envs, number)}

    def step(self, actions: Any) -> Any:
        n = self.num_envs
        obs: Any = self._part(7) if self.kind == "part" else np.zeros((n, 3), np.float32)
        reward: Any = np.ones(n)
        over: Any = np.zeros(n, bool)
        match self.kind:
            case "width":
                obs = np.zeros((n, 4), np.float32)
            case "length":
                obs = np.zeros((n + 1, 3), np.float32)
            case "one reward":
                reward = 1.0
            case "column of rewards":
                reward = np.ones((n, 1))
            case "short flags":
                over = np.zeros(n - 1, bool)
            case "no last observation":
                over = np.ones(n, bool)
            case "four":
                return obs, reward, over, {}
        return obs, reward, over, np.zeros(n, bool), {}


class StrangeBackend(Backend):
    """A user-defined backend with invalid return values; `kind` names the kind."""

    def __init__(self, target: EnvRequest) -> None:
        self.observation_space, self.action_space = SPACES["box"], Strange.action_space
        self.kind, self.n = target.kwargs["kind"], target.num_envs

    def reset(self, seeds: Any) -> Any:
        return np.zeros((self.n, 4 if self.kind == "reset" else 3), np.float32)

    def step(self, action: np.ndarray) -> Any:
        no_N, good = (
            np.zeros(self.n, bool),
            RawStep(np.zeros((self.n, 3)), np.ones(self.n), np.zeros(self.n, bool), np.zeros(self.n, bool), None),
        )
        return {
            "tuple": tuple(good)[:4],
            "shape": good._replace(obs=np.zeros((self.n, 3, 1))),
            "rewards": good._replace(reward_N=["1"] * self.n),
            "final": good._replace(terminated_N=~no_N, final=[(self.n, ZEROS)]),
            "final shape": good._replace(terminated_N=~no_N, final=[(0, np.zeros(1))]),
            "going": good._replace(final=[(0, ZEROS)]),
            "lives": good._replace(lives_N=3),
            "lists": good._replace(
                obs=[[0, 0, 0]] * self.n, reward_N=[1] * self.n, terminated_N=[0] * self.n, truncated_N=[False] * self.n
            ),
        }.get(self.kind, good)

    def close(self) -> None: ...


for entry in (Strange, NoSeed, Drawing):
    gym.register(f"{entry.__name__}-v0", entry_point=f"tests.env.strange:{entry.__name__}", max_episode_steps=9)
gym.register("Vector-v0", entry_point=Strange, vector_entry_point=StrangeVector)
