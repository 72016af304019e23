"""Gymnasium's backends: one by one in this process (sync), one process each (async), and an env's own vector form (native)."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from slm_lab.env.arguments import accepted, vector_creator
from slm_lab.env.backend import Backend, RawStep, Target
from slm_lab.env.single import SingleEnv
from slm_lab.lib.rng import generator_state, set_generator_state

CLOSE_SECONDS = 2.0
"""How long worker processes may take to close their envs before they are ended."""


class _LeanInfo:
    """Keeps of the envs' infos only what is used: stacking every entry costs more than a small env's step."""

    num_envs: int

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if "final_obs" in env_info and "final_info" in env_info:
            # a copy: the env may write its next observation into the same array
            vector_infos.setdefault("final", []).append((env_num, copy.deepcopy(env_info["final_obs"])))
        if isinstance(env_info.get("lives"), int | np.integer):
            vector_infos.setdefault("lives", np.zeros(self.num_envs, np.int64))[env_num] = env_info["lives"]
        return vector_infos


class _Sync(_LeanInfo, SyncVectorEnv[Any, Any]):
    """SyncVectorEnv that gathers no infos."""


class _Async(_LeanInfo, AsyncVectorEnv[Any, Any]):
    """AsyncVectorEnv that gathers no infos, shows the worker's own traceback, and always closes."""

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        failures = [self.error_queue.get() for success in successes if not success]
        if failures:
            self._state = AsyncState.DEFAULT
            index, _, _, trace = failures[0]
            raise RuntimeError(f"env {index} failed in its worker process:\n{trace}")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask the workers to close their envs, and end those that do not within CLOSE_SECONDS."""
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError):  # the worker is gone
                pipe.send(("close", None))
        end = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.parent_pipes:
            pipe.close()


class _KeepsLast(gym.Wrapper[Any, Any, Any, Any]):
    """Copies the last observation of an episode: Gymnasium's worker resets before it sends, and the env may reuse its array."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return copy.deepcopy(obs) if terminated or truncated else obs, reward, terminated, truncated, info


def _worker(
    index: int, env_fn: Any, pipe: Any, parent_pipe: Any, shared_memory: Any, error_queue: Any, autoreset_mode: Any, semaphore: Any
) -> None:
    """Gymnasium's worker, but a constructor that fails is reported, and signals to the whole group are left to the parent."""
    import signal
    import traceback

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        env = env_fn()
    except Exception as error:
        error_queue.put((index, type(error), str(error), traceback.format_exc()))
        pipe.recv()
        pipe.send((None, False))
        return
    try:
        _async_worker(index, lambda: _KeepsLast(env), pipe, parent_pipe, shared_memory, error_queue, autoreset_mode, semaphore)
    except OSError:  # the parent is gone
        env.close()


class _OneByOne(Backend):
    """What sync and async share: SAME_STEP autoreset, so that no step is spent on dummy rows."""

    _vec: Any
    _shows_rng: bool

    @classmethod
    def refuses(cls, target: Target) -> str | None:
        if target.registration is None:
            return f"Gymnasium does not know {target.id}"
        if target.registration.entry_point is None:
            return f"{target.id} exists as a vector env only"
        return None

    def _adopt(self, vec: gym.vector.VectorEnv[Any, Any, Any], target: Target) -> None:
        self._vec = vec
        self._shows_rng = target.atari is None  # the emulator keeps its own stream
        self.observation_space, self.action_space = vec.single_observation_space, vec.single_action_space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        return self._vec.reset(seed=None if seeds is None else list(seeds))[0]

    def step(self, action: np.ndarray) -> RawStep:
        obs, reward, terminated, truncated, info = self._vec.step(action)
        return RawStep(obs, reward, terminated, truncated, info.get("final"), info.get("lives"))

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [generator_state(rng) for rng in self._vec.get_attr("np_random")] if self._shows_rng else None

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        rngs = [np.random.default_rng() for _ in states]
        for rng, state in zip(rngs, states, strict=True):
            set_generator_state(rng, state)
        self._vec.set_attr("np_random", rngs)

    def close(self) -> None:
        self._vec.close()


