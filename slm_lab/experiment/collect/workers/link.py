"""Exchange of weights and rollouts between rollout workers and the learner, on one machine or on a cluster.

On one machine, weights and rollouts are in shared memory, and messages contain only slot numbers (a slot is storage for one rollout). On a
cluster, weights are sent once to each node, and rollouts are sent in messages. A worker acts with the newest weights that it has received.
The learner measures the policy lag, and masks transitions that are too old (meta.sampler.max_policy_lag). The learner's pool of workers
uses a SharedMemoryLink on one machine and a MessageLink on a cluster. Each worker process uses the corresponding MemoryEndpoint or
MessageEndpoint. The module also defines the functions that the processes of workers and of the inference server run.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.connection import Listener
from typing import Any

import numpy as np
import torch

from slm_lab.experiment.collect.workers.inference import CentralInference, InferenceServer
from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig, get_sampler_spec
from slm_lab.experiment.collect.workers.worker import RolloutReport, RolloutWorker, seed_process
from slm_lab.experiment.execute.executor import Context, Executor, Task
from slm_lab.experiment.execute.heartbeat import CLOSING
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.lib.system import has_feature
from slm_lab.spec.report import SpecError

CONNECT = "connect"
"""The first message that a worker on this machine receives. CONNECT means that the shared arrays are ready."""
_BROADCAST_SECONDS = 0.03
"""Minimum time in seconds between two broadcasts of weights to a worker, except in synchronous rounds. In CartPole with a broadcast after
every update, a worker spent a quarter of its processor time on receiving weights."""


class SharedMemoryLink:
    """Connection of the learner's pool to workers on this machine. Weights and rollouts are in shared memory and need not be sent.

    Attributes:
        remote: whether workers may run on other nodes. Such a worker may wait long for a free core before it starts.
        poll_seconds: maximum time in seconds between two calls of `send_newest_weights`.
        store: shared arrays that the workers attach to.
    """

    remote, poll_seconds = False, 1.0

    def __init__(self) -> None:
        self.fd = create_shared_file()
        self.store: SharedArrays | None = SharedArrays(self.fd)

    def worker_endpoint(self) -> WorkerEndpoint:
        """Return the worker's endpoint of this link. The endpoint is passed to the process of a worker as an argument."""
        return MemoryEndpoint(SharedFd(self.fd))

    def set_learner_arrays(self, arrays: WorkerArrays) -> None:
        """Set the arrays of the learner, which contain the initial weights. This method does nothing, since the learner's arrays are in
        shared memory."""

    def connect(self, task: Task) -> None:
        """Send the order CONNECT to a new worker process."""
        task.send(CONNECT)

    def send_newest_weights(self, tasks: Iterable[Task]) -> None:
        """Make the newest weights available to connected workers. With shared memory, this method does nothing."""

    def receive_rollout(self, worker: int, slot: int, report: RolloutReport) -> RolloutReport:
        """Make the content of a message "rollout" available in the learner's slot, and return the worker's report."""
        return report

    def close(self) -> None:
        """Close the file of the shared memory. `close` must be called after the workers have ended."""
        os.close(self.fd)


@dataclass(frozen=True)
class MemoryEndpoint:
    """The endpoint of a SharedMemoryLink in the process of a worker or of the inference server."""

    memory: SharedFd
    niceness = 5
    """Value added to the niceness of a worker process if collection is asynchronous, so that the learner has priority. With fewer cores
    than processes, training is more often the bottleneck than the envs, and workers that run ahead of the learner only wait."""

    @property
    def store(self) -> SharedArrays:
        """The shared arrays of the learner, mapped into the process of a worker or of the inference server."""
        return SharedArrays(self.memory.fd, fresh=False)

    def connect(self, worker: RolloutWorker, first: Any, context: Context) -> None:
        """Connect a worker to the learner's arrays, build the worker's policies, and begin the worker's episodes.

        Args: first: the first message that the worker has received.
        """
        worker.connect_and_reset(lambda arrays: self.store.attach({"workers": arrays}))
        config = worker.config
        if config.address:
            worker.inference = CentralInference(config.address, config.index, worker.arrays.buffers[config.index], worker.subscriber)

    def execute_order(self, order: Any) -> None:
        """Execute an order that a link has sent. `MemoryEndpoint.execute_order` does nothing, since a SharedMemoryLink sends no orders."""

    def send(self, worker: RolloutWorker, slot: int, report: RolloutReport, context: Context) -> None:
        """Send the message ("rollout", slot, report) after the worker has filled a slot."""
        context.send("rollout", slot, report)


@dataclass
class Broadcast:
    """A message with the newest weights of all policies."""

    weights: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]
    """Result of PublishedWeights.copy_newest for each policy."""
    active_P: np.ndarray
    """Whether each policy still needs frames, bool [P]."""


