"""Running statistics, and the treatments of observations and rewards that use them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from slm_lab.lib.heap import PRIVATE, Heap
from slm_lab.spec.env import EnvSpec

EPSILON = 1e-8
"""Added to a variance before its root."""
NORMALIZED_CLIP = 10.0
"""Bound of what is normalised, unless the spec gives one."""


class Moments(NamedTuple):
    """Number of samples, their mean, and the sum of squared distances from it."""

    samples: int
    mean: np.ndarray
    m2: np.ndarray


class RunningStats:
    """Mean and variance of all samples seen so far, merged batch by batch in float64 (Chan, Golub, LeVeque 1979)."""

    def __init__(self, shape: tuple[int, ...], heap: Heap = PRIVATE) -> None:
        self.heap = heap
        self._count = heap.array(np.zeros(1, np.int64))
        self.mean = heap.array(np.zeros(shape))
        self.m2 = heap.array(np.zeros(shape))
        self.inv_std = np.ones(shape)
        """1 / std (population); 1 before the second sample, where there is no spread yet."""

    @property
    def count(self) -> int:
        """Samples seen, by all Sessions that have the statistics in common."""
        return int(self._count[0])

    def update(self, batch: np.ndarray) -> None:
        """Take in [B, *shape], B ≥ 1."""
        mean = np.add.reduce(batch, 0, np.float64) / len(batch)
        spread = batch - mean
        self.merge(Moments(len(batch), mean, np.add.reduce(spread * spread, 0)))

    def merge(self, news: Moments) -> None:
        """Take in what others have seen."""
        size, mean, m2 = news
        if size == 0 or not self.heap.takes(m2):
            return
        with self.heap.exclusive("statistics"):
            before = self.count
            total = before + size
            delta = mean - self.mean
            self.m2 += m2 + delta * delta * (before * size / total)
            self.mean += delta * (size / total)
            self._count[0] = total  # last: who is killed before has added little
            if total > 1:
                self.inv_std = 1.0 / np.sqrt(self.m2 / total + EPSILON)

    def moments(self) -> Moments:
        """What was seen so far."""
        return Moments(self.count, self.mean.copy(), self.m2.copy())

    def set(self, moments: Moments) -> None:
        """Have seen this, and nothing else."""
        self._count[0], self.mean[...], self.m2[...] = moments
        self.inv_std = 1.0 / np.sqrt(self.m2 / self.count + EPSILON) if self.count > 1 else np.ones_like(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.tolist(), "m2": self.m2.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set(Moments(int(state["count"]), np.asarray(state["mean"]), np.asarray(state["m2"])))


class ObsTreatment:
    """normalize_obs and clip_obs. `stats` is None where observations are only clipped."""

    def __init__(self, spec: EnvSpec, shape: tuple[int, ...], training: bool, heap: Heap = PRIVATE) -> None:
        self.stats = RunningStats(shape, heap) if spec.normalize_obs else None
        self.news = self.stats
        """What takes in observations: the same, unless the statistics are kept elsewhere."""
        self.frozen = not training
        self._clip = spec.clip_obs if spec.clip_obs is not None else NORMALIZED_CLIP

    def update(self, obs: np.ndarray) -> None:
        """Take in observations [B, *shape]; none while frozen."""
        if self.news is not None and not self.frozen and len(obs):
            self.news.update(obs)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Float32 [B, *shape] → float32 [B, *shape], normalised by what was seen so far, clipped."""
        scaled = obs if self.stats is None else (obs - self.stats.mean) * self.stats.inv_std
        clipped = np.minimum(np.maximum(scaled, -self._clip), self._clip)
        return np.asarray(clipped.astype(np.float32, copy=False))


class RewardTreatment:
    """reward_scale, then normalize_reward, then clip_reward; raw rewards become what the agent trains on.

    Normalising divides by the running standard deviation of the discounted return of each env, which starts anew with
    each episode (as the reference implementations of PPO do; Engstrom et al., arXiv:2005.12729, section 3).
    """

    def __init__(self, spec: EnvSpec, num_envs: int, gamma: float, atari: bool, heap: Heap = PRIVATE) -> None:
        self.scale = spec.reward_scale
        self.gamma = gamma
        self.stats = RunningStats((), heap) if spec.normalize_reward else None
        self.news = self.stats
        """What takes in returns: the same, unless the statistics are kept elsewhere."""
        self.return_N = np.zeros(num_envs)
        clip = spec.clip_reward
        if clip is None:
            clip = NORMALIZED_CLIP if spec.normalize_reward else atari
        self.sign = clip is True
        self.clip = None if isinstance(clip, bool) else float(clip)

    @property
    def changes(self) -> bool:
        """Some reward may come out other than it goes in."""
        return self.scale != 1.0 or self.stats is not None or self.sign or self.clip is not None

    def __call__(self, reward_N: np.ndarray, ended_N: np.ndarray | None = None, valid_N: np.ndarray | None = None) -> np.ndarray:
        """Raw rewards [N] → float32 [N]. `ended_N`: the episode ended here; `valid_N`: is a transition (None: no, yes everywhere)."""
        if self.scale == "sign":
            reward_N = np.sign(reward_N)
        elif self.scale != 1.0:
            reward_N = reward_N * self.scale
        if self.stats is not None:
            reward_N = self._normalize(self.stats, reward_N, ended_N, valid_N)
        if self.sign:
            reward_N = np.sign(reward_N)
        elif self.clip is not None:
            reward_N = np.minimum(np.maximum(reward_N, -self.clip), self.clip)
        return reward_N.astype(np.float32)

    def _normalize(self, stats: RunningStats, reward_N: np.ndarray, ended_N: np.ndarray | None, valid_N: np.ndarray | None) -> np.ndarray:
        self.return_N = self.return_N * self.gamma + reward_N
        seen = self.return_N if valid_N is None else self.return_N[valid_N]
        if len(seen) and self.news is not None:
            self.news.update(seen)
        if ended_N is not None:
            self.return_N[ended_N] = 0.0
        if valid_N is not None:
            self.return_N[~valid_N] = 0.0
        return np.asarray(reward_N * stats.inv_std)

    def reset(self) -> None:
        """All envs begin an episode."""
        self.return_N[:] = 0.0
