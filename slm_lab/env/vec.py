"""The vector env that a Session steps: any backend's autoreset turned into one record per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_lab.env.backend import Backend, RawStep
from slm_lab.env.normalize import Moments, ObsTreatment, RewardTreatment, RunningStats
from slm_lab.env.spaces import Codec, batch_of_one
from slm_lab.lib.records import EnvInfo, Episode, VecStep
from slm_lab.lib.rng import generator_state, set_generator_state


class Env:
    """num_envs envs that step together; `make_env` builds it.

    Everything that differs between backends ends here. Rows that are no transition (`valid_N` false) come only from
    backends that reset in the step after the end; the transitions are the same as those of single envs stepped by hand.
    """

    def __init__(
        self,
        backend: Backend,
        info: EnvInfo,
        encode: Codec,
        decode: Codec,
        seed: int,
        *,
        obs_treatment: ObsTreatment | None = None,
        reward_treatment: RewardTreatment | None = None,
        life_loss: bool = False,
    ) -> None:
        """`obs_treatment`, `reward_treatment`: None where observations or rewards stay as they are (as rewards in evaluation)."""
        self.info = info
        self.backend = info.backend
        self._backend = backend
        self._encode, self._decode = encode, decode
        self._obs_treatment, self._reward_treatment = obs_treatment, reward_treatment
        self._life_loss = life_loss
        self._seed, self._resumes, self._fresh_streams = seed, 0, True
        backend.action_space.seed(seed)
        self._sampler = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        count = info.num_envs
        self._return_N = np.zeros(count)
        self._steps, self._begin_N = 0, np.zeros(count, np.int64)
        """Steps taken, and how many there were when each episode began."""
        self._pending_N: np.ndarray | None = None
        """Envs whose next row is a dummy."""
        self._lives_N: np.ndarray | None = None
        self._none_N, self._all_N = np.zeros(count, bool), np.ones(count, bool)
        self._none_N.flags.writeable = self._all_N.flags.writeable = False

    def reset(self) -> np.ndarray:
        """Begin an episode in every env; the first call seeds them. Returns obs_N [N, *shape]."""
        obs = self._encode(self._backend.reset(env_seeds(self._seed, self.info.num_envs, self._resumes) if self._fresh_streams else None))
        self._fresh_streams = False
        self._return_N[:], self._begin_N[:] = 0.0, self._steps
        self._pending_N = self._lives_N = None
        if self._reward_treatment is not None:
            self._reward_treatment.reset()
        if self._obs_treatment is not None:
            self._obs_treatment.update(obs)
            obs = self._obs_treatment(obs)
        return obs

    def step(self, action_N: np.ndarray) -> VecStep:
        """Act in every env. `action_N` as ActionSpace says.

        Raises: RuntimeError, or what the env raises, where an env fails.
        """
        raw = self._backend.step(self._decode(action_N))
        obs = self._encode(raw.obs)
        reward_N = raw.reward_N
        self._return_N += reward_N
        self._steps += 1
        # bytes: a third of the time of .any()
        ended = 1 in raw.terminated_N.tobytes() or 1 in raw.truncated_N.tobytes()
        if ended or self._pending_N is not None or self._life_loss:
            return self._boundary(raw, obs, ended)
        if self._obs_treatment is not None:
            self._obs_treatment.update(obs)
            obs = self._obs_treatment(obs)
        reward_N = reward_N.astype(np.float32) if self._reward_treatment is None else self._reward_treatment(reward_N)
        return VecStep(reward_N, self._none_N, self._none_N, obs, obs, self._none_N, self._all_N, [])

    def _boundary(self, raw: RawStep, obs: np.ndarray, ended: bool) -> VecStep:
        """The step where an episode ended, or the one after."""
        valid_N, reward_N, last_obs = self._all_N, raw.reward_N, obs
        terminated_N = truncated_N = over_N = first_N = self._none_N
        episodes: list[Episode] = []
        if (dummy_N := self._pending_N) is not None:
            valid_N, first_N = ~dummy_N, dummy_N
            reward_N = np.where(valid_N, reward_N, 0)
            self._return_N[dummy_N], self._begin_N[dummy_N] = 0.0, self._steps
            self._pending_N = None
        if ended:
            terminated_N = raw.terminated_N & valid_N
            truncated_N = raw.truncated_N & valid_N & ~terminated_N
            over_N = terminated_N | truncated_N
            episodes = self._finish(over_N)
            last_obs, reset_N = self._last_obs(raw, obs)
            waiting_N = over_N & ~reset_N
            first_N = first_N | reset_N
            self._pending_N = waiting_N if waiting_N.any() else None
        if self._life_loss:
            lost_N = self._lost_life(raw.lives_N, valid_N & ~over_N)
            terminated_N, first_N, over_N = terminated_N | lost_N, first_N | lost_N, over_N | lost_N
        reward_N = reward_N.astype(np.float32) if self._reward_treatment is None else self._reward_treatment(reward_N, over_N, valid_N)
        last_obs, obs = self._treat(last_obs, obs, raw)
        return VecStep(reward_N, terminated_N, truncated_N, last_obs, obs, first_N, valid_N, episodes)

    def _finish(self, over_N: np.ndarray) -> list[Episode]:
        """Count the episodes (in Atari the games) that end here."""
        rows = np.flatnonzero(over_N)
        episodes = [Episode(int(row), float(self._return_N[row]), self._steps - int(self._begin_N[row])) for row in rows]
        self._return_N[rows], self._begin_N[rows] = 0.0, self._steps
        return episodes

    def _last_obs(self, raw: RawStep, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The true successors, and which envs were reset within the step."""
        if not raw.final:
            return obs, self._none_N
        last_obs, reset_N = obs.copy(), np.zeros(len(obs), bool)
        for row, final in raw.final:
            last_obs[row] = self._encode(batch_of_one(final))[0]
            reset_N[row] = True
        return last_obs, reset_N

    def _lost_life(self, lives_N: np.ndarray | None, going_N: np.ndarray) -> np.ndarray:
        """Envs of `going_N` with fewer lives than before, but some: with none left the game itself ends."""
        before_N, self._lives_N = self._lives_N, lives_N
        if before_N is None or lives_N is None:
            return self._none_N
        return np.asarray(going_N & (lives_N < before_N) & (lives_N > 0))

    def _treat(self, last_obs: np.ndarray, obs: np.ndarray, raw: RawStep) -> tuple[np.ndarray, np.ndarray]:
        """Normalise both; the statistics see every observation once, whether the backend resets in this step or in the next."""
        treatment = self._obs_treatment
        if treatment is None:
            return last_obs, obs
        treatment.update(obs)
        if last_obs is obs:
            obs = treatment(obs)
            return obs, obs
        treatment.update(last_obs[[row for row, _ in raw.final or ()]])
        return treatment(last_obs), treatment(obs)

    def sample(self) -> np.ndarray:
        """Uniformly random actions in the agent's form: [N] or [N, dim]; standard normal where a continuous component is unbounded."""
        space, rng, count = self.info.action, self._sampler, self.info.num_envs
        match space.kind:
            case "discrete":
                return rng.integers(space.nvec[0], size=count)
            case "multi_discrete":
                return rng.integers(space.nvec, size=(count, space.dim))
            case "multi_binary":
                return rng.integers(2, size=(count, space.dim))
            case "continuous":
                actions = rng.uniform(-1, 1, (count, space.dim)) if space.bounded else rng.standard_normal((count, space.dim))
                return actions.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Statistics and random streams as plain Python. Running episodes are not part of it: reset() follows a load."""
        obs, reward = self._obs_treatment, self._reward_treatment
        return {
            "obs_stats": obs.stats.state_dict() if obs is not None and obs.stats is not None else None,
            "reward_stats": reward.stats.state_dict() if reward is not None and reward.stats is not None else None,
            "rng": None if self._fresh_streams else self._backend.rng_states(),
            "sampler": generator_state(self._sampler),
            "resumes": self._resumes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict() gave; call reset() next.

        Where the backend shows no random streams, the envs go on with new ones, drawn from the seed and the number of loads.
        """
        self.copy_statistics(state)
        reward = self._reward_treatment
        if reward is not None and reward.stats is not None and state["reward_stats"] is not None:
            reward.stats.load_state_dict(state["reward_stats"])
        set_generator_state(self._sampler, state["sampler"])
        self._resumes, self._fresh_streams = int(state["resumes"]) + 1, True
        if state["rng"] is not None:
            self.reset()  # some envs make their streams only here
            if len(self._backend.rng_states() or ()) == len(state["rng"]):
                self._backend.set_rng_states(state["rng"])
            self.copy_statistics(state)

    @property
    def treatments(self) -> list[ObsTreatment | RewardTreatment]:
        """Those with statistics."""
        both = (self._obs_treatment, self._reward_treatment)
        return [treatment for treatment in both if treatment is not None and treatment.stats is not None]

    def keep_statistics_apart(self) -> None:
        """From now on treat by the statistics as they were set, and gather what is seen apart from them."""
        for treatment in self.treatments:
            assert treatment.stats is not None
            treatment.news = RunningStats(treatment.stats.mean.shape)

    def take_news(self) -> list[Moments]:
        """What was seen since the last call, where the statistics are kept apart."""
        taken = []
        for treatment in self.treatments:
            assert treatment.news is not None
            taken.append(treatment.news.moments())
            treatment.news = RunningStats(treatment.news.mean.shape)
        return taken

    def merge_news(self, news: Sequence[Moments]) -> None:
        """Add what other envs have seen to the statistics."""
        for treatment, moments in zip(self.treatments, news, strict=True):
            assert treatment.stats is not None
            treatment.stats.merge(moments)

    @property
    def statistics(self) -> np.ndarray:
        """All of them in one vector, float64."""
        parts = [part for t in self.treatments if t.stats for part in (t.stats.count, t.stats.mean, t.stats.m2)]
        return np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in parts]) if parts else np.zeros(0)

    @statistics.setter
    def statistics(self, vector: np.ndarray) -> None:
        at = 0
        for treatment in self.treatments:
            assert treatment.stats is not None
            shape, size = treatment.stats.mean.shape, treatment.stats.mean.size
            mean, m2 = vector[at + 1 : at + 1 + 2 * size].reshape(2, *shape)
            treatment.stats.set(Moments(int(vector[at]), mean, m2))
            at += 1 + 2 * size

    def copy_statistics(self, state: dict[str, Any]) -> None:
        """Take the observation statistics of another env's state_dict(), for evaluation."""
        treatment = self._obs_treatment
        if treatment is not None and treatment.stats is not None and state["obs_stats"] is not None:
            treatment.stats.load_state_dict(state["obs_stats"])

    def close(self) -> None:
        """Free the envs and their processes; never hangs."""
        self._backend.close()


def env_seeds(seed: int, count: int, resumes: int = 0) -> list[int]:
    """A 31-bit seed for each env; the first ones do not depend on `count`."""
    words = np.random.SeedSequence([seed, 0, resumes]).generate_state(count)
    return [int(word) & 0x7FFFFFFF for word in words]
