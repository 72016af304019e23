"""Vector envs of Gymnasium for the backends "sync" and "async", and the worker processes of the backend "async"."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import queue
import random
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from slm_lab.env.arguments import WrapperError
from slm_lab.env.curriculum import Curriculum, Values, check_spaces, set_attributes
from slm_lab.env.mask_from_info import reject_undeclared_mask
from slm_lab.env.outcome import (
    InvalidOutcome,
    check_step,
    close_error_message,
    fit_to_space,
    raise_invalid_outcome,
    select_numbers,
    unpack_reset,
)
from slm_lab.env.single import SingleEnvConstructor
from slm_lab.env.snapshot import seed_spaces
from slm_lab.lib.log import PlainError, error_summary, explain_exit, notice
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

CLOSE_SECONDS = 2.0
"""Seconds that worker processes have to close their envs before they are killed."""
_EXIT_SECONDS = 2.0
"""Maximum time in seconds for a worker process to exit after its pipe was closed."""
_EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""Exceptions that are not subclasses of Exception. In a worker process, which ignores signals, only code raises them."""


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


class SyncEnvs(_MinimalInfo, SyncVectorEnv[Any, Any]):
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


class AsyncEnvs(_MinimalInfo, AsyncVectorEnv[Any, Any]):
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
            index, invalid, cause, trace = self.error_queue.get(timeout=CLOSE_SECONDS)
        except queue.Empty:
            raise RuntimeError("an env failed in its worker process, which died before it reported the error") from None
        if invalid is not None:
            raise_invalid_outcome(invalid, index)
        raise EnvWorkerError(f"env {index} failed in its worker process:\n{trace}", cause)

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


def _close_if_alive(reference: weakref.ref[AsyncEnvs]) -> None:
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
            self.env = rebuild_env(make, curriculum, values, self.env)
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
        except _EXITS as error:
            raise InvalidOutcome(explain_exit(error)) from None
        except Exception as error:
            raise_invalid_outcome(error)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            obs, reward, terminated, truncated, info = check_step(self.env.step(action))
            obs = fit_to_space(self._space, obs)
            if terminated or truncated:
                return copy.deepcopy(obs), reward, terminated, truncated, select_numbers(info, self._track_info)
            return obs, reward, terminated, truncated, _lives(info)
        except _EXITS as error:
            raise InvalidOutcome(explain_exit(error)) from None
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
    """Queue that passes errors of a worker process to its parent in picklable form: (index of the env, InvalidOutcome or None, summary of
    the error, traceback)."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, item: tuple[int, Any, Any, str]) -> None:
        """Put an error of Gymnasium's worker into the queue.

        Args: item: (index of the env, type, error, traceback).
        """
        index, _, error, trace = item
        self._queue.put((index, error if isinstance(error, InvalidOutcome) else None, error_summary(error), trace))


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
    except (Exception, *_EXITS) as error:
        error_queue.put((index, None, explain_exit(error) or error_summary(error), traceback.format_exc()))
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


def rebuild_env(make: SingleEnvConstructor, curriculum: Curriculum, values: Values, old: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
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


class EnvWorkerError(RuntimeError):
    """Raised if the code of an env raised an error in its worker process. The message contains the traceback of the worker process, and
    `cause` contains the type, message and location of the error."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class EnvProcessDied(PlainError, RuntimeError):
    """Raised if a worker process of the backend "async" has ended, for example because the env called os._exit."""


@contextlib.contextmanager
def explained_worker_death(processes: Sequence[Any] = ()) -> Iterator[None]:
    """Context manager that converts the errors of a closed pipe to EnvProcessDied, whose message says how the worker process of which env
    ended.

    Args: processes: multiprocessing.Process objects of the envs, or () if they are unknown.
    """
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        end = time.monotonic() + (_EXIT_SECONDS if processes else 0.0)
        while not (codes := {index: process.exitcode for index, process in enumerate(processes) if process.exitcode is not None}):
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        ends = [f"the worker process of env {index} {_describe_exit(code)}" for index, code in codes.items()]
        raise EnvProcessDied("; ".join(ends) or "a worker process of the env died (killed, or out of memory)") from error


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")
