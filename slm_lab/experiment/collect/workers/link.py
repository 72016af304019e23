"""The tasks of workers, and what differs between this machine and a cluster: how weights and rollouts are exchanged.

On one machine both are in shared memory, and messages carry slot numbers. On a cluster weights are sent, to each node once, and rollouts
come with the messages. What a worker acts with is as new as the last broadcast that has arrived; the learner measures the lag and leaves
out what is too old (meta.sampler.max_policy_lag). Each kind has two classes: a Link for the pool, and a WorkerEnd for each worker.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.connection import Listener
from typing import Any

import numpy as np
import torch

from slm_lab.experiment.collect.workers.inference import CentralInference, InferenceServer
from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig, sampler_of
from slm_lab.experiment.collect.workers.worker import Collected, RolloutWorker, seed_process
from slm_lab.experiment.execute.executor import Context, Executor, Task
from slm_lab.experiment.execute.heartbeat import CLOSING
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.lib.store import SharedArrays, shared_file
from slm_lab.spec.report import SpecError

CONNECT = "connect"
"""First order of a worker of this machine: the shared arrays are there."""
_BROADCAST_SECONDS = 0.03
"""Minimum time between two broadcasts to a worker, except in synchronous rounds. With a broadcast after every update of CartPole, receiving
weights took a quarter of a worker's processor time."""


class MemoryLink:
    """The pool's end of the links to workers of this machine: nothing is sent.

    Attributes:
        remote: workers are on any nodes, so they may wait long for a free core.
        poll_seconds: maximum time between two calls of `refresh`.
        store: what the workers attach to; None if they attach to nothing.
    """

    remote, poll_seconds = False, 1.0

    def __init__(self) -> None:
        self.fd = shared_file()
        self.store: SharedArrays | None = SharedArrays(self.fd)

    def worker_end(self) -> WorkerEnd:
        """Return the other end for one process, to which it goes as an argument."""
        return MemoryEnd(SharedFd(self.fd))

    def attach(self, arrays: WorkerArrays) -> None:
        """Use the learner's arrays, which hold the initial weights."""

    def connect(self, task: Task) -> None:
        """Send a new process its first order."""
        task.send(CONNECT)

    def refresh(self, tasks: Iterable[Task]) -> None:
        """Let connected workers have the newest weights."""

    def arrived(self, worker: int, slot: int, report: Collected) -> Collected:
        """Make the content of the message "rollout" available in the learner's slot; return the report."""
        return report

    def close(self) -> None:
        """Release what it holds, once the workers have ended."""
        os.close(self.fd)


@dataclass(frozen=True)
class MemoryEnd:
    """The end of a MemoryLink in the process of a worker, or of the inference server."""

    memory: SharedFd
    niceness = 5
    """The learner has priority: if cores are fewer than processes, the data that it trains on limits the run more often than the envs do,
    and workers that run ahead of it only wait. (Added to that of the process in async mode.)"""

    @property
    def store(self) -> SharedArrays:
        """The shared arrays, for another process than the learner's."""
        return SharedArrays(self.memory.fd, fresh=False)

    def connect(self, worker: RolloutWorker, first: Any, context: Context) -> None:
        """Build the policies and begin episodes. Args: first: the first order."""
        worker.attach(lambda own: self.store.attach({"workers": own}))
        config = worker.config
        if config.address:
            worker.inference = CentralInference(config.address, config.index, worker.arrays.buffers[config.index], worker.subscriber)

    def take(self, order: Any) -> None:
        """Carry out an order of the link: there is none."""

    def send(self, worker: RolloutWorker, slot: int, report: Collected, context: Context) -> None:
        """Send the message ("rollout", slot, report, …) once the slot is filled."""
        context.send("rollout", slot, report)


@dataclass
class Broadcast:
    """The newest weights of all policies."""

    weights: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]
    """Of each policy: what PublishedWeights.newest returns."""
    active_P: np.ndarray
    """Policies that still need frames."""


