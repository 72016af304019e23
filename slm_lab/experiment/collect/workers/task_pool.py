"""Pool of rollout workers that run as tasks of an executor, on this machine or on a cluster."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.link import LOAD, SAVE, Link, run_inference, run_worker
from slm_lab.experiment.collect.workers.shared import SLOTS, WorkerArrays, WorkerConfig, get_sampler_spec
from slm_lab.experiment.collect.workers.worker import RolloutReport
from slm_lab.experiment.execute.executor import Event, Executor, Message, Task, TaskDied, TaskStalled
from slm_lab.experiment.execute.heartbeat import WAITING
from slm_lab.experiment.execute.local.user_code import WorkerFailed, describe_failure
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.limits import cores
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.store import SharedArrays

_CLOSE_SECONDS = 3.0
"""Maximum time in seconds for workers to close their envs."""
_STATE_SECONDS = 30.0
"""Maximum time in seconds for workers to send their states. If a worker dies before the worker has sent its state, no states are saved."""
_BUILD_SECONDS = 120.0
"""Timeout in seconds for building the envs. If there are more workers than cores, the timeout is multiplied by the number of workers per
core. On a cluster there is no timeout, since a worker may have to wait for a free core."""


@dataclass
class _PoolProcess:
    """The pool's information about the process of a rollout worker or of the inference server."""

    index: int
    """Index of the worker."""
    task: Task
    running: bool = True
    """Whether the process is running."""
    deaths: int = 0
    """Number of processes of this worker or server that died for a reason other than a lost node."""
    built: bool = False
    """Whether the envs of the worker are built."""
    ready: bool = False
    """Whether the worker accepts orders to fill slots."""
    orders: deque[int] = field(default_factory=deque)
    """Slots that the worker was ordered to fill and has not filled yet, in order. Up to SLOTS orders are sent in advance, so that the
    worker need not wait for the next order after each rollout."""
    free: deque[int] = field(default_factory=lambda: deque(range(SLOTS)))
    ordered: int = 0
    """Number of rollouts that were ordered from the worker, except rollouts that were lost because the worker's process died."""


