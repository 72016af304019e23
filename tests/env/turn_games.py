"""Multi-agent backends for tests: a game of two players in turn, and Gymnasium's envs with a list of one agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.gym_backends import Sync


class Duel(Backend):
    """Game of two players in turn: each move adds 0 to 2 to a sum; the player who reaches `goal` or more gets 1, the other −1.

    The observation is (sum / goal, 1 if it is the player's turn, else 0). Env e begins with player e mod 2. The env is reset within the
    step that ends a game.
    """

    agents = ("left", "right")
    returns_new_arrays = returns_valid_arrays = True
    observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, target: EnvRequest) -> None:
        self.num_envs, self.goal = target.num_envs, int(target.kwargs.get("goal", 5))
        self.sum_E, self.turn_E = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        self.games = 0

    def _observe(self) -> np.ndarray:
        acts_N = (np.arange(2) == self.turn_E[:, None]).ravel()
        self.acts_N = acts_N
        return np.stack([np.repeat(self.sum_E / self.goal, 2), acts_N], axis=1).astype(np.float32)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        self.sum_E[:], self.turn_E[:] = 0, np.arange(self.num_envs) % 2
        return self._observe()

    def step(self, action: np.ndarray) -> RawStep:
        E, reward_EA = np.arange(self.num_envs), np.zeros((self.num_envs, 2))
        self.sum_E += action.reshape(-1, 2)[E, self.turn_E]
        over_E = self.sum_E >= self.goal
        reward_EA[over_E] = -1.0
        reward_EA[over_E, self.turn_E[over_E]] = 1.0
        self.turn_E = 1 - self.turn_E
        last = self._observe()
        final = [(int(row), last[row].copy()) for row in np.flatnonzero(np.repeat(over_E, 2))]
        self.sum_E[over_E], self.turn_E[over_E] = 0, E[over_E] % 2
        over_N = np.repeat(over_E, 2)
        return RawStep(self._observe(), reward_EA.ravel(), over_N, np.zeros_like(over_N), final)

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [{}] * self.num_envs

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        pass

    def episode_state(self) -> Any:
        return {"sum": self.sum_E.tolist(), "turn": self.turn_E.tolist()}

    def set_episode_state(self, state: Any) -> None:
        self.sum_E[:], self.turn_E[:] = state["sum"], state["turn"]
        self._observe()

    def close(self) -> None:
        pass


class OneAgent(Sync):
    """Gymnasium's envs as multi-agent envs with one agent."""

    agents = ("agent",)
    name = ""
