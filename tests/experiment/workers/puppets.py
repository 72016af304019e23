"""Fake rollout workers without envs: they fill slots with numbers, and die on request."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import numpy as np

from slm_lab.experiment.collect.workers.dataset import GroupRolloutReport
from slm_lab.experiment.collect.workers.link import CONNECT, MemoryEndpoint
from slm_lab.experiment.collect.workers.shared import SLOTS, RolloutSlot, WorkerConfig
from slm_lab.experiment.collect.workers.worker import RolloutReport
from slm_lab.experiment.execute.local.child import ChildContext
from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from slm_lab.lib.store import Arrays, Named, SharedArray, SharedArrays, attach_parts, prefixed_arrays

ROWS, STATE, WORKERS = 4, 2, 2
INFO = EnvInfo(3, ObservationSpace((1,)), ActionSpace("discrete", (2,)))
NEVER, AT_START = -1, 0


def empty_slot(columns: int = 3) -> RolloutSlot:
    return RolloutSlot(replace(INFO, num_envs=columns), ROWS, STATE)


def fill(slot: RolloutSlot, number: int) -> None:
    """Write numbers that identify slot, column and row: 100 · number + 10 · column + row."""
    _, N = slot.policy_TN.shape
    for name, slab in slot.storage.slabs.items():
        value = 100.0 * number + 10.0 * np.arange(N) + np.arange(len(slab))[:, None]
        slab[:] = name not in ("terminated", "truncated") if slab.dtype == np.bool_ else _like(value, slab)
    slot.storage.state_NS[:] = 100.0 * number + 10.0 * np.arange(N)[:, None]


def _like(value: np.ndarray, slab: np.ndarray) -> np.ndarray:
    return value.reshape(value.shape + (1,) * (slab.ndim - 2)).astype(slab.dtype)


def report(end: float) -> RolloutReport:
    return RolloutReport([GroupRolloutReport([], [])], [[]], end - 1, end, 0.5, 0.5)


class PuppetArrays:
    """The arrays that the pool, its assembler and the fake workers share."""

    def __init__(self) -> None:
        self.slots = [[[empty_slot()] for _ in range(SLOTS)] for _ in range(WORKERS)]
        self.filled_W = np.zeros(WORKERS, np.int64)
        """Number of rollouts of each worker."""
        self.deaths_WR = np.full((WORKERS, 4), NEVER)
        """The rollout at which each process of a worker dies."""

    def _slots(self) -> dict[str, RolloutSlot]:
        return {f"{w}/{s}": slot for w, slots in enumerate(self.slots) for s, (slot,) in enumerate(slots)}

    def shared_arrays(self) -> Named:
        own = {"filled": SharedArray(self.filled_W, "single"), "deaths": SharedArray(self.deaths_WR, "single")}
        return own | prefixed_arrays(self._slots())

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        self.filled_W, self.deaths_WR = arrays["filled"], arrays["deaths"]
        attach_parts(self._slots(), store, arrays)


def run_worker(context: ChildContext, config: WorkerConfig, link: MemoryEndpoint) -> None:
    """Replace link.run_worker: fill the requested slots with 10 · worker + the number of the worker's rollout, counted from 1."""
    context.send("built", INFO)
    if context.receive() != CONNECT:
        return
    arrays = PuppetArrays()
    link.store.attach({"puppets": arrays})
    death = arrays.deaths_WR[config.index, config.restart]
    if death == AT_START:
        _die()
    context.send("ready")
    for rollout in range(1, 1000):
        if (slot := context.receive()) is None:
            return
        (group,) = arrays.slots[config.index][slot]
        if rollout == death:
            fill(group, 99)  # a partly written rollout
            _die()
        arrays.filled_W[config.index] += 1
        fill(group, 10 * config.index + int(arrays.filled_W[config.index]))
        context.send("rollout", slot, report(time.perf_counter()))


def _die() -> None:
    os.write(2, b"the last line\n")
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(context: ChildContext, config: WorkerConfig, link: MemoryEndpoint) -> None:
    """Never become ready, and ignore stop requests."""
    time.sleep(1000)