class MessageLink:
    """Connection of the learner's pool to workers on any nodes of a cluster. Weights and rollouts are sent in messages of an executor.

    Args:
        in_rounds: if True, workers wait while the learner trains, and then collect a round with the new weights. If False, workers use new
            weights as soon as the weights arrive, even in the middle of a rollout.
    """

    remote, poll_seconds = True, 0.01
    store: SharedArrays | None = None

    def __init__(self, executor: Executor, *, in_rounds: bool) -> None:
        self.executor, self.in_rounds = executor, in_rounds
        self._broadcast: Any = None
        self._number = self._published = 0
        """`_number`: number of the newest broadcast. `_published`: number of times that weights had been published, summed over the
        policies, when the newest broadcast was created."""
        self._sent: dict[Task, tuple[int, float]] = {}
        """Task of a worker → (number of the last broadcast that was sent to the worker, time at which the broadcast was sent)."""

    def worker_endpoint(self) -> WorkerEndpoint:
        return MessageEndpoint()

    def set_learner_arrays(self, arrays: WorkerArrays) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # received rollouts are only read
        self.arrays = arrays

    def connect(self, task: Task) -> None:
        self._update_broadcast()
        self._sent[task] = self._number, time.monotonic()
        task.send(self._broadcast)

    def send_newest_weights(self, tasks: Iterable[Task]) -> None:
        now = time.monotonic()
        due = [task for task in tasks if self.in_rounds or now >= self._sent[task][1] + _BROADCAST_SECONDS]
        if due:
            self._update_broadcast()
        for task in due:
            if self._sent[task][0] < self._number and self._send(task):
                self._sent[task] = self._number, now

    def _send(self, task: Task) -> bool:
        """Send the newest broadcast to a worker. Returns whether the broadcast was sent.

        In synchronous rounds, the broadcast is sent by Task.send, before the order for the next rollout. Without rounds, the broadcast is
        sent by Task.signal, but is not sent if the previous signal has not been delivered yet.
        """
        if not self.in_rounds:
            return task.signal(self._broadcast)
        task.send(self._broadcast)
        return True

    def _update_broadcast(self) -> None:
        """Create a broadcast of the newest weights, unless the last broadcast already contains the newest weights."""
        published = sum(weights.publish_count for weights in self.arrays.weights)
        if published != self._published:
            self._published, self._number = published, self._number + 1
            newest = Broadcast([weights.copy_newest() for weights in self.arrays.weights], self.arrays.active_P.copy())
            self._broadcast = self.executor.put_shared(newest)

    def receive_rollout(self, worker: int, slot: int, report: RolloutReport, *groups: Any) -> RolloutReport:
        """Use the received arrays as the slot's arrays without copying. Returns the report with `begin` and `end` as times of the clock
        of this process: `end` is the time of arrival."""
        for group_slot, arrays in zip(self.arrays.slots[worker][slot], groups, strict=True):
            group_slot.use_arrays(arrays)
        now = time.perf_counter()
        return report._replace(begin=now - (report.end - report.begin), end=now)

    def close(self) -> None: ...


class MessageEndpoint:
    """The endpoint of a MessageLink in the process of a worker."""

    niceness = 0

    def connect(self, worker: RolloutWorker, first: Broadcast, context: Context) -> None:
        def load_weights(arrays: WorkerArrays) -> None:
            self.arrays = arrays
            self.execute_order(first)

        worker.connect_and_reset(load_weights)
        context.on_signal = self.execute_order

    def execute_order(self, order: Broadcast) -> None:
        """Load the weights of a broadcast. The worker's policies use the loaded weights from the next step on."""
        for weights, newest in zip(self.arrays.weights, order.weights, strict=True):
            weights.write(*newest)
        self.arrays.active_P[:] = order.active_P

    def send(self, worker: RolloutWorker, slot: int, report: RolloutReport, context: Context) -> None:
        context.send("rollout", slot, report, *(group_slot.arrays() for group_slot in worker.slots[slot]))


Link = SharedMemoryLink | MessageLink
WorkerEndpoint = MemoryEndpoint | MessageEndpoint


SAVE, LOAD = "save", "load"
"""Orders (messages) to a worker between two rounds. The order (SAVE, number of the request) makes the worker send its state. The order
(LOAD, state or None, number of times that the run was continued) makes the worker continue a run."""
_ORPHAN_SECONDS = 10.0
"""Time in seconds for which the inference server still answers workers after the learner was killed, so that the workers can close their
envs."""


def run_worker(context: Context, config: WorkerConfig, link: WorkerEndpoint) -> None:
    """Run a rollout worker, which collects rollouts into the requested slots until a stop is requested.

    The worker sends ("built", EnvInfo) when the envs are built, or ("user_error", SpecError) if the envs cannot be built. The worker sends
    ("ready",) after the first order has been executed. After ("ready",), the worker sends ("rollout", slot, RolloutReport, …) for each
    requested slot, and ("state", number of the request, state) for each SAVE order.
    """
    if get_sampler_spec(config.spec).async_rl and has_feature("priority"):
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
        _execute_order(order, worker, link, context)
    context.beat(CLOSING)
    worker.close()


def _execute_order(order: Any, worker: RolloutWorker, link: WorkerEndpoint, context: Context) -> None:
    """Execute an order: collect a rollout into a slot, load the worker's state, send the worker's state, or pass the order to the link."""
    match order:
        case int(slot):
            report = worker.collect(slot)
            if not context.stop.requested:
                link.send(worker, slot, report, context)
        case (kind, saved, resumes) if kind == LOAD:
            worker.load_process_state(saved, resumes)
        case (kind, request) if kind == SAVE:
            context.send("state", request, worker.state_dict())
        case _:
            link.execute_order(order)


def run_inference(context: Context, config: WorkerConfig, link: MemoryEndpoint) -> None:
    """Run the inference server until it is killed.

    If the learner was killed, the server runs until the workers have ended, but at most for _ORPHAN_SECONDS.

    The server sends the message ("ready",) when workers can connect.
    """
    server = InferenceServer(config, link.store, context.beat)
    if os.path.exists(config.address):  # left behind by a killed server
        os.unlink(config.address)
    with Listener(config.address, "AF_UNIX", backlog=256, authkey=current_process().authkey) as listener:
        context.send("ready")
        server.start_accept_thread(listener)
        while not context.stop.requested:
            server.answer_waiting_requests()
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while server.clients and time.monotonic() < deadline:
            server.answer_waiting_requests()
    shutil.rmtree(os.path.dirname(config.address), ignore_errors=True)  # the learner, which normally does this, was killed
