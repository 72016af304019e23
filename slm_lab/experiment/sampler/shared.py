"""What learner and rollout workers have in common: the newest weights, and slots for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.memory.on_policy import OnPolicyBatchReplay, slab_bytes
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.policy import Policy
from slm_lab.lib.heap import Heap
from slm_lab.lib.machine import memory_bytes
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.sampler import SamplerSpec
from slm_lab.spec.spec import Spec

SLOTS = 2
"""Slots of each group of envs: one is written while the other is read."""


class Weights:
    """The newest weights of a policy, and what goes with them.

    There are two halves: the writer fills the older one and then counts on, so that a reader finds the other whole; it has read a whole
    one unless the writer has meanwhile begun on that half again. Holds where writes of one core are seen by others in their order (x86).

    Args: heap: where they lie. flat: the parameters of this process, which `publish` writes and `pull` overwrites. notes: how many numbers
    go with them.
    """

    def __init__(self, heap: Heap, flat: FlatParams | None, notes: int) -> None:
        self.flat = flat
        sizes = (0, 0) if flat is None else (flat.param.numel(), flat.buffer.numel())
        self._begun = heap.array(np.zeros(1, np.int64))
        self._done = heap.array(np.zeros(1, np.int64))
        self._version_H = heap.array(np.zeros(2, np.int64))
        self._param_HP = torch.from_numpy(heap.array(np.zeros((2, sizes[0]), np.float32)))
        self._buffer_HQ = torch.from_numpy(heap.array(np.zeros((2, sizes[1]), np.float32)))
        self._notes_HK = heap.array(np.zeros((2, notes)))
        self._seen = 0
        self.version = 0
        """Of what was pulled last."""
        self.notes = np.zeros(notes)

    def publish(self, version: int, notes: np.ndarray) -> None:
        """Let every reader have the weights as they are now."""
        count = int(self._done[0]) + 1
        half = count % 2
        self._begun[0] = count
        if self.flat is not None:
            self._param_HP[half].copy_(self.flat.param.detach())
            self._buffer_HQ[half].copy_(self.flat.buffer.detach())
        self._notes_HK[half] = notes
        self._version_H[half] = version
        self._done[0] = count

    def pull(self) -> bool:
        """Take over the newest weights. Returns whether there were newer ones."""
        if self._done[0] == self._seen:
            return False
        while True:
            count = int(self._done[0])
            half = count % 2
            if self.flat is not None:
                self.flat.param.copy_(self._param_HP[half])
                self.flat.buffer.copy_(self._buffer_HQ[half])
            self.notes[:] = self._notes_HK[half]
            self.version = int(self._version_H[half])
            if self._begun[0] <= count + 1:
                self._seen = count
                return True


class Mail:
    """What a group of envs asks central inference, and is answered."""

    def __init__(self, heap: Heap, info: EnvInfo, policy: Policy) -> None:
        N, obs = info.num_envs, info.observation
        self.obs_N = heap.array(np.zeros((N, *obs.shape), obs.dtype))
        self.policy_N = heap.array(np.zeros(N, np.int64))
        self.state_NS = heap.array(np.zeros((N, policy.state_size), np.float32))
        """Before the observation, and in the answer after it."""
        self.params_NP = heap.array(np.zeros((N, policy.params), np.float32))
        self.version_N = heap.array(np.zeros(N, np.int64))


class Spans:
    """When central inference was busy: a ring in shared memory of (begin, end)."""

    SIZE = 4096

    def __init__(self, heap: Heap) -> None:
        self._ring = heap.array(np.zeros((self.SIZE, 2)))
        self._count = heap.array(np.zeros(1, np.int64))
        self._read = 0

    def add(self, begin: float, end: float) -> None:
        self._ring[self._count[0] % self.SIZE] = begin, end
        self._count[0] += 1

    def news(self) -> list[tuple[float, float]]:
        """Those since the last call, the newest SIZE of them."""
        count = int(self._count[0])
        first = max(self._read, count - self.SIZE)
        self._read = count
        return [(float(begin), float(end)) for begin, end in self._ring[np.arange(first, count) % self.SIZE]]


@dataclass(frozen=True)
class Slot:
    """Room for one rollout of a group of envs."""

    memory: OnPolicyBatchReplay
    policy_TN: np.ndarray
    """Which policy each transition is of."""


class Common:
    """Everything that lies in shared memory. Each process makes the same, in the same order, on its view of the heap."""

    def __init__(self, heap: Heap, spec: Spec, info: EnvInfo, algorithms: Sequence[Algorithm], notes: int) -> None:
        sampler = spec.meta.sampler
        assert sampler is not None
        rows, state_size = spec.rollout_rows, algorithms[0].policy.state_size
        group = replace(info, num_envs=sampler.num_envs_per_worker // splits(sampler))
        actings = [algorithm.acting for algorithm in algorithms]
        self.weights = [Weights(heap, None if acting is None else acting.flat, notes) for acting in actings]
        self.active_P = heap.array(np.ones(len(algorithms), np.bool_))
        """Policies that still need frames."""
        self.slots = [
            [[_slot(heap, group, rows, state_size) for _ in range(splits(sampler))] for _ in range(SLOTS)]
            for _ in range(sampler.num_workers)
        ]
        """[worker][slot][group]."""
        self.mail: list[list[Mail]] = []
        """[worker][group]; central inference only."""
        if sampler.inference == "central":
            policy = algorithms[0].policy
            self.mail = [[Mail(heap, group, policy) for _ in range(splits(sampler))] for _ in range(sampler.num_workers)]
        self.spans = Spans(heap)


def splits(sampler: SamplerSpec) -> int:
    """Groups of envs of a worker: local inference waits for nobody, so all step together."""
    return sampler.worker_num_splits if sampler.inference == "central" else 1


def _slot(heap: Heap, info: EnvInfo, rows: int, state_size: int) -> Slot:
    return Slot(OnPolicyBatchReplay(info, rows, state_size, heap), heap.array(np.zeros((rows, info.num_envs), np.int64)))


def check_room(spec: Spec, info: EnvInfo, at_once: int = 1) -> None:
    """Raise SpecError where slots and datasets of the Sessions that run at a time do not fit this machine."""
    sampler = spec.meta.sampler
    assert sampler is not None
    rows = spec.rollout_rows
    slots = SLOTS * slab_bytes(replace(info, num_envs=sampler.num_envs), rows + 1)
    waiting = sampler.num_batches_to_accumulate if sampler.async_rl and not sampler.serial_mode else 0
    datasets = sampler.num_policies * (waiting + 1)
    needed = at_once * (slots + (datasets + 1) * slab_bytes(replace(info, num_envs=spec.dataset_columns), rows + 1))
    if needed > memory_bytes():
        sizes = f"{needed / 2**30:,.1f} GiB for rollouts, this machine has {memory_bytes() / 2**30:,.1f}"
        advice = "take fewer envs (num_workers, num_envs_per_worker), shorter rollouts or smaller datasets"
        advice += "; or let fewer Sessions run at a time (--jobs)" if at_once > 1 else ""
        raise SpecError(spec.name, [Problem("meta.sampler", f"needs {sizes}; {advice}")])
