"""PettingZoo's envs (arXiv:2009.14471), whose agents act at once (parallel) or in turn (AEC): each agent is a row."""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from slm_lab.env.arguments import WrapperError
from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.mask_from_info import MASK_KEYS, mask_entry, missing_entry_message, not_discrete_message, undeclared_message
from slm_lab.env.outcome import InvalidOutcome, InvalidReward, fitted, flag, number, reraise, shown
from slm_lab.env.spaces import number_of_choices
from slm_lab.env.wrappers import Parts
from slm_lab.spec.compat.env_ids import PETTINGZOO, pettingzoo_envs, pettingzoo_id

_LONGEST = 100_000
"""Steps of an episode whose actions are kept, to save it."""
STATE = "state"
"""Entry of an observation with the state of the env, which all its agents share."""


class Result(NamedTuple):
    """What a step gave the agents that were present."""

    rewards: dict[str, float]
    terminated: list[str]
    truncated: list[str]


class _Game(ABC):
    """An env with the agents that are present, which act next, and their observations.

    Attributes: present: agents that take part in the episode. acts: those of them whose action the next step uses. obs, infos: of all
    agents that have been present in the episode.
    """

    def __init__(self, env: Any, agents: Sequence[str]) -> None:
        self.env, self._known = env, tuple(agents)
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
        """Step with the actions of `acts`. Raises InvalidOutcome."""

    def _begin(self) -> None:
        self._ended = set()
        self.present, self.obs, self.infos = list(self.env.agents), {}, {}
        self._check_names(self.present, "env.agents")
        if not self.present:
            raise InvalidOutcome("env.agents is empty after reset; expected the agents that take part")

    def _check_names(self, names: Iterable[Any], where: str) -> None:
        if unknown := [name for name in names if name not in self._known]:
            raise InvalidOutcome(f"{where} has an unknown agent {unknown[0]!r}; env.possible_agents: {', '.join(map(str, self._known))}")

    def _result(self, rewards: Mapping[str, Any], terminated: Mapping[str, Any], truncated: Mapping[str, Any]) -> Result:
        """Return the result for the agents that were present, and remove those whose episode ended."""
        over = {name: self._flags(name, terminated, truncated) for name in self.present}
        given = {name: _reward(name, rewards) for name in self.present}
        ended = [name for name, flags in over.items() if any(flags)]
        self._ended.update(ended)
        return Result(given, [name for name in ended if over[name][0]], [name for name in ended if not over[name][0]])

    @staticmethod
    def _flags(name: str, terminated: Mapping[str, Any], truncated: Mapping[str, Any]) -> tuple[bool, bool]:
        for flags, kind in ((terminated, "terminated"), (truncated, "truncated")):
            if name not in flags:
                raise InvalidOutcome(f"agent {name!r} has no entry in {kind}")
        return flag(terminated[name], f"terminated of agent {name!r}"), flag(truncated[name], f"truncated of agent {name!r}")

    def _live(self) -> list[str]:
        """Return the agents that take part in the next step, according to the env."""
        live = list(self.env.agents)
        self._check_names(live, "env.agents")
        return [name for name in live if name not in self._ended]


