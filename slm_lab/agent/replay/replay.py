"""Replay buffers, from which transitions are sampled many times: uniformly, or in proportion to their priorities (with a sum tree)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops import device as devices
from slm_lab.agent.ops.device import is_asynchronous, upload
from slm_lab.agent.replay.frames import FrameStore, ObservationStore, VectorStore, allocate_rows, load_rows
from slm_lab.agent.replay.step_links import StepLinks
from slm_lab.lib.clock import Clock
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.records import ActOut, EnvInfo, VecStep
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.models.memory import HindsightReplaySpec, PrioritizedReplaySpec, ReplaySpec
from slm_lab.spec.report import Problem, SpecError


class SumTree:
    """Tree of sums of `size` weights ≥ 0, for drawing indices in proportion to their weights.

    Each node is the sum of its FANOUT children. A node is always recomputed from its children, so that no rounding error accumulates. The
    tree is wide and shallow, because the time of numpy code depends mostly on the number of calls.
    """

    FANOUT = 64

    def __init__(self, size: int) -> None:
        self.size = size
        self.levels: list[np.ndarray] = []
        """Levels from the leaves up, each float64 [groups, FANOUT]. The last level has one group."""
        count = size
        while True:
            groups = -(-count // self.FANOUT)
            self.levels.append(np.zeros((groups, self.FANOUT)))
            if groups == 1:
                break
            count = groups

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self.levels[-1].sum())

    def get(self, index_B: np.ndarray) -> np.ndarray:
        """Return the weights [B] of the indices index_B."""
        return self.levels[0].reshape(-1).take(index_B)

    def set(self, index_B: np.ndarray, weight_B: np.ndarray | float) -> None:
        """Set the weights of the indices index_B [B].

        If an index occurs twice in index_B, the last weight for the index is used. Weights that are not finite are ignored.
        """
        finite_B = np.isfinite(weight_B)
        if not finite_B.all():
            if isinstance(weight_B, float):
                return
            index_B, weight_B = index_B[finite_B], weight_B[finite_B]
        self.levels[0].reshape(-1)[index_B] = weight_B
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            index_B = index_B // self.FANOUT
            above.reshape(-1)[index_B] = below.take(index_B, axis=0).sum(axis=1)

    def find_by_cumulative_weight(self, mass_B: np.ndarray) -> np.ndarray:
        """Return, for each number m of mass_B in [0, total), the first index i at which the sum of the weights 0 to i exceeds m.

        An index of weight 0 is never returned, provided that at least one weight is above 0.
        """
        index_B = np.zeros(len(mass_B), np.int64)
        for level in reversed(self.levels):
            sums_BF = level.take(index_B, axis=0).cumsum(axis=1)
            # rounding can move a mass to the end of the group: clip the mass to the group
            mass_B = np.minimum(mass_B, np.nextafter(sums_BF[:, -1], 0.0))
            child_B = (sums_BF <= mass_B[:, None]).sum(axis=1)
            before_B = np.where(child_B > 0, sums_BF[np.arange(len(child_B)), child_B - 1], 0.0)
            mass_B, index_B = mass_B - before_B, index_B * self.FANOUT + child_B
        return index_B


class Transitions(NamedTuple):
    """A batch of B transitions."""

    obs_B: Tensor
    """[B, *shape], in the env's dtype."""
    action_B: Tensor
    """int64 [B] or [B, D], or float32 [B, D]."""
    logp_B: Tensor
    """float32 [B]: log-probability of the action under the policy that chose the action, or NaN if log-probabilities are not computed."""
    reward_B: Tensor
    """float32 [B]."""
    next_obs_B: Tensor
    """[B, *shape]: the true next observation, even if the episode was truncated."""
    terminated_B: Tensor
    """float32 [B], 0 or 1: whether the transition ended its episode by termination, so that the target is not bootstrapped. The value is 0
    for a truncation."""
    weight_B: Tensor | None
    """float32 [B]: importance weights, at most 1, or None if all weights are 1."""
    row_B: np.ndarray
    """int64 [B]: rows of the transitions in the buffer."""
    reward_KB: Tensor | None = None
    """With n-step returns, float32 [n, B]: rewards of the n steps that begin with each transition, and 0 for steps that do not exist. With
    n-step returns, `next_obs_B` and `terminated_B` belong to the last step that exists, and `reward_B` is the first reward. The field is
    None with one-step returns."""
    steps_B: Tensor | None = None
    """With n-step returns, float32 [B]: the number of steps that exist, from 1 to n."""

    @property
    def sampled_rows(self) -> np.ndarray:
        """Rows of the sampled transitions, int64 [B], as `update_priorities` expects them."""
        return self.row_B

    def to(self, device: str) -> Transitions:
        """Return the batch on `device`."""
        return self._replace(**tensors_on_device(self._asdict(), device))


