"""Interface of env backends, and the description of the envs that a backend builds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration

from slm_lab.env.atari import AtariSettings, frame_limit
from slm_lab.env.curriculum import Curriculum

if TYPE_CHECKING:
    from slm_lab.env.wrappers import ConfiguredWrapper


@dataclass(frozen=True)
class EnvRequest:
    """Description of the envs that a backend must build: id, constructor arguments, wrappers, number of envs."""

    id: str
    """Env id as given in the spec, including the module prefix if the id has a prefix."""
    registration: Registration | None
    """Gymnasium's registration of the id; None for an id that is not registered with Gymnasium, such as an id of EnvPool."""
    kwargs: dict[str, Any]
    """Arguments of the env's constructor; empty if `atari` contains the arguments."""
    num_envs: int
    atari: AtariSettings | None = None
    """Settings of ALE ids with the usual preprocessing; None for other envs."""
    max_t: int | None = None
    threads: int = 1
    """Number of threads that a C++ backend may use."""
    wraps: tuple[ConfiguredWrapper, ...] = ()
    """Wrappers to apply to each env, innermost first."""
    track_info: tuple[str, ...] = ()
    """Entries of the env's info to report at the end of an episode."""
    action_mask: str | Literal[False] | None = None
    """Entry of the observation or of the env's info that contains the action mask; False: no mask is used; None: the spec does not give
    env.action_mask."""
    curriculum: Curriculum | None = None
    """Arguments and attributes of the envs that change when an episode ends; None if the spec has no env.schedule."""
    critic_keys: tuple[str, ...] = ()
    """Entries of the observation that only the critic receives."""

    @property
    def plain_id(self) -> str:
        """The id without the module prefix."""
        return self.id.rpartition(":")[2]

    @property
    def entry_point(self) -> str:
        """Import path of the env's class; "" if the entry point is not a string."""
        entry = self.registration.entry_point if self.registration else None
        return entry if isinstance(entry, str) else ""

    @property
    def vector_only(self) -> bool:
        """Whether only a vector env, and no single env, is registered for the id."""
        return self.registration is not None and self.registration.entry_point is None

    @property
    def main_module_reason(self) -> str | None:
        """The reason why other processes cannot build the env (its class is defined in the main script); None if other processes can build
        the env."""
        entry = self.registration.entry_point if self.registration else None
        module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")
        if "__main__" not in (module, self.id.rpartition(":")[0]):
            return None
        return (
            f"{self.plain_id} is defined in the script that runs (__main__), which other processes do not import; "
            f'move the class and its registration to a module and name the env "package.module:{self.plain_id}"'
        )

    @property
    def time_limit(self) -> int | None:
        """Number of steps until truncation: the minimum of the env's own limit and max_t; None if there is no limit."""
        own = self.registration.max_episode_steps if self.registration else None
        return min((limit for limit in (own, self.max_t) if limit is not None), default=None)

    @property
    def max_steps(self) -> int | None:
        """Number of agent steps until truncation (in Atari, an agent step has several frames); None if episodes are not limited."""
        return self.time_limit if self.atari is None else -(-frame_limit(self.atari, self.max_t) // self.atari.frameskip)


class RawStep(NamedTuple):
    """Result of one step of N envs, as returned by a backend."""

    obs: Any
    """Batch of observations in the env's own space."""
    reward_N: np.ndarray
    """float [N]: rewards of the envs, without scaling or clipping."""
    terminated_N: np.ndarray
    """bool [N]."""
    truncated_N: np.ndarray
    """bool [N]; may be true together with terminated_N."""
    final: list[tuple[int, Any]] | None
    """Index and last observation of each env that was reset within this step. An env whose episode ended, but which is not in `final`, is
    reset by the next step. In the step that resets the env, its row is not a transition."""
    lives_N: np.ndarray | None = None
    """int64 [N]: remaining lives (Atari)."""


Outcome = tuple[Any, Any, Any, Any, Any]
"""The result of `gymnasium.Env.step`: observation, reward, terminated, truncated, info."""


class AgentGroup(NamedTuple):
    """A group of agents with equal spaces, in an env whose agents have different spaces."""

    agents: tuple[str, ...]
    """Names of the agents, in the order of their rows."""
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


class SingleEnvBackend(Protocol):
    """Interface of a backend with a single env, for callers that step the env directly instead of a batch of size 1."""

    env: Any

    def gather(self, outcomes: Iterable[Any]) -> RawStep:
        """Convert the results of `env.step` to a RawStep, and reset the env if its episode ended. Raises InvalidOutcome."""


class Backend(ABC):
    """Base class of env backends. A backend steps `num_envs` envs together.

    A user's own backend is a subclass that the spec names in env.backend as "package.module:Class".
    """

    name: ClassVar[str] = ""
    """Name of the backend in a spec (env.backend); empty for a user's own backend."""
    applies_wraps: ClassVar[bool] = False
    """Whether the backend applies `EnvRequest.wraps`. A backend with `applies_wraps = False` is not used for envs with wrappers."""
    selects_parts: ClassVar[bool] = False
    """Whether the backend applies env.obs_keys (one of the `EnvRequest.wraps`), even though it applies no other wrapper."""
    reports_info: ClassVar[bool] = True
    """Whether `episode_info` can return entries. With `reports_info = False`, meta.track_info in the spec is an error."""
    finds_masks: ClassVar[bool] = True
    """Whether the backend adds the action mask to the observations if EnvRequest.action_mask names an entry of info."""
    follows_curriculum: ClassVar[bool] = False
    """Whether the backend applies the current values of EnvRequest.curriculum to an env when it resets the env."""
    lone: SingleEnvBackend | None = None
    """Access to the backend's single env, for callers that step this env without a batch. None unless the backend has exactly one env, the
    env's observation space is a Box, and the env's action is a row of the batch of actions."""
    fresh: bool = False
    """Whether step and reset return new arrays that are not modified later."""
    checks: bool = False
    """Whether step and reset always return arrays of the right shapes and types. `Env` checks the arrays of a backend with `checks =
    False`."""
    agents: tuple[str, ...] = ()
    """Names of the agents of each env, in the order of the env's rows. Batches of observations, rewards and actions have num_envs ·
    len(agents) rows, with row = env · len(agents) + agent. Empty for envs with one agent, which have one row each."""
    groups: tuple[AgentGroup, ...] = ()
    """For envs with several agents whose spaces differ: the groups of agents with equal spaces, in the order of their first agents. If
    `groups` is not empty, observations and actions are tuples with one batch per group, which contains the rows of the group's agents, and
    all other arrays contain the rows of all agents. If `groups` is empty, all agents have the spaces `observation_space` and
    `action_space`."""
    acts_N: np.ndarray | None = None
    """For envs with several agents, bool [N]: whether the next step uses the action of the row. Each reset and step sets this attribute.
    None means that the next step uses the actions of all rows."""
    present_N: np.ndarray | None = None
    """For envs with several agents, bool [N]: whether the agent of the row takes part in the episode. Each reset and step sets this
    attribute. An agent that has left the episode, or has not joined it yet, does not act, and the values of its row have no meaning. None
    means that all agents take part."""
    max_steps: int | None = None
    """Number of steps until truncation, if this number differs from Gymnasium's registration of the env."""
    observation_space: gym.Space[Any]
    """Space of one env; with `groups`, the Dict of the agents' spaces by name."""
    action_space: gym.Space[Any]
    """Space of one env; with `groups`, the Dict of the agents' spaces by name."""

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        """Return the reason why this backend cannot build the requested envs; None if the backend can build the envs."""
        return None

    @classmethod
    def variant(cls, target: EnvRequest) -> type[Backend]:
        """Return the backend class that builds the requested envs: this class, or its subclass for certain envs."""
        return cls

    @classmethod
    def preferred(cls, target: EnvRequest) -> bool:
        """Return whether `env.backend="auto"` should choose this backend if the backend supports the requested envs."""
        return True

    @abstractmethod
    def __init__(self, target: EnvRequest) -> None: ...

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None) -> Any:
        """Begin an episode in every env and return the observations. Args: seeds: one seed per env, or None to leave the envs' random
        streams unseeded."""

    @abstractmethod
    def step(self, action: np.ndarray) -> RawStep:
        """Step every env. Args: action: [N, …], a batch of `action_space`. Raises RuntimeError, or the env's own error, if an env fails."""

    def episode_info(self, row: int) -> Mapping[str, Any]:
        """Return the env's info of the last step of the episode that has just ended in a row of the batch. The result is empty if the
        backend has no info."""
        return {}

    def rng_states(self) -> list[dict[str, Any]] | None:
        """Return the states of the envs' random streams as plain Python objects; None if the backend does not expose these states."""
        return None

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of the envs' random streams that `rng_states` returned."""
        raise NotImplementedError(f"{type(self).__name__} does not support restoring random states")

    def episode_state(self) -> Any:
        """Return the state of the running episodes as plain Python objects; None if the backend does not expose this state."""
        return None

    def set_episode_state(self, state: Any) -> None:
        """Restore the state of the running episodes that `episode_state` returned. The caller has already reset the envs and restored their
        random streams."""
        raise NotImplementedError(f"{type(self).__name__} does not support restoring episode state")

    @abstractmethod
    def close(self) -> None:
        """Close the envs and end their processes within a bounded time."""
