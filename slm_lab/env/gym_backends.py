"""Backends for single Gymnasium envs: "sync" steps the envs one after the other in this process, "async" uses one process per env."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, iterate

from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.curriculum import set_attributes
from slm_lab.env.gym_workers import AsyncEnvs, SyncEnvs, explained_worker_death, rebuild_env
from slm_lab.env.mask_from_info import reject_undeclared_mask
from slm_lab.env.outcome import (
    FLAGS,
    NUMBERS,
    InvalidOutcome,
    check_step,
    fit_to_space,
    raise_invalid_outcome,
    to_bool,
    unpack_reset,
    unpack_step,
)
from slm_lab.env.single import SingleEnvConstructor
from slm_lab.env.snapshot import NotSavable, env_state, load_env_state, seed_spaces
from slm_lab.env.spaces import leaves
from slm_lab.lib.log import logger
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.compat.env_ids import envpool_id, package_hint


class _GymVectorBackend(Backend):
    """Base class of the backends Sync and Async. These backends reset an env in the step that ends its episode (AutoresetMode.SAME_STEP),
    so that every row of a step is a transition."""

    applies_wraps = returns_valid_arrays = follows_curriculum = True
    _vec: Any
    _exposes_rng: bool
    _infos: dict[int, Mapping[str, Any]]
    """Maps the index of an env to the last info of its most recent complete episode."""

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        if target.registration is None:
            hint = f" (it is an env of EnvPool){package_hint(target.id)}" if envpool_id(target.id) else ""
            return f"{target.id} is not registered with Gymnasium{hint}"
        if target.registration.entry_point is None:
            return f"{target.id} is registered as a vector env only"
        return None

    def _set_vector_env(self, vec: gym.vector.VectorEnv[Any, Any, Any], target: EnvRequest) -> None:
        self._vec, self._infos = vec, {}
        self._exposes_rng = target.atari is None  # the emulator has its own random stream
        self.observation_space, self.action_space = vec.single_observation_space, vec.single_action_space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        return self._vec.reset(seed=None if seeds is None else list(seeds))[0]

    def step(self, action: np.ndarray) -> RawStep:
        obs, reward, terminated, truncated, info = self._vec.step(action)
        self._infos = info.get("final_info", self._infos)
        return RawStep(obs, reward, terminated, truncated, info.get("final"), info.get("lives"))

    def episode_info(self, row: int) -> Mapping[str, Any]:
        return self._infos.get(row, {})

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [generator_state(rng) for rng in self._vec.get_attr("np_random")] if self._exposes_rng else None

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        rngs = [np.random.default_rng() for _ in states]
        for rng, state in zip(rngs, states, strict=True):
            set_generator_state(rng, state)
        self._vec.set_attr("np_random", rngs)

    def close(self) -> None:
        self._vec.close()


class Sync(_GymVectorBackend):
    """Backend that uses Gymnasium's SyncVectorEnv. This backend supports every env that Gymnasium has registered as a single env."""

    name = "sync"

    def __init__(self, target: EnvRequest) -> None:
        self._make, self._curriculum = SingleEnvConstructor.from_target(target), target.curriculum
        vec = SyncEnvs([self._make] * target.num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        self._set_vector_env(vec, target)
        self._envs, self._obs = vec.envs, vec._observations
        self._action_mask = target.action_mask
        self._plain = isinstance(self.observation_space, gym.spaces.Box)
        self._dtype, self._shape = self.observation_space.dtype, self.observation_space.shape
        in_rows = isinstance(self.action_space, gym.spaces.Discrete | gym.spaces.Box | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary)
        dtypes = [np.dtype(leaf.dtype) for _, leaf in leaves(self.observation_space)]
        self._narrow = any(dtype.kind in "iu" and dtype.itemsize < 8 for dtype in dtypes)
        """Whether stacking observations could silently change numbers that do not fit the dtype of the observation space."""
        if in_rows and self._plain and target.num_envs == 1:
            self.env, self.single_env = self._envs[0], self
            _speed_up_contains(self.env.unwrapped.action_space)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        if seeds is not None:
            for env, seed in zip(self._envs, seeds, strict=True):
                seed_spaces(env, seed)
        obs_list: list[Any] = []
        for row, given_seed in zip(range(len(self._envs)), seeds or repeat(None), strict=False):
            try:
                new_seed = self._prepare_reset(row, given_seed)
                env = self._envs[row]
                obs, info = unpack_reset(env.reset(seed=new_seed if given_seed is None else given_seed, options=None))
                reject_undeclared_mask(env, self._action_mask, info)
                obs_list.append(obs)
            except Exception as error:
                raise_invalid_outcome(error, len(obs_list))
        return self._stack(obs_list)

    def step(self, action: np.ndarray) -> RawStep:
        """Step all envs. SyncVectorEnv.step is not used, because with one CartPole env it takes 1.5 times as long as this method."""
        return self.finish_step(env.step(part) for env, part in zip(self._envs, iterate(self._vec.action_space, action), strict=True))

    def finish_step(self, outcomes: Iterable[Any]) -> RawStep:
        """Combine the results of the envs' steps into one RawStep, and reset the envs whose episode ended. Raises InvalidOutcome."""
        count, final, lives_N = len(self._envs), None, None
        reward_N, terminated_N, truncated_N = np.empty(count), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        obs_list: list[Any] = []
        try:
            for i, outcome in enumerate(outcomes):
                try:
                    obs, reward, terminated, truncated, info = outcome
                except (TypeError, ValueError):
                    obs, reward, terminated, truncated, info = unpack_step(outcome)
                if type(reward) not in NUMBERS or type(info) is not dict:
                    obs, reward, terminated, truncated, info = check_step(outcome)
                reward_N[i] = reward
                if terminated is not False or truncated is not False:
                    if type(terminated) not in FLAGS or type(truncated) not in FLAGS:
                        terminated, truncated = to_bool(terminated, "terminated"), to_bool(truncated, "truncated")
                    terminated_N[i], truncated_N[i] = terminated, truncated
                    if terminated or truncated:
                        final = final or []
                        final.append((i, self._copied_last_obs(obs)))
                        self._infos[i] = dict(info)
                        seed = self._prepare_reset(i)
                        obs, info = unpack_reset(self._envs[i].reset() if seed is None else self._envs[i].reset(seed=seed))
                obs_list.append(obs)
                if "lives" in info and isinstance(info["lives"], int | np.integer):
                    lives_N = np.zeros(count, np.int64) if lives_N is None else lives_N
                    lives_N[i] = info["lives"]
            return RawStep(self._stack(obs_list), reward_N, terminated_N, truncated_N, final, lives_N)
        except Exception as error:
            raise_invalid_outcome(error, len(obs_list) if len(obs_list) < count else None)

    def _prepare_reset(self, row: int, seed: int | None = None) -> int | None:
        """Apply the scheduled values of the curriculum to an env before its reset. Return the seed for the reset if the env was rebuilt
        with new constructor arguments, else None.

        Args: seed: seed that the caller gives for the reset, or None.
        """
        curriculum = self._curriculum
        if curriculum is None:
            return None
        if seed is not None:
            curriculum.seeds[row] = seed
        values, rebuild = curriculum.next_values_and_rebuild(row)
        if not rebuild:
            if values != curriculum.held[row]:
                set_attributes(self._envs[row], curriculum.attributes(values), curriculum.constructor_arguments)
            curriculum.record_episode_start(row, values)
            return None
        env = rebuild_env(self._make, curriculum, values, self._envs[row])
        self._envs[row] = env
        if self.single_env is not None:
            self.env = env
            _speed_up_contains(env.unwrapped.action_space)
        curriculum.record_episode_start(row, values)
        new_seed = curriculum.next_seed(row) if seed is None else seed
        seed_spaces(env, new_seed)
        return new_seed

    def _copied_last_obs(self, obs: Any) -> Any:
        """Return a copy of the last observation of an episode, because the env may reuse the observation's array."""
        if self._plain and type(obs) is np.ndarray and self.matches_space(obs):
            return obs.copy()
        return copy.deepcopy(fit_to_space(self.observation_space, obs))

    def episode_state(self) -> Any:
        try:
            return [env_state(env) for env in self._envs]
        except NotSavable as error:
            logger.info("open episodes cannot be saved: %s", error)
            return None

    def set_episode_state(self, state: Any) -> None:
        for env, saved in zip(self._envs, state, strict=True):
            load_env_state(env, saved)

    def _stack(self, obs_list: list[Any]) -> Any:
        if self._plain and len(obs_list) == 1 and self.matches_space(obs_list[0]):
            return obs_list[0][None]
        try:
            return concatenate(self.observation_space, self._fit_observations(obs_list) if self._narrow else obs_list, self._obs)
        except InvalidOutcome:
            raise
        except Exception:  # raised by gymnasium or numpy: check and convert the observations, with clear errors, and try again
            return concatenate(self.observation_space, self._fit_observations(obs_list), self._obs)

    def _fit_observations(self, obs_list: list[Any]) -> list[Any]:
        for row, obs in enumerate(obs_list):
            try:
                obs_list[row] = fit_to_space(self.observation_space, obs)
            except InvalidOutcome as error:
                error.row = row
                raise
        return obs_list

    def matches_space(self, obs: Any) -> bool:
        """Return whether an observation already has the dtype and shape of the Box observation space, so that no conversion is needed."""
        return isinstance(obs, np.ndarray) and obs.dtype == self._dtype and obs.shape == self._shape


def _speed_up_contains(space: gym.Space[Any]) -> None:
    """Replace the method `contains` of a Discrete space by a function that is faster for int64 actions. Gymnasium's `Discrete.contains`
    takes a fifth of the time of CartPole's step."""
    if type(space) is gym.spaces.Discrete:
        space.contains = functools.partial(_contains, space)  # type: ignore[method-assign]


def _contains(space: gym.spaces.Discrete, x: Any) -> bool:
    """Return whether `x` is in the Discrete space, with a fast path for int64 numbers."""
    return bool(type(x) is np.int64 and space.start <= x < space.start + space.n) or gym.spaces.Discrete.contains(space, x)


class Async(_GymVectorBackend):
    """Backend that uses Gymnasium's AsyncVectorEnv, with one process per env, for envs whose steps take milliseconds. `env.backend="auto"`
    never chooses this backend."""

    name = "async"

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        return super().unsupported_reason(target) or target.main_module_reason

    @classmethod
    def is_preferred(cls, target: EnvRequest) -> bool:
        return False

    def __init__(self, target: EnvRequest) -> None:
        with explained_worker_death():
            make = SingleEnvConstructor.from_target(target)
            try:
                vec = AsyncEnvs(make, target.num_envs, target.track_info, curriculum=target.curriculum)
            except ValueError as error:
                if not isinstance(error.__cause__, gym.error.CustomSpaceError):
                    raise
                # make_env raises an error for the unsupported space
                vec = AsyncEnvs(make, target.num_envs, target.track_info, shared_memory=False, curriculum=target.curriculum)
        self._set_vector_env(vec, target)
        self._curriculum = target.curriculum
        self._sent = None if self._curriculum is None else self._curriculum.current_values()
        """Scheduled values (env.schedule) that were last sent to the worker processes."""

    def reset(self, seeds: Sequence[int] | None) -> Any:
        with explained_worker_death(self._vec.processes):
            self._send_scheduled_values()
            obs = super().reset(seeds)
            self._prepare_reset(range(self._vec.num_envs))
            return obs

    def step(self, action: np.ndarray) -> RawStep:
        with explained_worker_death(self._vec.processes):
            self._send_scheduled_values()
            raw = super().step(action)
            if raw.final:
                self._prepare_reset(row for row, _ in raw.final)
            return raw

    def _send_scheduled_values(self) -> None:
        """Send the scheduled values for the next resets of the envs to the worker processes, if these values have changed. This method is
        called before each step, because each step may reset an env."""
        if self._curriculum is not None and (values := self._curriculum.current_values()) != self._sent:
            self._vec.set_attr("wanted_values", [values] * self._vec.num_envs)
            self._sent = values

    def _prepare_reset(self, rows: Iterable[int]) -> None:
        if self._curriculum is not None:
            for row in rows:
                self._curriculum.record_episode_start(row, self._curriculum.current_values())
