"""Examples of user-defined backends: the observation counts the steps, and episodes are truncated after four steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from slm_lab.env import Backend, EnvRequest, RawStep


class Counting(Backend):
    returns_new_arrays = True

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        return None if target.plain_id == "Counting-v0" else "not a counting env"

    def __init__(self, target: EnvRequest) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,))
        self.action_space = spaces.Discrete(2)
        self.start = float(target.kwargs.get("start", 0))
        self.t_N = np.zeros(target.num_envs, np.int64)

    def observe(self) -> np.ndarray:
        return (self.start + self.t_N[:, None]).astype(np.float32)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self.t_N[:] = 0
        return self.observe()

    def step(self, action: np.ndarray) -> RawStep:
        self.t_N += 1
        last, truncated_N = self.observe(), self.t_N >= 4
        self.t_N[truncated_N] = 0
        final = [(int(i), last[i]) for i in np.flatnonzero(truncated_N)]
        return RawStep(self.observe(), np.ones(len(self.t_N)), np.zeros(len(self.t_N), bool), truncated_N, final)

    def rng_states(self) -> list[dict[str, Any]]:
        return []

    def set_rng_states(self, states: list[dict[str, Any]]) -> None: ...

    def episode_state(self) -> Any:
        return self.t_N.tolist()

    def set_episode_state(self, state: Any) -> None:
        self.t_N[:] = state

    def close(self) -> None: ...


class Hidden(Counting):
    """Does not expose the random streams of its envs; `reset` adds random numbers, which the seeds determine, to the observations."""

    def reset(self, seeds: Sequence[int] | None) -> Any:
        if seeds is not None:
            self.rngs = [np.random.default_rng(seed) for seed in seeds]
        return super().reset(seeds) + np.array([[rng.random()] for rng in self.rngs], np.float32)

    def rng_states(self) -> None:  # type: ignore[override]
        return None


class Partial(Backend):
    """Lacks the required methods."""


class Pairs(Counting):
    """Two agents per env, of which only the second acts."""

    agents = ("a", "b")

    def __init__(self, target: EnvRequest) -> None:
        super().__init__(target)
        self.t_N = np.zeros(2 * target.num_envs, np.int64)
        self.acts_N = np.tile([False, True], target.num_envs)


NOT_ONE = 3
