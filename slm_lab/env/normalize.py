"""Running statistics, and normalisation of observations and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from slm_lab.env.atari import is_preprocessed
from slm_lab.lib.records import EnvInfo, ObservationSpace
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, attach_parts, is_shared, prefixed_arrays
from slm_lab.spec.models.env import EnvSpec

EPSILON = 1e-8
"""Number added to a variance before its square root is taken."""
NORMALIZED_CLIP = 10.0
"""Default absolute bound to which normalised observations and rewards are clipped."""
MAX_SQUARES = 1e30
"""Upper limit of a sum of squares below which all samples are finite and no moment can overflow."""


class Moments(NamedTuple):
    """Number of samples, mean of the samples, and sum of the squared deviations of the samples from the mean."""

    samples: int
    mean: np.ndarray
    m2: np.ndarray


class RunningStats:
    """Mean and variance of all samples so far. Each batch of samples is merged into the statistics in float64 (Chan, Golub, LeVeque 1979).

    Samples that are not finite are ignored.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._count = np.zeros(1, np.int64)
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)
        self.inv_std = np.ones(shape)
        """Reciprocal of the population standard deviation, or 1 before the second sample."""
        self._store: Store | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several processes share these statistics."""
        return is_shared(self._store)

    @property
    def count(self) -> int:
        """Number of samples seen by all processes that share these statistics."""
        return int(self._count[0])

    def update(self, batch: np.ndarray) -> bool:
        """Add a batch of samples [B, *shape], B ≥ 1. Returns False if some samples were ignored because they are not finite."""
        if np.vdot(batch, batch) < MAX_SQUARES:  # cheaper than np.errstate: all samples are finite, and no moment overflows
            self._merge(_moments(batch))
            return True
        with np.errstate(invalid="ignore", over="ignore"):
            delta = _moments(batch)
            if isfinite(np.add.reduce(delta.m2, None)):
                self._merge(delta)
                return True
            finite = batch[np.isfinite(batch).all(axis=tuple(range(1, batch.ndim)))]
            if len(finite):
                self.merge(_moments(finite))
            return False

    def merge(self, delta: Moments) -> None:
        """Add the moments of samples to the statistics.

        Args: delta: moments of the samples. Moments that are not finite are ignored.
        """
        if delta.samples and isfinite(np.add.reduce(delta.m2, None)):
            self._merge(delta)

    def _merge(self, delta: Moments) -> None:
        if self._store is None:
            self._add(delta)
        else:
            self._store.run_locked("statistics", self._add, delta)
            if self._store.remote:
                self.recompute_inv_std()

    def _add(self, delta: Moments) -> None:
        size, mean, m2 = delta
        before = self.count
        total = before + size
        distance = mean - self.mean
        self.m2 += m2 + distance * distance * (before * size / total)
        self.mean += distance * (size / total)
        self._count[0] = total  # last: if a process is killed before this line, the statistics have changed only little
        if total > 1:
            self.inv_std = 1.0 / np.sqrt(self.m2 / total + EPSILON)

    def moments(self) -> Moments:
        """Return a copy of the statistics as Moments."""
        return Moments(self.count, self.mean.copy(), self.m2.copy())

    def set_statistics(self, moments: Moments) -> None:
        """Replace the statistics by `moments`."""
        if self._store is None:
            self._set(moments)
        else:
            self._store.run_locked("statistics", self._set, moments)
            self.recompute_inv_std()

    def _set(self, moments: Moments) -> None:
        self._count[0], self.mean[...], self.m2[...] = moments
        self.recompute_inv_std()

    def recompute_inv_std(self) -> None:
        """Recompute `inv_std` from `count` and `m2`."""
        self.inv_std = 1.0 / np.sqrt(self.m2 / self.count + EPSILON) if self.count > 1 else np.ones_like(self.mean)

    def shared_arrays(self) -> Named:
        """Return a dict of the arrays that several processes can share: count, mean and m2."""
        return {name: SharedArray(values, "merge") for name, values in (("count", self._count), ("mean", self.mean), ("m2", self.m2))}

    def attach(self, store: Store, arrays: Arrays) -> None:
        """Use `arrays`, which several processes share, as the arrays of the statistics."""
        self._store = store
        self._count, self.mean, self.m2 = arrays["count"], arrays["mean"], arrays["m2"]
        self.recompute_inv_std()

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics as plain Python objects."""
        return {"count": self.count, "mean": self.mean.tolist(), "m2": self.m2.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the statistics by statistics that `state_dict` returned."""
        self.set_statistics(Moments(int(state["count"]), np.asarray(state["mean"]), np.asarray(state["m2"])))


def _moments(batch: np.ndarray) -> Moments:
    mean = np.add.reduce(batch, 0, np.float64) / len(batch)
    spread = batch - mean
    return Moments(len(batch), mean, np.add.reduce(spread * spread, 0))


class ObsNormalizer:
    """Function object that applies env.normalize_obs and env.clip_obs to float32 observations and to the float32 entries of packed
    observations, except action masks.

    The attribute `stats` is None if observations are clipped but not normalised.
    """

    def __init__(self, spec: EnvSpec, space: ObservationSpace, training: bool) -> None:
        self._packed = bool(space.parts)
        self._floats = space.packed_float_count if space.parts or space.mask is None else space.mask[0]
        self.stats = RunningStats((self._floats,) if self._floats or space.parts else space.shape) if spec.normalize_obs else None
        self.delta = self.stats
        """Statistics to which `update` adds samples: the same object as `stats`, unless new samples are accumulated separately
        (`Normalizers.accumulate_deltas`)."""
        self.frozen = not training
        self.clip = spec.clip_obs if spec.clip_obs is not None else NORMALIZED_CLIP

    def update(self, obs: np.ndarray) -> None:
        """Add observations [B, *shape] to the statistics, unless the statistics are frozen."""
        if self.delta is not None and not self.frozen and len(obs):
            self.delta.update(self._normalized_columns(obs) if self._floats else obs)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Return the observations `obs`, [B, *shape], normalised and clipped, in a new array."""
        if not self._floats:
            return self._normalize_and_clip(obs)
        normalized = obs.copy()
        self._normalized_columns(normalized)[...] = self._normalize_and_clip(self._normalized_columns(obs))
        return normalized

    def _normalized_columns(self, obs: np.ndarray) -> np.ndarray:
        """Return a view of those numbers of the observations that are normalised, float32 [B, F] with F numbers per observation."""
        return obs[:, : 4 * self._floats].view(np.float32) if self._packed else obs[:, : self._floats]

    def _normalize_and_clip(self, obs: np.ndarray) -> np.ndarray:
        scaled = obs if self.stats is None else (obs - self.stats.mean) * self.stats.inv_std
        clipped = np.minimum(np.maximum(scaled, -self.clip), self.clip)
        return np.asarray(clipped.astype(np.float32, copy=False))


class RewardNormalizer:
    """Function object that computes training rewards from raw rewards by applying env.reward_scale, then env.normalize_reward, then
    env.clip_reward.

    With env.normalize_reward, rewards are divided by the running standard deviation of the envs' discounted returns. The return of an env
    is reset to 0 at the start of each episode, as in the reference implementations of PPO (Engstrom et al., arXiv:2005.12729, section 3).
    """

    def __init__(self, spec: EnvSpec, num_envs: int, gamma: float) -> None:
        self.scale = spec.reward_scale
        self.gamma = gamma
        self.stats = RunningStats(()) if spec.normalize_reward else None
        self.delta = self.stats
        """Statistics to which returns are added: the same object as `stats`, unless new samples are accumulated separately
        (`Normalizers.accumulate_deltas`)."""
        self.return_N = np.zeros(num_envs)
        """Discounted returns of the running episodes, float64 [N]."""
        clip = spec.clip_reward
        if clip is None:
            clip = NORMALIZED_CLIP if spec.normalize_reward else is_preprocessed(spec)
        self.sign = clip is True
        self.clip = None if isinstance(clip, bool) else tuple(clip) if isinstance(clip, list) else (-clip, clip)
        """Smallest and largest reward after clipping, or None if rewards are not clipped to an interval."""

    @property
    def is_identity(self) -> bool:
        """Whether training rewards equal the raw rewards."""
        return self.scale == 1.0 and self.stats is None and not self.sign and self.clip is None

    def __call__(self, reward_N: np.ndarray, ended_N: np.ndarray | None = None, valid_N: np.ndarray | None = None) -> np.ndarray:
        """Return the training rewards, float32 [N], for raw rewards [N].

        Args:
            ended_N: bool [N], whether the row's episode ended in this step, or None if no episode ended.
            valid_N: bool [N], whether the row is a transition, or None if all rows are transitions.
        """
        return self.normalize(self.scale_and_update(reward_N, ended_N, valid_N))

    def normalize(self, reward: np.ndarray) -> np.ndarray:
        """Return the training rewards, float32, for rewards of any shape to which env.reward_scale has been applied."""
        if self.stats is not None:
            reward = reward * self.stats.inv_std
        if self.sign:
            reward = np.sign(reward)
        elif self.clip is not None:
            reward = np.minimum(np.maximum(reward, self.clip[0]), self.clip[1])
        return reward.astype(np.float32)

    def scale_and_update(self, reward_N: np.ndarray, ended_N: np.ndarray | None = None, valid_N: np.ndarray | None = None) -> np.ndarray:
        """Scale the rewards [N] by env.reward_scale, add the discounted returns to the statistics (if there are any), and return the scaled
        rewards.

        Args: see `__call__`.
        """
        if self.scale == "sign":
            reward_N = np.asarray(np.sign(reward_N))
        elif self.scale != 1.0:
            reward_N = reward_N * self.scale
        if self.stats is None:
            return reward_N
        before_N, self.return_N = self.return_N, self.return_N * self.gamma + reward_N
        seen = self.return_N if valid_N is None else self.return_N[valid_N]
        if len(seen) and self.delta is not None and not self.delta.update(seen):
            self.return_N = np.where(np.isfinite(self.return_N), self.return_N, before_N)  # ignore rewards that are not finite
        if ended_N is not None:
            self.return_N[ended_N] = 0.0
        if valid_N is not None:
            self.return_N[~valid_N] = 0.0
        return reward_N

    def reset(self) -> None:
        """Set the discounted returns of all envs to 0, because an episode begins in every env."""
        self.return_N[:] = 0.0


class Normalizers:
    """The normalisers of a vector env's observations and rewards. The attribute `obs` is None if observations are not changed, and `reward`
    is None if rewards are not changed.

    Several processes may share the statistics (`attach`). Alternatively, each process accumulates its new samples separately
    (`accumulate_deltas`), and one process merges the samples of all processes (`merge_deltas`).
    """

    def __init__(self, obs: ObsNormalizer | None = None, reward: RewardNormalizer | None = None) -> None:
        self.obs, self.reward = obs, reward
        both: list[tuple[str, ObsNormalizer | RewardNormalizer | None]] = [("obs", obs), ("reward", reward)]
        self._adaptive = {name: normalizer for name, normalizer in both if normalizer is not None and normalizer.stats is not None}
        """Maps "obs" and "reward" to those normalisers that have statistics."""

    @property
    def _stats(self) -> dict[str, RunningStats]:
        return {name: normalizer.stats for name, normalizer in self._adaptive.items() if normalizer.stats is not None}

    def shared_arrays(self) -> Named:
        """Return a dict of the arrays of the statistics, which several processes can share. Processes do not share the discounted returns
        of running episodes."""
        return prefixed_arrays(self._stats)

    def attach(self, store: Store, arrays: Arrays) -> None:
        """Use `arrays`, which several processes share, as the arrays of the statistics."""
        attach_parts(self._stats, store, arrays)

    def pull(self) -> None:
        """Recompute the values that are derived from the statistics, such as `inv_std`. Call this method after the shared arrays of the
        statistics have been restored."""
        for stats in self._stats.values():
            stats.recompute_inv_std()

    def accumulate_deltas(self) -> None:
        """Begin to accumulate new samples separately from the statistics that are used for normalisation. `take_deltas` returns the moments
        of the accumulated samples."""
        for normalizer in self._adaptive.values():
            assert normalizer.stats is not None
            normalizer.delta = RunningStats(normalizer.stats.mean.shape)

    def take_deltas(self) -> list[Moments]:
        """Return the moments of the samples that were accumulated since the last call of `take_deltas`."""
        taken = []
        for normalizer in self._adaptive.values():
            assert normalizer.delta is not None
            taken.append(normalizer.delta.moments())
            normalizer.delta = RunningStats(normalizer.delta.mean.shape)
        return taken

    def merge_deltas(self, deltas: Sequence[Moments]) -> None:
        """Add to the statistics the samples whose moments `take_deltas` returned in another process."""
        for stats, delta in zip(self._stats.values(), deltas, strict=True):
            stats.merge(delta)

    @property
    def statistics_vector(self) -> np.ndarray:
        """All statistics in one float64 vector, which is empty if there are no statistics."""
        parts = [part for stats in self._stats.values() for part in stats.moments()]
        return np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in parts]) if parts else np.zeros(0)

    @statistics_vector.setter
    def statistics_vector(self, vector: np.ndarray) -> None:
        at = 0
        for stats in self._stats.values():
            shape, size = stats.mean.shape, stats.mean.size
            mean, m2 = vector[at + 1 : at + 1 + 2 * size].reshape(2, *shape)
            stats.set_statistics(Moments(int(vector[at]), mean, m2))
            at += 1 + 2 * size

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and the discounted returns of the running episodes, as plain Python objects."""
        stats = self._stats
        return {
            "obs_stats": stats["obs"].state_dict() if "obs" in stats else None,
            "reward_stats": stats["reward"].state_dict() if "reward" in stats else None,
            "reward_returns": self.reward.return_N.tolist() if self.reward is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Statistics that this object does not use, or that several processes share, are not
        loaded."""
        for name, stats in self._stats.items():
            if (saved := state[f"{name}_stats"]) is not None and not stats.is_shared:
                stats.load_state_dict(saved)
        returns = state["reward_returns"]
        if self.reward is not None and returns is not None and len(returns) == len(self.reward.return_N):
            self.reward.return_N[:] = returns

    def load_foreign_obs_statistics(self, state: dict[str, Any]) -> bool:
        """Load the observation statistics that another run has saved.

        Returns False, without loading, if only one of the two runs has observation statistics, or if the shapes of the observations differ.
        Otherwise, returns True.
        """
        stats, saved = self._stats.get("obs"), state["obs_stats"]
        if stats is None or saved is None:
            return stats is saved
        if np.shape(saved["mean"]) != stats.mean.shape:
            return False
        stats.load_state_dict(saved)
        return True

    def copy_obs_statistics(self, state: dict[str, Any]) -> None:
        """Load only the observation statistics, for evaluation.

        Args: state: state that `Normalizers.state_dict` or `Env.state_dict` returned.
        """
        stats = self._stats.get("obs")
        if stats is not None and state["obs_stats"] is not None:
            stats.load_state_dict(state["obs_stats"])


def make_normalizers(spec: EnvSpec, info: EnvInfo, gamma: float, training: bool = True) -> Normalizers:
    """Build the normalisers of observations and rewards that a spec describes, without building an env.

    Args:
        gamma: discount factor of returns. With env.normalize_reward, rewards are divided by the standard deviation of these returns.
        training: whether the normalisers are for training. In evaluation, observation statistics are frozen and rewards are raw.
    """
    floats = info.observation.dtype == "float32" or info.observation.packed_float_count > 0
    obs = ObsNormalizer(spec, info.observation, training) if normalizes_obs(spec) and floats else None
    reward = RewardNormalizer(spec, info.num_envs, gamma)
    return Normalizers(obs, reward if training and not reward.is_identity else None)


def normalizes_obs(spec: EnvSpec) -> bool:
    """Return whether the spec requires observations to be normalised or clipped."""
    return spec.normalize_obs or spec.clip_obs is not None
