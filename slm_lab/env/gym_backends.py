"""Backends for Gymnasium envs: "sync" steps the envs one after the other in this process, "async" uses one process per env, and "native"
uses the vector env that Gymnasium has registered for the env id."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import queue
import random
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import concatenate, iterate

from slm_lab.env.arguments import WrapperError, accepted_arguments, env_creator
from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.curriculum import Curriculum, Values, check_spaces, set_attributes
from slm_lab.env.mask_from_info import reject_undeclared_mask, reject_vector_info_mask
from slm_lab.env.outcome import (
    FLAGS,
    NUMBERS,
    InvalidOutcome,
    batch_row,
    check_last_obs,
    check_step,
    close_error_message,
    fit_step,
    fit_to_space,
    raise_invalid_outcome,
    row_info,
    select_numbers,
    to_bool,
    unpack_reset,
    unpack_step,
    value_text,
)
from slm_lab.env.single import SingleEnvConstructor
from slm_lab.env.snapshot import NotSavable, env_state, load_env_state, seed_spaces
from slm_lab.env.spaces import leaves
from slm_lab.lib.log import logger, notice
from slm_lab.lib.process import (
    THREAD_LIMITS,
    InheritedState,
    choose_start_method,
    discard_stop_signals,
    hide_main_module,
    kill_group,
    start_process_group,
    stop_signals_blocked,
    temporary_environment,
)
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.compat.env_ids import envpool_id, package_hint

CLOSE_SECONDS = 2.0
"""Seconds that worker processes have to close their envs before they are killed."""


class _MinimalInfo:
    """Mixin for vector envs that keeps only the infos that the backends use: the last info of each episode, and "lives". Stacking all infos
    would take longer than a step of a small env."""

    num_envs: int

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if "final_obs" in env_info and "final_info" in env_info:
            vector_infos.setdefault("final", []).append((env_num, env_info["final_obs"]))
            vector_infos.setdefault("final_info", {})[env_num] = env_info["final_info"]
        if isinstance(env_info.get("lives"), int | np.integer):
            vector_infos.setdefault("lives", np.zeros(self.num_envs, np.int64))[env_num] = env_info["lives"]
        return vector_infos


class _Sync(_MinimalInfo, SyncVectorEnv[Any, Any]):
    """Gymnasium's SyncVectorEnv, which returns only the infos that the backend uses."""


class _EnvConstructor:
    """Picklable constructor of an env. Unpickling this object in a worker process also applies the main process's InheritedState
    (environment variables, umask, CPU cores and priority) to the worker."""

    def __init__(self, make: SingleEnvConstructor) -> None:
        self._make = make

    def __call__(self) -> gym.Env[Any, Any]:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_constructor, (InheritedState.of_this_process(), self._make)


def _unpickle_constructor(state: InheritedState, make: SingleEnvConstructor) -> _EnvConstructor:
    return _EnvConstructor(make)


class _EnvFns(list[_EnvConstructor]):
    """List of one constructor per env. AsyncVectorEnv iterates over this list and starts one process for each constructor.

    From the iteration over this list until the ExitStack `starting` is closed, new processes start with blocked stop signals, with one
    numpy thread, and without running the user's script.
    """

    def __init__(self, make: SingleEnvConstructor, count: int, starting: contextlib.ExitStack) -> None:
        super().__init__([_EnvConstructor(make)] * count)
        self._starting = starting

    def __iter__(self) -> Iterator[_EnvConstructor]:
        self._starting.enter_context(hide_main_module())
        self._starting.enter_context(temporary_environment({name: os.environ.get(name, "1") for name in THREAD_LIMITS}))
        self._starting.enter_context(stop_signals_blocked())
        return super().__iter__()


