"""Backend of PettingZoo's envs (arXiv:2009.14471), whose agents act simultaneously (parallel) or in turn (AEC). Each agent of an env has
one row in the batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from slm_lab.env.arguments import WrapperError
from slm_lab.env.backend import AgentGroup, Backend, EnvRequest, RawStep
from slm_lab.env.mask_from_info import MASK_KEYS, mask_entry, missing_entry_message, not_discrete_message, undeclared_mask_message
from slm_lab.env.outcome import InvalidOutcome, fit_to_space, raise_invalid_outcome, value_text
from slm_lab.env.pettingzoo_games import Result, pettingzoo_constructor, possible_agents, wrap_game
from slm_lab.env.spaces import number_of_choices
from slm_lab.env.wrappers import EntrySelector
from slm_lab.spec.compat.env_ids import PETTINGZOO, pettingzoo_id

_LONGEST = 100_000
"""Maximum number of steps of an unfinished episode that can be saved. The actions of later steps are not kept."""
STATE = "state"
"""Name of the entry of observations that contains the global state of the env, which is the same for all agents of the env."""


class PettingZoo(Backend):
    """Backend for envs of PettingZoo, of mpe2, or of a user's class with one of PettingZoo's interfaces. The backend steps the envs one
    after the other in this process.

    An agent whose episode ends before the episodes of other agents is absent until its env is reset. An env is reset in the step in which
    the episode of its last agent ends. Every episode has its own seed, derived from the env's seed and the number of the episode. An
    unfinished episode is saved as the env's seed, the number of the episode and the actions so far, and restored by repeating the actions.
    A restored episode is identical to the saved episode if all randomness of the env depends on the seed.
    """

    name = "pettingzoo"
    returns_new_arrays = returns_valid_arrays = selects_parts = True

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        return None if target.id.startswith(PETTINGZOO) else f'{target.id} is not an env of PettingZoo ("{PETTINGZOO}NAME")'

    def __init__(self, target: EnvRequest) -> None:
        create = pettingzoo_constructor(pettingzoo_id(target.id) or "")
        envs = [create(**target.kwargs) for _ in range(target.num_envs)]
        self._names = possible_agents(envs[0], target.id)
        self.agents = tuple(map(str, self._names))
        self._games = [wrap_game(env, self._names, target.id) for env in envs]
        self._limit = self.max_steps = target.max_t
        self._kinds = _agent_kinds(envs[0], self._names, target)
        self._kind_of = {name: kind for kind in self._kinds for name in kind.names}
        if STATE in target.critic_keys and any(STATE not in kind.entries for kind in self._kinds):
            self._add_state()
        self._set_spaces()
        rows = target.num_envs * len(self.agents)
        self._rows_of = [[row for row in range(rows) if self._names[row % len(self.agents)] in kind.names] for kind in self._kinds]
        """For each kind of agents (see `_AgentKind`), the rows of these agents in batches."""
        self._batches = [batch_space(kind.action_space, len(kind_rows)) for kind, kind_rows in zip(self._kinds, self._rows_of, strict=True)]
        """Spaces of the batches of actions, one space for each kind of agents."""
        self._seeds, self._episodes = [0] * target.num_envs, [0] * target.num_envs
        self._played: list[list[Any]] = [[] for _ in envs]
        """For each env, the actions of all agents in each step of the current episode."""
        self._lengths = [0] * target.num_envs
        self._elements: list[Any] = [None] * rows
        """Current observation of the agent of each row."""
        self._infos: dict[int, Mapping[str, Any]] = {}

    def _set_spaces(self) -> None:
        if len(self._kinds) == 1:
            self.observation_space, self.action_space = self._kinds[0].observation_space, self._kinds[0].action_space
            return
        self.groups = tuple(AgentGroup(tuple(map(str, kind.names)), kind.observation_space, kind.action_space) for kind in self._kinds)
        kinds = [(str(name), self._kind_of[name]) for name in self._names]
        self.observation_space = spaces.Dict({name: kind.observation_space for name, kind in kinds})
        self.action_space = spaces.Dict({name: kind.action_space for name, kind in kinds})

    def _add_state(self) -> None:
        """Add the entry "state", which contains the global state of the env, to the observations. Only the critic receives this entry."""
        env = self._games[0].env
        space = getattr(env, "state_space", None)
        if not isinstance(space, gym.Space):
            try:
                self._games[0].reset(0)
                state = np.asarray(env.state())
                space = spaces.Box(-np.inf, np.inf, state.shape, np.float32)
            except NotImplementedError:  # the state then consists of the observations of all agents
                space = spaces.Tuple([self._kind_of[name].space_without_mask for name in self._names])
        for kind in self._kinds:
            kind.add_state(space)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        if seeds is not None:
            self._seeds, self._episodes = list(seeds), [0] * len(self._games)
        for index in range(len(self._games)):
            try:
                self._reset(index)
            except Exception as error:
                raise_invalid_outcome(error, index)
        return self._batch_and_set_flags()

    def _reset(self, index: int) -> None:
        """Begin an episode of the env with the index `index`."""
        game, seed = self._games[index], self._seeds[index]
        episode = self._episodes[index]
        game.reset(seed if not episode else int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]) & 0x7FFFFFFF)
        self._episodes[index] += 1
        self._played[index], self._lengths[index] = [], 0
        for name, info in game.infos.items():
            if self._kind_of[name].undeclared and (found := next((key for key in MASK_KEYS if key in info), None)):
                raise InvalidOutcome(undeclared_mask_message(found))
        self._update_observations(index)

    def step(self, action: np.ndarray) -> RawStep:
        count, rows = len(self._names), len(self._elements)
        reward_N, terminated_N, truncated_N = np.zeros(rows), np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        final: list[tuple[int, Any]] = []
        actions = self._actions_by_row(action)
        for index in range(len(self._games)):
            try:
                begin = index * count
                result = self._step(index, actions[begin : begin + count])
                for name, reward in result.rewards.items():
                    reward_N[begin + self._names.index(name)] = reward
                terminated_N[[begin + self._names.index(name) for name in result.terminated]] = True
                truncated_N[[begin + self._names.index(name) for name in result.truncated]] = True
                if not self._games[index].present:
                    ended = [self._names.index(name) + begin for name in (*result.terminated, *result.truncated)]
                    final += [(row, self._elements[row]) for row in sorted(ended)]
                    self._reset(index)
            except Exception as error:
                raise_invalid_outcome(error, index)
        return RawStep(self._batch_and_set_flags(), reward_N, terminated_N, truncated_N, final or None)

    def _step(self, index: int, actions: Sequence[Any]) -> Result:
        """Step one env with the actions of its agents, and truncate the episode at the time limit."""
        game = self._games[index]
        result = game.step(dict(zip(self._names, actions, strict=True)))
        self._lengths[index] += 1
        if len(self._played[index]) < _LONGEST:
            self._played[index].append([action.tolist() if isinstance(action, np.ndarray) else action for action in actions])
        if self._limit is not None and self._lengths[index] >= self._limit:
            result = result._replace(truncated=[*result.truncated, *game.present])
            game.present = []
        for name in (*result.terminated, *result.truncated):
            self._infos[index * len(self._names) + self._names.index(name)] = dict(game.infos[name])
        self._update_observations(index, result.truncated)
        return result

    def _actions_by_row(self, action: Any) -> list[Any]:
        """Return a list with the action of the agent of each row.

        Args: action: a batch of actions or, for several kinds of agents, a tuple with one batch per kind.
        """
        actions: list[Any] = [None] * len(self._elements)
        batches = action if self.groups else (action,)
        for kind, rows, space, batch in zip(self._kinds, self._rows_of, self._batches, batches, strict=True):
            for row, row_action in zip(rows, iterate(space, batch), strict=True):
                actions[row] = int(row_action) if kind.discrete else row_action
        return actions

    def _update_observations(self, index: int, truncated: Sequence[str] = ()) -> None:
        """Update the observations of the agents of one env.

        Args: truncated: agents whose episodes were truncated. The last observations of these agents keep their action masks, because the
        values of these observations are bootstrapped.
        """
        game, count = self._games[index], len(self._names)
        joined = {name: self._kind_of[name].copy_checked_observation(name, obs) for name, obs in game.obs.items()}
        all_obs = [joined[name] if name in joined else self._substitute_observation(name, joined) for name in self._names]
        state = self._state(game.env, all_obs) if any(kind.state is not None for kind in self._kinds) else None
        for row, (name, obs) in enumerate(zip(self._names, all_obs, strict=True), index * count):
            kind = self._kind_of[name]
            masked = name in game.acts or (name in truncated and not (kind.mask_of_info and kind.mask not in game.infos[name]))
            self._elements[row] = kind.complete_observation(name, obs, state, game.infos[name] if masked else None)

    def _substitute_observation(self, name: str, joined: Mapping[str, Any]) -> Any:
        """Return an observation for an agent that has not joined the episode yet: the observation of another agent of the same kind, or
        zeros.

        Args: joined: observations, by name, of the agents that have joined.
        """
        kind = self._kind_of[name]
        return next((joined[other] for other in kind.names if other in joined), kind.blank)

    def _state(self, env: Any, all_obs: list[Any]) -> Any:
        """Return the global state of an env, for the entry "state" of observations.

        Args: all_obs: observations of all agents of the env.
        """
        space = next(kind.state for kind in self._kinds if kind.state is not None)
        if isinstance(space, spaces.Tuple):
            return tuple(self._kind_of[name].without_mask(obs) for name, obs in zip(self._names, all_obs, strict=True))
        return fit_to_space(space, np.asarray(env.state(), space.dtype), "the state")

    def _batch_and_set_flags(self) -> Any:
        """Set the attributes `present_N` and `acts_N`, and return the observations of all agents of all envs in new arrays."""
        flags = [[(name in game.present, name in game.acts) for name in self._names] for game in self._games]
        self.present_N, self.acts_N = np.array(flags, np.bool_).reshape(-1, 2).T.copy()
        if not self.groups:
            return _stack_elements(self.observation_space, self._elements)
        each = zip(self._kinds, self._rows_of, strict=True)
        return tuple(_stack_elements(kind.observation_space, [self._elements[row] for row in rows]) for kind, rows in each)

    def episode_info(self, row: int) -> Mapping[str, Any]:
        return self._infos.get(row, {})

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [{"seed": seed, "episodes": count} for seed, count in zip(self._seeds, self._episodes, strict=True)]

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        self._seeds, self._episodes = [state["seed"] for state in states], [state["episodes"] for state in states]

    def episode_state(self) -> Any:
        if not all(kind.plain_actions for kind in self._kinds) or max(self._lengths) > _LONGEST:
            return None
        return [list(played) for played in self._played]

    def set_episode_state(self, state: Any) -> None:
        for index, played in enumerate(state):
            self._episodes[index] -= 1
            self._reset(index)
            for actions in played:
                named = zip(self._names, actions, strict=True)
                self._step(index, [self._kind_of[name].decode_saved_action(action) for name, action in named])
        self._batch_and_set_flags()

    def close(self) -> None:
        for game in self._games:
            game.env.close()


class _AgentKind:
    """A kind of agents: all agents of an env that have equal spaces. This class converts the observations and actions of the agents of one
    kind.

    Attributes: names: names of the agents. selected_space: space of the selected entries of an observation (env.obs_keys), without the
    added entry "state" and without an action mask from the infos. mask: name of the entry that contains the action mask, or None if the
    agents have no mask. mask_of_info: whether the action mask is an entry of the infos instead of the observations. undeclared: whether an
    action mask in the infos is an error, because the spec does not say whether to use the mask. state: space of the added entry "state", or
    None if no state is added. observation_space, action_space: spaces of the agents, with the added entry "state" and the action mask in
    the observations.

    Raises WrapperError.
    """

    def __init__(self, names: Sequence[Any], given: spaces.Space[Any], action: spaces.Space[Any], target: EnvRequest) -> None:
        self.names, self._given, self.action_space, self._parts = names, given, action, None
        self.discrete = isinstance(action, spaces.Discrete)
        self.plain_actions = isinstance(action, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box)
        for wrap in target.wraps:  # env.obs_keys is the only wrapper that reaches this backend
            self._parts = EntrySelector(given, action, **wrap.kwargs)
            given = self._parts.space
        self.selected_space: spaces.Space[Any] = given
        self.mask, self.mask_of_info = self._find_mask_entry(target)
        self.undeclared = target.action_mask is None and self.mask is None
        self.state: spaces.Space[Any] | None = None
        self.blank = _zero_element(given)
        """Observation that consists of zeros, or of the lowest numbers of the space where 0 is not in the space."""
        self.observation_space = self._full_space()

    @property
    def entries(self) -> Mapping[str, spaces.Space[Any]]:
        return self.selected_space.spaces if isinstance(self.selected_space, spaces.Dict) else {}

    @property
    def space_without_mask(self) -> spaces.Space[Any]:
        """Space of the observations that the method `without_mask` returns."""
        if self.mask not in self.entries:
            return self.selected_space
        return spaces.Dict({key: space for key, space in self.entries.items() if key != self.mask})

    def _find_mask_entry(self, target: EnvRequest) -> tuple[str | None, bool]:
        """Return the name of the entry that contains the action mask, or None, and whether the entry belongs to the infos."""
        if (found := mask_entry(target.action_mask, self.entries, self.action_space)) is not None or not target.action_mask:
            return found, False
        if not number_of_choices(self.action_space):
            raise WrapperError("action_mask", not_discrete_message(self.action_space))
        return target.action_mask, True

    def add_state(self, space: spaces.Space[Any]) -> None:
        """Add the entry "state" to observations, unless the observations already contain such an entry."""
        if STATE not in self.entries:
            self.state = space
            self.observation_space = self._full_space()

    def _full_space(self) -> spaces.Space[Any]:
        if self.state is None and not self.mask_of_info:
            return self.selected_space
        entries = dict(self.entries) if isinstance(self.selected_space, spaces.Dict) else {"observation": self.selected_space}
        if self.mask_of_info:
            assert self.mask is not None
            entries[self.mask] = spaces.MultiBinary(number_of_choices(self.action_space))
        if self.state is not None:
            entries[STATE] = self.state
        return spaces.Dict(entries)

    def decode_saved_action(self, saved: Any) -> Any:
        """Convert an action that was saved as plain Python objects back to an element of the env's action space."""
        return int(saved) if self.discrete else np.asarray(saved, self.action_space.dtype)

    def copy_checked_observation(self, name: str, obs: Any) -> Any:
        """Check an agent's observation and return a copy, because the env may change the original array later. Raises InvalidOutcome."""
        obs = copy.deepcopy(fit_to_space(self._given, obs, f"the observation of agent {name!r}"))
        return obs if self._parts is None else self._parts(obs)

    def without_mask(self, obs: Any) -> Any:
        return {key: entry for key, entry in obs.items() if key != self.mask} if self.mask in self.entries else obs

    def complete_observation(self, name: str, obs: Any, state: Any, info: Mapping[str, Any] | None) -> Any:
        """Return the complete observation of one agent, including the entry "state" and the action mask.

        Args: info: the agent's info, which may contain the action mask, or None if all actions are valid.
        """
        if self.mask is None and self.state is None:
            return obs
        element = dict(obs) if isinstance(self.selected_space, spaces.Dict) else {"observation": obs}
        if self.mask is not None:
            if info is None:
                mask = self.observation_space[self.mask]  # type: ignore[index]  # a Dict
                element[self.mask] = np.ones(mask.shape, mask.dtype)
            elif self.mask_of_info:
                element[self.mask] = self._info_mask(name, info)
        return element if self.state is None else {**element, STATE: state}

    def _info_mask(self, name: str, info: Mapping[str, Any]) -> np.ndarray:
        assert self.mask is not None
        if self.mask not in info:
            raise InvalidOutcome(f"agent {name!r}: env.action_mask: {missing_entry_message(self.mask, [], info)}")
        mask: np.ndarray = np.asarray(info[self.mask]).ravel()
        size = number_of_choices(self.action_space)
        if len(mask) != size or mask.dtype.kind not in "biuf":
            wanted = f"expected {size} numbers, one per choice"
            raise InvalidOutcome(f"agent {name!r}: the action mask info[{self.mask!r}] is {value_text(info[self.mask])}; {wanted}")
        return np.asarray(mask != 0, np.int8)