class TaskPool:
    """Pool of rollout workers, each of which runs as a task of an executor.

    A thread orders rollouts from the workers, copies rollouts into datasets, and restarts workers that died. The learner takes complete
    datasets from a queue and returns the datasets after training. Without synchronous rounds, the other workers continue while a worker is
    restarted.

    Attributes:
        synchronous: whether workers wait while the learner trains (meta.sampler.async_rl is False).
        due: if `synchronous`, total number of rollouts to be ordered from each worker by the end of the current round.
        out: number of complete datasets that the learner has not returned yet.
        put, taken: total numbers of datasets that were put into the queue and taken from the queue.
        round_end: if `synchronous`, the value of `put` at the end of the previous round, or −1 while a round is being collected. The next
            round begins when the learner has returned all datasets, unless a stop is requested.
        restarts: number of processes of workers and of the inference server that were started in place of dead processes.
    """

    assembler: RolloutAssembler

    def __init__(self, config: WorkerConfig, executor: Executor, link: Link, stop: Stop, beat: Beat) -> None:
        self.spec, self.executor, self.link, self.stop, self.beat = config.spec, executor, link, stop, beat
        sampler = get_sampler_spec(self.spec)
        self.synchronous = not sampler.async_rl
        self.folder: str | None = None
        """Folder that contains the socket of the inference server, or None if there is no inference server."""
        if sampler.inference == "central":
            self.folder = tempfile.mkdtemp(prefix="slm_")
            config = replace(config, address=os.path.join(self.folder, "s"))
        self.config = config
        self.workers: list[_PoolProcess] = []
        self.server: _PoolProcess | None = None
        self.due = self.out = self.put = self.taken = self.round_end = 0
        self.datasets: SimpleQueue[tuple[int, Dataset] | str] = SimpleQueue()
        """Queue of complete datasets as (index of the policy, dataset). If the pool fails, the reason is put into the queue as text."""
        self.reported: SimpleQueue[tuple[int, RolloutReport]] = SimpleQueue()
        self.returned: SimpleQueue[tuple[int, Dataset]] = SimpleQueue()
        self._info: EnvInfo | None = None
        self.connected = self.begun = self.ended = self.closed = False
        self._resumes = self.restarts = 0
        self.requests = self.answered = 0
        """`requests`: number of the learner's last request for the states of the workers. `answered`: number of the last request that the
        thread has passed to the workers or refused."""
        self.states_W: dict[int, Any] = {}
        self.saved: SimpleQueue[tuple[int, list[Any] | None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run_thread, name="worker pool", daemon=True)
        beat(WAITING)  # starting the first process waits for the fork server
        try:
            for index in range(sampler.num_workers):
                args = replace(config, index=index), link.worker_endpoint()
                self.workers.append(_PoolProcess(index, executor.start(f"rollout worker {index}", run_worker, *args)))
        except BaseException:
            self.close()
            raise

    # ---- methods that the learner calls

    @property
    def store(self) -> SharedArrays | None:
        """Shared arrays that the workers attach to, or None if weights and rollouts are sent in messages."""
        return self.link.store

    @property
    def between_rounds(self) -> bool:
        """Whether the learner has taken all datasets of a round, and no rollout is being collected."""
        return self.taken == self.round_end

    def wait_for_env_info(self) -> EnvInfo:
        """Wait until the first worker has built its envs, and return the EnvInfo of one vector env that contains the envs of all workers.

        Raises SpecError if the envs cannot be built, WorkerFailed if a worker fails, and Interrupted if a stop is requested.
        """
        # on one machine, wait for worker 0, which checks the env; on a cluster, for any worker, since worker 0 may wait for a core
        self._wait(lambda: self._info is not None and (self.link.remote or self.workers[0].built))
        if self._info is None:
            raise Interrupted("", self.stop.number)
        return self._info

    def connect(self, arrays: WorkerArrays, assembler: RolloutAssembler, info: EnvInfo) -> None:
        """Connect the workers to the arrays of the learner, which contain the initial weights.

        Args:
            arrays: arrays of the learner.
            assembler: RolloutAssembler, which copies rollouts into datasets.
            info: EnvInfo of one vector env that contains the envs of all workers.
        """
        self.assembler = assembler
        self.assembler.round_over = True
        self.config = replace(self.config, info=info, acting_state_size=len(arrays.weights[0].acting_state))
        self.link.set_learner_arrays(arrays)
        self.connected = True
        if self.folder is not None:
            args = self.config, self.link.worker_endpoint()
            self.server = _PoolProcess(0, self.executor.start("inference server", run_inference, *args))
        for worker in self.workers:
            if worker.built:
                self.link.connect(worker.task)

    def start(self, states: list[Any] | None = None, resumes: int = 0) -> None:
        """Wait until enough workers are ready, and start the collection unless a stop is requested first. Raises WorkerFailed if a worker
        fails.

        Args:
            states: states from which the workers continue, as returned by `collect_states`, or None if the workers begin new episodes.
            resumes: number of times that the run was continued. If `states` is None, each continuation uses new random streams.
        """
        needed = 1 if self.link.remote and not self.synchronous else len(self.workers)
        self._wait(lambda: len(self._ready_workers()) >= needed)
        if len(self._ready_workers()) < needed:
            return
        self._resumes, self.begun = resumes, True
        self.link.send_newest_weights(worker.task for worker in self._ready_workers())
        for worker in self._ready_workers():
            self._restore_worker(worker, None if states is None else states[worker.index])
        self.thread.start()

    def next_dataset(self) -> tuple[int, Dataset] | None:
        """Return (index of the policy to train, dataset), or None if no dataset is complete yet. Raises WorkerFailed if the pool has
        failed."""
        try:
            item = self.datasets.get(timeout=0.2)
        except Empty:
            return None
        if isinstance(item, str):
            raise WorkerFailed(item)
        self.taken += 1
        return item

    def release(self, policy: int, dataset: Dataset) -> None:
        """Give a dataset back to the pool after the learner has trained on it."""
        self.returned.put((policy, dataset))
        self.executor.wake()

    def take_reports(self) -> Iterator[tuple[int, RolloutReport]]:
        """Yield (index of the worker, report) for each rollout report that has arrived since the last call."""
        with suppress(Empty):
            while True:
                yield self.reported.get_nowait()

    def collect_states(self) -> list[Any] | None:
        """Return the states of all workers, or None if a worker cannot save its unfinished episodes or the states do not arrive in time.

        `collect_states` may be called only between synchronous rounds.
        """
        self.requests += 1
        self.executor.wake()
        deadline = time.monotonic() + _STATE_SECONDS
        while self.thread.is_alive() and time.monotonic() < deadline:
            self.beat(WAITING)
            with suppress(Empty):
                request, states = self.saved.get(timeout=0.2)
                if request == self.requests:
                    return states
        return None

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Handle events until `condition` returns True or a stop is requested.

        Raises SpecError if the envs of a worker cannot be built, and WorkerFailed if a worker fails or the timeout has passed.
        """
        limit = math.inf if self.link.remote else _BUILD_SECONDS * max(1.0, len(self.workers) / cores())
        deadline = time.monotonic() + limit
        while not condition() and not self.stop.requested:
            self.beat(WAITING)
            for event in self.executor.events(0.2):
                if isinstance(event, Message) and event.kind == "user_error":
                    raise event.content[0]
                self._handle(event)
            if self.ended:
                raise WorkerFailed(str(self.datasets.get()))
            if time.monotonic() > deadline:
                late = [str(worker.index) for worker in self.workers if not worker.ready]
                reason = f"rollout workers {', '.join(late)} did not build their envs within {limit:.0f} seconds"
                raise WorkerFailed(f"{reason}; use fewer workers or envs (meta.sampler.num_workers, num_envs_per_worker)")

    def close(self) -> None:
        """Stop the workers and the inference server, and release their resources."""
        if self.closed:
            return
        self.closed = self.ended = True
        self.beat(WAITING)  # this process itself closes no env
        try:
            if self.thread.is_alive():
                self.executor.wake()
                self.thread.join()
            for worker in self.workers:
                worker.task.stop(_CLOSE_SECONDS)
            while any(worker.running for worker in self.workers):  # the server must still run, since workers may wait for its answers
                for event in self.executor.events(0.2):
                    if isinstance(event, TaskDied):
                        self._process_of_task(event.task).running = False
        finally:  # also if a second Ctrl-C interrupts the wait
            self.executor.close()
            self.link.close()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    # ---- methods that run in the pool's thread

    def _run_thread(self) -> None:
        try:
            while not self.ended:
                self._release_returned()
                self._assemble()
                self.link.send_newest_weights(worker.task for worker in self._ready_workers())
                self._begin_round()
                self._send_orders()
                self._request_states()
                for event in self.executor.events(self.link.poll_seconds):
                    self._handle(event)
        except BaseException as error:
            self._fail(describe_failure(error))

    def _ready_workers(self) -> list[_PoolProcess]:
        return [worker for worker in self.workers if worker.ready]

    def _process_of_task(self, task: Task) -> _PoolProcess:
        return next(child for child in [*self.workers, self.server] if child is not None and child.task is task)

    def _handle(self, event: Event) -> None:
        child, task = self._process_of_task(event.task), event.task
        match event:
            case Message(_, "built", (info,)):
                self._info, child.built = self._info or info, True
                if self.connected:
                    self.link.connect(task)
            case Message(_, "ready"):
                child.ready = True
                if self.begun and child is not self.server:
                    self._restore_worker(child, None)
            case Message(_, "rollout", (slot, report, *groups)):
                child.orders.remove(slot)
                self.assembler.put(child.index, slot, self.link.receive_rollout(child.index, slot, report, *groups))
            case Message(_, "state", (request, saved)) if request == self.answered:
                self.states_W[child.index] = saved
                if len(self.states_W) == len(self.workers):
                    states = [self.states_W[worker.index] for worker in self.workers]
                    self.saved.put((request, None if None in states else states))
            case Message(_, "failed" | "user_error", (reason,)):
                self._fail(f"{task.name} failed: {reason}")
            case TaskStalled(_, seconds, phase, "notice"):
                notice(f"{task.name}: no progress for {seconds:.0f} s ({phase})")
            case TaskStalled(_, seconds, phase, _, output):
                self._restart(TaskDied(task, f"made no progress for {seconds:.0f} s ({phase}; meta.stall_limit)", output))
            case TaskDied():
                child.running = False
                if not self.ended:
                    self._restart(event)

    def _restore_worker(self, worker: _PoolProcess, saved: Any) -> None:
        """In a continued run, order a worker to start from its saved state or, without a saved state, with new random streams."""
        if saved is not None or self._resumes:
            worker.task.send((LOAD, saved, self._resumes))

    def _fail(self, reason: str) -> None:
        """End the thread, and pass the reason of the failure to the learner."""
        self.ended = True
        self.datasets.put(reason)

    def _restart(self, died: TaskDied) -> None:
        """Start a new process for a worker or for the inference server. If more than meta.max_restart processes of this worker or of the
        server have died, the pool fails instead.

        A process that died because its node was lost does not count towards meta.max_restart.
        """
        task, max_restart = died.task, self.spec.meta.max_restart
        child, printed, was_ready = (
            self._process_of_task(task),
            f"\n{died.output}" if died.output else "",
            self._process_of_task(task).ready,
        )
        self.executor.kill(task)  # do not wait for the end of the process, which may be blocked
        child.running = child.built = child.ready = False
        before, child.deaths = child.deaths, child.deaths + (not died.lost)
        if child.deaths > max_restart:
            self._fail(f"{died.description} after {before} restart{'s' * (before != 1)} (meta.max_restart){printed}")
            return
        if not died.lost:
            notice(f"{died.description}; restarting it ({child.deaths} of {max_restart})")
        elif was_ready:
            notice(f"{died.description}; restarting it")
        child.ordered -= len(child.orders)
        child.free += child.orders
        child.orders.clear()
        try:
            self.executor.restart(task, replace(self.config, index=child.index, restart=task.restart + 1), self.link.worker_endpoint())
            child.running = True
            self.restarts += 1
        except OSError as error:  # for example, no memory for a new process
            self._fail(f"{died.description}; a new process could not be started: {error.strerror or error}{printed}")

    def _release_returned(self) -> None:
        """Empty the datasets that the learner has returned, so that the assembler can fill them again."""
        with suppress(Empty):
            while True:
                policy, dataset = self.returned.get_nowait()
                self.assembler.builders[policy].release(dataset)
                self.out -= 1

    def _assemble(self) -> None:
        """Copy the rollouts that have arrived into datasets, and put complete datasets into the learner's queue."""
        for filled, complete in self.assembler.assemble():
            if filled is not None:
                self.workers[filled.worker].free.append(filled.slot)
                self.reported.put((filled.worker, filled.report))
            self.out += len(complete)
            self.put += len(complete)
            if self.synchronous and self.assembler.round_over:
                self.round_end = self.put  # set before the learner can take the last dataset
            for item in complete:
                self.datasets.put(item)

    def _begin_round(self) -> None:
        """Begin the next synchronous round if the learner has trained on all datasets of the previous round."""
        if self.synchronous and self.assembler.round_over and self.out == 0 and not self.stop.requested:
            assert self.assembler.rollouts_per_round is not None
            self.assembler.round_over, self.round_end = False, -1
            self.due += self.assembler.rollouts_per_round

    def _send_orders(self) -> None:
        """Order workers to fill their free slots with rollouts."""
        while (worker := self._next_worker()) is not None:
            slot = worker.free.popleft()
            worker.ordered += 1
            worker.orders.append(slot)
            worker.task.send(slot)

    def _next_worker(self) -> _PoolProcess | None:
        """Return the worker that should be ordered next to fill a slot, or None if no rollout should be ordered now.

        In a synchronous round, rollouts are ordered until all rollouts of the round have been ordered. Without rounds, rollouts are ordered
        as long as they fit into the datasets.
        """
        if self.synchronous:
            candidates = [worker for worker in self.workers if worker.ordered < self.due]
        elif self.assembler.free_rollouts <= sum(len(worker.orders) for worker in self.workers):
            return None
        elif self.assembler.rollouts_per_round is not None:  # in the order of assembly, so that the free columns go to the right worker
            candidates = [min(self.workers, key=lambda worker: worker.ordered)]
        else:
            candidates = sorted(self.workers, key=lambda worker: len(worker.orders))
        return next((worker for worker in candidates if worker.ready and worker.free), None)

    def _request_states(self) -> None:
        """Request the states of all workers if the learner has asked for the states.

        The learner's request is refused in the middle of a round, and while a worker is being restarted.
        """
        if self.answered == self.requests:
            return
        self.answered = self.requests
        self.states_W.clear()
        if self.round_end < 0 or len(self._ready_workers()) < len(self.workers):
            self.saved.put((self.answered, None))
            return
        for worker in self.workers:
            worker.task.send((SAVE, self.answered))
