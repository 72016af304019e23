"""Memories of on-policy algorithms: each step is used once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from slm_lab.agent.rollout.rollout import Rollout, Truncations
from slm_lab.lib.heap import PRIVATE, Heap
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.spec.base import SpecModel
from slm_lab.spec.memory import OnPolicyBatchReplaySpec, OnPolicyCrossEntropySpec, OnPolicyReplaySpec

ROW_ARRAYS = ("action", "logp", "version", "reward", "terminated", "truncated", "valid")
"""Slabs with a row per step; `obs` and `first` have one row more."""


def slab_bytes(info: EnvInfo, rows: int) -> int:
    """Bytes of the slabs of so many rows."""
    obs, action = info.observation, info.action
    per_env = math.prod(obs.shape) * np.dtype(obs.dtype).itemsize + action.dim * (4 if action.kind == "continuous" else 8) + 20
    return rows * info.num_envs * per_env


Truncation = tuple[int, int, np.ndarray, np.ndarray]
"""(row, env, last observation, hidden state)."""


class RolloutStorage(ABC):
    """Slabs [T, N], preallocated, that steps are written into row by row.

    Args: length: training_frequency, in this memory's unit. rows: T to begin with. state_size: S of the hidden state. heap: where they lie.
    """

    def __init__(self, info: EnvInfo, length: int, rows: int, state_size: int, heap: Heap = PRIVATE) -> None:
        self.info, self.length, self.state_size, self.t, self.heap = info, length, state_size, 0, heap
        self.truncations: list[Truncation] = []
        self.slabs = self._allocate(rows)

    def _allocate(self, rows: int) -> dict[str, np.ndarray]:
        N, obs, action = self.info.num_envs, self.info.observation, self.info.action
        action_shape = () if action.kind == "discrete" else (action.dim,)
        slabs = {
            "obs": np.zeros((rows + 1, N, *obs.shape), obs.dtype),
            "first": np.zeros((rows + 1, N), np.bool_),
            "action": np.zeros((rows, N, *action_shape), np.float32 if action.kind == "continuous" else np.int64),
            "logp": np.zeros((rows, N), np.float32),
            "version": np.zeros((rows, N), np.int64),
            "reward": np.zeros((rows, N), np.float32),
            "terminated": np.zeros((rows, N), np.bool_),
            "truncated": np.zeros((rows, N), np.bool_),
            "valid": np.zeros((rows, N), np.bool_),
        }
        return {name: self.heap.array(slab) for name, slab in slabs.items()}

    def _write(self, obs_N: np.ndarray, out: ActOut, step: VecStep) -> None:
        slabs, t = self.slabs, self.t
        slabs["obs"][t] = obs_N
        slabs["action"][t] = out.action_N
        slabs["logp"][t] = out.logp_N
        slabs["reward"][t] = step.reward_N
        slabs["version"][t] = out.version
        slabs["terminated"][t] = step.terminated_N
        slabs["truncated"][t] = step.truncated_N
        slabs["valid"][t] = step.valid_N
        slabs["obs"][t + 1] = step.obs_N
        slabs["first"][t + 1] = step.first_N
        if 1 in step.truncated_N.tobytes():  # a sixth of the time of .any()
            for n in np.flatnonzero(step.truncated_N):
                state = np.zeros(0, np.float32) if out.state_N is None else out.state_N[n].copy()
                self.truncations.append((t, int(n), step.last_obs_N[n].copy(), state))
        self.t = t + 1

    @abstractmethod
    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Take one step. `first_N`: obs_N begins an episode; `state_N`: the hidden state before it."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Enough for one training."""

    @abstractmethod
    def rollout(self) -> Rollout:
        """What was gathered, as views where possible: used up by the next `add`."""

    def _pack(self, truncations: list[Truncation]) -> Truncations:
        obs = self.info.observation
        return Truncations(
            torch.tensor([item[0] for item in truncations], dtype=torch.int64),
            torch.tensor([item[1] for item in truncations], dtype=torch.int64),
            torch.from_numpy(np.array([item[2] for item in truncations], obs.dtype).reshape(-1, *obs.shape)),
            torch.from_numpy(np.array([item[3] for item in truncations], np.float32).reshape(len(truncations), self.state_size)),
        )


class OnPolicyBatchReplay(RolloutStorage):
    """A fixed number of vector steps."""

    def __init__(self, info: EnvInfo, length: int, state_size: int, heap: Heap = PRIVATE) -> None:
        super().__init__(info, length, length, state_size, heap)
        self.state_NS = heap.array(np.zeros((info.num_envs, state_size), np.float32))
        self._views = {name: torch.from_numpy(slab) for name, slab in self.slabs.items()}

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        if self.t == self.length:  # used up
            self.t = 0
            self.truncations.clear()
        if self.t == 0:
            self.slabs["first"][0] = first_N
            if state_N is not None:
                self.state_NS[:] = state_N
        self._write(obs_N, out, step)

    @property
    def ready(self) -> bool:
        return self.t == self.length and bool(self.slabs["valid"].any())  # short rollouts may be dummy rows only

    def rollout(self) -> Rollout:
        views = {f"{name}_TN": view for name, view in self._views.items()}
        return Rollout(**views, state_NS=torch.from_numpy(self.state_NS), truncations=self._pack(self.truncations))


