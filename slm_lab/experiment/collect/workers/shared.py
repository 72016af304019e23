"""Arrays that the learner, its rollout workers and the inference server share: weights, and slots (storage) for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slm_lab.agent.policy.policy import Policy
from slm_lab.agent.rollout.rollout import MultiAgentBatchReplay, build_batch_storage, storage_bytes
from slm_lab.env.normalize import Normalizers
from slm_lab.experiment.training.experience import Transition
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import Arrays, Named, Shareable, SharedArray, Store, attach_parts, prefixed_arrays
from slm_lab.spec.models.meta import SamplerSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

SLOTS = 2
"""Number of slots (each with storage for one rollout) of each env group. A worker writes one slot while the learner's process reads the
other slot."""


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of a rollout worker or of the inference server."""

    spec: Spec
    seeds: Seeds
    """Seeds of the Session."""
    index: int = 0
    restart: int = 0
    """Number of earlier processes of this worker or server that died."""
    info: EnvInfo | None = None
    """EnvInfo of one vector env that contains the envs of all workers, or None if the worker derives the info from its own envs."""
    acting_state_size: int = 0
    """Number of values of the acting state, which is published together with the weights. See the function acting_state_size."""
    address: str = ""
    """Address of the inference server's socket, or "" if each worker computes its actions itself."""
    device: str = "cpu"
    """Device of the inference server."""


def acting_state_size(normalizers: Normalizers) -> int:
    """Return the number of values of the acting state, which workers need in addition to the weights.

    The acting state consists of the exploration variable (explore_var), Policy.uniform, the number of frames and
    Normalizers.statistics_vector.
    """
    return 3 + len(normalizers.statistics_vector)


