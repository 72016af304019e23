"""The rollout workers of a Session: processes, or objects in this process (serial mode)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset
from slm_lab.experiment.collect.workers.process_pool import ProcessPool
from slm_lab.experiment.collect.workers.serial_pool import SerialPool
from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig
from slm_lab.experiment.collect.workers.worker import Collected
from slm_lab.experiment.plan import Stop, UserError
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import SharedArrays
from slm_lab.spec.models.sampler import SamplerSpec
from slm_lab.spec.models.spec import Spec


class WorkerPool(Protocol):
    """Rollout workers that collect for the learner."""

    store: SharedArrays | None
    """What the workers attach to; None if they run in this process."""

    def info(self) -> EnvInfo:
        """Wait for the first worker's envs; returns the info of all envs together. Raises SpecError, WorkerFailed or Interrupted."""

    def connect(self, arrays: WorkerArrays, assembler: RolloutAssembler, info: EnvInfo) -> None:
        """Let the workers use the arrays, which hold the initial weights; datasets come from the assembler."""

    @property
    def between_rounds(self) -> bool:
        """Whether all that was collected has been taken by the learner, and nothing more is being collected."""

    def states(self) -> list[Any] | None:
        """Between rounds: return the states of all workers; None if one cannot save its open episodes. Raises WorkerFailed."""

    def start(self, states: list[Any] | None = None, resumes: int = 0) -> None:
        """Begin to collect, unless a stop is requested first. Raises WorkerFailed.

        Args:
            states: what `states` returned, to continue from.
            resumes: how often the run was continued; without states new random streams are drawn for each.
        """

    def next(self) -> tuple[int, Dataset] | None:
        """The policy that is to train, and its dataset; None if there is none yet. Raises WorkerFailed."""

    def release(self, policy: int, dataset: Dataset) -> None:
        """Reuse a dataset that was trained on."""

    def reports(self) -> Iterator[tuple[int, Collected]]:
        """What workers reported since the last call, with their numbers."""

    def close(self) -> None:
        """End the workers."""


OpenPool = Callable[[Spec, Seeds, str, Stop, Beat], WorkerPool]
"""open_pool(spec, seeds, device, stop, beat): start the rollout workers that meta.sampler asks for."""


def open_pool(spec: Spec, seeds: Seeds, device: str, stop: Stop, beat: Beat) -> WorkerPool:
    """Start the rollout workers that meta.sampler asks for."""
    sampler: SamplerSpec | None = spec.meta.sampler
    assert sampler is not None
    if sys.platform == "win32" and not sampler.serial_mode:
        raise UserError("worker processes require Linux or macOS; on Windows set meta.sampler.serial_mode to true")
    config = WorkerConfig(spec, seeds, device=device)
    return SerialPool(config, stop, beat) if sampler.serial_mode else ProcessPool(config, stop, beat)
