"""What a backend owes the rest of the room, and what it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration

from slm_lab.env.atari import AtariSettings


@dataclass(frozen=True)
class Target:
    """Which envs to build."""

    id: str
    """As the user wrote it, with a module in front if there is one."""
    registration: Registration | None
    """Gymnasium's; None for an id that only the backend knows."""
    kwargs: dict[str, Any]
    """Of the env's constructor; empty where `atari` holds them."""
    num_envs: int
    atari: AtariSettings | None = None
    """Set for ALE ids with the usual preprocessing."""
    max_t: int | None = None
    threads: int = 1
    """Threads that a backend in C++ may use."""

    @property
    def plain_id(self) -> str:
        """Without the module."""
        return self.id.rpartition(":")[2]

    @property
    def entry_point(self) -> str:
        """Where Gymnasium finds the class, "" where it is an object."""
        entry = self.registration.entry_point if self.registration else None
        return entry if isinstance(entry, str) else ""

    @property
    def time_limit(self) -> int | None:
        """Steps to truncation: the env's own limit or max_t, whichever is less."""
        own = self.registration.max_episode_steps if self.registration else None
        return min((limit for limit in (own, self.max_t) if limit is not None), default=None)


class RawStep(NamedTuple):
    """One step as the backend saw it."""

    obs: Any
    """Batch of observations in the env's own form."""
    reward_N: np.ndarray
    """Raw."""
    terminated_N: np.ndarray
    truncated_N: np.ndarray
    """May be true together with terminated_N."""
    final: list[tuple[int, Any]] | None
    """Envs that were reset within this step, each with the last observation of the episode that ended. An env that ended
    and is not here is reset by the next step, which is a dummy row."""
    lives_N: np.ndarray | None = None
    """Atari: lives left."""


class Backend(ABC):
    """Steps num_envs envs at once."""

    name: ClassVar[str]
    fresh: bool = False
    """Step and reset return arrays that nobody writes to later."""
    observation_space: gym.Space[Any]
    """Of one env."""
    action_space: gym.Space[Any]
    """Of one env."""

    @classmethod
    @abstractmethod
    def refuses(cls, target: Target) -> str | None:
        """Why this backend cannot build the target; None if it can."""

    @classmethod
    def pays(cls, target: Target) -> bool:
        """Whether `auto` should take it where it can build the target."""
        return True

    @abstractmethod
    def __init__(self, target: Target) -> None: ...

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None) -> Any:
        """Begin an episode everywhere; one seed per env, or None to go on with the random streams as they are."""

    @abstractmethod
    def step(self, action: np.ndarray) -> RawStep:
        """Raises RuntimeError where an env failed."""

    def rng_states(self) -> list[dict[str, Any]] | None:
        """States of the envs' random streams, None where the backend does not show them."""
        return None

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        """Put back what rng_states() gave."""
        raise NotImplementedError(f"backend {self.name} does not show its random streams")

    @abstractmethod
    def close(self) -> None:
        """Free everything; never hangs."""