def tensors_on_device(items: dict[str, Any], device: str) -> dict[str, Any]:
    """Return those items that are tensors, moved to `device`.

    If `device` is "cpu", no items are returned, because the tensors are already on the CPU.
    """
    return {} if device == "cpu" else {name: upload(item, device) for name, item in items.items() if isinstance(item, Tensor)}


Transform = Callable[[np.ndarray], np.ndarray]
"""Function that maps an array to a new array of the same shape."""
COLUMNS = ("action", "logp", "reward", "terminated")
"""Names of the arrays of a replay buffer in addition to observations. Self-imitation learning adds further arrays."""


class Replay:
    """Ring buffer of the newest `capacity` transitions, which are sampled uniformly and independently (Lin 1992).

    Args:
        spec: memory spec with the keys batch_size, max_size and use_cer.
        info: description of the env. Space is reserved for at most info.max_transitions transitions.
        clock: clock whose current frame determines the values of schedules.
        rng: random generator that draws the batches.
        frequency: number of transitions between two updates.
        start: number of transitions before the first update.
        device: CUDA device that stores the transitions, or None to store the transitions in host memory. The rows of a batch are always
            drawn on the host.
        num_steps: number n of steps of n-step returns.

    Raises SpecError if the buffer does not fit into memory.
    """

    prioritized = False
    """Whether `update_priorities` has an effect."""
    obs_normalizer: Transform | None = None
    """Function that normalises the observations of a batch [B, *shape], or None if the stored observations are used unchanged."""
    reward_normalizer: Transform | None = None
    """Function that normalises the rewards of a batch, or None if the stored rewards are used unchanged."""

    def __init__(
        self,
        spec: ReplaySpec | PrioritizedReplaySpec | HindsightReplaySpec,
        info: EnvInfo,
        clock: Clock,
        rng: np.random.Generator,
        frequency: int = 1,
        start: int = 0,
        device: str | None = None,
        num_steps: int = 1,
    ) -> None:
        self.device, self.num_steps = device, num_steps
        self.batch_size, self.use_cer, self.clock, self.rng = spec.batch_size, spec.use_cer, clock, rng
        self.frequency, self.start = frequency, start
        self.capacity = self._capacity(min(spec.max_size, -(-info.max_transitions // info.num_envs) * info.num_envs), info.num_envs)
        self.links = StepLinks(self.capacity, info.num_envs) if self._needs_links else None
        """Links from transitions to their successors, or None if no links are needed."""
        self.nbytes = self._nbytes(info) + (0 if self.links is None else self.links.next_row.nbytes)
        if device is not None:
            _check_device(device, self.capacity, info)
        check_replay_memory(self.capacity, self.nbytes, device=device)
        self.store: ObservationStore = (FrameStore if _is_image(info) else VectorStore)(self.capacity, info, device)
        self.columns: dict[str, Any] = {
            "action": allocate_rows((self.capacity, *info.action.shape), info.action.dtype, device),
            **{name: allocate_rows((self.capacity,), np.float32, device) for name in COLUMNS[1:]},
        }
        self.seen = 0
        """Number of transitions added so far. The newest transition is in row (seen − 1) mod capacity."""
        self.size = 0
        """Number of transitions that can be sampled, which are the newest transitions."""
        self.ready = False
        """Whether an update is due after the last vector step."""
        self.replayed = 0
        """With use_cer: number, in order of addition, of the oldest transition that no batch has included as a new transition yet
        (arXiv:1712.01275)."""
        self.fresh = 0
        """With use_cer: number of transitions that the last batch included as new transitions. These transitions are at the end of the
        batch."""
        self.demonstrations: Replay | None = None
        """Buffer of recorded transitions, from which a part of each batch is drawn, or None if there are no recorded transitions."""

    @property
    def _needs_links(self) -> bool:
        return self.num_steps > 1

    def _capacity(self, max_rows: int, num_envs: int) -> int:
        """Return the number of rows of the buffer, which is at most `max_rows`."""
        return max_rows

    def _nbytes(self, info: EnvInfo) -> int:
        """Return the size of the buffer in bytes."""
        return replay_bytes(self.capacity, info)

    @property
    def max_items(self) -> int:
        """Maximum number of items in the buffer.

        An item of a replay buffer is a transition, or a sequence in SequenceReplay.
        """
        return self.capacity

    @property
    def has_batch(self) -> bool:
        """Whether enough transitions were added for one batch."""
        return self.size > 0 and self.seen >= self.batch_size

    def add(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store the transitions of one vector step. Entries of `step` that are not transitions are ignored."""
        env_K = np.flatnonzero(step.valid_N)
        row_K = (self.seen + np.arange(len(env_K))) % self.capacity
        self._write_transitions(row_K, env_K, obs_N, first_N, out, step)
        before, self.seen = self.seen, self.seen + len(env_K)
        self.size = min(self.size + len(env_K), self.capacity)
        self._on_added(row_K)
        while self.size and self.store.has_lost_frames((self.seen - self.size) % self.capacity):
            self._on_row_dropped((self.seen - self.size) % self.capacity)
            self.size -= 1
        self.ready = self.seen >= self.start and self.size > 0 and self.seen // self.frequency > before // self.frequency

    def _write_transitions(
        self, row_K: np.ndarray, env_K: np.ndarray, obs_N: np.ndarray, first_N: np.ndarray, out: ActOut, step: VecStep
    ) -> None:
        """Write the transitions of the envs env_K [K] into the rows row_K [K]."""
        self.store.put(row_K, env_K, obs_N, first_N, step)
        if self.links is not None:
            self.links.add(row_K, env_K, first_N, step)
        columns = self.columns
        columns["action"][row_K] = out.action_N[env_K]
        columns["logp"][row_K] = out.logp_N[env_K]
        columns["reward"][row_K] = step.reward_N[env_K]
        columns["terminated"][row_K] = step.terminated_N[env_K]

    def use_demonstrations(self, recorded: Replay) -> None:
        """From now on, draw recorded.batch_size transitions of each batch from the buffer `recorded` (arXiv:2302.02948, section 4.1)."""
        self.demonstrations, self.batch_size = recorded, self.batch_size - recorded.batch_size

    def set_normalizers(self, obs: Transform | None, reward: Transform | None) -> None:
        """Set the functions that normalise the observations and rewards of each sampled batch, also those of recorded transitions."""
        self.obs_normalizer, self.reward_normalizer = obs, reward
        if self.demonstrations is not None:
            self.demonstrations.set_normalizers(obs, reward)

    def sample(self) -> Transitions:
        """Sample a batch of batch_size transitions, followed by recorded transitions if `use_demonstrations` was called."""
        batch = self._sample()
        return batch if self.demonstrations is None else _append_recorded(batch, self.demonstrations.sample())

    def _sample(self) -> Transitions:
        """Sample batch_size transitions of this buffer, without recorded transitions."""
        row_B = self._draw_rows()
        if self.use_cer:
            self._include_new_transitions(row_B)
        weight_B = self._importance_weights(row_B)
        weight = None if weight_B is None else torch.from_numpy(weight_B)
        if self.links is not None:
            return self._n_step_batch(self.links, row_B, weight)
        obs_B, next_obs_B = self._observations(row_B), self._next_observations(row_B)
        action_B, logp_B, terminated_B = (as_tensor(self.columns[name].take(row_B, axis=0)) for name in ("action", "logp", "terminated"))
        return Transitions(obs_B, action_B, logp_B, self._rewards(row_B), next_obs_B, terminated_B, weight, row_B)

    def _observations(self, row_B: np.ndarray) -> Tensor:
        """Return the observations of the transitions in rows row_B, [B, *shape], normalised if there is a normaliser."""
        return apply_transform(self.obs_normalizer, self.store.observations(row_B))

    def _next_observations(self, row_B: np.ndarray) -> Tensor:
        """Return the true next observations of the transitions in rows row_B, [B, *shape], normalised if there is a normaliser."""
        return apply_transform(self.obs_normalizer, self.store.next_observations(row_B))

    def _rewards(self, row_B: np.ndarray) -> Tensor:
        """Return the rewards of the transitions in rows row_B, float32 [B], normalised if there is a normaliser."""
        return apply_transform(self.reward_normalizer, self.columns["reward"].take(row_B, axis=0))

    def _n_step_batch(self, links: StepLinks, row_B: np.ndarray, weight_B: Tensor | None) -> Transitions:
        """Return the batch of the transitions in rows row_B, for n-step returns.

        The batch contains the rewards of up to num_steps steps, and the observation after the last of these steps.
        """
        row_KB, exists_KB = links.successive_rows(row_B, self.num_steps)
        reward_KB = self._rewards(row_KB.reshape(-1)).view(row_KB.shape)
        reward_KB = torch.where(upload(torch.from_numpy(exists_KB), reward_KB.device), reward_KB, 0.0)
        obs_B, next_obs_B = self._observations(row_B), self._next_observations(row_KB[-1])
        action_B, logp_B = (as_tensor(self.columns[name].take(row_B, axis=0)) for name in ("action", "logp"))
        terminated_B = as_tensor(self.columns["terminated"].take(row_KB[-1], axis=0))
        steps_B = torch.from_numpy(exists_KB.sum(axis=0, dtype=np.float32))
        return Transitions(obs_B, action_B, logp_B, reward_KB[0], next_obs_B, terminated_B, weight_B, row_B, reward_KB, steps_B)

    def update_priorities(self, row_B: np.ndarray, error_B: Tensor) -> None:
        """Do nothing, because transitions are sampled uniformly. Subclasses with priorities override this method."""

    def _draw_rows(self) -> np.ndarray:
        """Draw the rows of a batch at random."""
        age_B = self.rng.integers(1, self.size + 1, self.batch_size)
        return (self.seen - age_B) % self.capacity

    def _include_new_transitions(self, row_B: np.ndarray) -> None:
        """Replace the last rows of a batch by the oldest transitions that were not yet replayed as new transitions (arXiv:1712.01275).

        SLM Lab uses this order too. The paper includes only the newest transition.
        """
        oldest = max(self.replayed, self.seen - self.size)
        self.fresh = min(self.seen - oldest, self.batch_size)
        row_B[self.batch_size - self.fresh :] = (oldest + np.arange(self.fresh)) % self.capacity
        self.replayed = oldest + self.fresh

    def _importance_weights(self, row_B: np.ndarray) -> np.ndarray | None:
        """Return the importance weights [B] of the transitions in rows row_B, or None if all weights are equal."""
        return None

    def _on_added(self, row_K: np.ndarray) -> None:
        """Hook for subclasses, called with the rows of new transitions.

        SequenceReplay calls this method with the indices of new sequences.
        """

    def _on_row_dropped(self, row: int) -> None:
        """Hook for subclasses, called with the row of a transition that can no longer be sampled."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random stream. The stored transitions are returned by `contents` instead."""
        return {"rng": generator_state(self.rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])

    def contents(self) -> dict[str, Any]:
        """Return the transitions in used rows, as tensors and numbers. If all rows in host memory are used, no copies are made."""
        counts = {"seen": self.seen, "size": self.size, "ready": self.ready, "capacity": self.capacity, "replayed": self.replayed}
        counts["raw"] = True  # whether observations and rewards were stored before normalisation; absent in version 0.2.0
        rows = self._num_written_rows()
        columns = {name: column[:rows] for name, column in self.columns.items()}
        links = {} if self.links is None else {"links": self.links.state_dict(rows)}
        return {**counts, "columns": _arrays_to_tensors(columns), "store": _arrays_to_tensors(self.store.state_dict(rows)), **links}

    def _num_written_rows(self) -> int:
        """Return the smallest n such that only the first n rows have been written."""
        return min(self.seen, self.capacity)

    def _num_written_items(self) -> int:
        """Return the smallest n such that only the first n items (see `max_items`) have been written."""
        return self._num_written_rows()

    def require_full_batch(self) -> None:
        """Require at least one batch of transitions before the next update, for a trained agent that continues with an empty buffer."""
        self.start = max(self.start, self.batch_size)

    def load_contents(self, state: dict[str, Any]) -> None:
        """Load transitions that `contents` returned. Raises ValueError if these transitions do not fit into the buffer.

        Transitions of a buffer with another capacity can be loaded if no row of that buffer was overwritten, and if all transitions fit.
        """
        if state["capacity"] != self.capacity and state["seen"] > min(state["capacity"], self.capacity):
            raise ValueError(f"incompatible replay buffer: {state['capacity']} transitions; expected {self.capacity}")
        if "raw" not in state and (self.obs_normalizer is not None or self.reward_normalizer is not None):
            raise ValueError("incompatible replay buffer: version 0.2.0 stored its observations and rewards after their normalisation")
        self.store.load_state_dict(state["store"])
        if self.links is not None and "links" in state:  # else the stored transitions have one-step returns
            self.links.load_state_dict(state["links"])
        self.seen, self.size, self.ready = int(state["seen"]), int(state["size"]), bool(state["ready"])
        self.replayed = int(state.get("replayed", self.seen))
        for name, column in self.columns.items():
            load_rows(name, column, state["columns"][name].numpy())


def apply_transform(function: Transform | None, values_B: np.ndarray | Tensor) -> Tensor:
    """Apply `function`, if it is not None, to values [B, …] from the buffer. Return a tensor on the device of the values."""
    if function is None:
        return as_tensor(values_B)
    if isinstance(values_B, np.ndarray):
        return torch.from_numpy(function(values_B))
    return upload(torch.from_numpy(function(values_B.cpu().numpy())), values_B.device)


def _append_recorded(batch: Transitions, recorded: Transitions) -> Transitions:
    """Append recorded transitions to a uniformly sampled batch. In the result, `row_B` contains only the rows of `batch`."""
    names = ("obs_B", "action_B", "logp_B", "reward_B", "next_obs_B", "terminated_B")
    joined: dict[str, Any] = {name: torch.cat((getattr(batch, name), getattr(recorded, name))) for name in names}
    return batch._replace(**joined)


class PrioritizedReplay(Replay):
    """Replay buffer whose transitions are sampled in proportion to their priorities (arXiv:1511.05952, proportional variant, Algorithm 1).

    A transition's priority is (|error| + epsilon)^alpha. A new transition gets either the error initial_error or the greatest priority so
    far. One transition is drawn from each of batch_size strata of equal total priority (arXiv:1511.05952, section B.2.1). If the spec key
    beta is set, importance weights are (N · P)^−beta, divided by the maximum weight of the batch.
    """

    prioritized = True
    INITIAL_ERROR = 100_000.0
    """Default error of new transitions. This error is so great that each new transition is sampled soon."""

    MIN_PRIORITY = 1e-12
    """Minimum priority of a transition. With epsilon 0, a transition with error 0 would have priority 0, and the sum of priorities must not
    be 0."""

    def __init__(self, spec: PrioritizedReplaySpec, *arguments: Any, **keywords: Any) -> None:
        super().__init__(spec, *arguments, **keywords)
        self.alpha, self.epsilon, self.beta = spec.alpha, spec.epsilon, spec.beta
        self.tree = SumTree(self.max_items)
        self.greatest = 1.0
        """Greatest priority of a transition so far."""
        error = self.INITIAL_ERROR if spec.initial_error is None else spec.initial_error
        self.initial = None if isinstance(error, str) else max((error + self.epsilon) ** self.alpha, self.MIN_PRIORITY)
        """Priority of new transitions, or None for the greatest priority so far."""

    def _on_added(self, row_K: np.ndarray) -> None:
        self.tree.set(row_K, self.greatest if self.initial is None else self.initial)

    def _on_row_dropped(self, row: int) -> None:
        self.tree.set(np.array([row]), 0.0)

    def _draw_rows(self) -> np.ndarray:
        strata_B = np.arange(self.batch_size) + self.rng.random(self.batch_size)
        return self.tree.find_by_cumulative_weight(strata_B * (self.tree.total / self.batch_size))

    def _importance_weights(self, row_B: np.ndarray) -> np.ndarray | None:
        if self.beta is None:
            return None
        beta = self.beta if isinstance(self.beta, float) else self.beta.value(self.clock.global_frame)
        # N and the sum of all priorities are the same for each row and cancel out
        weight_B = self.tree.get(row_B) ** -beta
        return (weight_B / weight_B.max()).astype(np.float32)

    def update_priorities(self, row_B: np.ndarray, error_B: Tensor) -> None:
        """Set the priorities of the transitions in rows row_B from the absolute values of their errors [B].

        Errors that are not finite count as 0. Transitions that were added to the batch by use_cer keep their priorities.
        """
        size_B = np.abs(error_B.detach().cpu().numpy().astype(np.float64))
        priority_B = np.maximum((np.where(np.isfinite(size_B), size_B, 0.0) + self.epsilon) ** self.alpha, self.MIN_PRIORITY)
        num_drawn = len(row_B) - self.fresh
        self.tree.set(row_B[:num_drawn], priority_B[:num_drawn])
        self.greatest = max(self.greatest, float(priority_B.max()))

    def contents(self) -> dict[str, Any]:
        weights = self.tree.levels[0].reshape(-1)[: self._num_written_items()]
        return {**super().contents(), "weights": torch.from_numpy(weights.copy()), "greatest": self.greatest}

    def load_contents(self, state: dict[str, Any]) -> None:
        super().load_contents(state)
        self.tree.set(np.arange(len(state["weights"])), np.asarray(state["weights"]))
        self.greatest = float(state["greatest"])


def _is_image(info: EnvInfo) -> bool:
    return info.observation.dtype == "uint8" and len(info.observation.shape) == 3


def replay_bytes(capacity: int, info: EnvInfo) -> int:
    """Return the size in bytes of a replay buffer for `capacity` transitions."""
    action = info.action
    row = np.dtype(action.dtype).itemsize * action.dim + 3 * 4 + 8
    return (FrameStore if _is_image(info) else VectorStore).nbytes(capacity, info) + capacity * row


def check_replay_memory(capacity: int, nbytes: int, memories: int = 1, hint: str = "", device: str | None = None) -> None:
    """Raise SpecError if `memories` buffers of `capacity` transitions and `nbytes` bytes each do not fit into host or device memory."""
    available, where = memory_bytes(), "machine"
    if device is not None and torch.device(device).type != "cpu":
        available, where = devices.memory_bytes(device), f"device ({device})"
    if nbytes * memories > available:
        fitting = math.floor(capacity * available / (nbytes * memories) * 0.9)
        each = f"{memories} at once of {nbytes / 2**30:,.1f} GiB each" if memories > 1 else f"{nbytes / 2**30:,.1f} GiB"
        sizes = f"{capacity:,} transitions take {each}; this {where} has {available / 2**30:,.1f} GiB"
        raise SpecError("agent", [Problem("agent.memory.max_size", f"{sizes}; at most {fitting:,} would fit{hint}")])


def _check_device(device: str, capacity: int, info: EnvInfo) -> None:
    """Raise SpecError if a buffer of `capacity` transitions cannot be stored on `device`."""
    if not is_asynchronous(torch.device(device)):
        message = "invalid value true: the net computes on the CPU; set agent.net.gpu or remove it"
        raise SpecError("agent", [Problem("agent.memory.on_device", message)])
    if capacity < info.num_envs:  # one step would write some rows twice, in undefined order
        message = f"must be at least env.num_envs ({info.num_envs}) with on_device, not {capacity}"
        raise SpecError("agent", [Problem("agent.memory.max_size", message)])


def as_tensor(values: np.ndarray | Tensor) -> Tensor:
    """Return a numpy array as a tensor that shares the array's memory, or return a tensor unchanged."""
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def _arrays_to_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Convert arrays to tensors for a checkpoint.

    The tensors share the arrays' memory, except that views of a part of an array are copied.
    """
    return {name: _array_to_tensor(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}


def _array_to_tensor(array: np.ndarray) -> Tensor:
    base = array.base
    return torch.from_numpy(array.copy() if isinstance(base, np.ndarray) and base.nbytes > array.nbytes else array)
