"""The vector env that a training session steps. `Env.step` returns the same VecStep for every backend and autoreset mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf, isfinite
from typing import Any

import numpy as np

from slm_lab.env.backend import Backend, RawStep, SingleEnvBackend
from slm_lab.env.curriculum import Curriculum
from slm_lab.env.normalize import Normalizers, ObsNormalizer
from slm_lab.env.outcome import (
    FLAGS,
    MAX_REWARD,
    NUMBERS,
    InvalidOutcome,
    InvalidReward,
    close_error_message,
    fit_step,
    fit_to_space,
    raise_invalid_outcome,
    raise_located_outcome,
    select_numbers,
)
from slm_lab.env.snapshot import NotSavable
from slm_lab.env.spaces import Codec, batch_of_one, single_observation_codec
from slm_lab.lib.log import notice
from slm_lab.lib.masks import has_valid_action
from slm_lab.lib.random_actions import draw_uniform_actions
from slm_lab.lib.records import EnvInfo, Episode, VecStep
from slm_lab.lib.rng import generator_state, set_generator_state

_FEW = 2**14
"""Number of elements up to which a sum over all observations takes less time than np.isfinite for some rows."""


class Env:
    """Vector env of `num_envs` envs that are stepped together. `make_env` builds this object.

    This class hides the differences between backends, so that the transitions are the same as with single envs. With a backend that resets
    an env in the step after the end of an episode, the env's row of this step is not a transition (`VecStep.valid_N` is false).
    """

    def __init__(
        self,
        backend: Backend,
        info: EnvInfo,
        encode: Codec,
        decode: Codec,
        seed: int,
        *,
        name: str = "env",
        normalizers: Normalizers | None = None,
        life_loss: bool = False,
        track_info: Sequence[str] = (),
        curriculum: Curriculum | None = None,
        defer_normalization: bool = False,
    ) -> None:
        self.curriculum = curriculum
        """Curriculum that changes constructor arguments and attributes of the envs at the end of episodes, or None without env.schedule."""
        self.normalizers = normalizers or Normalizers()
        self.info, self.name = info, name
        self.backend = info.backend
        self._backend = backend
        self._encode, self._decode = encode, decode
        self._encode_lone = single_observation_codec(backend.observation_space, encode)
        self._dtype, self._shape = backend.observation_space.dtype, backend.observation_space.shape
        self._normalize_obs, self._normalize_reward = self.normalizers.obs, self.normalizers.reward
        self._defers_normalization = defer_normalization
        """Whether observations and rewards are added to the statistics, but are returned without normalisation."""
        self._normalizes = self._normalize_obs is not None or self._normalize_reward is not None
        self._reward_type = np.dtype(np.float64 if self._normalizes else np.float32)
        self._lone = None if life_loss else backend.single_env  # stepping a lone env does not report lives
        self._checks = backend.returns_valid_arrays
        self._all_floats = info.observation.dtype == "float32"
        self._life_loss, self._track_info = life_loss, tuple(track_info)
        self._seed, self._resumes, self._fresh_streams = seed, 0, True
        self._saved_episodes: dict[str, Any] | None = None
        """Loaded state of the running episodes, or None if no state was loaded since the last call of `resume` or `reset`."""
        backend.action_space.seed(seed)
        self._sampler = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        count = info.num_envs
        self._return_N = np.zeros(count)
        self._steps, self._begin_N = 0, np.zeros(count, np.int64)
        """Number of steps of the vector env so far, and the value of this number at the start of each env's episode."""
        self._pending_N: np.ndarray | None = None
        """bool [N]: the rows of the next step that are not transitions, or None if all rows of the next step will be transitions."""
        self._lives_N: np.ndarray | None = None
        self._mask = None if info.observation.mask is None else slice(*info.observation.mask)
        """Columns of the observations that contain the action mask."""
        self._valid_NA: np.ndarray | None = None
        """Whether each action is valid for the last observation of each row, bool [N, A]."""
        self.acts_N: np.ndarray | None = None
        """Whether the next step uses the action of each row, see `VecStep.acts_N`. Each reset and step sets this attribute."""
        self._none_N, self._all_N = np.zeros(count, bool), np.ones(count, bool)
        self._none_N.flags.writeable = self._all_N.flags.writeable = False

    def reset(self) -> np.ndarray:
        """Begin an episode in every env and return the observations [N, *shape]. The first call of `reset` seeds the envs. Raises the same
        errors as `step`."""
        obs = self._reset_backend(self._env_seeds() if self._fresh_streams else None)
        self._fresh_streams, self._saved_episodes = False, None
        self._return_N[:], self._begin_N[:] = 0.0, self._steps
        self._pending_N = self._lives_N = None
        self.acts_N, present_N = self._backend.acts_N, self._backend.present_N
        if present_N is not None and not present_N.all():
            self._pending_N = ~present_N
        if self._normalize_reward is not None:
            self._normalize_reward.reset()
        if self._normalize_obs is not None:
            self._normalize_obs.update(self._acting_rows(obs))
            obs = self._transform_obs(self._normalize_obs, obs)
        if self._pending_N is not None:
            obs = self._replace_nonfinite(obs, self._pending_N)
        try:
            self._check_finite(obs)
        except InvalidOutcome as error:
            raise_located_outcome(error, self.name, "reset", 0)
        return obs

    def policy_inputs(self, obs_N: np.ndarray) -> np.ndarray:
        """Return the observations on which a policy acts, [N, *shape], for observations that `reset` or `step` returned.

        The result is `obs_N` itself, unless the env was built with defer_normalization=True.
        """
        return self._normalize_obs(obs_N) if self._defers_normalization and self._normalize_obs is not None else obs_N

    def _transform_obs(self, normalizer: ObsNormalizer, obs: np.ndarray) -> np.ndarray:
        """Return the observations, normalised unless normalisation is deferred."""
        return obs if self._defers_normalization else normalizer(obs)

    def _transform_reward(self, reward_N: np.ndarray, over_N: np.ndarray | None = None, valid_N: np.ndarray | None = None) -> np.ndarray:
        """Return the training rewards of a step, float32 [N] (see RewardNormalizer). If normalisation is deferred, rewards are only
        scaled."""
        normalizer = self._normalize_reward
        if normalizer is None:
            return reward_N.astype(np.float32)
        if self._defers_normalization and normalizer.stats is not None:
            return normalizer.scale_and_update(reward_N, over_N, valid_N).astype(np.float32)
        return normalizer(reward_N, over_N, valid_N)

    def _acting_rows(self, obs_N: np.ndarray) -> np.ndarray:
        """Return the observations of the agents that act next, which are added to the observation statistics. Rows of waiting or absent
        agents are omitted."""
        return obs_N if self.acts_N is None else obs_N[self.acts_N]

    def _reset_backend(self, seeds: list[int] | None) -> np.ndarray:
        try:
            obs = self._backend.reset(seeds)
            encoded = self._encode_observations(
                obs if self._checks else fit_to_space(self._backend.observation_space, obs, lead=(self.info.num_envs,))
            )
            self._check_mask(encoded)
            return encoded
        except Exception as error:
            raise_located_outcome(error, self.name, "reset", 0)

    def _env_seeds(self) -> list[int]:
        return env_seeds(self._seed, self.info.frames, self._resumes)

    def reseed(self, seed: int) -> None:
        """Set the seed of new random streams of the envs and of `sample`. The envs use the new streams from the next reset on."""
        self._seed, self._fresh_streams = seed, True
        self._sampler = np.random.default_rng(np.random.SeedSequence([seed, 1]))

    def step(self, action_N: np.ndarray) -> VecStep:
        """Step every env.

        Args: action_N: a batch of the agent's actions (see ActionSpace).

        Raises: InvalidOutcome if an env returns a value that violates its spaces or Gymnasium's interface, a reward that is not finite, or
        an observation that is not finite although its episode was not terminated (infinite numbers are allowed if they are clipped). If an
        env fails, `step` raises RuntimeError or the env's own error.
        """
        self._steps += 1
        try:
            if self._lone is not None:
                return self._step_single_env(self._lone, action_N)
            raw = self._backend.step(self._decode(action_N))
            return self._finish_step(raw if self._checks else fit_step(raw, self._backend.observation_space, self.info.num_envs))
        except Exception as error:
            raise_located_outcome(error, self.name, "step", self._steps)

    def _step_single_env(self, lone: SingleEnvBackend, action_N: np.ndarray) -> VecStep:
        """Step a single env without arrays of size 1, because handling such arrays takes as long as a step of CartPole. If the step ends an
        episode or returns values of unusual types, this method calls the code for several envs."""
        outcome = lone.env.step(self._decode(action_N)[0])
        try:
            obs, reward, terminated, truncated, info = outcome
            plain = (
                (terminated is False or (type(terminated) in FLAGS and not terminated))
                and (truncated is False or (type(truncated) in FLAGS and not truncated))
                and type(info) is dict
                and type(reward) in NUMBERS
                and -MAX_REWARD <= reward <= MAX_REWARD
                and type(obs) is np.ndarray
                and obs.dtype == self._dtype
                and obs.shape == self._shape
            )
        except (TypeError, ValueError, OverflowError):
            plain = False
        if not plain:
            return self._finish_step(lone.finish_step([outcome]))
        self._return_N[0] += reward
        obs_N, reward_N = self._encode_lone(obs), np.empty(1, self._reward_type)
        reward_N[0] = reward
        if self._normalizes:
            obs_N, reward_N = self._normalize_both(obs_N, reward_N)
        self._check_finite(obs_N)
        return VecStep(reward_N, self._none_N, self._none_N, obs_N, obs_N, self._none_N, self._all_N, [])

    def _finish_step(self, raw: RawStep) -> VecStep:
        """Convert the RawStep of a backend to a VecStep."""
        self.acts_N = self._backend.acts_N
        obs_N = self._encode_observations(raw.obs)
        reward_N = raw.reward_N
        self._return_N += reward_N
        # below 1e38, all rewards are finite in float32; np.vdot takes half the time of np.isfinite, and overflows without a warning
        if not np.vdot(reward_N, reward_N) < 1e38:
            self._check_rewards(reward_N)
        # searching bytes takes a third of the time of .any()
        ended = 1 in raw.terminated_N.tobytes() or 1 in raw.truncated_N.tobytes()
        if ended or self._pending_N is not None or self._life_loss:
            return self._episode_end_step(raw, obs_N, ended)
        self._check_mask(obs_N)
        if self._normalizes:
            obs_N, reward_N = self._normalize_both(obs_N, reward_N)
        else:
            reward_N = reward_N.astype(np.float32)
        self._check_finite(obs_N)
        return VecStep(reward_N, self._none_N, self._none_N, obs_N, obs_N, self._none_N, self._all_N, [], self.acts_N)

    def _encode_observations(self, obs: Any) -> np.ndarray:
        """Convert a batch of the env's observations to one array for the agent. Raises InvalidOutcome for a number that is not in the
        observation space."""
        try:
            return self._encode(obs)
        except Exception:
            fit_to_space(self._backend.observation_space, obs, lead=(self.info.num_envs,))  # raises an error that explains the cause
            raise

    def _normalize_both(self, obs_N: np.ndarray, reward_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Transform the observations and rewards of a step in which no episode ended and all rows are transitions."""
        if self._normalize_obs is not None:
            self._normalize_obs.update(self._acting_rows(obs_N))
            obs_N = self._transform_obs(self._normalize_obs, obs_N)
        return obs_N, self._transform_reward(reward_N)

    def _check_rewards(self, reward_N: np.ndarray) -> None:
        """Raise InvalidReward for the first reward that float32 cannot represent as a finite number. The rewards of rows that are not
        transitions are not checked."""
        invalid_N = ~(np.abs(reward_N) <= MAX_REWARD)
        if self._pending_N is not None:
            invalid_N &= ~self._pending_N
        for row in np.flatnonzero(invalid_N)[:1]:
            env, agent = self._env_and_agent_text(int(row))
            expected = f"a number from {-MAX_REWARD:.4g} to {MAX_REWARD:.4g}" if isfinite(reward_N[row]) else "a finite number"
            raise_invalid_outcome(InvalidReward(f"step returned the reward {reward_N[row]}{agent}; expected {expected}"), env)

    def _env_and_agent_text(self, row: int) -> tuple[int, str]:
        """Return the index of the env to which a row belongs, and the text " for AGENT" for a message, or "" if each env has one agent."""
        agents = self.info.agents
        return (row // len(agents), f" for {agents[row % len(agents)]}") if agents else (row, "")

    def _episode_end_step(self, raw: RawStep, obs: np.ndarray, ended: bool) -> VecStep:
        """Return the VecStep of a step in which an episode ended, a life may have been lost, or some rows are not transitions."""
        valid_N, reward_N, last_obs = self._all_N, raw.reward_N, obs
        terminated_N = truncated_N = over_N = first_N = self._none_N
        episodes: list[Episode] = []
        if (dummy_N := self._pending_N) is not None:
            valid_N, first_N, self._pending_N = ~dummy_N, dummy_N, None
            reward_N = np.where(valid_N, reward_N, 0)
            self._return_N[dummy_N], self._begin_N[dummy_N] = 0.0, self._steps
            if (present_N := self._backend.present_N) is not None:
                first_N = dummy_N & present_N
                absent_N = dummy_N & ~first_N
                self._pending_N = absent_N if absent_N.any() else None
        if ended:
            terminated_N = over_N = raw.terminated_N & valid_N
            if 1 in raw.truncated_N.tobytes():
                truncated_N = raw.truncated_N & valid_N & ~terminated_N
                over_N = terminated_N | truncated_N
            episodes = self._ended_episodes(over_N, truncated_N, raw.shortened_N)
            waiting_N = over_N  # the same array may be used several times, because nothing writes to the arrays of a VecStep
            if raw.final:
                last_obs, reset_N = self._true_last_obs(raw.final, obs)
                waiting_N, first_N = over_N & ~reset_N, first_N | reset_N
            if 1 in waiting_N.tobytes():
                self._pending_N = waiting_N if self._pending_N is None else waiting_N | self._pending_N
            last_obs, obs = self._fill_empty_masks(last_obs, over_N), self._fill_empty_masks(obs, waiting_N)
        self._check_mask(obs)
        if self._life_loss:
            lost_N = self._find_lost_lives(raw.lives_N, valid_N & ~over_N)
            terminated_N, first_N, over_N = terminated_N | lost_N, first_N | lost_N, over_N | lost_N
        reward_N = self._transform_reward(reward_N, over_N, valid_N)
        last_obs, obs = self._normalize(last_obs, obs, raw)
        last_obs = self._replace_nonfinite(last_obs, terminated_N | ~valid_N)
        if self._pending_N is not None:
            obs = self._replace_nonfinite(obs, self._pending_N)
        self._check_finite(obs)
        if last_obs is not obs:
            self._check_finite(last_obs)
        return VecStep(reward_N, terminated_N, truncated_N, last_obs, obs, first_N, valid_N, episodes, self.acts_N)

    def _check_mask(self, obs: np.ndarray) -> None:
        """Store the action masks of the observations, from which `sample` draws valid actions. Raises InvalidOutcome if a mask has no valid
        action."""
        if self._mask is None:
            return
        self._valid_NA = obs[:, self._mask] != 0
        found_N = has_valid_action(self._valid_NA, self.info.action.nvec)
        if 0 in found_N.tobytes():
            env, agent = self._env_and_agent_text(int(found_N.argmin()))
            message = f"the action mask{agent} has no valid action; at least one must be 1 until the episode ends"
            raise_invalid_outcome(InvalidOutcome(message), env)

    def _fill_empty_masks(self, obs: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
        """Return the observations after replacing each empty action mask in the rows `rows_N` by a mask of ones. The episodes of these rows
        have ended, so that no action follows.

        Action masks with a valid action are kept, because the value of the last observation is bootstrapped after a truncation.
        """
        if self._mask is None or not rows_N.any():
            return obs
        empty_N = rows_N & ~has_valid_action(obs[:, self._mask] != 0, self.info.action.nvec)
        if not empty_N.any():
            return obs
        obs = obs.copy()
        obs[empty_N, self._mask] = 1
        return obs

    def _replace_nonfinite(self, obs: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
        """Return the observations after replacing each number that is not finite in the rows `rows_N` by 0.

        An env may end an episode because its simulation diverged. The agent multiplies by 0 the value of an observation after a termination
        and the value of a row that is not a transition. If such an observation contained NaN, the product would be NaN and would spread to
        other results.
        """
        floats = self._floats(obs)
        # if the sum of squares is finite, all numbers are finite
        if floats is None or (floats.size <= _FEW and np.vdot(floats, floats) < inf) or np.isfinite(floats[rows_N]).all():
            return obs
        obs = obs.copy()
        floats = self._floats(obs)
        assert floats is not None
        floats[rows_N] = np.where(np.isfinite(floats[rows_N]), floats[rows_N], 0)
        return obs

    def _check_finite(self, obs: np.ndarray) -> None:
        """Raise InvalidOutcome for the first observation that contains NaN or an infinite number. Infinite numbers are allowed if the
        observations will be normalised later (defer_normalization), because they will then be clipped."""
        floats = self._floats(obs)
        if floats is None or np.vdot(floats, floats) < inf:  # if the sum of squares is finite, all numbers are finite
            return
        clipped = self._defers_normalization and self._normalize_obs is not None
        invalid_NF = (np.isnan(floats) if clipped else ~np.isfinite(floats)).reshape(len(obs), -1)
        for row in np.flatnonzero(invalid_NF.any(axis=1))[:1]:
            env, agent = self._env_and_agent_text(int(row))
            element = int(invalid_NF[row].argmax())
            value, size = floats[row].flat[element], invalid_NF.shape[1]
            message = (
                f"the observation{agent} contains {value} (element {element} of {size}); expected finite numbers in the range of float32"
            )
            raise_invalid_outcome(InvalidOutcome(message), env)

    def _floats(self, obs: np.ndarray) -> np.ndarray | None:
        """Return a view of the float32 numbers of the observations, or None if the observations contain no float32 numbers."""
        if self._all_floats:
            return obs
        numbers = self.info.observation.packed_float_count
        return obs[:, : 4 * numbers].view(np.float32) if numbers else None

    def _ended_episodes(self, over_N: np.ndarray, truncated_N: np.ndarray, shortened_N: np.ndarray | None) -> list[Episode]:
        """Return a list of the episodes that end in this step, without episodes that env.stagger_episodes shortened, and reset the returns
        and lengths of the rows of all episodes that end. In Atari, an episode is a complete game."""
        rows = (over_N if shortened_N is None else over_N & ~shortened_N).nonzero()[0]
        columns = (rows, self._return_N[rows], self._steps - self._begin_N[rows], truncated_N[rows])
        episodes = [
            Episode(row, total_reward, length, self._episode_info(row), truncated)
            for row, total_reward, length, truncated in zip(*(column.tolist() for column in columns), strict=True)
        ]
        self._return_N[over_N], self._begin_N[over_N] = 0.0, self._steps
        return episodes

    def _episode_info(self, row: int) -> dict[str, float]:
        info = select_numbers(self._backend.episode_info(row), self._track_info) if self._track_info else {}
        return info if self.curriculum is None else info | self.curriculum.end_episode(row, float(self._return_N[row]))

    def set_frame(self, frame: int) -> None:
        """Set the number of frames trained so far, from which the rules of env.schedule compute the values for the next episodes."""
        if self.curriculum is not None:
            self.curriculum.frame = frame

    def _true_last_obs(self, final: Sequence[tuple[int, Any]], obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the last observation of each row's transition, and whether each row's env was reset within this step, bool [N].

        Args: final: see RawStep.
        """
        last_obs, reset_N = obs.copy(), np.zeros(len(obs), bool)
        for row, last in final:
            last_obs[row] = self._encode(batch_of_one(last))[0]
            reset_N[row] = True
        return last_obs, reset_N

    def _find_lost_lives(self, lives_N: np.ndarray | None, going_N: np.ndarray) -> np.ndarray:
        """Return whether each env lost a life in this step and has at least one life left, bool [N]. The result is false for envs that are
        not in `going_N`. An env without lives left does not count, because its game ends."""
        before_N, self._lives_N = self._lives_N, lives_N
        if before_N is None or lives_N is None:
            return self._none_N
        return np.asarray(going_N & (lives_N < before_N) & (lives_N > 0))

    def _normalize(self, last_obs: np.ndarray, obs: np.ndarray, raw: RawStep) -> tuple[np.ndarray, np.ndarray]:
        """Return the last observations of transitions and the observations for the next step, normalised unless normalisation is deferred.
        Each observation is added to the statistics exactly once, regardless of whether the backend resets envs in this step or in the next
        step."""
        normalizer = self._normalize_obs
        if normalizer is None:
            return last_obs, obs
        normalizer.update(self._acting_rows(obs))
        if last_obs is obs:
            obs = self._transform_obs(normalizer, obs)
            return obs, obs
        normalizer.update(last_obs[[row for row, _ in raw.final or ()]])
        return self._transform_obs(normalizer, last_obs), self._transform_obs(normalizer, obs)

    def sample(self, rng: np.random.Generator | None = None) -> np.ndarray:
        """Draw a batch of random valid actions of the agent, [N] or [N, dim]. Actions are uniformly distributed. If any continuous
        component is unbounded, all continuous components are standard normal.

        Args: rng: random generator, or None for the generator of this env.
        """
        return draw_uniform_actions(self.info.action, self.info.num_envs, rng or self._sampler, self._valid_NA)[0]

    def normalizers_of(self, agents: Collection[str]) -> Normalizers:
        """Return the normalizers of the observations and rewards of some agents with equal spaces.

        Args: agents: names of the agents, or () for an env with one agent.
        """
        return self.normalizers

    def state_dict(self) -> dict[str, Any]:
        """Return the normalizers' statistics, the states of the random streams and the states of the running episodes as plain Python
        objects.

        The entry "rng" is None if the backend does not expose its random streams. The entry "backend" in "episodes" is None if the backend
        does not expose its running episodes.
        """
        pending_N, lives_N = self._pending_N, self._lives_N
        return {
            **self.normalizers.state_dict(),
            "rng": None if self._fresh_streams else self._backend.rng_states(),
            "sampler": generator_state(self._sampler),
            "resumes": self._resumes,
            "fresh": self._fresh_streams,
            "deferred": self._defers_normalization,
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "episodes": {
                "returns": self._return_N.tolist(),
                "lengths": (self._steps - self._begin_N).tolist(),
                "pending": None if pending_N is None else pending_N.tolist(),
                "lives": None if lives_N is None else lives_N.tolist(),
                "backend": None if self._fresh_streams else self._backend.episode_state(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. After this call, call `resume` to continue the loaded episodes, or `reset` to begin new
        episodes.

        If the backend does not expose its random streams, the envs use new random streams, which are derived from the seed and the number
        of loaded states.
        """
        self.normalizers.load_state_dict(state)
        set_generator_state(self._sampler, state["sampler"])
        self._resumes, self._fresh_streams, self._saved_episodes = int(state["resumes"]), True, None
        if not state["fresh"]:
            self._resumes += 1
        curriculum = state.get("curriculum")
        if self.curriculum is not None and curriculum is not None:
            self.curriculum.load_state_dict(curriculum)
        if state["rng"] is not None:
            self._reset_backend(self._env_seeds())  # some envs create their random streams only in reset
            self._fresh_streams = False
            if len(self._backend.rng_states() or ()) == len(state["rng"]):
                self._backend.set_rng_states(state["rng"])
                # version 0.2.0 saved normalised observations, from which episodes cannot continue if normalisation is deferred
                self._saved_episodes = None if self._defers_normalization and not state.get("deferred") else state["episodes"]
        if self.curriculum is not None and curriculum is not None:
            self.curriculum.finish_restoration(curriculum)

    def resume(self) -> bool:
        """Continue the episodes that `load_state_dict` loaded. Returns whether the backend can continue them; if not, the caller must call
        `reset`."""
        saved, self._saved_episodes = self._saved_episodes, None
        if saved is None or saved["backend"] is None or len(saved["returns"]) != self.info.num_envs:
            return False
        try:
            self._backend.set_episode_state(saved["backend"])
        except NotSavable as error:
            notice(f"the continuation is not exact, because the open episodes cannot be continued: {error}")
            return False
        self._return_N[:], self._begin_N[:] = saved["returns"], self._steps - np.asarray(saved["lengths"])
        self._pending_N = None if saved["pending"] is None else np.asarray(saved["pending"], bool)
        self._lives_N = None if saved["lives"] is None else np.asarray(saved["lives"])
        self.acts_N = self._backend.acts_N
        return True

    def close(self) -> None:
        """Close the envs and end their processes within a bounded time. Errors of an env's `close` are logged."""
        close_backend(self._backend)


def close_backend(backend: Backend) -> None:
    """Close a backend. An error of an env's `close` is logged."""
    try:
        backend.close()
    except Exception as error:
        notice(close_error_message(error))


def env_seeds(seed: int, count: int, resumes: int = 0) -> list[int]:
    """Return a list of one 31-bit seed per env. The seed of an env does not depend on the number of envs `count`."""
    words = np.random.SeedSequence([seed, 0, resumes]).generate_state(count)
    return [int(word) & 0x7FFFFFFF for word in words]
