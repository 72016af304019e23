"""Backends of envs written in C++: ALE's vector env and EnvPool."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import asdict, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from slm_lab.env.atari import frame_limit
from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.envpool_suites import (
    OWN_LIMIT_SUITES,
    InfoTracker,
    ObservationReader,
    TruncationReader,
    convert_options,
    correct_action_space,
    import_envpool,
    known_options,
    make_vizdoom_folder,
)
from slm_lab.env.outcome import batch_row, row_info
from slm_lab.env.single import quiet_gymnasium, register_atari
from slm_lab.spec.compat.env_ids import envpool_envs

_NO_LIMIT = 2**31 - 1
"""Value of EnvPool's option max_episode_steps that stands for no time limit."""


class Ale(Backend):
    """Backend that uses ALE's vector env of Atari games. In the last step of an episode, ALE returns the infos of the reset instead of the
    infos of the step, so that `episode_info` is empty."""

    name = "ale"
    returns_new_arrays = returns_valid_arrays = True
    reports_info = finds_masks = False

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
    """Backend that uses EnvPool (arXiv:2206.10558), a library of envs in C++: MuJoCo, Box2D, Atari, classic control and twelve other
    suites.

    EnvPool receives a time limit that is one step longer than the actual limit, because EnvPool reports as truncated an episode that
    terminates in the step of EnvPool's limit. In the step of the actual limit, this class truncates the episode and resets the env. An env
    whose episode terminated is reset by the next step. The env's row of that next step is not a transition. Suites whose envs count steps
    themselves (`OWN_LIMIT_SUITES`) keep their own time limit, and an episode that ends at this limit counts as truncated (see
    `TruncationReader`).
    """

    name = "envpool"
    returns_new_arrays = returns_valid_arrays = selects_parts = staggers_episodes = True

    @classmethod
    def unsupported_reason(cls, target: EnvRequest) -> str | None:
        if importlib.util.find_spec("envpool") is None:
            return "envpool is not installed: pip install 'slm-lab[envpool]'"
        if target.registration is not None and target.atari is None and not target.entry_point.startswith("gymnasium.envs."):
            return f"{target.id} is not one of Gymnasium's own envs; an env of that name in envpool may differ"
        if target.atari is not None and (target.atari.continuous or not target.atari.maxpool or not target.atari.grayscale):
            return "envpool supports Atari only with discrete actions, max-pooling and grayscale images"
        envpool = import_envpool()
        name, config = _envpool_name_and_config(target)
        if name not in envpool.list_all_envs():
            return f"envpool has no env {target.plain_id}"
        if target.registration is None:
            return None  # the options were checked before
        unknown = [key for key in config if key not in known_options(name, config)]
        return f"envpool's {name} has no argument {', '.join(unknown)}" if unknown else None

    @classmethod
    def backend_class_for(cls, target: EnvRequest) -> type[Backend]:
        env = envpool_envs().get(_envpool_name_and_config(target)[0])
        return EnvPoolAgents if env is not None and env.players > 1 else cls

    @classmethod
    def is_preferred(cls, target: EnvRequest) -> bool:
        """Return true for ids that exist only in EnvPool, and for several envs with slow steps. For such envs, threads save more time than
        the import of EnvPool takes (2 s).

        With EnvPool, steps of Acrobot are 6 times as fast as with Sync, but steps of Pendulum are hardly faster.
        """
        heavy = ("gymnasium.envs.mujoco", "gymnasium.envs.box2d", "gymnasium.envs.classic_control.acrobot")
        return target.registration is None or (target.num_envs > 1 and target.entry_point.startswith(heavy))

    def __init__(self, target: EnvRequest) -> None:
        name, config = _envpool_name_and_config(target)
        self._config = convert_options(config, known_options(name, config))
        with quiet_gymnasium():
            spec = import_envpool().make_spec(name, **self._config)
            space, self.action_space = spec.gymnasium_observation_space, correct_action_space(spec.gymnasium_action_space)
        env = envpool_envs().get(name)
        self._suite = "" if env is None else env.suite
        limits = [limit for limit in (target.time_limit, _episode_limit(target, self._suite, spec.config)) if limit is not None]
        self.max_steps = min(limits, default=None)
        keeps_own_limit = self._suite in OWN_LIMIT_SUITES
        # no limit is set in EnvPool if the env's own limit ends the episode first
        self._limit = min((target.max_t if keeps_own_limit else self.max_steps) or _NO_LIMIT, _NO_LIMIT)
        self._pool_limit = spec.config.max_episode_steps if keeps_own_limit else min(self._limit + 1, _NO_LIMIT)
        self._name, self._num_envs, self._keys = name, target.num_envs, list(spec._state_keys)
        self._staggers = target.staggers_episodes
        self._usual_limit_N = np.full(target.num_envs, self._limit, np.int32)
        self._limit_N = self._usual_limit_N  # comparing with an array takes half the time of comparing with an int
        """Time limit, in steps, of the current episode of each env, int [N]."""
        # two threads per core hide wake-up latency: 8 HalfCheetahs, with updates in between, take 520 µs per step instead of 620. On a
        # single core a second thread only adds context switches, 3 % of a step.
        self._threads = min(2 * target.threads, target.num_envs) if target.threads > 1 else 1
        self._pool: Any = None
        self._command: list[np.ndarray] | None = None
        self._slots: dict[str, int] = {}
        self._state: Sequence[np.ndarray] = ()
        self._atari = target.atari is not None
        self._folder = make_vizdoom_folder() if self._suite == "vizdoom" else None
        self._none_N = np.zeros(target.num_envs, np.bool_)
        self._none_N.flags.writeable = False
        self._tracked = InfoTracker(target.track_info, spec._state_keys)
        self._read = ObservationReader(space, spec._state_keys, fills_masks=self._suite == "jumanji")
        for wrap in target.wraps:  # env.obs_keys is the only wrapper that reaches this backend
            self._read.restrict_entries(**wrap.kwargs, action=self.action_space)
        self._read.add_mask(target.action_mask, self.action_space)
        self.observation_space = self._read.space

    def reset(self, seeds: Sequence[int] | None) -> Any:
        with quiet_gymnasium(), nullcontext() if self._folder is None else chdir(self._folder.name):
            if seeds is not None or self._pool is None:
                self._create_pool(seeds)
            if self._staggers and self.max_steps is not None:
                self._limit_N = np.maximum(self.max_steps * np.arange(1, self._num_envs + 1) // self._num_envs, 1)
            return self._reset_rows(np.arange(self._num_envs, dtype=np.int32))

    def _create_pool(self, seeds: Sequence[int] | None) -> None:
        """Create EnvPool's pool of envs. The seeds of a pool cannot be changed after the pool has been created."""
        self.close()
        self._pool = import_envpool().make(
            self._name,
            env_type="gymnasium",
            num_threads=self._threads,
            max_episode_steps=self._pool_limit,
            **self._sizes(),
            **({} if seeds is None else {"env_seed": self._pool_seeds(seeds)}),
            **self._config,
        )

    def _sizes(self) -> dict[str, int]:
        """Return a dict of EnvPool's options `num_envs` and `batch_size`."""
        return {"num_envs": self._num_envs}

    def _pool_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Return the seed of each env in EnvPool's pool."""
        return list(seeds)

    def _reset_rows(self, rows: np.ndarray) -> Any:
        """Reset the envs with the indices `rows` and return the observations of these envs."""
        self._pool._reset(rows)
        return self._read(self._receive(reset=True))

    def _receive(self, reset: bool = False) -> Sequence[np.ndarray]:
        """Wait until EnvPool's pool has finished a step or reset, and return the arrays of the pool."""
        arrays: Sequence[np.ndarray] = self._pool._recv()
        return arrays

    def step(self, action: np.ndarray) -> RawStep:
        pool = self._pool
        # `pool.step` without building trees and dicts: 319 µs instead of 433 for 8 HalfCheetahs
        if self._command is None:
            self._command = pool._from(action)
            keys = self._keys
            self._slots = {name: keys.index(name) for name in ("reward", "done", "elapsed_step")}
            self._cut = TruncationReader(keys) if self._suite in OWN_LIMIT_SUITES else None
            self._lives = keys.index("info:lives") if self._atari else None
        self._command[-1] = np.ascontiguousarray(action, self._command[-1].dtype)
        pool._send(self._command)
        self._state = state = self._receive()
        reward, done, elapsed = (state[slot] for slot in self._slots.values())
        self._tracked.add(state, elapsed)
        obs, lives = self._read(state), None if self._lives is None else state[self._lives]
        terminated, truncated = done, self._none_N
        if self._cut is not None and 1 in done.tobytes():
            truncated = self._cut(state)
            terminated = done & ~truncated
        out_of_time, shortened = elapsed >= self._limit_N, None
        if self._limit_N is not self._usual_limit_N:
            shortened = out_of_time & ~done & (self._limit_N < (self.max_steps or 0))
            self._limit_N[out_of_time | done] = self._limit
            if (self._limit_N == self._limit).all():
                self._limit_N = self._usual_limit_N
        if 1 not in out_of_time.tobytes():  # takes a third of the time of .any()
            return RawStep(obs, reward, terminated, truncated, None, lives)
        late = out_of_time & ~done
        rows = np.flatnonzero(late)
        final = [(int(row), batch_row(obs, int(row))) for row in rows]
        if len(rows):
            obs = _replace_rows(obs, rows, self._reset_rows(rows.astype(np.int32)))
        return RawStep(obs, reward, terminated, truncated | late, final, lives, shortened)

    def episode_info(self, row: int) -> Mapping[str, Any]:
        infos = {key.removeprefix("info:"): values for key, values in zip(self._keys, self._state, strict=False) if key.startswith("info:")}
        return {**row_info(infos, row), **self._tracked.combined_entries(row)}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = self._command = None


_CHANCE = ("Backgammon-v1",)
"""Games of pgx whose steps are random. In other games of pgx, only the resets of an env use the env's random stream."""


class EnvPoolAgents(EnvPool):
    """Backend for EnvPool's envs with several agents: games whose players act in turn (pgx), and vehicles that act simultaneously
    (highway).

    EnvPool returns envs with several agents in the order in which the envs finish their step. EnvPool returns a batch only when it contains
    as many envs as requested, even if only some envs are reset. This class creates a pool with twice as many envs as requested, so that
    spare envs can fill the batches in which only some envs are reset. The saved state of a game consists of the seed of its env, the number
    of resets since the env was seeded, and the moves so far. A saved game is restored by repeating the resets and moves.
    """

    staggers_episodes = False

    def __init__(self, target: EnvRequest) -> None:
        super().__init__(target)
        games, count = self._suite == "pgx", envpool_envs()[self._name].players
        self.agents = tuple(f"{'player' if games else 'vehicle'}_{index}" for index in range(count))
        self._at = {key: slot for slot, key in enumerate(self._keys)}
        self._turns, self._crashed = self._at.get("info:current_player"), self._at.get("info:players.crashed")
        self._spread = self._tracked.array_indices
        self._envs_N = np.arange(target.num_envs)
        self._turn_N, self._over_N = np.zeros(target.num_envs, np.int64), np.zeros(target.num_envs, np.bool_)
        """For each env, the index of the player who acts next, and whether the env's episode has ended. If the episode has ended, the next
        step resets the env."""
        self._replays = games and self._name not in _CHANCE
        self._seeds: list[int] | None = None
        self._resets_N, self._length_N = np.zeros(target.num_envs, np.int64), np.zeros(target.num_envs, np.int64)
        """For each env, the number of resets since the env was seeded, and the number of moves of the running game."""
        self._moves_NL = np.zeros((target.num_envs, 64), np.int32)
        """Moves of the running games, one row per env: the first `_length_N[e]` numbers of row e are the moves of the game of env e. The
        last column never contains a move."""

    def _sizes(self) -> dict[str, int]:
        return {"num_envs": 2 * self._num_envs, "batch_size": self._num_envs}

    def _pool_seeds(self, seeds: Sequence[int]) -> list[int]:
        return [*seeds, *seeds]

    def _create_pool(self, seeds: Sequence[int] | None) -> None:
        super()._create_pool(seeds)
        self._seeds = None if seeds is None else list(seeds)
        self._resets_N[:] = 0

    def _reset_rows(self, rows: np.ndarray) -> Any:
        """Reset the envs with the indices `rows`, in ascending order, and return the observations of the agents in these envs."""
        self._fill_batch(len(rows))
        obs = super()._reset_rows(rows)
        self._resets_N[rows] += 1
        self._length_N[rows] = 0
        return obs

    def _fill_batch(self, count: int) -> None:
        """Reset as many spare envs of EnvPool's pool as are missing in a batch of `count` envs, because the pool returns only full
        batches."""
        if count < self._num_envs:
            self._pool._reset(np.arange(self._num_envs, 2 * self._num_envs - count, dtype=np.int32))

    def _receive(self, reset: bool = False) -> Sequence[np.ndarray]:
        """Return the arrays of EnvPool's pool for the envs that were stepped or reset, in the order of the envs. In the returned arrays,
        the action mask has one row per agent of each env."""
        state = list(super()._receive())
        envs_K, count = state[self._at["info:env_id"]], len(self.agents)
        if envs_K.max() >= self._num_envs or (envs_K[1:] < envs_K[:-1]).any():
            order_K = envs_K.argsort()[: int((envs_K < self._num_envs).sum())]
            rows = (order_K[:, None] * count + np.arange(count)).ravel()
            state = [array[order_K if len(array) == len(envs_K) else rows] for array in state]
            envs_K = state[self._at["info:env_id"]]
        self._over_N[envs_K] = state[self._at["done"]]
        if self._turns is not None:
            self._turn_N[envs_K] = state[self._turns]
            if (slot := self._read.mask_index) is not None:
                mask_K = state[slot].reshape(len(envs_K), -1)
                mask = np.ones((len(envs_K), count, mask_K.shape[1]), mask_K.dtype)
                mask[np.arange(len(envs_K)), self._turn_N[envs_K]] = mask_K
                state[slot] = mask.reshape(-1, mask_K.shape[1])
        for slot in self._spread:
            if len(state[slot]) == len(envs_K):
                state[slot] = state[slot].repeat(count, axis=0)
        self.acts_N = self._acting_agents()
        return state

    def _acting_agents(self) -> np.ndarray:
        """Return whether the agent of each row acts in the next step, bool [N]. No agent acts in an env that the next step resets."""
        acts_NA = np.zeros((self._num_envs, len(self.agents)), np.bool_)
        if self._turns is None:
            acts_NA[:] = ~self._over_N[:, None]
        else:
            acts_NA[self._envs_N, self._turn_N] = ~self._over_N
        return acts_NA.ravel()

    def step(self, action: np.ndarray) -> RawStep:
        count = len(self.agents)
        if self._turns is not None:  # the action of the player whose turn it is
            action = action.reshape(self._num_envs, count)[self._envs_N, self._turn_N]
        state = self._step_pool(action)
        reward, done, elapsed = (state[self._at[name]] for name in ("reward", "done", "elapsed_step"))
        self._note_moves(self._envs_N, action, elapsed)
        self._tracked.add(state, elapsed.repeat(count))
        obs, truncated = self._read(state), self._none_N
        if self._crashed is not None:
            truncated = state[self._at["trunc"]] & ~state[self._crashed].reshape(-1, count).any(axis=1)
        late = (elapsed >= self._limit) & ~done
        envs, final = np.flatnonzero(late), None
        if len(envs):
            rows = (envs[:, None] * count + np.arange(count)).ravel()
            final = [(int(row), batch_row(obs, int(row))) for row in rows]
            obs = _replace_rows(obs, rows, self._reset_rows(envs.astype(np.int32)))
        return RawStep(obs, reward, (done & ~truncated).repeat(count), (truncated | late).repeat(count), final)

    def _step_pool(self, action: np.ndarray) -> Sequence[np.ndarray]:
        """Step every env and return the arrays of EnvPool's pool.

        Args: action: one action per env in games, or one action per vehicle.
        """
        if self._command is None:
            envs = self._envs_N.astype(np.int32)
            self._command = [envs, envs if self._turns is not None else envs.repeat(len(self.agents)), np.empty(0, np.int32)]
        self._command[-1] = np.ascontiguousarray(action, self._command[-1].dtype)
        self._pool._send(self._command)
        self._state = self._receive()
        return self._state

    def _note_moves(self, envs_K: np.ndarray, action_K: np.ndarray, elapsed_K: np.ndarray) -> None:
        """Record the moves and the resets of a step. `episode_state` returns the moves, and `rng_states` the number of resets, to restore
        the games."""
        if not self._replays:
            return
        if (length := int(elapsed_K.max())) >= self._moves_NL.shape[1]:
            self._moves_NL = np.pad(self._moves_NL, ((0, 0), (0, length)))
        self._moves_NL[envs_K, elapsed_K - 1] = action_K  # the action of a reset is not a move and is written to the last column
        self._length_N[envs_K] = elapsed_K
        self._resets_N[envs_K] += elapsed_K == 0

    def episode_info(self, row: int) -> Mapping[str, Any]:
        rows = self._num_envs * len(self.agents)
        infos = {key.removeprefix("info:"): values for key, values in zip(self._keys, self._state, strict=False) if key.startswith("info:")}
        entries = {key: values[row if len(values) == rows else row // len(self.agents)] for key, values in infos.items()}
        return {**entries, **self._tracked.combined_entries(row)}

    def rng_states(self) -> list[dict[str, Any]] | None:
        if not self._replays or self._seeds is None:
            return None
        return [{"seed": seed, "resets": count} for seed, count in zip(self._seeds, self._resets_N.tolist(), strict=True)]

    def set_rng_states(self, states: list[dict[str, Any]]) -> None:
        wanted_N = np.array([state["resets"] for state in states])
        self.reset([state["seed"] for state in states])
        while len(envs := np.flatnonzero(self._resets_N < wanted_N)):
            self._reset_rows(envs.astype(np.int32))

    def episode_state(self) -> Any:
        if not self._replays:
            return None
        return [moves[:length].tolist() for moves, length in zip(self._moves_NL, self._length_N, strict=True)]

    def set_episode_state(self, state: Any) -> None:
        for index in range(max(map(len, state))):
            envs = np.array([env for env, moves in enumerate(state) if len(moves) > index], np.int32)
            moves = np.array([state[env][index] for env in envs], np.int32)
            self._fill_batch(len(envs))
            self._pool._send([envs, envs, moves])
            self._note_moves(envs, moves, self._receive()[self._at["elapsed_step"]])


def _episode_limit(target: EnvRequest, suite: str, config: Any) -> int | None:
    """Return the number of steps after which an env itself ends an episode, or None if the env has no such limit or if the limit varies
    (BabyAI)."""
    if target.atari is not None:
        return -(-frame_limit(target.atari, None) // target.atari.frameskip)
    if target.plain_id.startswith(("lane-keeping-", "LaneKeeping-")):  # these envs never end an episode
        return None
    if suite == "highway":
        return int(config.duration * config.policy_frequency)
    limit = int(config.max_episode_steps)
    return limit if 0 < limit < _NO_LIMIT else None


def _replace_rows(obs: Any, rows: np.ndarray, new: Any) -> Any:
    """Return a copy of the batch `obs` with the rows `rows` replaced by the observations `new`."""
    if isinstance(obs, dict):
        return {key: _replace_rows(value, rows, new[key]) for key, value in obs.items()}
    obs = obs.copy()
    obs[rows] = new
    return obs


def _envpool_name_and_config(target: EnvRequest) -> tuple[str, dict[str, Any]]:
    """Return the id that EnvPool uses for the requested env, and the options with which EnvPool builds the env."""
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
