"""Assemble datasets from the slots that rollout workers have filled. A slot is storage for one rollout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from slm_lab.experiment.collect.workers.dataset import Dataset, DatasetBuilder
from slm_lab.experiment.collect.workers.shared import RolloutSlot
from slm_lab.experiment.collect.workers.worker import RolloutReport


@dataclass
class FilledSlot:
    """A filled slot that waits to be copied into datasets. The slot contains the rollouts of all env groups of one worker."""

    worker: int
    slot: int
    report: RolloutReport
    begins: list[int]
    """Index of the first env row of the rollout that has not been copied yet, for each pair of env group and policy."""


class RolloutAssembler:
    """Object that copies the rollouts of workers into datasets, in the order of arrival or in synchronous rounds.

    In a round, each worker collects the same number of rollouts, and rollouts are copied in the order of the worker indices. At the end of
    a round, datasets count as complete even if they are not full.

    Args:
        slots: the slots of all workers, indexed as [worker][slot][group].
        builders: the dataset builder of each policy.
        rollouts_per_round: number of rollouts of each worker in a round, or None to copy rollouts in the order of arrival.
    """

    def __init__(self, slots: list[list[list[RolloutSlot]]], builders: list[DatasetBuilder], rollouts_per_round: int | None) -> None:
        self.slots, self.builders, self.rollouts_per_round = slots, builders, rollouts_per_round
        self.waiting: list[deque[FilledSlot]] = [deque() for _ in slots]
        self.copied_W = [0] * len(slots)
        """Number of rollouts of each worker that were copied in the current round."""
        self.turn = 0
        """Index of the worker whose rollout is copied next, if rollouts are copied in rounds."""
        self.round_over = False

    def put(self, worker: int, slot: int, report: RolloutReport) -> None:
        """Add a filled slot of a worker to the queue of this worker."""
        parts = len(report.rollouts) * len(self.builders)
        self.waiting[worker].append(FilledSlot(worker, slot, report, [0] * parts))

    def assemble(self) -> Iterator[tuple[FilledSlot | None, list[tuple[int, Dataset]]]]:
        """Copy waiting rollouts into datasets until no more rollouts fit.

        Yields pairs (slot, complete). `slot` is a slot that the worker may overwrite, or None if a slot is only partly copied. `complete`
        is a list of (index of a policy, complete dataset of the policy).
        """
        while (filled := self._next_filled_slot()) is not None:
            complete, all_copied = self._copy_to_datasets(filled)
            if not all_copied:
                yield None, complete
                return
            self.waiting[filled.worker].popleft()
            if self.rollouts_per_round is not None:
                complete += self._finish_rollout(filled.worker)
            yield filled, complete

    @property
    def between_rounds(self) -> bool:
        """Whether all rollouts of a round have been copied, and no rollout of the next round has arrived."""
        return self.rollouts_per_round is not None and not any(self.copied_W) and not any(self.waiting)

    @property
    def free_rollouts(self) -> int:
        """Number of further rollouts that fit into the current dataset and the free datasets, rounded up.

        The number of rollouts that already wait to be copied is subtracted.
        """
        columns: int = sum(builder.free_columns for builder in self.builders)
        waiting = sum(map(len, self.waiting))
        return -(-columns // sum(int(slot.played_TN.shape[1]) for slot in self.slots[0][0])) - waiting

    def _next_filled_slot(self) -> FilledSlot | None:
        """Return the filled slot that is copied next, or None if there is no such slot yet."""
        if self.rollouts_per_round is None:  # the oldest rollout first
            heads = [queue[0] for queue in self.waiting if queue]
            return min(heads, key=lambda filled: filled.report.end, default=None)
        queue = self.waiting[self.turn]
        return queue[0] if queue else None

    def _copy_to_datasets(self, filled: FilledSlot) -> tuple[list[tuple[int, Dataset]], bool]:
        """Copy as much of a filled slot to the datasets as fits into the datasets.

        Returns (list of (index of a policy, complete dataset of the policy), whether the whole slot has been copied).
        """
        complete: list[tuple[int, Dataset]] = []
        all_copied, part = True, 0
        for slot, rollout in zip(self.slots[filled.worker][filled.slot], filled.report.rollouts, strict=True):
            for builder in self.builders:
                full, filled.begins[part] = builder.add(slot, rollout, filled.begins[part])
                all_copied &= filled.begins[part] == slot.played_TN.shape[1]
                complete += [(builder.policy, dataset) for dataset in full]
                part += 1
        return complete, all_copied

    def _finish_rollout(self, worker: int) -> list[tuple[int, Dataset]]:
        """Count a rollout of a worker that was copied in the current round.

        If the rollout was the last of the round, return (index of a policy, dataset) for each policy with a non-empty dataset, else [].
        """
        assert self.rollouts_per_round is not None
        self.copied_W[worker] += 1
        self.turn = (worker + 1) % len(self.slots)
        if min(self.copied_W) < self.rollouts_per_round:
            return []
        self.copied_W, self.round_over = [0] * len(self.slots), True
        rest = [(builder.policy, builder.take_dataset()) for builder in self.builders]
        return [(policy, dataset) for policy, dataset in rest if dataset is not None]
