"""Rollout workers on the nodes of a Ray cluster, managed by a thread of the learner's process.

Whole rollouts come through Ray's object store, and weights go to each node once. A worker has up to two rollouts under way, so that it
never waits for a message. What it acts with is as new as the last broadcast that has arrived; the learner measures the lag and leaves out
what is too old (meta.sampler.max_policy_lag). A worker whose process or node dies is started again elsewhere; without synchronous rounds
the others go on meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slm_lab.experiment.collect.workers import worker_pool as local
from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.pool_base import PoolBase
from slm_lab.experiment.collect.workers.ray_worker import Broadcast, RolloutActor, SentRollout, Weights
from slm_lab.experiment.collect.workers.shared import SLOTS, WorkerArrays, WorkerConfig
from slm_lab.experiment.execute.heartbeat import WAITING
from slm_lab.experiment.execute.local.failures import cause
from slm_lab.experiment.execute.ray.remote import LOST_NODE, died, pack, unpack
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.experiment.training.experience import Beat
from slm_lab.experiment.training.resolve import resolve_inference
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import SharedArrays
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

_POLL = 0.01
"""Seconds between two looks at what the learner has given back."""
_BROADCAST_SECONDS = 0.03
"""Minimum time between two broadcasts to a worker, except in synchronous rounds. With a broadcast after every update of CartPole, receiving
weights took a quarter of a worker's processor time."""
_STATE_SECONDS = 30.0
"""Time that workers have to send their states."""
_CLOSE_SECONDS = 3.0
"""Time that workers have to close their envs."""


def with_local_inference(spec: Spec) -> Spec:
    """Return the spec with the inference of rollout workers on other nodes: "auto" is "local". Raises SpecError for central inference."""
    sampler = spec.meta.sampler
    if sampler is None or sampler.serial_mode or sampler.inference == "local":
        return spec
    if sampler.inference == "central":
        message = "'central' requires memory that all rollout workers share, so one machine; with --cluster set it to 'local' or 'auto'"
        raise SpecError(spec.name, [Problem("meta.sampler.inference", message)])
    return resolve_inference(spec, "cpu")


def open_pool(spec: Spec, seeds: Seeds, device: str, stop: Stop, beat: Beat) -> local.WorkerPool:
    """Start the rollout workers that meta.sampler asks for, on any nodes. Raises SpecError for central inference."""
    spec = with_local_inference(spec)
    assert spec.meta.sampler is not None
    if spec.meta.sampler.serial_mode:
        return local.open_pool(spec, seeds, device, stop, beat)
    return RayPool(WorkerConfig(spec, seeds, device=device), stop, beat)


@dataclass
class _Worker:
    """A rollout worker with its process."""

    index: int
    config: WorkerConfig
    actor: Any
    built: Any
    """What `build` will return; None once it has."""
    connected: Any = None
    """What `connect` will return; None before it is called and once it has returned."""
    ready: bool = False
    orders: deque[tuple[Any, int]] = field(default_factory=deque)
    """Rollouts under way, in order, each with the slot for it."""
    free: deque[int] = field(default_factory=lambda: deque(range(SLOTS)))
    sending: Any = None
    """The broadcast under way."""
    sent: int = 0
    """Number of the last broadcast that was sent."""
    sent_at: float = 0.0
    """When, in seconds of monotonic()."""
    deaths: int = 0
    ordered: int = 0
    """Number of rollouts that were ever ordered and not lost."""


