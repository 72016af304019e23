"""C++ backends: ALE's vector env and envpool."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from slm_lab.env.atari import frame_limit
from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.outcome import row_info, row_of
from slm_lab.env.single import quiet_gymnasium, register_atari


class Ale(Backend):
    """ALE's vector env of Atari games. At the end of an episode it returns the infos of the reset, so there is no episode_info."""

    name = "ale"
    fresh = checks = True
    reports_info = False

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        if target.atari is None:
            return f"{target.id} is not a preprocessed Atari game (ALE/…)"
        if target.atari.mode is not None or target.atari.difficulty is not None:
            return "ALE's vector env has no arguments mode and difficulty"
        return None

    def __init__(self, target: EnvRequest) -> None:
        register_atari()
        settings = target.atari
        assert settings is not None
        arguments = asdict(replace(settings, episodic_life=False, life_loss_info=False))
        del arguments["mode"], arguments["difficulty"]
        arguments["max_num_frames_per_episode"] = frame_limit(settings, target.max_t)
        self._vec: Any = gym.make_vec(
            target.id,
            target.num_envs,
            vectorization_mode="vector_entry_point",
            autoreset_mode=AutoresetMode.SAME_STEP,
            num_threads=min(target.threads, target.num_envs),
            reward_clipping=False,
            **arguments,
        )
        self.observation_space, self.action_space = self._vec.single_observation_space, self._vec.single_action_space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        return self._vec.reset(seed=None if seeds is None else np.array(seeds))[0]

    def step(self, action: np.ndarray) -> RawStep:
        obs, reward, terminated, truncated, info = self._vec.step(action)
        final = None
        if "final_obs" in info:
            final = [(int(i), info["final_obs"][i]) for i in np.flatnonzero(terminated | truncated)]
        return RawStep(obs, reward, terminated, truncated, final, info["lives"])

    def close(self) -> None:
        self._vec.close()


