"""Common interface of PettingZoo's parallel and AEC envs: which agents are present, which agents act next, and what each agent observes."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from slm_lab.env.arguments import WrapperError
from slm_lab.env.outcome import InvalidOutcome, InvalidReward, reward_to_float, to_bool, value_text
from slm_lab.spec.compat.env_ids import pettingzoo_envs


class Result(NamedTuple):
    """Result of a step: the rewards of the agents that took part in the step, and the names of the agents whose episodes terminated or were
    truncated."""

    rewards: dict[str, float]
    terminated: list[str]
    truncated: list[str]


class Game(ABC):
    """Base class of adapters for PettingZoo's envs. A game consists of an env, the agents that take part in the episode, the agents that
    act next, and the observations of the agents.

    Attributes: present: agents that currently take part in the episode. acts: agents in `present` whose action the next step uses. obs,
    infos: last observation and info of each agent that has taken part in the episode.
    """

    def __init__(self, env: Any, agents: Sequence[str]) -> None:
        self.env, self._possible_agents = env, tuple(agents)
        self.present: list[str] = []
        self.acts: list[str] = []
        self.obs: dict[str, Any] = {}
        self.infos: dict[str, Mapping[str, Any]] = {}
        self._ended: set[str] = set()

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Begin an episode. Raises InvalidOutcome."""

    @abstractmethod
    def step(self, actions: Mapping[str, Any]) -> Result:
        """Step the env with the actions of the agents in `acts`. Raises InvalidOutcome."""

    def _begin(self) -> None:
        self._ended = set()
        self.present, self.obs, self.infos = list(self.env.agents), {}, {}
        self._check_agent_names(self.present, "env.agents")
        if not self.present:
            raise InvalidOutcome("env.agents is empty after reset; expected the agents that take part")

    def _check_agent_names(self, names: Iterable[Any], where: str) -> None:
        if unknown := [name for name in names if name not in self._possible_agents]:
            possible = ", ".join(map(str, self._possible_agents))
            raise InvalidOutcome(f"{where} has an unknown agent {unknown[0]!r}; env.possible_agents: {possible}")

    def _record_step_result(self, rewards: Mapping[str, Any], terminated: Mapping[str, Any], truncated: Mapping[str, Any]) -> Result:
        """Return the result of a step for the agents that took part in the step, and record the agents whose episodes ended."""
        over = {name: self._flags(name, terminated, truncated) for name in self.present}
        checked_rewards = {name: _reward(name, rewards) for name in self.present}
        ended = [name for name, flags in over.items() if any(flags)]
        self._ended.update(ended)
        return Result(checked_rewards, [name for name in ended if over[name][0]], [name for name in ended if not over[name][0]])

    @staticmethod
    def _flags(name: str, terminated: Mapping[str, Any], truncated: Mapping[str, Any]) -> tuple[bool, bool]:
        for flags, kind in ((terminated, "terminated"), (truncated, "truncated")):
            if name not in flags:
                raise InvalidOutcome(f"agent {name!r} has no entry in {kind}")
        return to_bool(terminated[name], f"terminated of agent {name!r}"), to_bool(truncated[name], f"truncated of agent {name!r}")

    def _remaining_agents(self) -> list[str]:
        """Return the agents that take part in the next step, according to `env.agents`."""
        live = list(self.env.agents)
        self._check_agent_names(live, "env.agents")
        return [name for name in live if name not in self._ended]


class ParallelGame(Game):
    """Game of a `pettingzoo.ParallelEnv`, whose agents act simultaneously."""

    def reset(self, seed: int) -> None:
        result = self.env.reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Mapping) for part in result)):
            raise InvalidOutcome(f"reset returned {value_text(result)}; expected (observations, infos), dicts by agent")
        self._begin()
        self._store_observations(*result)
        self.acts = self.present

    def _store_observations(self, obs: Mapping[str, Any], infos: Mapping[str, Any]) -> None:
        """Store the observations and infos of the agents that take part in the episode. Raises InvalidOutcome."""
        self._check_agent_names(obs, "the dict of observations")
        for name in self.present:
            if name not in obs or obs[name] is None:
                raise InvalidOutcome(f"agent {name!r} has no observation")
            self.obs[name], self.infos[name] = obs[name], infos.get(name) or {}

    def step(self, actions: Mapping[str, Any]) -> Result:
        outcome = self.env.step({name: actions[name] for name in self.acts})
        if not (isinstance(outcome, tuple) and len(outcome) == 5 and all(isinstance(part, Mapping) for part in outcome)):
            wanted = "(observations, rewards, terminated, truncated, infos), dicts by agent"
            raise InvalidOutcome(f"step returned {value_text(outcome)}; expected {wanted}")
        obs, rewards, terminated, truncated, infos = outcome
        for part, what in ((rewards, "rewards"), (terminated, "terminated"), (truncated, "truncated")):
            self._check_agent_names(part, f"the dict of {what}")
        self._store_observations(obs, infos)
        before, result = self.present, self._record_step_result(rewards, terminated, truncated)
        self.present = self.acts = self._remaining_agents()
        going = [name for name in before if name not in self._ended]
        if left := [name for name in going if name not in self.present]:
            raise InvalidOutcome(f"agent {left[0]!r} has left env.agents, but is neither terminated nor truncated")
        if going and (late := [name for name in self.env.agents if name in self._ended]):
            raise InvalidOutcome(f"agent {late[0]!r} is in env.agents after its episode has ended; expected the agent to leave")
        if len(self.present) > len(going):  # agents have joined
            self._store_observations(obs, infos)
        return result