class _Async(_MinimalInfo, AsyncVectorEnv[Any, Any]):
    """Gymnasium's AsyncVectorEnv, which returns only the infos that the backend uses. Errors contain the tracebacks of worker processes,
    and `close` always ends the worker processes.

    Each worker process leads a process group, so that a process which an env has started (such as a simulator) ends with the env's worker
    process.
    """

    def __init__(
        self,
        make: SingleEnvConstructor,
        num_envs: int,
        track_info: Sequence[str],
        shared_memory: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.parent_pipes, self.processes = [], []
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)  # before multiprocessing joins its child processes at exit, which would block forever
        try:
            with contextlib.ExitStack() as self._starting:
                self._starting.callback(make.restore_folder)  # AsyncVectorEnv builds one env in this process to get its spaces
                # Gymnasium's annotation of `worker` lacks the first arguments
                make_and_curriculum = None if curriculum is None else (make, curriculum)
                worker: Any = functools.partial(_run_worker, os.getpid(), track_info, make.action_mask, make_and_curriculum)
                makers = _EnvFns(make, num_envs, self._starting)
                mode, context = AutoresetMode.SAME_STEP, choose_start_method()
                super().__init__(makers, shared_memory, copy=False, context=context, worker=worker, autoreset_mode=mode)
        except BaseException:  # including Ctrl-C while a constructor blocks
            self.close(terminate=True)
            raise

    def _check_spaces(self) -> None:
        """Wait for the constructors of the envs. AsyncVectorEnv calls this method after it has started all processes."""
        self._starting.close()
        super()._check_spaces()  # type: ignore[no-untyped-call]  # Gymnasium leaves it untyped

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        if all(successes):
            return
        self._state = AsyncState.DEFAULT
        try:
            index, invalid, trace = self.error_queue.get(timeout=CLOSE_SECONDS)
        except queue.Empty:
            raise RuntimeError("an env failed in its worker process, which died before it reported the error") from None
        if invalid is not None:
            raise_invalid_outcome(invalid, index)
        raise RuntimeError(f"env {index} failed in its worker process:\n{trace}")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Tell the worker processes to close their envs, and kill their process groups after CLOSE_SECONDS (immediately if `terminate` is
        true)."""
        atexit.unregister(self._at_exit)
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError):  # the worker has died
                pipe.send(("close", None))
        end = time.monotonic() + (0 if terminate else CLOSE_SECONDS)
        for process in self.processes:
            if process.pid is None:  # its start failed
                continue
            process.join(max(end - time.monotonic(), 0))
            kill_group(process.pid)
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self.parent_pipes:
            pipe.close()


def _close_if_alive(reference: weakref.ref[_Async]) -> None:
    vec = reference()
    if vec is not None:
        vec.close()


class _CheckedWorkerEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper of an env in a worker process. The wrapper checks the values that the env returns, and drops infos that the parent process
    does not use.

    Infos that the parent process does not use are dropped because they may not be picklable. The last observation of an episode is copied,
    because Gymnasium's worker resets the env before it sends the observation, and the env may reuse the observation's array. A reset with a
    seed also seeds the spaces of the env and the global random generators of the worker process.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        track_info: Sequence[str],
        action_mask: str | Literal[False] | None,
        make_and_curriculum: tuple[SingleEnvConstructor, Curriculum] | None = None,
    ) -> None:
        super().__init__(env)
        self._action_mask, self._make_and_curriculum = action_mask, make_and_curriculum
        self.wanted_values: Values | None = None
        """Scheduled values (env.schedule) that the env receives with its next reset, or None if the env already has the current values."""
        self._track_info, self._space = track_info, env.observation_space

    def _prepare_reset(self, seed: int | None) -> int | None:
        """Apply `wanted_values` to the env before a reset, and return the seed for this reset."""
        assert self._make_and_curriculum is not None
        assert self.wanted_values is not None
        (make, curriculum), values = self._make_and_curriculum, self.wanted_values
        self.wanted_values = None
        if any(values[key] != curriculum.held[0][key] for key in curriculum.arguments):
            self.env = _rebuild_env(make, curriculum, values, self.env)
            seed = curriculum.next_seed(0) if seed is None else seed
        else:
            set_attributes(self.env, curriculum.attributes(values), curriculum.constructor_arguments)
        curriculum.record_episode_start(0, values)
        return seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None and self._make_and_curriculum is not None:
            self._make_and_curriculum[1].seeds[0] = seed
        if self.wanted_values is not None:
            seed = self._prepare_reset(seed)
        if seed is not None:
            seed_spaces(self.env, seed)
            _seed_process(seed)
        try:
            obs, info = unpack_reset(self.env.reset(seed=seed, options=options))
            reject_undeclared_mask(self.env, self._action_mask, info)
            return fit_to_space(self._space, obs), _lives(info)
        except Exception as error:
            raise_invalid_outcome(error)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            obs, reward, terminated, truncated, info = check_step(self.env.step(action))
            obs = fit_to_space(self._space, obs)
            if terminated or truncated:
                return copy.deepcopy(obs), reward, terminated, truncated, select_numbers(info, self._track_info)
            return obs, reward, terminated, truncated, _lives(info)
        except Exception as error:
            raise_invalid_outcome(error)

    def close(self) -> None:
        try:
            super().close()
        except Exception as error:
            notice(close_error_message(error))


def _lives(info: Mapping[str, Any]) -> dict[str, Any]:
    lives = info.get("lives")
    return {"lives": int(lives)} if isinstance(lives, int | np.integer) else {}


def _seed_process(seed: int) -> None:
    """Seed the global random generators of Python, numpy and torch (if torch is imported), because some envs use these generators."""
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


class _ErrorQueue:
    """Queue that passes errors of a worker process to its parent in picklable form: (index of the env, InvalidOutcome or None,
    traceback)."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, item: tuple[int, Any, Any, str]) -> None:
        """Put an error of Gymnasium's worker into the queue.

        Args: item: (index of the env, type, error, traceback).
        """
        index, _, error, trace = item
        self._queue.put((index, error if isinstance(error, InvalidOutcome) else None, trace))


