"""Vector envs whose agents have different spaces. Each group of agents with equal spaces has its own `Env`, and all groups are stepped
together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slm_lab.env.backend import AgentGroup, Backend, RawStep
from slm_lab.env.normalize import Normalizers
from slm_lab.env.outcome import raise_located_outcome
from slm_lab.env.spaces import Codec, UnsupportedSpace
from slm_lab.env.vec import Env
from slm_lab.lib.padding import pad_rows, remove_padding
from slm_lab.lib.records import ActionSpace, EnvInfo, Episode, ObservationSpace, VecStep


class GroupBackend(Backend):
    """Backend of the Env of one group of agents with equal spaces. `reset` and `step` return the rows of the group's agents. Before each
    call, `GroupedEnv` passes these rows to `set_group_rows`."""

    def __init__(self, shared: Backend, group: AgentGroup, num_envs: int) -> None:
        rows = np.flatnonzero([agent in group.agents for _ in range(num_envs) for agent in shared.agents])
        self.rows, self._shared, self.max_steps = rows, shared, shared.max_steps
        self._positions = {int(row): k for k, row in enumerate(rows)}
        self.agents, self.observation_space, self.action_space = group.agents, group.observation_space, group.action_space
        self.returns_new_arrays, self.returns_valid_arrays = shared.returns_new_arrays, shared.returns_valid_arrays
        self._obs: Any = None
        self._step: RawStep | None = None

    def set_group_rows(self, obs: Any, raw: RawStep | None = None) -> None:
        """Store the rows that the next call of `reset` or `step` returns.

        Args: obs: observations of the group's agents. raw: RawStep with the rows of all agents, or None after a reset.
        """
        acts_N, present_N, rows = self._shared.acts_N, self._shared.present_N, self.rows
        self.acts_N = None if acts_N is None else acts_N[rows]
        self.present_N = None if present_N is None else present_N[rows]
        self._obs = obs
        if raw is not None:
            final = [(self._positions[row], last) for row, last in raw.final or () if row in self._positions]
            self._step = RawStep(obs, raw.reward_N[rows], raw.terminated_N[rows], raw.truncated_N[rows], final or None)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        return self._obs

    def step(self, action: np.ndarray) -> RawStep:
        assert self._step is not None
        return self._step

    def episode_info(self, row: int) -> Any:
        return self._shared.episode_info(int(self.rows[row]))

    def rng_states(self) -> list[dict[str, Any]] | None:
        return []  # GroupedEnv saves the state of the shared backend

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        pass

    def episode_state(self) -> Any:
        return {}

    def set_episode_state(self, state: Any) -> None:
        pass

    def close(self) -> None:
        pass


class GroupedEnv(Env):
    """Vector env whose agents have different spaces.

    Each group of agents with equal spaces has its own Env, with its own encoding, masks and normalizers. In arrays that contain the rows of
    all groups, shorter rows are padded, see `EnvInfo.groups`.

    Args: info: description of the rows of all agents. groups: the Env of each group, with GroupBackend as its backend. decoders: for each
    group, the function that converts the actions of the group's agents to actions of the env.
    """

    def __init__(self, backend: Backend, info: EnvInfo, groups: Sequence[Env], decoders: Sequence[Codec], seed: int, *, name: str) -> None:
        super().__init__(backend, info, encode=np.asarray, decode=np.asarray, seed=seed, name=name)
        self.groups, self._decoders = groups, decoders
        self._rows = [info.agent_rows(group.info.agents) for group in groups]
        self._defers_normalization = groups[0]._defers_normalization

    def normalizers_of(self, agents: Collection[str]) -> Normalizers:
        return next(group.normalizers for group in self.groups if not set(agents).isdisjoint(group.info.agents))

    def policy_inputs(self, obs_N: np.ndarray) -> np.ndarray:
        if not self._defers_normalization:
            return obs_N
        return self._join_observations(
            [
                group.policy_inputs(remove_padding(obs_N[rows], group.info.observation))
                for rows, group in zip(self._rows, self.groups, strict=True)
            ]
        )

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        for group in self.groups:
            group.reseed(seed)

    def _group_backend(self, group: Env) -> GroupBackend:
        assert isinstance(group._backend, GroupBackend)
        return group._backend

    def _reset_backend(self, seeds: list[int] | None) -> np.ndarray:
        try:
            obs = self._backend.reset(seeds)
        except Exception as error:
            raise_located_outcome(error, self.name, "reset", 0)
        for group, batch in zip(self.groups, obs, strict=True):
            self._group_backend(group).set_group_rows(batch)
        return self._join_observations([group.reset() for group in self.groups])

    def _check_finite(self, obs: np.ndarray) -> None:
        """Do nothing, because each group has checked its own observations, and padding changes the positions of their numbers."""

    def step(self, action_N: np.ndarray) -> VecStep:
        self._steps += 1
        actions = [remove_padding(action_N[rows], group.info.action) for rows, group in zip(self._rows, self.groups, strict=True)]
        try:
            decoded: Any = tuple(decode(action_K) for decode, action_K in zip(self._decoders, actions, strict=True))
            raw = self._backend.step(decoded)
        except Exception as error:
            raise_located_outcome(error, self.name, "step", self._steps)
        for group, batch in zip(self.groups, raw.obs, strict=True):
            self._group_backend(group).set_group_rows(batch, raw)
        self.acts_N = self._backend.acts_N
        return self._join_steps([group.step(action_K) for group, action_K in zip(self.groups, actions, strict=True)])

    def _join_steps(self, steps: Sequence[VecStep]) -> VecStep:
        """Join the VecStep of each group of agents to one VecStep with the rows of all agents."""
        episodes: list[Episode] = []
        for rows, step in zip(self._rows, steps, strict=True):
            episodes += [episode._replace(env=int(rows[episode.env])) for episode in step.episodes]
        obs_N = self._join_observations([step.obs_N for step in steps])
        has_equal_obs = all(step.last_obs_N is step.obs_N for step in steps)
        last_obs_N = obs_N if has_equal_obs else self._join_observations([step.last_obs_N for step in steps])
        return VecStep(
            self._join_group_rows([step.reward_N for step in steps]),
            self._join_group_rows([step.terminated_N for step in steps]),
            self._join_group_rows([step.truncated_N for step in steps]),
            last_obs_N,
            obs_N,
            self._join_group_rows([step.first_N for step in steps]),
            self._join_group_rows([step.valid_N for step in steps]),
            sorted(episodes, key=lambda episode: episode.env),
            self.acts_N,
        )

    def _join_group_rows(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Join one array [K, …] per group of agents to one array [N, …] with the rows of all agents."""
        values_N = np.empty((self.info.num_envs, *values[0].shape[1:]), values[0].dtype)
        for rows, values_K in zip(self._rows, values, strict=True):
            values_N[rows] = values_K
        return values_N

    def _join_observations(self, batches: Sequence[np.ndarray]) -> np.ndarray:
        return self._join_group_rows([pad_rows(batch, self.info.observation) for batch in batches])

    def sample(self, rng: np.random.Generator | None = None) -> np.ndarray:
        return self._join_group_rows([pad_rows(group.sample(rng or self._sampler), self.info.action) for group in self.groups])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "groups": [group.state_dict() for group in self.groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for group, saved in zip(self.groups, state["groups"], strict=True):
            group.load_state_dict(saved)

    def resume(self) -> bool:
        if not super().resume():
            return False
        for group in self.groups:
            view = self._group_backend(group)
            view.set_group_rows(view._obs)
            group.resume()
        return True


def joint_info(groups: Sequence[EnvInfo], agents: tuple[str, ...]) -> EnvInfo:
    """Return the EnvInfo of an env that consists of several groups of agents.

    Args: groups: EnvInfo of each group. agents: names of all agents, in the order of their rows.

    Raises: UnsupportedSpace if one array cannot contain the observations of all agents.
    """
    rows = groups[0].frames * len(agents)
    observation, action = _common_observation_space(groups), _common_action_space([group.action for group in groups])
    return replace(groups[0], num_envs=rows, observation=observation, action=action, agents=agents, spaces=None, groups=tuple(groups))


def _common_observation_space(groups: Sequence[EnvInfo]) -> ObservationSpace:
    """Return the observation space of the group with the most numbers per observation, with text that describes the observations of all
    groups. Raises UnsupportedSpace."""
    observations = [group.observation for group in groups]
    widest = max(observations, key=lambda space: space.shape)
    vectors = all(len(space.shape) == 1 for space in observations)
    if any(space.dtype != widest.dtype or not (vectors or space.shape == widest.shape) for space in observations):
        texts = "; ".join(f"{group.agents[0]}: {group.observation.text or list(group.observation.shape)}" for group in groups)
        raise UnsupportedSpace(f"the agents have observations of different kinds ({texts}); expected vectors, or images of one shape")
    text = "; ".join(f"{', '.join(group.agents)}: {group.observation.text}" for group in groups)
    ambiguities = tuple(dict.fromkeys(each for space in observations for each in space.ambiguities))
    return replace(widest, critic_begin=None, mask=None, goals=None, ambiguities=ambiguities, text=text)


def _common_action_space(actions: Sequence[ActionSpace]) -> ActionSpace:
    """Return an action space whose arrays can contain the actions of all groups of agents."""
    kinds = {action.kind for action in actions}
    if kinds == {"discrete"}:
        return ActionSpace("discrete", (max(action.nvec[0] for action in actions),))
    dim = max(action.dim for action in actions)
    if any(action.dtype is np.float32 for action in actions):
        return ActionSpace("continuous", dim=dim, bounded=all(action.bounded for action in actions))
    return ActionSpace("multi_binary" if kinds == {"multi_binary"} else "multi_discrete", dim=dim)
