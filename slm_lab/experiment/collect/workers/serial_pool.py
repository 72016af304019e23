"""Rollout workers in this process, one after the other (meta.sampler.serial_mode)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig
from slm_lab.experiment.collect.workers.worker import Collected, RolloutWorker
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.store import SharedArrays


class SerialPool:
    """A WorkerPool of objects in this process."""

    store: SharedArrays | None = None

    def __init__(self, config: WorkerConfig, stop: Stop, beat: Beat) -> None:
        sampler = config.spec.meta.sampler
        assert sampler is not None
        self.stop = stop
        self.workers: list[RolloutWorker] = []
        try:
            for index in range(sampler.num_workers):
                self.workers.append(RolloutWorker(replace(config, index=index), beat))
        except BaseException:
            self.close()
            raise
        self._reports: list[tuple[int, Collected]] = []
        self.ready: deque[tuple[int, Dataset]] = deque()

    def info(self) -> EnvInfo:
        return self.workers[0].info

    def connect(self, arrays: WorkerArrays, assembler: RolloutAssembler, info: EnvInfo) -> None:
        self.assembler = assembler
        for worker in self.workers:
            worker.attach(None, arrays)

    def start(self, states: list[Any] | None = None, resumes: int = 0) -> None:
        for worker, saved in zip(self.workers, states or [None] * len(self.workers), strict=True):
            worker.resume(saved, resumes)

    @property
    def between_rounds(self) -> bool:
        return not self.ready and self.assembler.between_rounds

    def states(self) -> list[Any] | None:
        states = [worker.state_dict() for worker in self.workers]
        return None if None in states else states

    def next(self) -> tuple[int, Dataset] | None:
        while not self.ready:
            if self.stop.requested and self.between_rounds:  # a round that has begun is finished, see WorkerSource
                return None
            for index, worker in enumerate(self.workers):
                report = worker.collect(0)
                self._reports.append((index, report))
                self.assembler.put(index, 0, report)
                for _, complete in self.assembler.assemble():
                    self.ready += complete
        return self.ready.popleft()

    def release(self, policy: int, dataset: Dataset) -> None:
        self.assembler.builders[policy].release(dataset)

    def reports(self) -> Iterator[tuple[int, Collected]]:
        reports, self._reports = self._reports, []
        yield from reports

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []
