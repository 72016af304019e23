"""Backends for vector envs: "native" uses the vector env that Gymnasium has registered for an id, UserVectorBackend a class of the user."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from slm_lab.env.arguments import accepted_arguments, env_creator
from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.mask_from_info import reject_vector_info_mask
from slm_lab.env.outcome import (
    InvalidOutcome,
    batch_row,
    check_last_obs,
    fit_step,
    fit_to_space,
    row_info,
    unpack_reset,
    unpack_step,
    value_text,
)
from slm_lab.lib.rng import generator_state, set_generator_state

CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"


class VectorBackend(Backend):
    """Base class of backends that use a gymnasium.vector.VectorEnv. The vector env's `metadata["autoreset_mode"]` determines how ended
    episodes are handled.

    NEXT_STEP: the vector env resets an env in the step after the end of its episode, so that the env's row of this step is not a
    transition. SAME_STEP: the vector env resets an env in the step that ends the episode, and returns the last observation in
    `info["final_obs"]`. DISABLED: this class resets an env in the step that ends the episode, by calling `reset(options={"reset_mask": bool
    [N]})`.
    """

    returns_valid_arrays = True
    action_mask: str | Literal[False] | None = None
    """Key of the action mask in the observation or in the info dict (see `EnvRequest.action_mask`)."""
    _is_trusted = False
    """Whether the vector env always returns new arrays of the right shapes and types."""

    def _set_vector_env(self, vec: gym.vector.VectorEnv[Any, Any, Any], num_envs: int) -> None:
        """Set the vector env of this backend. Raises ValueError for an unknown autoreset mode, or if the vector env does not have
        `num_envs` envs."""
        self._vec = vec
        name, mode, modes = type(vec.unwrapped).__name__, vec.metadata.get("autoreset_mode"), [*AutoresetMode]
        wrong = ""
        if mode not in modes:
            allowed = ", ".join(f"AutoresetMode.{allowed_mode.name}" for allowed_mode in modes)
            wrong = f'{name}.metadata["autoreset_mode"] is {mode!r}; expected {allowed} (gymnasium.vector)'
        elif vec.num_envs != num_envs:
            wrong = f"{name}.num_envs is {vec.num_envs}; expected its argument num_envs, {num_envs}"
        if wrong:
            vec.close()
            raise ValueError(wrong)
        self._mode = mode
        self._info: Mapping[str, Any] = {}
        # decoded actions are always valid; the check takes a quarter of CartPole's step
        vec.action_space.contains = lambda x: True  # type: ignore[method-assign]
        self.observation_space, self.action_space = vec.single_observation_space, vec.single_action_space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        obs, info = unpack_reset(self._vec.reset(seed=None if seeds is None else seeds[0]))
        reject_vector_info_mask(self.observation_space, self.action_mask, info)
        return obs if self._is_trusted else fit_to_space(self.observation_space, obs, lead=(self._vec.num_envs,))

    def step(self, action: np.ndarray) -> RawStep:
        outcome = self._vec.step(action)
        if not self._is_trusted:
            return self._check_step(outcome)
        obs, reward_N, terminated_N, truncated_N, self._info = outcome
        return RawStep(obs, reward_N, terminated_N, truncated_N, None)

    def _check_step(self, outcome: Any) -> RawStep:
        """Check the result of the vector env's step and return a RawStep. `RawStep.final` contains the last observations of the episodes
        that ended, except in the mode NEXT_STEP. In the mode DISABLED, this method also resets the envs whose episodes ended. Raises
        InvalidOutcome."""
        obs, reward_N, terminated_N, truncated_N, info = unpack_step(outcome)
        if not isinstance(info, Mapping):
            raise InvalidOutcome(f"step returned the info {value_text(info)}; expected a dict")
        self._info = info
        raw = fit_step(RawStep(obs, reward_N, terminated_N, truncated_N, None), self.observation_space, self._vec.num_envs)
        over_N = raw.terminated_N | raw.truncated_N
        if self._mode == AutoresetMode.NEXT_STEP or not over_N.any():
            return raw
        if self._mode == AutoresetMode.DISABLED:
            return self._reset_rows(raw, over_N)
        if "final_obs" not in info:
            raise InvalidOutcome('step returned no info["final_obs"] although an episode ended; autoreset_mode SAME_STEP requires it')
        last = [(int(row), batch_row(info["final_obs"], int(row))) for row in np.flatnonzero(over_N)]
        return raw._replace(final=[check_last_obs(row, obs, self.observation_space) for row, obs in last])

    def _reset_rows(self, raw: RawStep, over_N: np.ndarray) -> RawStep:
        """Reset the envs for which `over_N` is true, and return a RawStep with copies of the arrays that the reset may change."""
        last = [(int(row), copy.deepcopy(batch_row(raw.obs, int(row)))) for row in np.flatnonzero(over_N)]
        reward_N, terminated_N, truncated_N = raw.reward_N.copy(), raw.terminated_N.copy(), raw.truncated_N.copy()
        obs, _ = unpack_reset(self._vec.reset(options={"reset_mask": over_N}))
        return RawStep(fit_to_space(self.observation_space, obs, lead=(len(over_N),)), reward_N, terminated_N, truncated_N, last)

    def episode_info(self, row: int) -> Mapping[str, Any]:
        return row_info(self._info.get("final_info", {}) if self._mode == AutoresetMode.SAME_STEP else self._info, row)

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [generator_state(rng) for rng in self._rngs()]

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        for rng, state in zip(self._rngs(), states, strict=True):
            set_generator_state(rng, state)

    def _rngs(self) -> tuple[np.random.Generator, ...]:
        """Return a tuple of the vector env's random generators: one generator for all envs, or one generator for each env."""
        rng = self._vec.np_random
        return rng if isinstance(rng, tuple) else (rng,)

    def close(self) -> None:
        self._vec.close()