class _Parallel(_Game):
    """A `pettingzoo.ParallelEnv`."""

    def reset(self, seed: int) -> None:
        result = self.env.reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Mapping) for part in result)):
            raise InvalidOutcome(f"reset returned {shown(result)}; expected (observations, infos), dicts by agent")
        self._begin()
        self._note(*result)
        self.acts = self.present

    def _note(self, obs: Mapping[str, Any], infos: Mapping[str, Any]) -> None:
        """Keep the observations and infos of the agents that are present."""
        self._check_names(obs, "the dict of observations")
        for name in self.present:
            if name not in obs or obs[name] is None:
                raise InvalidOutcome(f"agent {name!r} has no observation")
            self.obs[name], self.infos[name] = obs[name], infos.get(name) or {}

    def step(self, actions: Mapping[str, Any]) -> Result:
        outcome = self.env.step({name: actions[name] for name in self.acts})
        if not (isinstance(outcome, tuple) and len(outcome) == 5 and all(isinstance(part, Mapping) for part in outcome)):
            wanted = "(observations, rewards, terminated, truncated, infos), dicts by agent"
            raise InvalidOutcome(f"step returned {shown(outcome)}; expected {wanted}")
        obs, rewards, terminated, truncated, infos = outcome
        for part, what in ((rewards, "rewards"), (terminated, "terminated"), (truncated, "truncated")):
            self._check_names(part, f"the dict of {what}")
        self._note(obs, infos)
        before, result = self.present, self._result(rewards, terminated, truncated)
        self.present = self.acts = self._live()
        going = [name for name in before if name not in self._ended]
        if left := [name for name in going if name not in self.present]:
            raise InvalidOutcome(f"agent {left[0]!r} has left env.agents, but is neither terminated nor truncated")
        if going and (late := [name for name in self.env.agents if name in self._ended]):
            raise InvalidOutcome(f"agent {late[0]!r} is in env.agents after its episode has ended; expected that it leaves")
        if len(self.present) > len(going):  # some have come
            self._note(obs, infos)
        return result


class _Turns(_Game):
    """A `pettingzoo.AECEnv`: the agent that env.agent_selection names acts; the others wait."""

    def reset(self, seed: int) -> None:
        self.env.reset(seed=seed)
        self._begin()
        self._observe()
        self._select()

    def _observe(self) -> None:
        infos = self.env.infos
        for name in self.present:
            self.obs[name], self.infos[name] = self.env.observe(name), infos.get(name) or {}
            if self.obs[name] is None:
                raise InvalidOutcome(f"agent {name!r} has no observation")

    def _select(self) -> None:
        """Set the agent that acts next."""
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
        self._check_names(rewards, "env.rewards")
        self._observe()
        result = self._result(rewards, terminated, truncated)
        removed = self._remove()
        self.present = self._live()
        if removed and self.present:
            self._observe()
        if self.present:
            self._select()
        return result

    def _remove(self) -> bool:
        """Let the agents whose episode has ended take their last, empty step; return whether there were any."""
        count = 0
        while self.env.agents and (name := self.env.agent_selection) in self._ended:
            if not (self.env.terminations.get(name) or self.env.truncations.get(name)) or count > len(self._known):
                break
            self.env.step(None)
            count += 1
        return count > 0


def _reward(name: str, rewards: Mapping[str, Any]) -> float:
    """Return the reward of an agent. Raises InvalidOutcome."""
    if name not in rewards:
        raise InvalidOutcome(f"agent {name!r} has no reward")
    try:
        reward = number(rewards[name])
    except InvalidReward:
        reward = float("nan")
    if not isfinite(reward):
        raise InvalidReward(f"agent {name!r} has the reward {shown(rewards[name])}; expected a finite number")
    return reward


