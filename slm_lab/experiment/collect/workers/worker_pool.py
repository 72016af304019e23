"""The pool of rollout workers that run in this process, and functions that select and start the pool for a spec."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.link import MessageLink, SharedMemoryLink
from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig, get_sampler_spec
from slm_lab.experiment.collect.workers.task_pool import TaskPool
from slm_lab.experiment.collect.workers.worker import RolloutReport, RolloutWorker
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.execute.ray.ray_executor import RayExecutor
from slm_lab.experiment.plan import Stop, UserError
from slm_lab.experiment.training.experience import Beat
from slm_lab.experiment.training.resolve import resolve_inference
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import SharedArrays
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

STALL_LIMIT = 300.0
"""Number of seconds without a heartbeat after which a worker is restarted if meta.stall_limit is absent."""


class SerialPool:
    """Pool of rollout workers that collect one after another in this process (meta.sampler.serial_mode).

    SerialPool has the same methods as TaskPool.
    """

    store: SharedArrays | None = None
    restarts = 0

    def __init__(self, config: WorkerConfig, stop: Stop, beat: Beat) -> None:
        self.stop = stop
        self.workers: list[RolloutWorker] = []
        try:
            for index in range(get_sampler_spec(config.spec).num_workers):
                self.workers.append(RolloutWorker(replace(config, index=index), beat))
        except BaseException:
            self.close()
            raise
        self._reports: list[tuple[int, RolloutReport]] = []
        self.ready: deque[tuple[int, Dataset]] = deque()

    def wait_for_env_info(self) -> EnvInfo:
        return self.workers[0].info

    def connect(self, arrays: WorkerArrays, assembler: RolloutAssembler, info: EnvInfo) -> None:
        self.assembler = assembler
        for worker in self.workers:
            worker.connect_and_reset(lambda worker_arrays: worker_arrays.use_learner_arrays(arrays))

    def start(self, states: list[Any] | None = None, resumes: int = 0) -> None:
        for worker, saved in zip(self.workers, states or [None] * len(self.workers), strict=True):
            worker.load_state(saved, resumes)

    @property
    def between_rounds(self) -> bool:
        return not self.ready and self.assembler.between_rounds

    def collect_states(self) -> list[Any] | None:
        states = [worker.state_dict() for worker in self.workers]
        return None if None in states else states

    def next_dataset(self) -> tuple[int, Dataset] | None:
        while not self.ready:
            if self.stop.requested and self.between_rounds:  # a round that has begun is finished first, see WorkerSource
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

    def take_reports(self) -> Iterator[tuple[int, RolloutReport]]:
        reports, self._reports = self._reports, []
        yield from reports

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


WorkerPool = SerialPool | TaskPool
OpenPool = Callable[[Spec, Seeds, str, Stop, Beat], WorkerPool]
"""Function open_pool(spec, seeds, device, stop, beat), which starts the rollout workers that meta.sampler configures."""


def open_pool(spec: Spec, seeds: Seeds, device: str, stop: Stop, beat: Beat) -> WorkerPool:
    """Start the rollout workers that meta.sampler configures, on this machine."""
    config, sampler = WorkerConfig(spec, seeds, device=device), get_sampler_spec(spec)
    if sampler.serial_mode:
        return SerialPool(config, stop, beat)
    if not has_feature("groups"):
        raise UserError("worker processes require Linux or macOS; on Windows set meta.sampler.serial_mode to true")
    return TaskPool(config, LocalExecutor(*_stall_limits(spec)), SharedMemoryLink(), stop, beat)


def open_cluster_pool(spec: Spec, seeds: Seeds, device: str, stop: Stop, beat: Beat) -> WorkerPool:
    """Start the rollout workers that meta.sampler configures, on any nodes of a cluster.

    Raises SpecError if meta.sampler.inference is "central".
    """
    spec = with_local_inference(spec)
    sampler = get_sampler_spec(spec)
    if sampler.serial_mode:
        return open_pool(spec, seeds, device, stop, beat)
    executor = RayExecutor(*_stall_limits(spec))
    return TaskPool(WorkerConfig(spec, seeds, device=device), executor, MessageLink(executor, in_rounds=not sampler.async_rl), stop, beat)


def with_local_inference(spec: Spec) -> Spec:
    """Return `spec` with meta.sampler.inference="auto" replaced by "local", for rollout workers that may run on other nodes.

    Raises SpecError if meta.sampler.inference is "central".
    """
    sampler = spec.meta.sampler
    if sampler is None or sampler.serial_mode or sampler.inference == "local":
        return spec
    if sampler.inference == "central":
        message = "'central' requires all rollout workers on one machine, since they share memory; with --cluster, set 'local' or 'auto'"
        raise SpecError(spec.name, [Problem("meta.sampler.inference", message)])
    return resolve_inference(spec, "cpu")


def _stall_limits(spec: Spec) -> tuple[float | None, float]:
    """Return (stall_notice, stall_limit) for an executor. If meta.stall_limit is absent, the limit is STALL_LIMIT."""
    limit = spec.meta.stall_limit
    return spec.meta.stall_notice, STALL_LIMIT if limit is None else limit