class Sync(_OneByOne):
    """Gymnasium's SyncVectorEnv: takes every env."""

    name = "sync"

    def __init__(self, target: Target) -> None:
        make = SingleEnv.of(target)
        self._adopt(_Sync([make] * target.num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP), target)


class Async(_OneByOne):
    """Gymnasium's AsyncVectorEnv: a process for each env, for envs that take milliseconds a step. Never chosen by auto."""

    name = "async"

    @classmethod
    def pays(cls, target: Target) -> bool:
        return False

    def __init__(self, target: Target) -> None:
        make = SingleEnv.of(target)
        worker: Any = _worker  # Gymnasium annotates it without the arguments
        # spawn: a fork of a process with threads (torch's, envpool's) may hang
        with _Died():
            vec = _Async([make] * target.num_envs, copy=False, context="spawn", worker=worker, autoreset_mode=AutoresetMode.SAME_STEP)
        self._adopt(vec, target)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        with _Died():
            return super().reset(seeds)

    def step(self, action: np.ndarray) -> RawStep:
        with _Died():
            return super().step(action)


class _Died:
    """Says that a worker process is gone where the pipe only says that it is closed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
            raise RuntimeError("a worker process of the env died (killed, or out of memory)") from error


CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"


class Native(Backend):
    """The vector env that an id itself registers (vector_entry_point), such as Gymnasium's CartPoleVectorEnv."""

    name = "native"

    @classmethod
    def refuses(cls, target: Target) -> str | None:
        registration = target.registration
        if registration is None or registration.vector_entry_point is None:
            return f"{target.id} has no vector env of its own"
        if target.plain_id.startswith("ALE/"):
            return f"{target.id} has the backend ale"
        if registration.additional_wrappers:
            return f"{target.id} is registered with wrappers"
        try:
            known, open_ended = accepted(vector_creator(registration))
        except ImportError as error:
            return f"the vector env of {target.id} cannot be imported: {error}"
        wanted = [*target.kwargs, *(["max_episode_steps"] if target.max_t is not None else [])]
        unknown = [key for key in wanted if key not in known and not open_ended]
        return f"the vector env of {target.id} does not take {', '.join(unknown)}" if unknown else None

    @classmethod
    def pays(cls, target: Target) -> bool:
        """A step of CartPole's arrays costs as much for one env as for eight: alone, Sync takes 0.6 of it, with four as much."""
        return target.num_envs > 2 or not target.entry_point.startswith("gymnasium.envs.classic_control")

    def __init__(self, target: Target) -> None:
        limit: dict[str, Any] = {"max_episode_steps": target.time_limit} if target.max_t is not None else {}
        vec = gym.make_vec(target.id, target.num_envs, vectorization_mode="vector_entry_point", **limit, **target.kwargs)
        self._vec = vec
        mode = vec.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            vec.close()
            raise ValueError(f'it does not say when it resets (metadata["autoreset_mode"] is {mode}); use "backend": "sync"')
        self._same_step = mode == AutoresetMode.SAME_STEP
        assert target.registration is not None
        self.fresh = target.registration.vector_entry_point == CARTPOLE  # which makes its observations anew
        # `decode` gives valid actions only; CartPole's own check of them takes a quarter of its step
        vec.action_space.contains = lambda x: True  # type: ignore[method-assign]
        self.observation_space, self.action_space = vec.single_observation_space, vec.single_action_space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        return self._vec.reset(seed=None if seeds is None else seeds[0])[0]

    def step(self, action: np.ndarray) -> RawStep:
        obs, reward, terminated, truncated, info = self._vec.step(action)
        terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        final = None
        if self._same_step and (terminated | truncated).any():
            final = [(int(i), info["final_obs"][i]) for i in np.flatnonzero(terminated | truncated)]
        return RawStep(obs, reward, terminated, truncated, final)

    def rng_states(self) -> list[dict[str, Any]] | None:
        return [generator_state(rng) for rng in self._rngs()]

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        for rng, state in zip(self._rngs(), states, strict=True):
            set_generator_state(rng, state)

    def _rngs(self) -> tuple[np.random.Generator, ...]:
        """One for all envs, or one for each."""
        rng = self._vec.np_random
        return rng if isinstance(rng, tuple) else (rng,)

    def close(self) -> None:
        self._vec.close()
