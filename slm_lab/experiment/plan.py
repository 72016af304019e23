"""Options for running a spec (`Plan`), and exceptions that a run raises."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slm_lab.lib.limits import cores
from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.models.spec import Spec


class UserError(Exception):
    """An error that the user can correct. The command line shows the error without a traceback and exits with code 2."""


def check_spec(spec: object) -> None:
    """Raise TypeError if `spec` is not a Spec."""
    if not isinstance(spec, Spec):
        raise TypeError(f"expected a Spec, not a {type(spec).__name__}; create one with slm_lab.load_spec from a dict or a file")


class TrialFailed(Exception):
    """Exception that is raised if at least one Session of a trial failed.

    Args: metrics: metrics of the trial, computed from the Sessions that did not fail, or {} if all Sessions failed.
    """

    def __init__(self, message: str, metrics: dict[str, Any]) -> None:
        super().__init__(message)
        self.metrics = metrics


class Interrupted(KeyboardInterrupt):
    """Exception that is raised if a signal ends the run early. `code` is the exit code of the process: 128 + signal number (130 for
    Ctrl-C)."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.code = 128 + (number or signal.SIGINT)


class Stop:
    """Flag with which a signal or the parent process requests that the run stops.

    The training loop checks `requested` between steps, and ends early if `requested` is True.
    """

    __slots__ = ("number", "requested")

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        """Number of the signal that requested the stop, or None if the stop was not requested by a signal."""


@dataclass(frozen=True)
class Plan:
    """Mode, data folder and resources of a run."""

    mode: Literal["train", "dev"] = "train"
    data_dir: Path = Path("data")
    """Folder in which the run folder is created."""
    device: str | None = None
    """Torch device ("cpu", "cuda" or "cuda:N"), or None if agent.net.gpu determines the device."""
    first_gpu: int = 0
    """If neither `device` nor agent.net.cuda_id selects a GPU, Session s uses the GPU (first_gpu + s) modulo the number of GPUs."""
    jobs: int | None = None
    """Maximum number of concurrent Sessions, or None to let the number of cores limit the number of Sessions."""
    engine: str | None = None
    """Name of the engine that runs the Sessions (a key of run.engine.ENGINES), or None to let `choose_engine` select the engine."""
    cluster: str | None = None
    """Address of the Ray cluster on which to run the spec: HOST:PORT, "auto" (the cluster to which this machine belongs), or "local" (a
    cluster that is started on this machine). If `cluster` is None, the spec is run on this machine without Ray."""
    storage: str | None = None
    """URL below which a new run on a cluster writes its checkpoints if the nodes share no folder, or None to write checkpoints to the run
    folder. A continued run keeps the location of its checkpoints."""
    common_seeds: bool = False
    """Whether all trials of a search use the seeds of the first trial."""
    observers: tuple[Callable[..., Any], ...] = ()
    """Factories of the user's observers, used in addition to meta.observers (see observers.base.ObserverFactory)."""

    def concurrent_sessions(self, meta: MetaSpec) -> int:
        """Return the number of concurrent Sessions.

        If the Sessions train one shared net (meta.distributed), all Sessions run concurrently. If each Session trains its own net, `jobs`
        limits the number of concurrent Sessions. If `jobs` is None, the limit is the number of cores divided by the number of processes of
        a Session. On a cluster, only `jobs` limits the returned number, and each Session waits until a node has free resources.
        """
        if meta.distributed:
            return meta.max_session
        if self.cluster is not None:
            return min(meta.max_session, self.jobs or meta.max_session)
        return max(1, min(meta.max_session, self.jobs or cores() // count_session_processes(meta)))


def count_session_processes(meta: MetaSpec) -> int:
    """Return the number of busy processes of one Session: the Session's process, its rollout workers and its inference server."""
    sampler = meta.sampler
    return 1 if sampler is None or sampler.serial_mode else 1 + sampler.num_workers + (sampler.inference == "central")