Span = tuple[int, int, int]
"""An episode: (env, first row, row after its last)."""


class OnPolicyReplay(RolloutStorage):
    """Whole episodes. A rollout holds those that have ended, each as one column; the others go on being gathered."""

    FIRST_ROWS = 256

    def __init__(self, info: EnvInfo, length: int, state_size: int) -> None:
        super().__init__(info, length, self.FIRST_ROWS, state_size)
        self.begin_N = np.zeros(info.num_envs, np.int64)
        self.ended: list[Span] = []
        self._taken = False

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        if self._taken:
            self._drop_ended()
        if self.t == len(self.slabs["reward"]):
            self._grow()
        t = self.t
        self._write(obs_N, out, step)
        for n in np.flatnonzero(step.terminated_N | step.truncated_N):
            self.ended.append((int(n), int(self.begin_N[n]), t + 1))
        self.begin_N[step.first_N] = t + 1

    def _grow(self) -> None:
        old = self.slabs
        self.slabs = self._allocate(2 * self.t)
        for name, slab in old.items():
            self.slabs[name][: len(slab)] = slab

    def _drop_ended(self) -> None:
        """Keep the rows from the oldest unfinished episode on."""
        keep = int(self.begin_N.min())
        for name, slab in self.slabs.items() if keep else ():
            rows = self.t + (name in ("obs", "first")) - keep
            slab[:rows] = slab[keep : keep + rows].copy()
        self.t -= keep
        self.begin_N -= keep
        self.truncations = [(t - keep, n, obs, state) for t, n, obs, state in self.truncations if t - keep >= self.begin_N[n]]
        self.ended.clear()
        self._taken = False

    @property
    def ready(self) -> bool:
        return not self._taken and len(self.ended) >= self.length

    def _episodes(self) -> list[Span]:
        """The episodes that a rollout holds."""
        return self.ended

    def rollout(self) -> Rollout:
        episodes = self._episodes()
        T, E = max(end - begin for _, begin, end in episodes), len(episodes)
        padded = {name: np.zeros((T + (name in ("obs", "first")), E, *slab.shape[2:]), slab.dtype) for name, slab in self.slabs.items()}
        for column, (n, begin, end) in enumerate(episodes):
            for name in ("obs", *ROW_ARRAYS):
                padded[name][: end - begin, column] = self.slabs[name][begin:end, n]
        padded["first"][0] = True
        where = {(n, end - 1): (end - 1 - begin, column) for column, (n, begin, end) in enumerate(episodes)}
        cuts = [(*where[n, t], obs, state) for t, n, obs, state in self.truncations if (n, t) in where]
        self._taken = True
        arrays = {f"{name}_TN": torch.from_numpy(slab) for name, slab in padded.items()}
        return Rollout(**arrays, state_NS=torch.zeros(E, self.state_size), truncations=self._pack(cuts))


class OnPolicyCrossEntropy(OnPolicyReplay):
    """Whole episodes, of which a rollout holds only the best (the elite samples of the cross-entropy method, Rubinstein 1999).

    Args: share: of the episodes gathered for a training, to the nearest number and at least one, by their sum of rewards as they
    are trained on; of equal ones those that ended first.
    """

    def __init__(self, info: EnvInfo, length: int, state_size: int, share: float) -> None:
        super().__init__(info, length, state_size)
        self.share = share

    def _episodes(self) -> list[Span]:
        reward_TN = self.slabs["reward"]
        best_first = sorted(range(len(self.ended)), key=lambda i: -self._total(reward_TN, self.ended[i]))
        kept = sorted(best_first[: max(1, round(self.share * len(self.ended)))])
        return [self.ended[i] for i in kept]

    @staticmethod
    def _total(reward_TN: np.ndarray, episode: Span) -> float:
        n, begin, end = episode
        return float(reward_TN[begin:end, n].sum(dtype=np.float64))


MEMORIES: dict[type, type[OnPolicyBatchReplay] | type[OnPolicyReplay]] = {
    OnPolicyBatchReplaySpec: OnPolicyBatchReplay,
    OnPolicyReplaySpec: OnPolicyReplay,
    OnPolicyCrossEntropySpec: OnPolicyCrossEntropy,
}


def build_memory(spec: SpecModel, info: EnvInfo, length: int, state_size: int) -> OnPolicyBatchReplay | OnPolicyReplay:
    """The memory that an on-policy spec names. `length`: training_frequency, in its unit; `state_size`: S of the hidden state."""
    arguments: dict[str, Any] = {"share": spec.cross_entropy} if isinstance(spec, OnPolicyCrossEntropySpec) else {}
    return MEMORIES[type(spec)](info, length, state_size, **arguments)