class EnvPool(Backend):
    """envpool (arXiv:2206.10558): C++ implementations of MuJoCo, Box2D, Atari and classic control envs.

    envpool's time limit reports a termination on the last step as a truncation. Therefore envpool gets a limit one step longer, and this
    class truncates and resets the env in the same step. Terminated envs are reset by the next step (dummy rows).
    """

    name = "envpool"
    fresh = checks = True

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        if importlib.util.find_spec("envpool") is None:
            return "envpool is not installed: pip install 'slm-lab[envpool]'"
        if target.registration is not None and target.atari is None and not target.entry_point.startswith("gymnasium.envs."):
            return f"{target.id} is not one of Gymnasium's own envs; an env of that name in envpool may differ"
        if target.atari is not None and (target.atari.continuous or not target.atari.maxpool or not target.atari.grayscale):
            return "envpool supports Atari with discrete actions, max-pooling and grayscale images only"
        import envpool

        name, config = _pool_config(target)
        if name not in envpool.list_all_envs():
            return f"envpool has no env {target.plain_id}"
        known = set(envpool.make_spec(name).config._fields)
        unknown = [key for key in config if key not in known]
        return f"envpool's {name} has no argument {', '.join(unknown)}" if unknown else None

    @classmethod
    def preferred(cls, target: EnvRequest) -> bool:
        """Prefer envpool if a step costs more than passing it to a thread, and the import (2 s): Acrobot gains 6 times, Pendulum hardly."""
        heavy = ("gymnasium.envs.mujoco", "gymnasium.envs.box2d", "gymnasium.envs.classic_control.acrobot")
        return target.num_envs > 1 and target.entry_point.startswith(heavy)

    def __init__(self, target: EnvRequest) -> None:
        import envpool

        name, self._config = _pool_config(target)
        spec = envpool.make_spec(name, **self._config)
        limit = spec.config.max_episode_steps
        if target.atari is not None:
            limit = -(-frame_limit(target.atari, None) // target.atari.frameskip)
        own = target.time_limit or limit
        self._limit = min(own, target.max_t or own)
        self._name, self._num_envs = name, target.num_envs
        # two threads per core hide wake-up latency: 8 HalfCheetahs, with updates in between, take 520 µs per step instead of 620. On a
        # single core a second thread only adds context switches, 3 % of a step.
        self._threads = min(2 * target.threads, target.num_envs) if target.threads > 1 else 1
        self._pool: Any = None
        self._command: list[np.ndarray] | None = None
        self._slots: list[int] = []
        self._state: Sequence[np.ndarray] = ()
        self._info: dict[str, Any] = {}
        self._atari = target.atari is not None
        self._none_N = np.zeros(target.num_envs, np.bool_)
        self._none_N.flags.writeable = False
        self.observation_space, self.action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        import envpool

        with quiet_gymnasium():
            if seeds is not None or self._pool is None:
                self.close()
                # a pool's seeds are fixed when it is created
                seeding = {} if seeds is None else {"env_seed": list(seeds)}
                self._pool = envpool.make(
                    self._name,
                    env_type="gymnasium",
                    num_envs=self._num_envs,
                    num_threads=self._threads,
                    max_episode_steps=min(self._limit + 1, 2**31 - 1),
                    **seeding,
                    **self._config,
                )
            return self._pool.reset()[0]

    def step(self, action: np.ndarray) -> RawStep:
        obs, reward, terminated, elapsed, lives = self._exchange(action)
        out_of_time = elapsed >= self._limit
        if 1 not in out_of_time.tobytes():  # takes a third of the time of .any()
            return RawStep(obs, reward, terminated, self._none_N, None, lives)
        truncated = out_of_time & ~terminated
        rows = np.flatnonzero(truncated)
        final = [(int(row), row_of(obs, int(row))) for row in rows]
        if len(rows):
            obs = _replaced(obs, rows, self._pool.reset(rows.astype(np.int32))[0])
        return RawStep(obs, reward, terminated, truncated, final, lives)

    def _exchange(self, action: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Step the pool; return observations, rewards, terminated, current episode lengths and lives."""
        pool, names = self._pool, ["reward", "done", "trunc", "elapsed_step", "obs"]
        keys = getattr(pool, "_state_keys", ())
        if not set(names).issubset(keys) or not hasattr(pool, "_send"):  # Dict observations, or another version of envpool
            obs, reward, terminated, _, info = pool.step(action)
            self._info = info
            return obs, reward, terminated, info["elapsed_step"], info["lives"] if self._atari else None
        # `pool.step` without building trees and dicts: 319 µs instead of 433 for 8 HalfCheetahs
        if self._command is None:
            self._command = pool._from(action)
            self._slots = [keys.index(name) for name in (*names, "info:lives" if self._atari else "obs")]
        self._command[-1] = np.ascontiguousarray(action, self._command[-1].dtype)
        pool._send(self._command)
        self._state = state = pool._recv()
        reward, done, truncated, elapsed, obs, lives = (state[slot] for slot in self._slots)
        return obs, reward, done & ~truncated, elapsed, lives if self._atari else None

    def episode_info(self, row: int) -> Mapping[str, Any]:
        keys = getattr(self._pool, "_state_keys", ())
        infos = {key.removeprefix("info:"): values for key, values in zip(keys, self._state, strict=False) if key.startswith("info:")}
        return row_info(infos or self._info, row)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = self._command = None


def _replaced(obs: Any, rows: np.ndarray, new: Any) -> Any:
    """Return a copy of the batch with some rows replaced."""
    if isinstance(obs, dict):
        return {key: _replaced(value, rows, new[key]) for key, value in obs.items()}
    obs = obs.copy()
    obs[rows] = new
    return obs


def _pool_config(target: EnvRequest) -> tuple[str, dict[str, Any]]:
    """Return envpool's name of the env and its arguments."""
    settings = target.atari
    if settings is None:
        name, config = target.plain_id, dict(target.kwargs)
        if name.startswith("LunarLander-") and config.pop("continuous", False):
            name = name.replace("LunarLander-", "LunarLanderContinuous-")
        return name, config
    config = {
        key: getattr(settings, key)
        for key in ("repeat_action_probability", "full_action_space", "noop_max", "use_fire_reset", "stack_num", "img_height", "img_width")
    }
    optional = {key: value for key in ("mode", "difficulty") if (value := getattr(settings, key)) is not None}
    return target.plain_id.removeprefix("ALE/"), {
        **config,
        **optional,
        "frame_skip": settings.frameskip,
        "reward_clip": False,
        "episodic_life": False,
    }
