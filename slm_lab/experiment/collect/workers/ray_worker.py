"""The process of a rollout worker on a node of the cluster, which Ray has started. This module does not import ray."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig
from slm_lab.experiment.collect.workers.worker import Collected, RolloutWorker, build_policies, extras_count, seed_process
from slm_lab.experiment.execute.ray.remote import pack, unpack
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.report import SpecError


class Weights(NamedTuple):
    """What the learner has published of a policy."""

    version: int
    param: np.ndarray
    buffer: np.ndarray
    extras: np.ndarray


class Broadcast(NamedTuple):
    """The newest weights of all policies. Ray brings them to each node once."""

    weights: list[Weights]
    active_P: np.ndarray
    """Policies that still need frames."""


class SentRollout(NamedTuple):
    """A rollout, as it goes to the learner."""

    report: Collected
    groups: list[dict[str, np.ndarray]]
    """For each group of envs: the arrays of its slot by name."""


class RolloutActor:
    """Rollout worker number `config.index`. `take` and `stop` are called from another thread while it collects.

    Args: folder: current folder of the learner.
    """

    def __init__(self, config: WorkerConfig, folder: Path) -> None:
        self.config = config
        with suppress(OSError):  # this node has no such folder
            os.chdir(folder)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for "package.module:Name" in a spec
        torch.set_num_threads(1)

    def build(self) -> EnvInfo | SpecError:
        """Make the envs; return the info of the envs of all workers, or what the user can correct."""
        config = self.config
        seed_process(config)
        try:
            self._worker = RolloutWorker(config)
        except SpecError as error:
            return error
        return self._worker.info

    def connect(self, newest: Broadcast | bytes, saved: dict[str, Any] | None = None, resumes: int = 0) -> None:
        """Make the policies, begin episodes, and continue from a state if there is one; see RolloutWorker.resume."""
        worker = self._worker
        policies = build_policies(self.config, worker.info)
        self._arrays = WorkerArrays(self.config.spec, worker.info, policies, extras_count(worker.envs[0]))
        self.take(newest)
        worker.attach(None, self._arrays)
        if saved is not None or resumes:
            worker.resume_process(saved, resumes)

    def take(self, newest: Broadcast | bytes) -> None:
        """Act with these weights from the next step on."""
        newest = unpack(newest)
        for mine, weights in zip(self._arrays.weights, newest.weights, strict=True):
            mine.write(*weights)
        self._arrays.active_P[:] = newest.active_P

    def collect(self) -> SentRollout | bytes:
        """Collect a rollout of every group."""
        report = self._worker.collect(0)
        sent = SentRollout(report, [slot.arrays() for slot in self._worker.slots[0]])
        return pack(sent, (array for arrays in sent.groups for array in arrays.values()))

    def state(self) -> dict[str, Any] | None:
        """Return the state between two rollouts; None if the backend cannot save open episodes."""
        return self._worker.state_dict()

    def stop(self) -> None:
        """Break off the rollout under way."""
        self._worker.stop.requested = True

    def close(self) -> None:
        """Close the envs."""
        self._worker.close()