class TurnGame(Game):
    """Game of a `pettingzoo.AECEnv`, in which only the agent that `env.agent_selection` names acts while the other agents wait."""

    def reset(self, seed: int) -> None:
        self.env.reset(seed=seed)
        self._begin()
        self._observe_agents()
        self._select_next_agent()

    def _observe_agents(self) -> None:
        infos = self.env.infos
        for name in self.present:
            self.obs[name], self.infos[name] = self.env.observe(name), infos.get(name) or {}
            if self.obs[name] is None:
                raise InvalidOutcome(f"agent {name!r} has no observation")

    def _select_next_agent(self) -> None:
        """Set the attribute `acts` to a list of the agent that acts next. Raises InvalidOutcome."""
        name = self.env.agent_selection
        if name in self._ended:
            raise InvalidOutcome(f"agent {name!r} is to act (env.agent_selection) after its episode has ended")
        if name not in self.present:
            raise InvalidOutcome(f"env.agent_selection is {name!r}; expected one of env.agents: {', '.join(map(str, self.present))}")
        self.acts = [name]

    def step(self, actions: Mapping[str, Any]) -> Result:
        (name,) = self.acts
        self.env.step(actions[name])
        rewards, terminated, truncated = self.env.rewards, self.env.terminations, self.env.truncations
        self._check_agent_names(rewards, "env.rewards")
        self._observe_agents()
        result = self._record_step_result(rewards, terminated, truncated)
        removed = self._step_ended_agents()
        self.present = self._remaining_agents()
        if removed and self.present:
            self._observe_agents()
        if self.present:
            self._select_next_agent()
        return result

    def _step_ended_agents(self) -> bool:
        """Step the env with the action None for each agent whose episode has ended, as AEC requires. Return whether there was at least one
        such step."""
        count = 0
        while self.env.agents and (name := self.env.agent_selection) in self._ended:
            if not (self.env.terminations.get(name) or self.env.truncations.get(name)) or count > len(self._possible_agents):
                break
            self.env.step(None)
            count += 1
        return count > 0


def _reward(name: str, rewards: Mapping[str, Any]) -> float:
    """Return the checked reward of an agent. Raises InvalidOutcome."""
    if name not in rewards:
        raise InvalidOutcome(f"agent {name!r} has no reward")
    try:
        reward = reward_to_float(rewards[name])
    except InvalidReward:
        reward = float("nan")
    if not isfinite(reward):
        raise InvalidReward(f"agent {name!r} has the reward {value_text(rewards[name])}; expected a finite number")
    return reward


def pettingzoo_constructor(name: str) -> Callable[..., Any]:
    """Return the constructor of an env of PettingZoo or mpe2, or of a user's class with one of PettingZoo's interfaces. Raises
    WrapperError, ImportError."""
    if ":" not in name:
        env = pettingzoo_envs()[name]
        if env.kind != "mpe2":
            return partial(_make_registered_env, env.kind, env.id)
        name = f"mpe2.{env.id}:parallel_env"
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise WrapperError("name", f"{module} has no {path!r}; expected a class or function that returns an env of PettingZoo")
        found = getattr(found, part)
    creator: Callable[..., Any] = found
    return creator


def _make_registered_env(kind: Any, id_: str, **kwargs: Any) -> Any:
    """Build an env that is registered with PettingZoo. Raises ImportError if a package that the env needs is missing."""
    import pettingzoo
    from pettingzoo.env_registry.exceptions import FailedToImport

    try:
        return pettingzoo.make(kind, id_, **kwargs)
    except FailedToImport as error:
        raise ImportError(str(error)) from error


def wrap_game(env: Any, agents: Sequence[str], id_: str) -> Game:
    """Return a ParallelGame for an env with PettingZoo's parallel interface, or a TurnGame for an env with the AEC interface. Raises
    WrapperError for envs of other types."""
    from pettingzoo import AECEnv, ParallelEnv

    if isinstance(env, ParallelEnv):
        return ParallelGame(env, agents)
    if isinstance(env, AECEnv):
        return TurnGame(env, agents)
    raise WrapperError(
        "name", f"{id_} makes a value of the type {type(env).__name__}; expected a pettingzoo.ParallelEnv or a pettingzoo.AECEnv"
    )


def possible_agents(env: Any, id_: str) -> tuple[Any, ...]:
    """Return the names of all agents that may take part in an env (`env.possible_agents`). Raises WrapperError if the env does not have
    this attribute."""
    wrap_game(env, (), id_)
    agents = tuple(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise WrapperError("name", f"{id_} has no env.possible_agents; expected the names of all agents that may take part")
    return agents