def _run_worker(
    parent: int,
    track_info: Sequence[str],
    action_mask: str | Literal[False] | None,
    make_and_curriculum: tuple[SingleEnvConstructor, Curriculum] | None,
    index: int,
    env_fn: Any,
    pipe: Any,
    parent_pipe: Any,
    shared_memory: Any,
    error_queue: Any,
    autoreset_mode: Any,
    semaphore: Any,
) -> None:
    """Run Gymnasium's worker function for one env in this worker process. The process becomes the leader of a new process group, reports
    errors of the env's constructor to the parent process, and ignores stop signals."""
    start_process_group(parent)
    discard_stop_signals()
    parent_pipe.close()  # otherwise this copy would keep `pipe` open after the parent has died
    try:
        env = env_fn()
    except Exception:
        error_queue.put((index, None, traceback.format_exc()))
        try:
            pipe.recv()
            pipe.send((None, False))
        except (OSError, EOFError):  # the parent has died
            kill_group(os.getpid())
        return
    try:
        wrapped, errors = _CheckedWorkerEnv(env, track_info, action_mask, make_and_curriculum), _ErrorQueue(error_queue)
        _async_worker(index, lambda: wrapped, pipe, parent_pipe, shared_memory, errors, autoreset_mode, semaphore)  # type: ignore[arg-type]
    except OSError:  # the parent has died; the env has been closed
        kill_group(os.getpid())


def _rebuild_env(make: SingleEnvConstructor, curriculum: Curriculum, values: Values, old: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Close the env `old` and return a new env with the scheduled values `values`. Raises InvalidOutcome if the spaces of the new env
    differ from the spaces of the old env."""
    observation, action = old.observation_space, old.action_space
    try:
        old.close()
    except Exception as error:
        notice(close_error_message(error))
    env = make.with_values(curriculum, values)()
    try:
        check_spaces(env, observation, action, values)
    except WrapperError as error:
        raise InvalidOutcome("env.{}: {}".format(*error.args)) from None
    return env


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
        vec = _Sync([self._make] * target.num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
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
        env = _rebuild_env(self._make, curriculum, values, self._envs[row])
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
        with _explained_worker_death():
            make = SingleEnvConstructor.from_target(target)
            try:
                vec = _Async(make, target.num_envs, target.track_info, curriculum=target.curriculum)
            except ValueError as error:
                if not isinstance(error.__cause__, gym.error.CustomSpaceError):
                    raise
                # make_env raises an error for the unsupported space
                vec = _Async(make, target.num_envs, target.track_info, shared_memory=False, curriculum=target.curriculum)
        self._set_vector_env(vec, target)
        self._curriculum = target.curriculum
        self._sent = None if self._curriculum is None else self._curriculum.current_values()
        """Scheduled values (env.schedule) that were last sent to the worker processes."""

    def reset(self, seeds: Sequence[int] | None) -> Any:
        with _explained_worker_death():
            self._send_scheduled_values()
            obs = super().reset(seeds)
            self._prepare_reset(range(self._vec.num_envs))
            return obs

    def step(self, action: np.ndarray) -> RawStep:
        with _explained_worker_death():
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


@contextlib.contextmanager
def _explained_worker_death() -> Iterator[None]:
    """Context manager that converts the errors of a closed pipe to a RuntimeError, which says that a worker process died."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RuntimeError("a worker process of the env died (killed, or out of memory)") from error


CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"


class VectorBackend(Backend):
    """Base class of backends that use a gymnasium.vector.VectorEnv with any autoreset mode. The entry "autoreset_mode" of the vector env's
    metadata names the mode.

    NEXT_STEP: the vector env resets an env in the step after the end of its episode, so that the env's row of this step is not a
    transition. SAME_STEP: the vector env resets an env in the step that ends the episode, and returns the last observation in
    `info["final_obs"]`. DISABLED: this class resets an env in the step that ends the episode, by calling `reset(options={"reset_mask": bool
    [N]})`.
    """

    returns_valid_arrays = True
    action_mask: str | Literal[False] | None = None
    """Key of the action mask in observations or infos, see `EnvRequest.action_mask`."""
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
