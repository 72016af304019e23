"""Rollouts, which contain T steps of N envs as tensors or numpy arrays, and storages that collect rollouts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic

import numpy as np
import torch

from slm_lab.agent.ops.arrays import A, as_array
from slm_lab.agent.ops.device import upload
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.lib.store import Arrays
from slm_lab.spec.models.base import Component
from slm_lab.spec.models.memory import OnPolicyCrossEntropySpec


@dataclass(frozen=True)
class Truncations(Generic[A]):
    """The K truncations of episodes in a rollout, with the data for bootstrapping."""

    t_K: A
    """int64 [K]: time step (row) of each truncation."""
    n_K: A
    """int64 [K]: env (column) of each truncation."""
    obs_K: A
    """[K, *shape]: the true last observation."""
    state_KS: A
    """float32 [K, S]: hidden state before the true last observation."""


@dataclass(frozen=True)
class Rollout(Generic[A]):
    """T steps of N envs, or of N episodes. Shorter episodes are padded with invalid rows to the length of the longest episode."""

    obs_TN: A
    """[T + 1, N, *shape]: observations. The last row contains the observations for the next actions."""
    first_TN: A
    """bool [T + 1, N]: whether the observation begins an episode. This tensor is always on the CPU, because it determines the control flow
    of recurrent nets."""
    action_TN: A
    """[T, N] or [T, N, D]."""
    logp_TN: A
    """float32 [T, N]: log-probability of the action under the policy that chose the action, or NaN if log-probabilities are not
    computed."""
    version_TN: A
    """int64 [T, N]: version of the policy that chose the action."""
    reward_TN: A
    """float32 [T, N]."""
    terminated_TN: A
    """bool [T, N]: whether the episode terminated, so that the return is not bootstrapped."""
    truncated_TN: A
    """bool [T, N]: whether the episode was truncated, so that the return is bootstrapped."""
    valid_TN: A
    """bool [T, N]: whether the entry is a transition. Entries that are not transitions are not used in a loss."""
    state_NS: A
    """float32 [N, S]: hidden state before the first observation."""
    truncations: Truncations[A]
    """Data for bootstrapping truncated episodes."""

    @property
    def done_TN(self) -> A:
        return self.terminated_TN | self.truncated_TN

    @cached_property
    def as_numpy(self) -> Rollout[np.ndarray]:
        """This rollout with numpy arrays, which share memory with the tensors if the tensors are on the CPU."""
        cut = Truncations(*(as_array(getattr(self.truncations, f.name)) for f in fields(Truncations)))
        return Rollout(**{f.name: as_array(getattr(self, f.name)) for f in fields(self) if f.name != "truncations"}, truncations=cut)

    def to(self: Rollout, device: str | torch.device) -> Rollout:
        """Return the rollout on `device`. A rollout that is already on `device` is returned itself."""
        if self.obs_TN.device == torch.device(device):
            return self
        moved = {f.name: upload(getattr(self, f.name), device) for f in fields(self) if f.name not in ("first_TN", "truncations")}
        cut = self.truncations
        return replace(self, **moved, truncations=Truncations(*(upload(getattr(cut, f.name), device) for f in fields(cut))))


ROW_ARRAYS = ("action", "logp", "version", "reward", "terminated", "truncated", "valid")
"""Names of the arrays with one row for each step. The arrays `obs` and `first` have an additional row."""
ROLLOUT_ARRAYS = ("obs", "first", *ROW_ARRAYS)
"""Names of all arrays of a rollout."""


def storage_bytes(info: EnvInfo, rows: int) -> int:
    """Return the size in bytes of the arrays of a rollout storage with `rows` rows."""
    obs, action = info.observation, info.action
    per_env = math.prod(obs.shape) * np.dtype(obs.dtype).itemsize + action.dim * np.dtype(action.dtype).itemsize + 20
    return rows * info.num_envs * per_env


Truncation = tuple[int, int, np.ndarray, np.ndarray]
"""(time step, env, last observation, hidden state before the last observation) of an episode that was truncated. A storage with
`stores_terminal_obs` also has such entries for terminated episodes."""


class RolloutStorage(ABC):
    """Base class of rollout storages: preallocated arrays [T, N], into which vector steps are written row by row.

    Each step belongs to at most one rollout.

    Args: length: spec key training_frequency, in vector steps or episodes, depending on the storage class. rows: initial number T of rows.
    state_size: size S of the hidden state.
    """

    def __init__(self, info: EnvInfo, length: int, rows: int, state_size: int) -> None:
        self.info, self.length, self.state_size, self.t = info, length, state_size, 0
        self.truncations: list[Truncation] = []
        self.stores_terminal_obs = False
        """Whether the last observations of terminated episodes are stored too, for a replay memory to which the steps are added. Batch norm
        and hindsight replay use the next observation of every transition."""
        self.slabs = self._allocate(rows)
        self._next_obs_N: np.ndarray | None = None
        """Observations that are already stored in row t as the next observations of row t − 1, or None if row t is empty."""

    def _allocate(self, rows: int) -> dict[str, np.ndarray]:
        N, obs, action = self.info.num_envs, self.info.observation, self.info.action
        return {
            "obs": np.zeros((rows + 1, N, *obs.shape), obs.dtype),
            "first": np.zeros((rows + 1, N), np.bool_),
            "action": np.zeros((rows, N, *action.shape), action.dtype),
            "logp": np.zeros((rows, N), np.float32),
            "version": np.zeros((rows, N), np.int64),
            "reward": np.zeros((rows, N), np.float32),
            "terminated": np.zeros((rows, N), np.bool_),
            "truncated": np.zeros((rows, N), np.bool_),
            "valid": np.zeros((rows, N), np.bool_),
        }

    def _write_row(self, obs_N: np.ndarray, out: ActOut, step: VecStep) -> None:
        slabs, t = self.slabs, self.t
        if obs_N is not self._next_obs_N or t == 0:
            slabs["obs"][t] = obs_N
        slabs["action"][t] = out.action_N
        slabs["logp"][t] = out.logp_N
        slabs["reward"][t] = step.reward_N
        slabs["version"][t] = out.version
        slabs["terminated"][t] = step.terminated_N
        slabs["truncated"][t] = step.truncated_N
        slabs["valid"][t] = step.valid_N
        slabs["obs"][t + 1] = self._next_obs_N = step.obs_N
        slabs["first"][t + 1] = step.first_N
        ended_N = self._needs_last_obs(step)
        if 1 in ended_N.tobytes():  # a sixth of the time of .any()
            for n in np.flatnonzero(ended_N):
                state = np.zeros(0, np.float32) if out.state_N is None else out.state_N[n].copy()
                self.truncations.append((t, int(n), step.last_obs_N[n].copy(), state))
        self.t = t + 1

    def _needs_last_obs(self, step: VecStep) -> np.ndarray:
        """Return the envs whose last observations are stored after a step, bool [N]."""
        return step.terminated_N | step.truncated_N if self.stores_terminal_obs else step.truncated_N

    @abstractmethod
    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store one vector step.

        Args: first_N: bool [N], whether each observation is the first of its episode. state_N: hidden state [N, S] before obs_N.
        """

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether the storage contains enough steps for one update."""

    @abstractmethod
    def rollout(self) -> Rollout:
        """Return the collected steps as a rollout.

        If possible, the arrays of the rollout are views of the storage, which the next `add` overwrites.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the steps collected so far, which are useful only if the envs continue their current episodes."""
        rows = {name: slab[: self.t + (name in ("obs", "first"))] for name, slab in self.slabs.items()}
        return {
            "slabs": {name: torch.from_numpy(slab.copy()) for name, slab in rows.items()},
            "t": self.t,
            "truncations": [(t, n, torch.from_numpy(obs.copy()), torch.from_numpy(state)) for t, n, obs, state in self.truncations],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the state belongs to other envs."""
        self.t = int(state["t"])
        for name, slab in state["slabs"].items():
            self.slabs[name][: len(slab)] = slab.numpy()
        self.truncations = [(int(t), int(n), obs.numpy().copy(), hidden.numpy().copy()) for t, n, obs, hidden in state["truncations"]]

    def _stack_truncations(self, truncations: list[Truncation]) -> Truncations:
        obs = self.info.observation
        return Truncations(
            torch.tensor([item[0] for item in truncations], dtype=torch.int64),
            torch.tensor([item[1] for item in truncations], dtype=torch.int64),
            torch.from_numpy(np.array([item[2] for item in truncations], obs.dtype).reshape(-1, *obs.shape)),
            torch.from_numpy(np.array([item[3] for item in truncations], np.float32).reshape(len(truncations), self.state_size)),
        )