def _vector_arguments(target: EnvRequest) -> dict[str, Any]:
    """Return the arguments for the constructor of the requested vector env, without num_envs."""
    return {**target.kwargs, **({"max_episode_steps": target.time_limit} if target.max_t is not None else {})}


class UserVectorBackend(VectorBackend):
    """Base class of backends that use a user's vector env class (see `make_vector_backend_class`)."""

    creator: ClassVar[type[gym.vector.VectorEnv[Any, Any, Any]]]

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        names, open_ended = accepted_arguments(cls.creator)
        if target.max_t is None or open_ended or "max_episode_steps" in names:
            return None
        return f"{cls.creator.__name__} has no argument max_episode_steps, which env.max_t sets; remove env.max_t"

    def __init__(self, target: EnvRequest) -> None:
        creator: Any = self.creator
        self.action_mask = target.action_mask
        self._set_vector_env(creator(num_envs=target.num_envs, **_vector_arguments(target)), target.num_envs)


def make_vector_backend_class(creator: type[gym.vector.VectorEnv[Any, Any, Any]]) -> type[UserVectorBackend]:
    """Return a new backend class that uses a user's vector env class."""
    return type(creator.__name__, (UserVectorBackend,), {"creator": creator})


class Native(VectorBackend):
    """Backend that uses the vector env registered for an id (vector_entry_point), such as Gymnasium's CartPoleVectorEnv."""

    name = "native"
    finds_masks = False

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        registration = target.registration
        if registration is None or registration.vector_entry_point is None:
            return f"{target.id} has no vector env of its own"
        if target.plain_id.startswith("ALE/"):
            return f"{target.id} is stepped by the backend ale"
        if registration.additional_wrappers:
            return f"{target.id} is registered with wrappers"
        try:
            names, open_ended = accepted_arguments(env_creator(registration, vector=True))
        except ImportError as error:
            return f"the vector env of {target.id} cannot be imported: {error}"
        unknown = [key for key in _vector_arguments(target) if key not in names and not open_ended]
        return f"the vector env of {target.id} has no argument {', '.join(unknown)}" if unknown else None

    @classmethod
    def is_preferred(cls, target: EnvRequest) -> bool:
        """Return true, unless the request is for one or two envs of classic control.

        A step of CartPoleVectorEnv takes the same time for one env as for eight envs. With one env, a step of the backend Sync takes 0.4
        times as long as a step of CartPoleVectorEnv. With four envs, steps of Sync and of CartPoleVectorEnv take the same time.
        """
        return target.num_envs > 2 or not target.entry_point.startswith("gymnasium.envs.classic_control")

    def __init__(self, target: EnvRequest) -> None:
        vec = gym.make_vec(target.id, target.num_envs, vectorization_mode="vector_entry_point", **_vector_arguments(target))
        self.action_mask = target.action_mask
        self._set_vector_env(vec, target.num_envs)
        assert target.registration is not None
        self._is_trusted = self.returns_new_arrays = target.registration.vector_entry_point == CARTPOLE

    def episode_state(self) -> Any:
        if not isinstance(self._vec, CartPoleVectorEnv):
            return None
        vec: Any = self._vec
        return {"state": vec.state.tolist(), "steps": vec.steps.tolist(), "ended": vec.prev_done.tolist()}

    def set_episode_state(self, state: Any) -> None:
        vec: Any = self._vec
        vec.state, vec.steps = np.array(state["state"]), np.array(state["steps"], np.int32)
        vec.prev_done = np.array(state["ended"], np.bool_)
