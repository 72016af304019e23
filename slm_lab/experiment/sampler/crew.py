"""Who collects: worker processes, attended by a thread of the learner's process; or, serial, workers in this process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Protocol

from slm_lab.experiment.engine import WorkerFailed, cause
from slm_lab.experiment.engine.spawned import CommonFile
from slm_lab.experiment.plan import Stop, cores
from slm_lab.experiment.sampler.batcher import Dataset
from slm_lab.experiment.sampler.intake import Intake
from slm_lab.experiment.sampler.process import WorkerProcess
from slm_lab.experiment.sampler.shared import SLOTS
from slm_lab.experiment.sampler.worker import Collected, RolloutWorker
from slm_lab.lib.log import notice

_END_SECONDS = 2.0
"""So long may a worker take to close its envs."""
_START_SECONDS = 120.0
"""So long may the workers of a core take to build their envs."""


class Crew(Protocol):
    """Who collects for the learner."""

    def start(self, stop: Stop) -> None:
        """Begin to collect, unless a stop is requested first. Raises WorkerFailed."""

    def next(self) -> tuple[int, Dataset] | None:
        """A dataset, and the policy that is to train on it; None for now. Raises WorkerFailed."""

    def release(self, policy: int, dataset: Dataset) -> None:
        """The policy has trained on it."""

    def reports(self) -> Iterator[tuple[int, Collected]]:
        """What workers told since the last call, with their numbers."""

    def close(self) -> None:
        """End them."""


class SerialCrew:
    """Workers in this process, one after the other."""

    def __init__(self, workers: list[RolloutWorker], intake: Intake) -> None:
        self.workers, self.intake, self.stop = workers, intake, Stop()
        self._reports: list[tuple[int, Collected]] = []
        self.ready: deque[tuple[int, Dataset]] = deque()

    def start(self, stop: Stop) -> None:
        self.stop = stop

    def next(self) -> tuple[int, Dataset] | None:
        while not self.ready:
            for worker, one in enumerate(self.workers):
                if self.stop.requested:
                    return None
                report = one.collect(0)
                self._reports.append((worker, report))
                self.intake.put(worker, 0, report)
                for _, complete in self.intake.take():
                    self.ready += complete
        return self.ready.popleft()

    def release(self, policy: int, dataset: Dataset) -> None:
        self.intake.batchers[policy].release(dataset)

    def reports(self) -> Iterator[tuple[int, Collected]]:
        taken, self._reports = self._reports, []
        yield from taken

    def close(self) -> None:
        for one in self.workers:
            one.close()


class ProcessCrew:
    """Worker processes, and the thread that attends to them.

    The thread alone talks with the workers: it hands out slots, copies what comes into datasets, and starts a new process in place of one
    that died. The learner takes complete datasets from a queue and gives them back.

    Args: turns: workers wait while the learner trains.
    """

    def __init__(
        self, workers: list[WorkerProcess], server: WorkerProcess | None, memory: CommonFile, intake: Intake, max_restart: int, turns: bool
    ) -> None:
        self.workers, self.memory, self.intake, self.max_restart, self.turns = workers, memory, intake, max_restart, turns
        self.server = server
        intake.round_over = True
        self.ready_W = [False] * len(workers)
        self.orders: list[deque[int]] = [deque() for _ in self.workers]
        """Slots that each worker was told to fill and has not yet, in order."""
        self.given_W = [0] * len(workers)
        """Slots that each worker was ever told to fill."""
        self.due = 0
        """In turns: how many that are to be by the end of the round."""
        self.free: list[deque[int]] = [deque(range(SLOTS)) for _ in self.workers]
        self.datasets: SimpleQueue[tuple[int, Dataset] | str] = SimpleQueue()
        self.told: SimpleQueue[tuple[int, Collected]] = SimpleQueue()
        self.returned: SimpleQueue[tuple[int, Dataset]] = SimpleQueue()
        self.hear, self.call = os.pipe()
        """Wakes the thread."""
        self.out = 0
        """Datasets that the learner has not given back."""
        self.ended = False
        self.thread = threading.Thread(target=self._attend, name="rollout workers", daemon=True)

    def start(self, stop: Stop) -> None:
        """Wait until every worker has built its envs. Raises WorkerFailed where one cannot."""
        patience = _START_SECONDS * max(1.0, len(self.workers) / cores())
        deadline = time.monotonic() + patience
        while not all(self.ready_W):
            if stop.requested:
                return
            wait([item for one in self._all() for item in one.waitable], timeout=0.2)
            for one in self._all():
                self._hear(one)
            if failure := self._failure():
                raise WorkerFailed(failure)
            if time.monotonic() > deadline:
                late = [str(index) for index, ready in enumerate(self.ready_W) if not ready]
                what = f"rollout workers {', '.join(late)} did not build their envs within {patience:.0f} seconds"
                raise WorkerFailed(f"{what}; take fewer workers or envs (meta.sampler.num_workers, num_envs_per_worker)")
        self.thread.start()

    def _all(self) -> list[WorkerProcess]:
        return self.workers if self.server is None else [*self.workers, self.server]

    def _failure(self) -> str | None:
        with suppress(Empty):
            item = self.datasets.get_nowait()
            return item if isinstance(item, str) else None
        return None

    def next(self) -> tuple[int, Dataset] | None:
        try:
            item = self.datasets.get(timeout=0.2)
        except Empty:
            return None
        if isinstance(item, str):
            raise WorkerFailed(item)
        return item

    def release(self, policy: int, dataset: Dataset) -> None:
        self.returned.put((policy, dataset))
        os.write(self.call, b"x")

    def reports(self) -> Iterator[tuple[int, Collected]]:
        with suppress(Empty):
            while True:
                yield self.told.get_nowait()

    def close(self) -> None:
        self.ended = True
        try:
            if self.thread.is_alive():
                os.write(self.call, b"x")
                self.thread.join()
            if all(self.ready_W):  # the others have no envs to close, and may take seconds to listen
                for one in self.workers:
                    one.send(None)
                deadline = time.monotonic() + _END_SECONDS
                for one in self.workers:
                    one.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also where a second Ctrl-C breaks off the wait
            for one in self._all():
                one.kill()
            os.close(self.hear)
            os.close(self.call)

    def _attend(self) -> None:
        try:
            while not self.ended:
                self._new_round()
                self._hand_out()
                wait([self.hear, *(item for one in self._all() for item in one.waitable)], timeout=1.0)
                for one in self._all():
                    self._hear(one)
                self._take_back()
                self._copy()
        except BaseException as error:
            self.datasets.put(cause(error))

    def _hear(self, one: WorkerProcess) -> None:
        ended = not one.process.is_alive()  # asked first: whatever it sent before it ended is then in the pipe
        for kind, *content in one.messages():
            match kind:
                case "ready" if one is self.server:
                    pass
                case "ready":
                    self.ready_W[one.index] = True
                    for slot in self.orders[one.index]:  # those of the process in whose place it is
                        one.send(slot)
                case "rollout":
                    slot, report = content
                    self.orders[one.index].remove(slot)
                    self.intake.put(one.index, slot, report)
                case "failed":
                    self.datasets.put(f"{one.name} failed: {content[0]}")
                    self.ended = True
        if ended and not self.ended:
            self._replace(one)

    def _replace(self, one: WorkerProcess) -> None:
        setting, (how, printed) = one.setting, one.death()
        assert setting is not None
        if setting.restart >= self.max_restart:
            self.ended = True
            restarts = f", after {setting.restart} new process{'es' * (setting.restart != 1)} (meta.max_restart)"
            self.datasets.put(f"{one.name} {how}{restarts}{printed}")
            return
        notice(f"{one.name} {how}; a new process takes its place ({setting.restart + 1} of {self.max_restart})")
        one.kill()
        try:
            other = WorkerProcess(one.index, self.memory)
        except OSError as error:  # no memory, no process
            self.ended = True
            self.datasets.put(f"{one.name} {how}; no new process could be started: {error.strerror}{printed}")
            return
        other.begin(replace(setting, restart=setting.restart + 1))
        if one is self.server:
            self.server = other
        else:
            self.ready_W[one.index] = False
            self.workers[one.index] = other

    def _take_back(self) -> None:
        """Datasets that were trained on."""
        with suppress(BlockingIOError):
            os.set_blocking(self.hear, False)
            os.read(self.hear, 4096)
        with suppress(Empty):
            while True:
                policy, dataset = self.returned.get_nowait()
                self.intake.batchers[policy].release(dataset)
                self.out -= 1

    def _new_round(self) -> None:
        """In turns: when the learner is done with all of a round, the next one begins."""
        if self.turns and self.intake.round_over and self.out == 0:
            assert self.intake.rounds is not None
            self.intake.round_over = False
            self.due += self.intake.rounds

    def _copy(self) -> None:
        for filled, complete in self.intake.take():
            if filled is not None:
                self.free[filled.worker].append(filled.slot)
                self.told.put((filled.worker, filled.report))
            self.out += len(complete)
            for item in complete:
                self.datasets.put(item)

    def _hand_out(self) -> None:
        """Let workers fill slots that are free: in turns with the learner as many as they owe, else as many as there is room for."""
        while (one := self._next_worker()) is not None:
            slot = self.free[one.index].popleft()
            self.given_W[one.index] += 1
            self.orders[one.index].append(slot)
            if self.ready_W[one.index]:
                one.send(slot)

    def _next_worker(self) -> WorkerProcess | None:
        """Who may fill a slot now."""
        if self.turns:
            able = [one for one in self.workers if self.free[one.index] and self.given_W[one.index] < self.due]
        elif self.intake.room <= sum(map(len, self.orders)):
            return None
        elif self.intake.rounds is not None:  # in the order in which rollouts are taken, or room might be left only for the wrong worker
            able = [min(self.workers, key=lambda one: (self.given_W[one.index], one.index))]
        else:
            able = sorted(self.workers, key=lambda one: len(self.orders[one.index]))
        return next((one for one in able if self.free[one.index]), None)