class PettingZoo(Backend):
    """Envs of PettingZoo, of mpe2, or of a user's class with one of PettingZoo's interfaces, stepped in turn in this process.

    An agent whose episode ends before that of others is absent until its env is reset, which happens in the step in which the last one's
    ends. Every episode has a seed of its own, derived from the env's seed and the number of the episode. Therefore an open episode is saved
    as these numbers and its actions, and restored by playing them again: exactly, if all of the env's chance follows from the seed.
    """

    name = "pettingzoo"
    fresh = checks = selects_parts = True

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        return None if target.id.startswith(PETTINGZOO) else f'{target.id} is not an env of PettingZoo ("{PETTINGZOO}NAME")'

    def __init__(self, target: EnvRequest) -> None:
        create = _creator(pettingzoo_id(target.id) or "")
        envs = [create(**target.kwargs) for _ in range(target.num_envs)]
        self._names, own, self.action_space = _common_spaces(envs[0], target.id)
        self.agents = tuple(map(str, self._names))
        self._games = [_game(env, self._names, target.id) for env in envs]
        self._limit = self.max_steps = target.max_t
        self._space, self._parts = own, None
        for wrap in target.wraps:  # env.obs_keys: no other wrapper reaches this backend
            self._parts = Parts(own, self.action_space, **wrap.kwargs)
            own = self._parts.space
        self._own = own
        self._mask, self._mask_of_info = _mask(target, own, self.action_space)
        self._undeclared = target.action_mask is None and self._mask is None
        """Whether a mask in the infos is an error, because the spec does not say whether to use it."""
        self._state = self._state_form(target)
        self.observation_space = self._full_space()
        rows = target.num_envs * len(self.agents)
        self._rows_of_actions = batch_space(self.action_space, rows)
        self._plain_actions = isinstance(self.action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box)
        self._seeds, self._episodes = [0] * target.num_envs, [0] * target.num_envs
        self._played: list[list[Any]] = [[] for _ in envs]
        """Actions of all rows of each env in each step of its episode."""
        self._lengths = [0] * target.num_envs
        self._elements: list[Any] = [None] * rows
        """The observation of each row."""
        self._infos: dict[int, Mapping[str, Any]] = {}

    def _state_form(self, target: EnvRequest) -> spaces.Space[Any] | None:
        """Return the space of the entry "state" that is added to observations; None if there is none."""
        entries = self._own.spaces if isinstance(self._own, spaces.Dict) else {}
        if STATE not in target.critic_keys or STATE in entries:
            return None
        env = self._games[0].env
        space = getattr(env, "state_space", None)
        if not isinstance(space, gym.Space):
            try:
                self._games[0].reset(0)
                state = np.asarray(env.state())
            except NotImplementedError:
                seen = spaces.Dict({key: one for key, one in entries.items() if key != self._mask}) if self._mask in entries else self._own
                return spaces.Tuple([seen] * len(self._names))
            space = spaces.Box(-np.inf, np.inf, state.shape, np.float32)
        return space

    def _full_space(self) -> spaces.Space[Any]:
        if self._state is None and not self._mask_of_info:
            return self._own
        entries = dict(self._own.spaces) if isinstance(self._own, spaces.Dict) else {"observation": self._own}
        if self._mask_of_info:
            assert self._mask is not None
            entries[self._mask] = spaces.MultiBinary(number_of_choices(self.action_space))
        if self._state is not None:
            entries[STATE] = self._state
        return spaces.Dict(entries)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        if seeds is not None:
            self._seeds, self._episodes = list(seeds), [0] * len(self._games)
        for index in range(len(self._games)):
            try:
                self._reset(index)
            except Exception as error:
                reraise(error, index)
        return self._batch()

    def _reset(self, index: int) -> None:
        """Begin an episode of an env."""
        game, seed = self._games[index], self._seeds[index]
        episode = self._episodes[index]
        game.reset(seed if not episode else int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]) & 0x7FFFFFFF)
        self._episodes[index] += 1
        self._played[index], self._lengths[index] = [], 0
        if self._undeclared and (found := next((key for key in MASK_KEYS for info in game.infos.values() if key in info), None)):
            raise InvalidOutcome(undeclared_message(found))
        self._note(index)

    def step(self, action: np.ndarray) -> RawStep:
        count, rows = len(self._names), len(self._elements)
        reward_N, terminated_N, truncated_N = np.zeros(rows), np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        final: list[tuple[int, Any]] = []
        each = list(iterate(self._rows_of_actions, action))
        for index in range(len(self._games)):
            try:
                begin = index * count
                result = self._step(index, each[begin : begin + count])
                for name, reward in result.rewards.items():
                    reward_N[begin + self._names.index(name)] = reward
                terminated_N[[begin + self._names.index(name) for name in result.terminated]] = True
                truncated_N[[begin + self._names.index(name) for name in result.truncated]] = True
                if not self._games[index].present:
                    ended = [self._names.index(name) + begin for name in (*result.terminated, *result.truncated)]
                    final += [(row, self._elements[row]) for row in sorted(ended)]
                    self._reset(index)
            except Exception as error:
                reraise(error, index)
        return RawStep(self._batch(), reward_N, terminated_N, truncated_N, final or None)

    def _step(self, index: int, actions: Sequence[Any]) -> Result:
        """Step an env with the actions of its rows; truncate its episode at the time limit."""
        game = self._games[index]
        if isinstance(self.action_space, spaces.Discrete):
            actions = [int(one) for one in actions]
        result = game.step(dict(zip(self._names, actions, strict=True)))
        self._lengths[index] += 1
        if len(self._played[index]) < _LONGEST:
            self._played[index].append([one.tolist() if isinstance(one, np.ndarray) else one for one in actions])
        if self._limit is not None and self._lengths[index] >= self._limit:
            result = result._replace(truncated=[*result.truncated, *game.present])
            game.present = []
        for name in (*result.terminated, *result.truncated):
            self._infos[index * len(self._names) + self._names.index(name)] = dict(game.infos[name])
        self._note(index, result.truncated)
        return result

    def _note(self, index: int, truncated: Sequence[str] = ()) -> None:
        """Update the observations of an env's rows. Args: truncated: agents whose last observation is bootstrapped, with its own mask."""
        game, count = self._games[index], len(self._names)
        own = {name: self._fitted(name, obs) for name, obs in game.obs.items()}
        first = next(iter(own.values()))  # for agents that have not come yet
        seen = [own.get(name, first) for name in self._names]
        state = None if self._state is None else self._shared(game.env, seen)
        for row, (name, obs) in enumerate(zip(self._names, seen, strict=True), index * count):
            masked = name in game.acts or (name in truncated and not (self._mask_of_info and self._mask not in game.infos[name]))
            self._elements[row] = self._element(name, obs, state, game.infos[name] if masked else None)

    def _fitted(self, name: str, obs: Any) -> Any:
        """Return a copy of an agent's observation, which its env may change later. Raises InvalidOutcome."""
        obs = copy.deepcopy(fitted(self._space, obs, f"the observation of agent {name!r}"))
        return obs if self._parts is None else self._parts(obs)

    def _shared(self, env: Any, seen: list[Any]) -> Any:
        """Return the state of an env."""
        assert self._state is not None
        if isinstance(self._state, spaces.Tuple):
            in_dict = isinstance(self._own, spaces.Dict) and self._mask in self._own.spaces
            return tuple({key: one for key, one in obs.items() if key != self._mask} if in_dict else obs for obs in seen)
        return fitted(self._state, np.asarray(env.state(), self._state.dtype), "the state")

    def _element(self, name: str, obs: Any, state: Any, info: Mapping[str, Any] | None) -> Any:
        """Return the observation of a row, with the state and the action mask. Args: info: None: all actions are valid."""
        if self._mask is None and state is None:
            return obs
        element = dict(obs) if isinstance(self._own, spaces.Dict) else {"observation": obs}
        if self._mask is not None:
            if info is None:
                mask = self.observation_space[self._mask]  # type: ignore[index]  # a Dict
                element[self._mask] = np.ones(mask.shape, mask.dtype)
            elif self._mask_of_info:
                element[self._mask] = self._info_mask(name, info)
        return element if state is None else {**element, STATE: state}

    def _info_mask(self, name: str, info: Mapping[str, Any]) -> np.ndarray:
        assert self._mask is not None
        if self._mask not in info:
            raise InvalidOutcome(f"agent {name!r}: env.action_mask: {missing_entry_message(self._mask, [], info)}")
        mask: np.ndarray = np.asarray(info[self._mask]).ravel()
        size = number_of_choices(self.action_space)
        if len(mask) != size or mask.dtype.kind not in "biuf":
            wanted = f"expected {size} numbers, one per choice"
            raise InvalidOutcome(f"agent {name!r}: the action mask info[{self._mask!r}] is {shown(info[self._mask])}; {wanted}")
        return np.asarray(mask != 0, np.int8)

    def _batch(self) -> Any:
        """Return the observations of all rows in new arrays, and set who is present and who acts."""
        flags = [[(name in game.present, name in game.acts) for name in self._names] for game in self._games]
        self.present_N, self.acts_N = np.array(flags, np.bool_).reshape(-1, 2).T.copy()
        empty: Any = create_empty_array(self.observation_space, len(self._elements), fn=np.zeros)
        return concatenate(self.observation_space, self._elements, empty)

    def episode_info(self, row: int) -> Mapping[str, Any]:
        return self._infos.get(row, {})

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [{"seed": seed, "episodes": count} for seed, count in zip(self._seeds, self._episodes, strict=True)]

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        self._seeds, self._episodes = [one["seed"] for one in states], [one["episodes"] for one in states]

    def episode_state(self) -> Any:
        if not self._plain_actions or max(self._lengths) > _LONGEST:
            return None
        return [list(played) for played in self._played]

    def set_episode_state(self, state: Any) -> None:
        for index, played in enumerate(state):
            self._episodes[index] -= 1
            self._reset(index)
            for actions in played:
                self._step(index, [np.asarray(one, self.action_space.dtype) for one in actions])
        self._batch()

    def close(self) -> None:
        for game in self._games:
            game.env.close()


