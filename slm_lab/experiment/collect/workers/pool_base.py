"""What pools of rollout workers in processes of their own share: rounds, which worker collects next, and what the learner takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.worker import Collected
from slm_lab.experiment.execute.local.failures import WorkerFailed
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat
from slm_lab.spec.models.spec import Spec


class PoolBase(ABC):
    """Base of the pools whose workers are managed by a thread; the learner takes complete datasets from a queue and returns them.

    Attributes:
        turns: workers wait while the learner trains (no async_rl).
        due: in turns, how many rollouts should have been ordered from each worker at the end of the round.
        out: datasets that the learner has not given back.
        put, taken: datasets that were ever put in the queue and taken from it.
        round_end: in turns, once a round is complete: how many datasets were put until then; −1 while one is collected. The next begins
            when the learner has given them back, unless a stop is requested.
    """

    assembler: RolloutAssembler

    def __init__(self, spec: Spec, stop: Stop, beat: Beat) -> None:
        sampler = spec.meta.sampler
        assert sampler is not None
        self.spec, self.sampler, self.stop, self.beat, self.turns = spec, sampler, stop, beat, not sampler.async_rl
        self.due = self.out = self.put = self.taken = self.round_end = 0
        self.datasets: SimpleQueue[tuple[int, Dataset] | str] = SimpleQueue()
        """Complete ones with their policies, or why the pool has failed."""
        self.reported: SimpleQueue[tuple[int, Collected]] = SimpleQueue()
        self.returned: SimpleQueue[tuple[int, Dataset]] = SimpleQueue()

    # ---- for the learner

    @property
    def between_rounds(self) -> bool:
        return self.taken == self.round_end

    def next(self) -> tuple[int, Dataset] | None:
        try:
            item = self.datasets.get(timeout=0.2)
        except Empty:
            return None
        if isinstance(item, str):
            raise WorkerFailed(item)
        self.taken += 1
        return item

    def reports(self) -> Iterator[tuple[int, Collected]]:
        with suppress(Empty):
            while True:
                yield self.reported.get_nowait()

    def _raise_failure(self) -> None:
        """Raise WorkerFailed if the pool has failed before it collects."""
        with suppress(Empty):
            item = self.datasets.get_nowait()
            assert isinstance(item, str)
            raise WorkerFailed(item)

    # ---- in the thread

    def _begin_round(self) -> None:
        """In turns: once the learner has trained on everything of a round, begin the next."""
        if self.turns and self.assembler.round_over and self.out == 0 and not self.stop.requested:
            assert self.assembler.rounds is not None
            self.assembler.round_over, self.round_end = False, -1
            self.due += self.assembler.rounds

    def _assemble(self) -> None:
        """Copy rollouts that have arrived into datasets, and put complete ones in the queue."""
        for filled, complete in self.assembler.assemble():
            if filled is not None:
                self._free_slot(filled.worker, filled.slot)
                self.reported.put((filled.worker, filled.report))
            self.out += len(complete)
            self.put += len(complete)
            if self.turns and self.assembler.round_over:
                self.round_end = self.put  # before the learner can have the last one
            for item in complete:
                self.datasets.put(item)

    def _release_returned(self) -> None:
        """Release the datasets that were trained on."""
        with suppress(Empty):
            while True:
                policy, dataset = self.returned.get_nowait()
                self.assembler.builders[policy].release(dataset)
                self.out -= 1

    def _next_worker(self) -> int | None:
        """Return the worker that is to fill a slot now: in turns as many as the round needs, else as many as the datasets can hold."""
        ordered, pending = self._ordered(), self._pending()
        workers = range(len(ordered))
        if self.turns:
            candidates: Sequence[int] = [w for w in workers if ordered[w] < self.due]
        elif self.assembler.free_rollouts <= sum(pending):
            return None
        elif self.assembler.rounds is not None:  # in the order of assembly, or the free columns might be left to the wrong worker
            candidates = [min(workers, key=lambda w: (ordered[w], w))]
        else:
            candidates = sorted(workers, key=lambda w: pending[w])
        return next((w for w in candidates if self._can_take(w)), None)

    @abstractmethod
    def _free_slot(self, worker: int, slot: int) -> None:
        """Let a slot, which was copied, be filled again."""

    @abstractmethod
    def _ordered(self) -> Sequence[int]:
        """Return how many rollouts were ever ordered from each worker."""

    @abstractmethod
    def _pending(self) -> Sequence[int]:
        """Return how many of them each worker has not delivered yet."""

    @abstractmethod
    def _can_take(self, worker: int) -> bool:
        """Return whether a worker can be given another order."""
