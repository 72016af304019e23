"""Rollout workers in processes of their own, managed by a thread of the learner's process."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from slm_lab.experiment.collect.workers import worker_process as process
from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.pool_base import PoolBase
from slm_lab.experiment.collect.workers.shared import SLOTS, WorkerArrays, WorkerConfig
from slm_lab.experiment.execute.executor import Died, Event, Message, Stalled
from slm_lab.experiment.execute.heartbeat import WAITING
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.experiment.execute.local.local_executor import LocalExecutor, LocalTask
from slm_lab.experiment.execute.local.user_code import WorkerFailed, cause
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.limits import cores
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.store import SharedArrays, shared_file

STALL_LIMIT = 300.0
"""Seconds without a heartbeat after which a worker is restarted, if meta.stall_limit is absent."""
_CLOSE_SECONDS = 2.0
"""Time that workers have to close their envs."""
_STATE_SECONDS = 30.0
"""Time that workers have to send their states. Those of a worker that dies meanwhile are not saved."""
_BUILD_SECONDS = 120.0
"""Timeout in seconds for building the envs; with more workers than cores it is multiplied by the workers per core."""


class ProcessPool(PoolBase):
    """A WorkerPool of processes.

    One thread communicates with the workers: it assigns slots, copies rollouts into datasets, and restarts a worker that died. The learner
    takes complete datasets from a queue and returns them.
    """

    def __init__(self, config: WorkerConfig, stop: Stop, beat: Beat) -> None:
        super().__init__(config.spec, stop, beat)
        spec, sampler = self.spec, self.sampler
        self.fd = shared_file()
        self.store: SharedArrays | None = SharedArrays(self.fd)
        self.folder: str | None = None
        """Of the inference server's socket."""
        if sampler.inference == "central":
            self.folder = tempfile.mkdtemp(prefix="slm_")
            config = replace(config, address=os.path.join(self.folder, "s"))
        limit = spec.meta.stall_limit
        self.executor = LocalExecutor(spec.meta.stall_notice, STALL_LIMIT if limit is None else limit)
        self.config, workers = config, sampler.num_workers
        self.children: list[LocalTask] = []
        self.server: LocalTask | None = None
        self._info: EnvInfo | None = None
        self.connected = self.ended = False
        self.built_W = [False] * workers
        self.ready_W = [False] * workers
        self.orders: list[deque[int]] = [deque() for _ in range(workers)]
        """Slots that each worker was ordered to fill and has not filled yet, in order."""
        self.ordered_W = [0] * workers
        """Number of slots that each worker was ever ordered to fill."""
        self.free: list[deque[int]] = [deque(range(SLOTS)) for _ in range(workers)]
        self.requests = self.answered = 0
        """Number of the last request for the workers' states, and of the last one that was answered or refused."""
        self.states_W: dict[int, Any] = {}
        self.saved: SimpleQueue[tuple[int, list[Any] | None]] = SimpleQueue()
        self.wake, self.call = os.pipe()
        """Wakes the thread."""
        os.set_blocking(self.wake, False)
        self.thread = threading.Thread(target=self._run_thread, name="worker pool", daemon=True)
        beat(WAITING)  # the first start waits for the fork server
        try:
            for index in range(workers):
                own = replace(config, index=index)
                self.children.append(self.executor.start(f"rollout worker {index}", process.run_worker, own, SharedFd(self.fd)))
        except BaseException:
            self.close()
            raise

    def info(self) -> EnvInfo:
        self._wait(lambda: self._info is not None and self.built_W[0])  # whose worker has tried the env
        if self._info is None:
            raise Interrupted("", self.stop.number)
        return self._info

    def connect(self, arrays: WorkerArrays, assembler: RolloutAssembler, info: EnvInfo) -> None:
        self.assembler = assembler
        self.assembler.round_over = True
        self.config = replace(self.config, info=info, extras=len(arrays.weights[0].extras))
        self.connected = True
        if self.folder is not None:
            self.server = self.executor.start("inference server", process.run_inference, self.config, SharedFd(self.fd))
        for child, built in zip(self.children, self.built_W, strict=True):
            if built:
                child.send(process.CONNECT)

    def start(self, states: list[Any] | None = None, resumes: int = 0) -> None:
        self._wait(lambda: all(self.ready_W))
        if all(self.ready_W):
            for child, saved in zip(self.children, states or [None] * len(self.children), strict=True):
                if saved is not None or resumes:
                    child.send((process.LOAD, saved, resumes))
            self.thread.start()

    def states(self) -> list[Any] | None:
        self.requests += 1
        os.write(self.call, b"x")
        deadline = time.monotonic() + _STATE_SECONDS
        while self.thread.is_alive() and time.monotonic() < deadline:
            self.beat(WAITING)
            with suppress(Empty):
                request, states = self.saved.get(timeout=0.2)
                if request == self.requests:
                    return states
        return None

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Handle events until the condition holds or a stop is requested. Raises SpecError or WorkerFailed."""
        limit = _BUILD_SECONDS * max(1.0, len(self.children) / cores())
        deadline = time.monotonic() + limit
        while not condition() and not self.stop.requested:
            self.beat(WAITING)
            for event in self.executor.events(0.2):
                if isinstance(event, Message) and event.kind == "user_error":
                    raise event.content[0]
                self._handle(event)
            self._raise_failure()
            if time.monotonic() > deadline:
                late = [str(index) for index, ready in enumerate(self.ready_W) if not ready]
                what = f"rollout workers {', '.join(late)} did not build their envs within {limit:.0f} seconds"
                raise WorkerFailed(f"{what}; use fewer workers or envs (meta.sampler.num_workers, num_envs_per_worker)")

    def release(self, policy: int, dataset: Dataset) -> None:
        self.returned.put((policy, dataset))
        os.write(self.call, b"x")

    def close(self) -> None:
        if self.fd < 0:
            return
        self.ended = True
        self.beat(WAITING)  # no env is closed in this process
        try:
            if self.thread.is_alive():
                os.write(self.call, b"x")
                self.thread.join()
            for child in self.children:
                child.stop(_CLOSE_SECONDS)
            while not {*self.executor.children} <= {self.server}:  # until then workers may wait for answers of the server
                for _ in self.executor.events(0.2):
                    pass
        finally:  # also if a second Ctrl-C breaks off the wait
            self.executor.close()
            for fd in (self.wake, self.call, self.fd):
                os.close(fd)
            self.fd = -1
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _run_thread(self) -> None:
        try:
            while not self.ended:
                self._begin_round()
                self._assign_slots()
                for event in self.executor.events(1.0, also=[self.wake]):
                    self._handle(event)
                self._release_returned()
                self._assemble()
                self._request_states()
        except BaseException as error:
            self.datasets.put(cause(error))

    def _handle(self, event: Event) -> None:
        match event:
            case Message(child, "built", (info,)):
                self._info = self._info or info
                self.built_W[self.children.index(child)] = True
                if self.connected:
                    child.send(process.CONNECT)
            case Message(child, "ready") if child is not self.server:
                index = self.children.index(child)
                self.ready_W[index] = True
                for slot in self.orders[index]:  # of the process that died
                    child.send(slot)
            case Message(child, "rollout", (slot, report)):
                index = self.children.index(child)
                self.orders[index].remove(slot)
                self.assembler.put(index, slot, report)
            case Message(child, "state", (request, saved)) if request == self.answered:
                self.states_W[self.children.index(child)] = saved
                if len(self.states_W) == len(self.children):
                    states = [self.states_W[worker] for worker in range(len(self.children))]
                    self.saved.put((request, None if None in states else states))
            case Message(child, "failed" | "user_error", (reason,)):
                self._fail(f"{child.name} failed: {reason}")
            case Stalled(child, seconds, phase, "notice"):
                notice(f"{child.name}: no progress for {seconds:.0f} s ({phase})")
            case Stalled(child, seconds, phase, _):
                self._restart(child, f"made no progress for {seconds:.0f} s ({phase}; meta.stall_limit)", child.tail())
            case Died(child, reason, output) if not self.ended:
                self._restart(child, reason, output)

    def _request_states(self) -> None:
        """Ask the workers for their states if the learner wants them. In the middle of a round, or while one restarts, there are none."""
        if self.answered == self.requests:
            return
        self.answered = self.requests
        self.states_W.clear()
        if self.round_end < 0 or not all(self.ready_W):
            self.saved.put((self.answered, None))
            return
        for child in self.children:
            child.send((process.SAVE, self.answered))

    def _fail(self, reason: str) -> None:
        self.ended = True
        self.datasets.put(reason)

    def _restart(self, child: LocalTask, reason: str, output: str) -> None:
        printed = f"\n{output}" if output else ""
        most = self.spec.meta.max_restart
        if child.restart >= most:
            self.executor.kill(child)  # it may block, and would be waited for
            restarts = f" after {child.restart} restart{'s' * (child.restart != 1)} (meta.max_restart)"
            self._fail(f"{child.name} {reason}{restarts}{printed}")
            return
        notice(f"{child.name} {reason}; restarting it ({child.restart + 1} of {most})")
        config = replace(self.config, restart=child.restart + 1)
        if child is not self.server:
            index = self.children.index(child)
            config, self.built_W[index], self.ready_W[index] = replace(config, index=index), False, False
        try:
            self.executor.restart(child, config, SharedFd(self.fd))
        except OSError as error:  # no memory, no process
            self._fail(f"{child.name} {reason}; a new process could not be started: {error.strerror or error}{printed}")

    def _release_returned(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wake, 4096)
        super()._release_returned()

    def _assign_slots(self) -> None:
        """Order workers to fill free slots."""
        while (index := self._next_worker()) is not None:
            slot = self.free[index].popleft()
            self.ordered_W[index] += 1
            self.orders[index].append(slot)
            if self.ready_W[index]:
                self.children[index].send(slot)

    def _free_slot(self, worker: int, slot: int) -> None:
        self.free[worker].append(slot)

    def _ordered(self) -> list[int]:
        return self.ordered_W

    def _pending(self) -> list[int]:
        return list(map(len, self.orders))

    def _can_take(self, worker: int) -> bool:
        return bool(self.free[worker])