class PublishedWeights:
    """Shared arrays with the newest weights of a policy, the version of the weights, and the acting state (see acting_state_size).

    Each array for the weights has two halves. The writer increments `begun`, fills the older half, and increments `done`. A reader copies
    the half that `done` selects, and accepts the copy unless `begun` shows that the writer has begun to overwrite the same half. Memory
    barriers between the steps of the writer and of the reader are needed on processors that reorder writes.

    Args:
        policy: policy whose parameters and buffers are copied to the shared arrays by `publish` and from the shared arrays by `pull`.
        acting_state_size: number of values of the acting state.
    """

    def __init__(self, policy: Policy, acting_state_size: int) -> None:
        self.flat = policy.flat
        sizes = (0, 0) if self.flat is None else (self.flat.size, self.flat.buffer.numel())
        self._arrays: dict[str, np.ndarray] = {
            "begun": np.zeros(1, np.int64),
            "done": np.zeros(1, np.int64),
            "version": np.zeros(2, np.int64),
            "param": np.zeros((2, sizes[0]), np.float32),
            "buffer": np.zeros((2, sizes[1]), np.float32),
            "extras": np.zeros((2, acting_state_size)),
        }
        self._store: Store | None = None
        self._seen = 0
        self.version = 0
        """Version of the weights that were pulled last."""
        self.acting_state = np.zeros(acting_state_size)

    def shared_arrays(self) -> Named:
        return {name: SharedArray(array, "single") for name, array in self._arrays.items()}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._arrays, self._store = dict(arrays), store

    def share_arrays_of(self, writer: PublishedWeights) -> None:
        """Use the arrays of `writer`, the PublishedWeights object of this process that publishes the weights."""
        self._arrays = writer._arrays

    def publish(self, version: int, acting_state: np.ndarray) -> None:
        """Make the current weights of the policy available to all readers."""
        param, buffer = (
            (np.zeros(0), np.zeros(0)) if self.flat is None else (self.flat.without_padding(self.flat.param), self.flat.buffer.detach())
        )
        self.write(version, param, buffer, acting_state)

    def write(self, version: int, param: torch.Tensor | np.ndarray, buffer: torch.Tensor | np.ndarray, acting_state: np.ndarray) -> None:
        """Make the weights in `param` and `buffer` available to all readers. Only one process or thread may call this method at a time."""
        arrays = self._arrays
        count = int(arrays["done"][0]) + 1
        half = count % 2
        arrays["begun"][0] = count
        self._barrier()
        for name, values in (("param", param), ("buffer", buffer)):
            if isinstance(values, torch.Tensor):
                torch.from_numpy(arrays[name][half]).copy_(values)
            else:
                arrays[name][half] = values
        arrays["extras"][half] = acting_state
        arrays["version"][half] = version
        self._barrier()
        arrays["done"][0] = count

    def copy_newest(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Return copies of the version, parameters, buffers and acting state that were published last.

        Only the process that publishes the weights may call this method.
        """
        half = int(self._arrays["done"][0]) % 2
        return int(self._arrays["version"][half]), *(self._arrays[name][half].copy() for name in ("param", "buffer", "extras"))

    @property
    def publish_count(self) -> int:
        """Number of times that weights were published."""
        return int(self._arrays["done"][0])

    def pull(self) -> bool:
        """Copy the newest weights into the policy. Returns False if the policy already had the newest weights."""
        arrays = self._arrays
        if arrays["done"][0] == self._seen:
            return False
        while True:
            count = int(arrays["done"][0])
            half = count % 2
            self._barrier()
            if self.flat is not None:
                self.flat.copy_to_param(torch.from_numpy(arrays["param"][half]))
                self.flat.buffer.copy_(torch.from_numpy(arrays["buffer"][half]))
            self.acting_state[:] = arrays["extras"][half]
            self.version = int(arrays["version"][half])
            self._barrier()
            if arrays["begun"][0] <= count + 1:
                self._seen = count
                return True

    def forget_pulled(self) -> None:
        """Make the next `pull` copy the newest weights even if they were already copied."""
        self._seen = 0

    def _barrier(self) -> None:
        if self._store is not None:
            self._store.barrier()


class InferenceBuffer:
    """Shared arrays with the request of an env group (observations) and the answer of the inference server (action distributions)."""

    def __init__(self, info: EnvInfo, policy: Policy) -> None:
        N, obs = info.num_envs, info.observation
        self.obs_N = np.zeros((N, *obs.shape), obs.dtype)
        self.policy_N = np.zeros(N, np.int64)
        self.state_NS = np.zeros((N, policy.state_size), np.float32)
        """Hidden states. A request contains the hidden states before the observations, and an answer contains the hidden states after the
        observations."""
        self.params_NP = np.zeros((N, policy.param_dim), np.float32)
        """Parameters of the action distributions, which the server writes."""
        self.version_N = np.zeros(N, np.int64)

    def shared_arrays(self) -> Named:
        return {name: SharedArray(array, "single") for name, array in vars(self).items()}

    def attach(self, store: Store, arrays: Arrays) -> None:
        for name, array in arrays.items():
            setattr(self, name, array)


class BusySpans:
    """Shared ring buffer of the time spans in which the inference server was busy, as (begin, end) in seconds of perf_counter."""

    SIZE = 4096

    def __init__(self) -> None:
        self._ring, self._count = np.zeros((self.SIZE, 2)), np.zeros(1, np.int64)
        self._read = 0

    def shared_arrays(self) -> Named:
        return {"ring": SharedArray(self._ring, "single"), "count": SharedArray(self._count, "single")}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._ring, self._count = arrays["ring"], arrays["count"]

    def add(self, begin: float, end: float) -> None:
        self._ring[self._count[0] % self.SIZE] = begin, end
        self._count[0] += 1

    def take_unread_spans(self) -> list[tuple[float, float]]:
        """Return the time spans that were added since the last call, but at most the newest SIZE spans."""
        count = int(self._count[0])
        first = max(self._read, count - self.SIZE)
        self._read = count
        return [(float(begin), float(end)) for begin, end in self._ring[np.arange(first, count) % self.SIZE]]


class RolloutSlot:
    """Storage for one rollout of an env group.

    Args: for_replay: whether the transitions of the rollout are added to a replay memory.
    """

    def __init__(self, info: EnvInfo, steps: int, state_size: int, *, for_replay: bool = False) -> None:
        self.storage, self.t = build_batch_storage(info, steps, state_size), 0
        self.storage.stores_terminal_obs = for_replay
        self.played_TN = np.zeros((steps, info.num_envs), np.int64)
        """Index of the policy that played each row of the vector env in each step, int64 [T, N]."""
        self.policy_TN = np.zeros_like(self.played_TN) if info.agents else self.played_TN
        """Index of the policy that played each stored transition. With several agents, index t counts the transitions of a column and not
        the steps of the envs (see MultiAgentBatchReplay)."""

    def begin(self) -> None:
        """Begin a new rollout, which overwrites the previous rollout."""
        self.t = 0
        self.storage.begin_rollout()

    def add(self, policy_N: np.ndarray, transition: Transition) -> None:
        """Store the transitions that end in one step of the envs.

        Args: policy_N: index of the policy that played each row of the vector env in the step.
        """
        self.played_TN[self.t] = policy_N
        self.t += 1
        self.storage.add(*transition)
        if isinstance(self.storage, MultiAgentBatchReplay):
            n_K = np.flatnonzero(transition[-1].valid_N)
            self.policy_TN[self.storage.count_N[n_K] - 1, n_K] = policy_N[n_K]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the slot as a dict: name → array."""
        arrays = {**self.storage.arrays(), "played": self.played_TN}
        return arrays if self.policy_TN is self.played_TN else arrays | {"policy": self.policy_TN}

    def shared_arrays(self) -> Named:
        return {name: SharedArray(array, "single") for name, array in self.arrays().items()}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self.use_arrays(arrays)

    def use_arrays(self, arrays: Arrays) -> None:
        """Use `arrays` as the storage of the slot. The dict must have the same keys as the dict that the method `arrays` returns."""
        self.storage.use_arrays(arrays)
        self.played_TN = arrays["played"]
        self.policy_TN = arrays.get("policy", self.played_TN)


class WorkerArrays:
    """All arrays that the learner, the workers and the inference server share."""

    def __init__(self, spec: Spec, info: EnvInfo, policies: Sequence[Policy], acting_state_size: int) -> None:
        sampler = get_sampler_spec(spec)
        steps, policy, groups = spec.worker_rollout_len, policies[0], num_env_groups(sampler)
        group, for_replay = info.with_num_envs(sampler.num_envs_per_worker // groups), not spec.agent.algorithm.on_policy
        self.weights = [PublishedWeights(each, acting_state_size) for each in policies]
        self.active_P = np.ones(len(policies), np.bool_)
        """Whether each policy still needs frames, bool [P]."""
        self.slots = [
            [[RolloutSlot(group, steps, policy.state_size, for_replay=for_replay) for _ in range(groups)] for _ in range(SLOTS)]
            for _ in range(sampler.num_workers)
        ]
        """Storage for rollouts, indexed as [worker][slot][env group]."""
        self.buffers: list[list[InferenceBuffer]] = []
        """Inference buffers, indexed as [worker][group], or [] without central inference."""
        if sampler.inference == "central":
            self.buffers = [[InferenceBuffer(group, policy) for _ in range(groups)] for _ in range(sampler.num_workers)]
        self.spans = BusySpans()

    def _named_components(self) -> dict[str, Shareable]:
        parts: dict[str, Shareable] = {f"weights/{p}": weights for p, weights in enumerate(self.weights)}
        for w, slots in enumerate(self.slots):
            parts |= {f"slot/{w}/{s}/{g}": slot for s, groups in enumerate(slots) for g, slot in enumerate(groups)}
        for w, buffers in enumerate(self.buffers):
            parts |= {f"inference/{w}/{g}": buffer for g, buffer in enumerate(buffers)}
        return parts | {"spans": self.spans}

    def shared_arrays(self) -> Named:
        return {"active": SharedArray(self.active_P, "single"), **prefixed_arrays(self._named_components())}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self.active_P = arrays["active"]
        attach_parts(self._named_components(), store, arrays)

    def use_learner_arrays(self, learner_arrays: WorkerArrays) -> None:
        """Replace the weights, slots and `active_P` of this object by those of the learner, which runs in the same process."""
        for reader, writer in zip(self.weights, learner_arrays.weights, strict=True):
            reader.share_arrays_of(writer)
        self.slots, self.active_P = learner_arrays.slots, learner_arrays.active_P


def get_sampler_spec(spec: Spec) -> SamplerSpec:
    """Return meta.sampler of a spec that has this section."""
    assert spec.meta.sampler is not None
    return spec.meta.sampler


def num_env_groups(sampler: SamplerSpec) -> int:
    """Return the number of env groups (vector envs) of a worker.

    With central inference, a worker steps one env group while another group waits for actions. With local inference, a worker has one env
    group.
    """
    return sampler.worker_num_splits if sampler.inference == "central" else 1


def rollout_bytes(spec: Spec, info: EnvInfo) -> int:
    """Return the memory in bytes that the rollout slots and the datasets of a Session need."""
    sampler, steps = get_sampler_spec(spec), spec.worker_rollout_len
    slots = SLOTS * storage_bytes(info.with_num_envs(sampler.num_envs), steps + 1)
    waiting = sampler.num_batches_to_accumulate if sampler.async_rl and not sampler.serial_mode else 0
    columns = count_dataset_columns(spec, info)
    return slots + storage_bytes(replace(info, num_envs=(waiting + 1) * sum(columns) + max(columns)), steps + 1)


def count_dataset_columns(spec: Spec, info: EnvInfo) -> list[int]:
    """Return the number of columns of a dataset for each policy.

    A dataset has one column for each agent of the policy in each of spec.rollouts_per_dataset envs. With agent.policies, the agents of a
    policy are the agents that agent.policies lists for the policy. Without agent.policies, every policy may be drawn for every agent (see
    meta.sampler.num_policies), and all agents of the env are counted for each policy.
    """
    fixed = spec.agent.policies
    agents = [max(1, len(info.agents))] * spec.policies if fixed is None else [len(names) for names in fixed.values()]
    return [spec.rollouts_per_dataset * count for count in agents]


def fixed_policy_indices(spec: Spec, info: EnvInfo) -> np.ndarray | None:
    """Return the index of the policy that agent.policies assigns to each row of the vector env, int64 [N].

    If the spec does not contain agent.policies, a policy is drawn for each episode, and None is returned.
    """
    if spec.agent.policies is None:
        return None
    policy_N = np.zeros(info.num_envs, np.int64)
    for policy, names in enumerate(spec.agent.policies.values()):
        policy_N[info.agent_rows(names)] = policy
    return policy_N


def check_memory(spec: Spec, info: EnvInfo, concurrent_sessions: int = 1) -> None:
    """Raise SpecError if the rollout slots and datasets of all concurrent Sessions do not fit into the memory of this machine."""
    needed = concurrent_sessions * rollout_bytes(spec, info)
    if needed > memory_bytes():
        sizes = f"needs {needed / 2**30:,.1f} GiB for rollouts; this machine has {memory_bytes() / 2**30:,.1f} GiB"
        advice = "use fewer envs (num_workers, num_envs_per_worker), shorter rollouts or smaller datasets"
        advice += ", or run fewer sessions at a time (--jobs)" if concurrent_sessions > 1 else ""
        raise SpecError(spec.name, [Problem("meta.sampler", f"{sizes}; {advice}")])