def _agent_kinds(env: Any, names: Sequence[Any], target: EnvRequest) -> list[_AgentKind]:
    """Return a list of the kinds of agents of an env, in the order of the first agent of each kind. Raises WrapperError."""
    kinds: list[tuple[list[Any], spaces.Space[Any], spaces.Space[Any]]] = []
    for name in names:
        agent_spaces = env.observation_space(name), env.action_space(name)
        alike = next((agents for agents, *kind_spaces in kinds if tuple(kind_spaces) == agent_spaces), None)
        if alike is None:
            kinds.append(([name], *agent_spaces))
        else:
            alike.append(name)
    return [_AgentKind(*kind, target) for kind in kinds]


def _zero_element(space: spaces.Space[Any]) -> Any:
    """Return an element of a space. The element consists of zeros, or of the lowest numbers of the space where 0 is not in the space."""
    match space:
        case spaces.Dict():
            return {key: _zero_element(inner) for key, inner in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_zero_element(inner) for inner in space.spaces)
        case spaces.Box():
            return np.clip(0, space.low, space.high).astype(space.dtype)
        case spaces.Discrete() | spaces.MultiDiscrete():
            return np.zeros(space.shape or (), space.dtype) + np.asarray(space.start, space.dtype)
    return np.zeros(space.shape or (), space.dtype)


def _stack_elements(space: spaces.Space[Any], elements: Sequence[Any]) -> Any:
    """Return several elements of a space as one batch in new arrays."""
    empty: Any = create_empty_array(space, len(elements), fn=np.zeros)
    return concatenate(space, elements, empty)