def _mask(target: EnvRequest, own: spaces.Space[Any], action: spaces.Space[Any]) -> tuple[str | None, bool]:
    """Return the entry with the action mask, and whether it is one of the infos. Raises WrapperError."""
    entries = own.spaces if isinstance(own, spaces.Dict) else {}
    if (found := mask_entry(target.action_mask, entries, action)) is not None or not target.action_mask:
        return found, False
    if not number_of_choices(action):
        raise WrapperError("action_mask", not_discrete_message(action))
    return target.action_mask, True


def _creator(name: str) -> Callable[..., Any]:
    """Return the constructor of an env. Raises WrapperError, ImportError."""
    if ":" not in name:
        env = pettingzoo_envs()[name]
        if env.kind != "mpe2":
            return partial(_of_registry, env.kind, env.id)
        name = f"mpe2.{env.id}:parallel_env"
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise WrapperError("name", f"{module} has no {path!r}; expected a class or function that returns an env of PettingZoo")
        found = getattr(found, part)
    creator: Callable[..., Any] = found
    return creator


def _of_registry(kind: Any, id_: str, **kwargs: Any) -> Any:
    """Return an env of PettingZoo's registry. Raises ImportError if it needs a package that is missing."""
    import pettingzoo
    from pettingzoo.env_registry.exceptions import FailedToImport

    try:
        return pettingzoo.make(kind, id_, **kwargs)
    except FailedToImport as error:
        raise ImportError(str(error)) from error


def _game(env: Any, agents: Sequence[str], id_: str) -> _Game:
    from pettingzoo import AECEnv, ParallelEnv

    if isinstance(env, ParallelEnv):
        return _Parallel(env, agents)
    if isinstance(env, AECEnv):
        return _Turns(env, agents)
    raise WrapperError(
        "name", f"{id_} makes a value of the type {type(env).__name__}; expected a pettingzoo.ParallelEnv or a pettingzoo.AECEnv"
    )


def _common_spaces(env: Any, id_: str) -> tuple[tuple[Any, ...], spaces.Space[Any], spaces.Space[Any]]:
    """Return the agents and the spaces that they have in common. Raises WrapperError."""
    _game(env, (), id_)
    agents = tuple(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise WrapperError("name", f"{id_} has no env.possible_agents; expected the names of all agents that may take part")
    for kind, of in (("observation", env.observation_space), ("action", env.action_space)):
        first = of(agents[0])
        if other := next((name for name in agents if of(name) != first), None):
            message = f"the agents of {id_} have different {kind} spaces ({agents[0]}: {first}; {other}: {of(other)}); expected one for all"
            raise WrapperError("name", message)
    return agents, env.observation_space(agents[0]), env.action_space(agents[0])