class RayPool(PoolBase):
    """A WorkerPool of Ray actors."""

    store: SharedArrays | None = None

    def __init__(self, config: WorkerConfig, stop: Stop, beat: Beat) -> None:
        import ray

        super().__init__(config.spec, stop, beat)
        self._ray: Any = ray
        remote = self._ray.remote(
            num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD", concurrency_groups={"control": 1}, enable_task_events=False
        )
        self._actor: Any = remote(RolloutActor)
        self.workers = [self._start(replace(config, index=index)) for index in range(self.sampler.num_workers)]
        self._info: EnvInfo | None = None
        self._ended = False
        self._states: list[Any] | None = None
        self._resumes = 0
        self._broadcast: Any = None
        self._number = self._published = 0
        """Of the newest broadcast; sum over policies of how often weights were published until then."""
        self.thread = threading.Thread(target=self._run_thread, name="worker pool", daemon=True)

    def _start(self, config: WorkerConfig, deaths: int = 0) -> _Worker:
        actor = self._actor.remote(config, Path(os.getcwd()))
        return _Worker(config.index, config, actor, actor.build.remote(), deaths=deaths)

    # ---- for the learner

    def info(self) -> EnvInfo:
        while self._info is None and not self.stop.requested:
            self.beat(WAITING)
            self._look(0.2)
            self._raise_failure()
        if self._info is None:
            raise Interrupted("", self.stop.number)
        return self._info

    def connect(self, arrays: WorkerArrays, assembler: RolloutAssembler, info: EnvInfo) -> None:
        self.arrays, self.assembler = arrays, assembler
        self.assembler.round_over = True

    def start(self, states: list[Any] | None = None, resumes: int = 0) -> None:
        self._states, self._resumes = states, resumes
        self._renew_broadcast()
        needed = len(self.workers) if self.turns else 1
        while sum(worker.ready for worker in self.workers) < needed and not self.stop.requested:
            self.beat(WAITING)
            self._look(0.2)
            self._connect()
            self._raise_failure()
        if not self.stop.requested:
            self.thread.start()

    def states(self) -> list[Any] | None:
        if self.round_end < 0 or not all(worker.ready for worker in self.workers):
            return None
        self.beat(WAITING)
        try:
            states: list[Any] = self._ray.get([worker.actor.state.remote() for worker in self.workers], timeout=_STATE_SECONDS)
        except self._ray.exceptions.RayError:
            return None
        return None if None in states else states

    def release(self, policy: int, dataset: Dataset) -> None:
        self.returned.put((policy, dataset))

    def close(self) -> None:
        self._ended = True
        self.beat(WAITING)
        if self.thread.is_alive():
            self.thread.join()
        closing = []
        for worker in self.workers:
            with suppress(self._ray.exceptions.RayError):
                if worker.ready:
                    worker.actor.stop.options(concurrency_group="control").remote()
                    closing.append(worker.actor.close.remote())
        with suppress(self._ray.exceptions.RayError):
            self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS) if closing else None
        for worker in self.workers:
            self._ray.kill(worker.actor)
        self.workers = []

    # ---- in the thread

    def _run_thread(self) -> None:
        try:
            while not self._ended:
                self._release_returned()
                self._assemble()  # what did not fit before
                self._renew_broadcast()
                self._begin_round()
                self._connect()
                self._order()
                self._look(_POLL)
        except BaseException as error:
            self.datasets.put(cause(error))

    def _look(self, seconds: float) -> None:
        """Handle what workers have returned, after waiting for at most `seconds`."""
        pending: dict[Any, _Worker] = {}
        for worker in self.workers:
            futures = (worker.built, worker.connected, worker.sending, worker.orders[0][0] if worker.orders else None)
            pending |= {future: worker for future in futures if future is not None}
        if not pending:
            time.sleep(seconds)
            return
        done, _ = self._ray.wait(list(pending), num_returns=1, timeout=seconds)
        if done:  # what else there is, or the first worker would always come first
            done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for future in done:
            worker = pending[future]
            if worker not in self.workers:  # restarted meanwhile
                continue
            try:
                self._handle(worker, future, self._ray.get(future))
            except self._ray.exceptions.RayTaskError as error:
                self.datasets.put(f"rollout worker {worker.index} failed: {error.cause or error}")
                self._ended = True
            except self._ray.exceptions.RayError as error:
                self._restart(worker, died(error))

    def _handle(self, worker: _Worker, future: Any, result: Any) -> None:
        if future == worker.sending:
            worker.sending = None
        elif future == worker.built:
            worker.built = None
            if isinstance(result, SpecError):
                raise result
            self._info = self._info or result
        elif future == worker.connected:
            worker.connected, worker.ready = None, True
        else:
            _, slot = worker.orders.popleft()
            self._arrived(worker.index, slot, unpack(result))

    def _arrived(self, index: int, slot: int, sent: SentRollout) -> None:
        """Let the assembler have a rollout, where it is, in Ray's object store. Times are those of this process's clock."""
        for place, arrays in zip(self.arrays.slots[index][slot], sent.groups, strict=True):
            place.use(arrays)
        now = time.perf_counter()
        report = sent.report._replace(begin=now - (sent.report.end - sent.report.begin), end=now)
        self.assembler.put(index, slot, report)
        self._assemble()

    def _renew_broadcast(self) -> None:
        """Send the newest weights to each worker whose last broadcast is over; large ones go through the object store."""
        now = time.monotonic()
        free = [worker for worker in self.workers if worker.ready and worker.sending is None]
        due = free if self.turns else [worker for worker in free if now >= worker.sent_at + _BROADCAST_SECONDS]
        published = sum(weights.published for weights in self.arrays.weights)
        if (due and published != self._published) or self._broadcast is None:
            self._published, self._number = published, self._number + 1
            newest = Broadcast([Weights(*weights.newest()) for weights in self.arrays.weights], self.arrays.active_P.copy())
            packed = pack(newest, (array for weights in newest.weights for array in weights[1:]))
            self._broadcast = packed if isinstance(packed, bytes) else self._ray.put(newest)
        for worker in due:
            if worker.sent < self._number:
                worker.sent, worker.sent_at = self._number, now
                worker.sending = worker.actor.take.options(concurrency_group="control").remote(self._broadcast)
                if self.turns:  # a round is collected with its weights
                    self._ray.wait([worker.sending])

    def _connect(self) -> None:
        for worker in self.workers:
            if worker.built is None and worker.connected is None and not worker.ready:
                saved = self._states[worker.index] if self._states is not None and not worker.config.restart else None
                worker.sent = self._number
                worker.connected = worker.actor.connect.remote(self._broadcast, saved, self._resumes)

    def _order(self) -> None:
        """Order rollouts."""
        while (index := self._next_worker()) is not None:
            worker = self.workers[index]
            worker.ordered += 1
            worker.orders.append((worker.actor.collect.remote(), worker.free.popleft()))

    def _restart(self, worker: _Worker, reason: str) -> None:
        most, lost = self.spec.meta.max_restart, reason == LOST_NODE
        deaths = worker.deaths + (not lost)
        if deaths > most:
            restarts = f" after {worker.deaths} restart{'s' * (worker.deaths != 1)} (meta.max_restart)"
            self.datasets.put(f"rollout worker {worker.index} ended{restarts}: {reason}")
            self._ended = True
            return
        if worker.ready or not lost:
            notice(f"rollout worker {worker.index} ended: {reason}; restarting it" + ("" if lost else f" ({deaths} of {most})"))
        self._ray.kill(worker.actor)
        new = self._start(replace(worker.config, restart=worker.config.restart + 1), deaths)
        new.ordered, new.free = worker.ordered - len(worker.orders), worker.free
        new.free.extend(slot for _, slot in worker.orders)
        self.workers[worker.index] = new

    def _free_slot(self, worker: int, slot: int) -> None:
        self.workers[worker].free.append(slot)

    def _ordered(self) -> list[int]:
        return [worker.ordered for worker in self.workers]

    def _pending(self) -> list[int]:
        return [len(worker.orders) for worker in self.workers]

    def _can_take(self, worker: int) -> bool:
        return self.workers[worker].ready and bool(self.workers[worker].free)
