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
    """Env id as in the spec, including a module prefix such as "package.module:" if the id has a prefix."""
    registration: Registration | None
    """Gymnasium's registration of the id, or None for an id that is not registered with Gymnasium, such as an id of EnvPool."""
    kwargs: dict[str, Any]
    """Arguments of the env's constructor. The dict is empty if `atari` contains the arguments."""
    num_envs: int
    atari: AtariSettings | None = None
    """Settings of an ALE env with the usual Atari preprocessing, or None for other envs."""
    max_t: int | None = None
    threads: int = 1
    """Number of threads that a C++ backend may use."""
    wraps: tuple[ConfiguredWrapper, ...] = ()
    """Wrappers to apply to each env, innermost first."""
    track_info: tuple[str, ...] = ()
    """Entries of the env's info to report at the end of an episode."""
    action_mask: str | Literal[False] | None = None
    """Name of the entry of the observation or of the env's info that contains the action mask, False if no mask is used, or None if the
    spec does not give env.action_mask."""
    curriculum: Curriculum | None = None
    """Arguments and attributes of the envs that change when an episode ends, or None if the spec has no env.schedule."""
    critic_keys: tuple[str, ...] = ()
    """Entries of the observation that only the critic receives."""
    staggers_episodes: bool = False
    """Whether the first episode of env i is truncated after (i + 1) / num_envs of the time limit."""

    @property
    def plain_id(self) -> str:
        """The env id without the module prefix, such as "CartPole-v1" for "package.module:CartPole-v1"."""
        return self.id.rpartition(":")[2]

    @property
    def entry_point(self) -> str:
        """Import path of the env's class, or "" if the entry point is not a string."""
        entry = self.registration.entry_point if self.registration else None
        return entry if isinstance(entry, str) else ""

    @property
    def vector_only(self) -> bool:
        """Whether Gymnasium has registered only a vector env, and no single env, for the env id."""
        return self.registration is not None and self.registration.entry_point is None

    @property
    def main_module_reason(self) -> str | None:
        """The reason why other processes cannot build the env (its class is defined in the main script), or None if other processes can
        build the env."""
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
        """Number of steps until truncation, which is the minimum of the env's own limit and max_t, or None if there is no limit."""
        own = self.registration.max_episode_steps if self.registration else None
        return min((limit for limit in (own, self.max_t) if limit is not None), default=None)

    @property
    def max_steps(self) -> int | None:
        """Number of agent steps until truncation (in Atari, an agent step has several frames), or None if episodes are not limited."""
        return self.time_limit if self.atari is None else -(-frame_limit(self.atari, self.max_t) // self.atari.frameskip)


class RawStep(NamedTuple):
    """Result of one step of N envs, as returned by a backend."""

    obs: Any
    """Batch of observations in the env's own space."""
    reward_N: np.ndarray
    """float [N]: rewards of the envs, without scaling or clipping."""
    terminated_N: np.ndarray
    """bool [N]: whether each env's episode terminated."""
    truncated_N: np.ndarray
    """bool [N]: whether each env's episode was truncated. Both terminated_N and truncated_N may be true for an env."""
    final: list[tuple[int, Any]] | None
    """Index and last observation of each env that was reset within this step. An env whose episode ended and that is not in `final` is
    reset by the next step. The env's row of that next step is not a transition."""
    lives_N: np.ndarray | None = None
    """int64 [N]: remaining lives (Atari)."""
    shortened_N: np.ndarray | None = None
    """bool [N]: whether each env's episode was truncated early because of env.stagger_episodes; None if none was. The returns of these
    episodes are not reported."""


Outcome = tuple[Any, Any, Any, Any, Any]
"""The result of `gymnasium.Env.step`: observation, reward, terminated, truncated, info."""


class AgentGroup(NamedTuple):
    """A group of agents with equal spaces, in an env whose agents have different spaces."""

    agents: tuple[str, ...]
    """Names of the agents, in the order of their rows in batches."""
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


class SingleEnvBackend(Protocol):
    """Interface of a backend with a single env, for callers that step the env itself, without arrays of batch size 1."""

    env: Any

    def finish_step(self, outcomes: Iterable[Any]) -> RawStep:
        """Convert the result of one call of `env.step` to a RawStep, and reset the env if its episode ended.

        Args: outcomes: iterable with this result as its only element. Raises InvalidOutcome.
        """


class Backend(ABC):
    """Base class of env backends. A backend steps `num_envs` envs together.

    A user's own backend is a subclass that the spec names in env.backend as "package.module:Class".
    """

    name: ClassVar[str] = ""
    """Name of the backend in a spec (env.backend), or "" for a user's own backend."""
    applies_wraps: ClassVar[bool] = False
    """Whether the backend applies `EnvRequest.wraps`. A backend with `applies_wraps = False` is not used for envs with wrappers."""
    selects_parts: ClassVar[bool] = False
    """Whether the backend restricts Dict observations to the entries that env.obs_keys names, even though the backend applies no other
    wrapper of `EnvRequest.wraps`."""
    reports_info: ClassVar[bool] = True
    """Whether `episode_info` can return entries. With `reports_info = False`, meta.track_info in the spec is an error."""
    finds_masks: ClassVar[bool] = True
    """Whether the backend adds the action mask to the observations if EnvRequest.action_mask names an entry of info."""
    staggers_episodes: ClassVar[bool] = False
    """Whether the backend applies EnvRequest.staggers_episodes."""
    follows_curriculum: ClassVar[bool] = False
    """Whether the backend applies the current values of EnvRequest.curriculum to an env when it resets the env."""
    single_env: SingleEnvBackend | None = None
    """Interface to the backend's single env, for callers that step this env without a batch. A backend sets `single_env` only if it has
    exactly one env, the env's observation space is a Box, and the env's action is a row of the batch of actions."""
    returns_new_arrays: bool = False
    """Whether `step` and `reset` return new arrays, which the backend does not modify later."""
    returns_valid_arrays: bool = False
    """Whether `step` and `reset` always return arrays of the right shapes and types. `Env` checks the arrays of all other backends."""
    agents: tuple[str, ...] = ()
    """Names of the agents of each env, in the order of the env's rows, or () for envs with one agent. Batches of observations, rewards and
    actions have one row per agent of each env: agent i of env e has the row e · len(agents) + i."""
    groups: tuple[AgentGroup, ...] = ()
    """For envs with several agents whose spaces differ: the groups of agents with equal spaces, in the order of their first agents. If
    `groups` is not empty, observations and actions are tuples with one batch per group of agents, and all other arrays contain the rows of
    all agents. If `groups` is empty, all agents have the spaces `observation_space` and `action_space`."""
    acts_N: np.ndarray | None = None
    """For envs with several agents, bool [N]: whether the next step uses the action of each row, or None if the next step uses the actions
    of all rows. Each reset and step sets `acts_N`."""
    present_N: np.ndarray | None = None
    """For envs with several agents, bool [N]: whether the agent of each row takes part in the episode, or None if all agents take part.
    Each reset and step sets `present_N`. An agent that has left the episode, or has not yet joined the episode, does not act, and the
    values of its row have no meaning."""
    max_steps: int | None = None
    """Number of steps until truncation, or None if this number is `EnvRequest.max_steps`."""
    observation_space: gym.Space[Any]
    """Observation space of one env. If `groups` is not empty, a Dict with the observation space of each agent by name."""
    action_space: gym.Space[Any]
    """Action space of one env. If `groups` is not empty, a Dict with the action space of each agent by name."""

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        """Return the reason why this backend cannot build the requested envs, or None if the backend can build the envs."""
        return None

    @classmethod
    def backend_class_for(cls, target: EnvRequest) -> type[Backend]:
        """Return the backend class that builds the requested envs: this class, or its subclass for certain envs."""
        return cls

    @classmethod
    def is_preferred(cls, target: EnvRequest) -> bool:
        """Return whether `env.backend="auto"` should choose this backend for requested envs that the backend supports."""
        return True

    @abstractmethod
    def __init__(self, target: EnvRequest) -> None: ...

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None) -> Any:
        """Begin an episode in every env and return the observations.

        Args: seeds: one seed per env, or None to continue the envs' random streams.
        """

    @abstractmethod
    def step(self, action: np.ndarray) -> RawStep:
        """Step every env.

        Args: action: [N, …], a batch of `action_space`. Raises RuntimeError, or the env's own error, if an env fails.
        """

    def episode_info(self, row: int) -> Mapping[str, Any]:
        """Return the env's info from the last step of the episode that has just ended in the row `row`, or an empty mapping if the backend
        does not report infos."""
        return {}

    def rng_states(self) -> list[dict[str, Any]] | None:
        """Return the states of the envs' random streams as plain Python objects, or None if the backend does not expose these states."""
        return None

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of the envs' random streams that `rng_states` returned."""
        raise NotImplementedError(f"{type(self).__name__} does not support restoring random states")

    def episode_state(self) -> Any:
        """Return the state of the running episodes as plain Python objects, or None if the backend does not expose this state."""
        return None

    def set_episode_state(self, state: Any) -> None:
        """Restore the state of the running episodes that `episode_state` returned. The caller must first reset the envs and restore their
        random streams."""
        raise NotImplementedError(f"{type(self).__name__} does not support restoring episode state")

    @abstractmethod
    def close(self) -> None:
        """Close the envs and end their processes within a bounded time."""