class MessageLink:
    """The pool's end of the links to workers on any nodes, through the messages of an executor.

    Args: in_rounds: workers wait while the learner trains, and a round is collected with its weights; otherwise weights are used as soon as
        they arrive, in the middle of a rollout too.
    """

    remote, poll_seconds = True, 0.01
    store: SharedArrays | None = None

    def __init__(self, executor: Executor, *, in_rounds: bool) -> None:
        self.executor, self.in_rounds = executor, in_rounds
        self._broadcast: Any = None
        self._number = self._published = 0
        """Of the newest broadcast; sum over policies of how often weights were published until then."""
        self._sent: dict[Task, tuple[int, float]] = {}
        """Number of the last broadcast to each worker, and when it was sent."""

    def worker_end(self) -> WorkerEnd:
        return MessageEnd()

    def attach(self, arrays: WorkerArrays) -> None:
        self.arrays = arrays

    def connect(self, task: Task) -> None:
        self._renew()
        self._sent[task] = self._number, time.monotonic()
        task.send(self._broadcast)

    def refresh(self, tasks: Iterable[Task]) -> None:
        now = time.monotonic()
        due = [task for task in tasks if self.in_rounds or now >= self._sent[task][1] + _BROADCAST_SECONDS]
        if due:
            self._renew()
        for task in due:
            if self._sent[task][0] < self._number and self._send(task):
                self._sent[task] = self._number, now

    def _send(self, task: Task) -> bool:
        """Send the newest broadcast; in rounds as an order, since the next rollout has to wait for it. Return whether it was sent."""
        if not self.in_rounds:
            return task.signal(self._broadcast)
        task.send(self._broadcast)
        return True

    def _renew(self) -> None:
        """Make a broadcast of the newest weights, unless they are in the last one."""
        published = sum(weights.published for weights in self.arrays.weights)
        if published != self._published:
            self._published, self._number = published, self._number + 1
            newest = Broadcast([weights.newest() for weights in self.arrays.weights], self.arrays.active_P.copy())
            self._broadcast = self.executor.share(newest)

    def arrived(self, worker: int, slot: int, report: Collected, *groups: Any) -> Collected:
        """Use the arrays where they are. Times become those of this process's clock."""
        for place, arrays in zip(self.arrays.slots[worker][slot], groups, strict=True):
            place.use(arrays)
        now = time.perf_counter()
        return report._replace(begin=now - (report.end - report.begin), end=now)

    def close(self) -> None: ...


class MessageEnd:
    """The end of a MessageLink in the process of a worker."""

    niceness = 0

    def connect(self, worker: RolloutWorker, first: Broadcast, context: Context) -> None:
        def connect(own: WorkerArrays) -> None:
            self.arrays = own
            self.take(first)

        worker.attach(connect)
        context.on_signal = self.take

    def take(self, order: Broadcast) -> None:
        """Act with these weights from the next step on."""
        for mine, newest in zip(self.arrays.weights, order.weights, strict=True):
            mine.write(*newest)
        self.arrays.active_P[:] = order.active_P

    def send(self, worker: RolloutWorker, slot: int, report: Collected, context: Context) -> None:
        context.send("rollout", slot, report, *(group.arrays() for group in worker.slots[slot]))


Link = MemoryLink | MessageLink
WorkerEnd = MemoryEnd | MessageEnd


SAVE, LOAD = "save", "load"
"""Orders between two rounds: (SAVE, number of the request): send the state; (LOAD, state or None, resumes): continue a run."""
_ORPHAN_SECONDS = 10.0
"""Time for which workers are answered after the learner was killed, so that they can close their envs."""


def run_worker(context: Context, config: WorkerConfig, link: WorkerEnd) -> None:
    """Collect rollouts into the requested slots until a stop is requested.

    Messages: ("built", EnvInfo), after the first order ("ready",), then ("rollout", slot, Collected, …) for each slot that is ordered, and
    ("state", number, state) when asked; or ("user_error", SpecError).
    """
    if sampler_of(config.spec).async_rl and hasattr(os, "nice"):
        os.nice(link.niceness)
    torch.set_num_threads(1)
    seed_process(config)
    try:
        worker = RolloutWorker(config, context.beat)
    except SpecError as error:
        context.send("user_error", error)
        return
    worker.stop = context.stop
    context.send("built", worker.info)
    if (first := context.receive()) is None:
        return
    link.connect(worker, first, context)
    context.send("ready")
    while (order := context.receive()) is not None:
        _carry_out(order, worker, link, context)
    context.beat(CLOSING)
    worker.close()


def _carry_out(order: Any, worker: RolloutWorker, link: WorkerEnd, context: Context) -> None:
    """Collect into a slot, or load or send the state, or do what the link does."""
    match order:
        case int(slot):
            report = worker.collect(slot)
            if not context.stop.requested:
                link.send(worker, slot, report, context)
        case (kind, saved, resumes) if kind == LOAD:
            worker.resume_process(saved, resumes)
        case (kind, request) if kind == SAVE:
            context.send("state", request, worker.state_dict())
        case _:
            link.take(order)


def run_inference(context: Context, config: WorkerConfig, link: MemoryEnd) -> None:
    """Serve inference requests until killed; if the learner was killed, until the workers have ended. Message: ("ready",)."""
    server = InferenceServer(config, link.store, context.beat)
    if os.path.exists(config.address):  # of a server that was killed
        os.unlink(config.address)
    with Listener(config.address, "AF_UNIX", backlog=256, authkey=current_process().authkey) as listener:
        context.send("ready")
        server.accept(listener)
        while not context.stop.requested:
            server.serve()
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while server.clients and time.monotonic() < deadline:
            server.serve()
    shutil.rmtree(os.path.dirname(config.address), ignore_errors=True)  # the learner's work, but it is gone