class OnPolicyBatchReplay(RolloutStorage):
    """Rollout storage of a fixed number of vector steps."""

    def __init__(self, info: EnvInfo, length: int, state_size: int) -> None:
        super().__init__(info, length, length, state_size)
        self.state_NS = np.zeros((info.num_envs, state_size), np.float32)
        """Hidden state before the first step."""
        self._rollout = self._rollout_view()

    def _rollout_view(self) -> Rollout:
        """Return a rollout whose arrays are views of the storage, without truncations."""
        views = {f"{name}_TN": torch.from_numpy(slab) for name, slab in self.slabs.items()}
        return Rollout(**views, state_NS=torch.from_numpy(self.state_NS), truncations=self._stack_truncations([]))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays of the storage, by name."""
        return {**self.slabs, "state": self.state_NS}

    def use_arrays(self, arrays: Arrays) -> None:
        """Replace the arrays of the storage by `arrays`, for example to read or write a rollout in shared memory.

        Args: arrays: arrays with the names that the method `arrays` returns.
        """
        self.slabs, self.state_NS = {name: arrays[name] for name in self.slabs}, arrays["state"]
        self._rollout = self._rollout_view()

    def begin_rollout(self) -> None:
        """Begin a new rollout in the first row."""
        self.t = 0
        self.truncations.clear()

    def copy_columns(self, begin: int, source: OnPolicyBatchReplay, columns: np.ndarray | slice) -> None:
        """Copy columns of another storage to the columns of this storage from index `begin` on. Truncations are not copied."""
        for name, slab in self.slabs.items():
            copied = source.slabs[name][:, columns]
            slab[:, begin : begin + copied.shape[1]] = copied
        state_KS = source.state_NS[columns]
        self.state_NS[begin : begin + len(state_KS)] = state_KS

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        if self.t == self.length:
            self.begin_rollout()
        if self.t == 0:
            self.slabs["first"][0] = first_N
            if state_N is not None:
                self.state_NS[:] = state_N
        self._write_row(obs_N, out, step)

    @property
    def ready(self) -> bool:
        return self.t == self.length and bool(self.slabs["valid"].any())  # short rollouts may contain only dummy rows

    def rollout(self) -> Rollout:
        return replace(self._rollout, truncations=self._stack_truncations(self.truncations)) if self.truncations else self._rollout

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": torch.from_numpy(self.state_NS.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.state_NS[:] = state["state"].numpy()


class MultiAgentBatchReplay(OnPolicyBatchReplay):
    """Rollout storage of a fixed number of vector steps, for envs with several agents.

    The transitions of different agents may end in different steps (see TurnTransitionBuilder). Each column contains, without gaps, the
    transitions of one agent of an env, so that a rollout is processed in the same way as for an env with one agent. A column with fewer
    transitions than other columns ends with invalid rows, and the return of the column is bootstrapped before the invalid rows.
    """

    def __init__(self, info: EnvInfo, length: int, state_size: int) -> None:
        super().__init__(info, length, state_size)
        self.steps = 0
        """Number of vector steps since the last rollout."""
        self.count_N = np.zeros(info.num_envs, np.int64)
        """Number of transitions in each column. The maximum of these numbers is `t`."""
        self._end_state_NS = np.zeros((info.num_envs, state_size), np.float32)
        """Hidden state after the last transition of each column."""
        self._even = True
        """Whether all columns have the same number of transitions."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), "count": self.count_N, "end_state": self._end_state_NS}

    def use_arrays(self, arrays: Arrays) -> None:
        super().use_arrays(arrays)
        self.count_N, self._end_state_NS = arrays["count"], arrays["end_state"]

    def begin_rollout(self) -> None:
        super().begin_rollout()
        self.steps = 0
        self.count_N[:] = 0
        self._even = True
        self.slabs["valid"][:] = False

    def copy_columns(self, begin: int, source: OnPolicyBatchReplay, columns: np.ndarray | slice) -> None:
        assert isinstance(source, MultiAgentBatchReplay)
        super().copy_columns(begin, source, columns)
        count_K = source.count_N[columns]
        end = begin + len(count_K)
        self.count_N[begin:end], self._end_state_NS[begin:end] = count_K, source._end_state_NS[columns]
        self.t = int(self.count_N.max())
        self._even = self.t == int(self.count_N.min())

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        if self.steps == self.length:
            self.begin_rollout()
        self.steps += 1
        if self._even and 0 not in step.valid_N.tobytes():  # all agents act: this case takes a third of the time of the general case
            self._add_row(obs_N, first_N, state_N, out, step)
        else:
            self._add_transitions(obs_N, first_N, state_N, out, step)

    def _add_row(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store one transition in each column, all in the same row."""
        self.slabs["first"][self.t] = first_N  # a backend that resets in the next step reports the new episode only in that step
        if self.t == 0 and state_N is not None:
            self.state_NS[:] = state_N
        self._write_row(obs_N, out, step)
        if out.state_N is not None:
            self._end_state_NS[:] = out.state_N
        self.count_N[:] = self.t

    def _add_transitions(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store the valid transitions of a vector step, each at the end of its column."""
        self._next_obs_N = None
        n_K = np.flatnonzero(step.valid_N)
        t_K, slabs = self.count_N[n_K], self.slabs
        begins_K = n_K[t_K == 0]
        slabs["first"][t_K, n_K] = first_N[n_K]
        if state_N is not None and out.state_N is not None:
            self.state_NS[begins_K] = state_N[begins_K]
            self._end_state_NS[n_K] = out.state_N[n_K]
        values = {"obs": obs_N, "action": out.action_N, "logp": out.logp_N, "version": np.broadcast_to(out.version, len(step.valid_N))}
        values |= {"reward": step.reward_N, "terminated": step.terminated_N, "truncated": step.truncated_N, "valid": step.valid_N}
        for name, value_N in values.items():
            slabs[name][t_K, n_K] = value_N[n_K]
        slabs["obs"][t_K + 1, n_K] = step.last_obs_N[n_K]
        slabs["first"][t_K + 1, n_K] = (step.terminated_N | step.truncated_N)[n_K]
        for n in np.flatnonzero(self._needs_last_obs(step)):
            self._store_last_obs(int(n), int(self.count_N[n]), step.last_obs_N[n].copy())
        self.count_N[n_K] += 1
        self.t = int(self.count_N.max())
        self._even = self.t == self.count_N.min()

    def _store_last_obs(self, n: int, t: int, obs: np.ndarray) -> None:
        """Store the last observation of the episode that ends in row t of column n."""
        self.truncations.append((t, n, obs, self._end_state_NS[n].copy()))

    @property
    def ready(self) -> bool:
        return self.steps == self.length and self.t > 0

    def rollout(self) -> Rollout:
        T, last_N = self.t, self.count_N - 1
        done_TN = self.slabs["terminated"] | self.slabs["truncated"]
        for n in np.flatnonzero((last_N >= 0) & (last_N < T - 1)):
            if not done_TN[last_N[n], n]:  # the return of the column is bootstrapped with the value of its last observation
                self.slabs["truncated"][last_N[n], n] = True
                self._store_last_obs(int(n), int(last_N[n]), self.slabs["obs"][last_N[n] + 1, n].copy())
        if not self._even:
            self._clear_invalid()
        views = {f"{name}_TN": torch.from_numpy(slab[: T + (name in ("obs", "first"))]) for name, slab in self.slabs.items()}
        return Rollout(**views, state_NS=torch.from_numpy(self.state_NS), truncations=self._stack_truncations(self.truncations))

    def _clear_invalid(self) -> None:
        """Set invalid rows, which contain data of earlier rollouts, to zero.

        Without `_clear_invalid`, the array `first` of an earlier rollout would split the sequences of recurrent nets.
        """
        after_TN = np.arange(self.t + 1)[:, None] > self.count_N
        for name, slab in self.slabs.items():
            if name in ("obs", "first"):
                slab[: self.t + 1][after_TN] = 0
            else:
                slab[: self.t][after_TN[1:]] = 0

    def state_dict(self) -> dict[str, Any]:
        end_state = torch.from_numpy(self._end_state_NS.copy())
        return {**super().state_dict(), "steps": self.steps, "count": self.count_N.tolist(), "end_state": end_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps, self.count_N[:], self._end_state_NS[:] = int(state["steps"]), state["count"], state["end_state"].numpy()
        self._even = self.t == self.count_N.min()


EpisodeRows = tuple[int, int, int]
"""(env, first row, last row + 1) of an episode."""


class OnPolicyReplay(RolloutStorage):
    """Rollout storage of complete episodes.

    A rollout contains the finished episodes, one episode in each column. Unfinished episodes stay in the storage.
    """

    FIRST_ROWS = 256

    def __init__(self, info: EnvInfo, length: int, state_size: int) -> None:
        super().__init__(info, length, self.FIRST_ROWS, state_size)
        self.begin_N = np.zeros(info.num_envs, np.int64)
        self.ended: list[EpisodeRows] = []
        self._taken = False

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        if self._taken:
            self._drop_ended()
        if self.t == len(self.slabs["reward"]):
            self._grow_arrays()
        t = self.t
        self._write_row(obs_N, out, step)
        for n in np.flatnonzero(step.terminated_N | step.truncated_N):
            self.ended.append((int(n), int(self.begin_N[n]), t + 1))
        self.begin_N[step.first_N] = t + 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "begin": self.begin_N.tolist(), "ended": list(self.ended), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (rows := int(state["t"])) > len(self.slabs["reward"]):
            self.slabs = self._allocate(rows)
        super().load_state_dict(state)
        self.begin_N[:] = state["begin"]
        self.ended = [(int(n), int(begin), int(end)) for n, begin, end in state["ended"]]
        self._taken = bool(state["taken"])

    def _grow_arrays(self) -> None:
        old = self.slabs
        self.slabs = self._allocate(2 * self.t)
        for name, slab in old.items():
            self.slabs[name][: len(slab)] = slab

    def _drop_ended(self) -> None:
        """Drop the rows before the oldest unfinished episode."""
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

    def _episodes_to_train_on(self) -> list[EpisodeRows]:
        """Return the episodes that the next rollout contains."""
        return self.ended

    def _transition_rows(self, n: int, begin: int, end: int) -> np.ndarray:
        """Return those rows of an episode that are transitions.

        If several agents act in turn, an agent has no transition in the rows in which other agents act.
        """
        return begin + np.flatnonzero(self.slabs["valid"][begin:end, n]) if self.info.agents else np.arange(begin, end)

    def rollout(self) -> Rollout:
        episodes = self._episodes_to_train_on()
        rows = [self._transition_rows(*episode) for episode in episodes]
        T, E = max(map(len, rows)), len(episodes)
        padded = {
            name: np.zeros((T + (name in ("obs", "first")), E, *slab.shape[2:]), slab.dtype)
            for name, slab in self.slabs.items()
            if name in ROLLOUT_ARRAYS
        }
        for column, (n, _, _) in enumerate(episodes):
            for name in ("obs", *ROW_ARRAYS):
                padded[name][: len(rows[column]), column] = self.slabs[name][rows[column], n]
        padded["first"][0] = True
        places = {(n, end - 1): (len(rows[column]) - 1, column) for column, (n, _, end) in enumerate(episodes)}
        cuts = [(*places[n, t], obs, state) for t, n, obs, state in self.truncations if (n, t) in places]
        self._taken = True
        arrays = {f"{name}_TN": torch.from_numpy(slab) for name, slab in padded.items()}
        return Rollout(**arrays, state_NS=torch.zeros(E, self.state_size), truncations=self._stack_truncations(cuts))


class OnPolicyCrossEntropy(OnPolicyReplay):
    """Rollout storage of complete episodes. A rollout contains only the best episodes (cross-entropy method, Rubinstein 1999).

    Args: quantile: a rollout contains the episodes whose sum of training rewards is at or above the quantile `quantile` of all sums (linear
    interpolation). With quantile=1, a rollout contains all episodes.
    """

    def __init__(self, info: EnvInfo, length: int, state_size: int, quantile: float) -> None:
        super().__init__(info, length, state_size)
        self.quantile = quantile

    def _episodes_to_train_on(self) -> list[EpisodeRows]:
        totals = [self.slabs["reward"][self._transition_rows(*episode), episode[0]].sum(dtype=np.float64) for episode in self.ended]
        threshold = np.quantile(totals, self.quantile) if self.quantile < 1.0 else -np.inf
        return [episode for episode, total in zip(self.ended, totals, strict=True) if not total < threshold]


def build_batch_storage(info: EnvInfo, length: int, state_size: int) -> OnPolicyBatchReplay:
    """Build the storage for rollouts of `length` vector steps.

    The storage is a MultiAgentBatchReplay for envs with several agents, and an OnPolicyBatchReplay for other envs.
    """
    return (MultiAgentBatchReplay if info.agents else OnPolicyBatchReplay)(info, length, state_size)


def build_rollout_storage(spec: Component, info: EnvInfo, length: int, state_size: int) -> RolloutStorage:
    """Build the rollout storage that an on-policy memory spec names.

    The class of the storage is `type(spec).implementation()`, except that envs with several agents use MultiAgentBatchReplay instead of
    OnPolicyBatchReplay.

    Args: length: spec key training_frequency, in vector steps or episodes, depending on the storage class. state_size: size S of the hidden
    state.
    """
    arguments: dict[str, Any] = {"quantile": spec.cross_entropy} if isinstance(spec, OnPolicyCrossEntropySpec) else {}
    kind = type(spec).implementation()
    if kind is OnPolicyBatchReplay:
        return build_batch_storage(info, length, state_size)
    storage: RolloutStorage = kind(info, length, state_size, **arguments)
    return storage
