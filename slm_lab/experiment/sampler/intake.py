"""From slots that workers have filled to datasets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from slm_lab.experiment.sampler.batcher import Batcher, Dataset
from slm_lab.experiment.sampler.shared import Slot
from slm_lab.experiment.sampler.worker import Collected


@dataclass
class Filled:
    """Rollouts of all groups of a worker, in a slot that waits to be copied."""

    worker: int
    slot: int
    report: Collected
    begins: list[int]
    """Of each group and policy: the first column that is not copied yet."""


class Intake:
    """Copies what slots hold into datasets: as it comes; or, in rounds, in the order of the workers, and what a round gives is complete.

    Args: slots: [worker][slot][group]. rounds: rollouts of each worker that make a round; None: no rounds.
    """

    def __init__(self, slots: list[list[list[Slot]]], batchers: list[Batcher], rounds: int | None) -> None:
        self.slots, self.batchers, self.rounds = slots, batchers, rounds
        self.waiting: list[deque[Filled]] = [deque() for _ in slots]
        self.taken_W = [0] * len(slots)
        """In this round."""
        self.turn = 0
        self.round_over = False

    def put(self, worker: int, slot: int, report: Collected) -> None:
        """A slot was filled."""
        parts = len(report.gathered) * len(self.batchers)
        self.waiting[worker].append(Filled(worker, slot, report, [0] * parts))

    def take(self) -> Iterator[tuple[Filled | None, list[tuple[int, Dataset]]]]:
        """Copy what can be copied. Yields slots that are free again, and datasets, with their policies, that are complete."""
        while (filled := self._next()) is not None:
            complete, done = self._copy(filled)
            if not done:
                yield None, complete
                return
            self.waiting[filled.worker].popleft()
            if self.rounds is not None:
                complete += self._count(filled.worker)
            yield filled, complete

    @property
    def room(self) -> int:
        """Rollouts of a worker for which the datasets that are free and under way have room, beside those that wait; rounded up."""
        columns: int = sum(batcher.room for batcher in self.batchers)
        waiting = sum(map(len, self.waiting))
        return -(-columns // sum(int(slot.policy_TN.shape[1]) for slot in self.slots[0][0])) - waiting

    def _next(self) -> Filled | None:
        if self.rounds is None:  # oldest first
            heads = [queue[0] for queue in self.waiting if queue]
            return min(heads, key=lambda filled: filled.report.end, default=None)
        queue = self.waiting[self.turn]
        return queue[0] if queue else None

    def _copy(self, filled: Filled) -> tuple[list[tuple[int, Dataset]], bool]:
        complete: list[tuple[int, Dataset]] = []
        done, part = True, 0
        for slot, gathered in zip(self.slots[filled.worker][filled.slot], filled.report.gathered, strict=True):
            for batcher in self.batchers:
                full, filled.begins[part] = batcher.add(slot, gathered, filled.begins[part])
                done &= filled.begins[part] == slot.policy_TN.shape[1]
                complete += [(batcher.policy, dataset) for dataset in full]
                part += 1
        return complete, done

    def _count(self, worker: int) -> list[tuple[int, Dataset]]:
        """In rounds: whose turn is next; at the end of a round what each policy has got, be it a whole dataset or not."""
        assert self.rounds is not None
        self.taken_W[worker] += 1
        self.turn = (worker + 1) % len(self.slots)
        if min(self.taken_W) < self.rounds:
            return []
        self.taken_W, self.round_over = [0] * len(self.slots), True
        rest = [(batcher.policy, batcher.close()) for batcher in self.batchers]
        return [(policy, dataset) for policy, dataset in rest if dataset is not None]
