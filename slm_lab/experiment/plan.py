"""How to run a spec: the choices made on the command line, passed on as arguments."""

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
    """An error that the user can correct: shown without a traceback, exit code 2."""


def check_spec(spec: object) -> None:
    """Raise TypeError if `spec` is not a Spec."""
    if not isinstance(spec, Spec):
        raise TypeError(f"expected a Spec, not a {type(spec).__name__}; slm_lab.load_spec makes one of a dict or a file")


class TrialFailed(Exception):
    """A Session failed. `metrics` are computed from the other Sessions; {} if there are none."""

    def __init__(self, message: str, metrics: dict[str, Any]) -> None:
        super().__init__(message)
        self.metrics = metrics


class Interrupted(KeyboardInterrupt):
    """A signal ended the run early; `code` is the exit code for it (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.code = 128 + (number or signal.SIGINT)


class Stop:
    """A request to end early, set by a signal or by the parent process. The training loop checks it between two steps."""

    __slots__ = ("number", "requested")

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        """Number of the signal that requested the stop."""


@dataclass(frozen=True)
class Plan:
    """Mode, data folder and resources of a run."""

    mode: Literal["train", "dev"] = "train"
    data_dir: Path = Path("data")
    """Folder in which the run folder is created."""
    device: str | None = None
    """cpu, cuda or cuda:N; None: according to agent.net.gpu."""
    first_gpu: int = 0
    """GPU of Session 0 if neither `device` nor agent.net.cuda_id names one; further Sessions use the GPUs after it."""
    jobs: int | None = None
    """Number of Sessions that run at a time; None: as many as the cores allow."""
    engine: str | None = None
    """A name in engine.ENGINES; None: the engine that the spec needs."""
    cluster: str | None = None
    """Address of the Ray cluster that runs the spec: HOST:PORT, "auto" (the cluster that this machine is a node of), or "local" (start a
    cluster on this machine); None: this machine without Ray."""
    storage: str | None = None
    """URL below which a new run on a cluster writes its checkpoints if the nodes share no folder; None: the run folder. A continued run
    keeps the location of its checkpoints."""
    common_seeds: bool = False
    """Whether every trial of a search uses the seeds of the first."""
    observers: tuple[Callable[..., Any], ...] = ()
    """Factories of the user's observers, used in addition to meta.observers (see observers.base.ObserverFactory)."""

    def concurrent_sessions(self, meta: MetaSpec) -> int:
        """Return the number of Sessions that run at a time: all if they train one net, else as many as the cores allow for their processes.

        On a cluster, at most as many Sessions run as its nodes have resources for.
        """
        if meta.distributed:
            return meta.max_session
        if self.cluster is not None:
            return min(meta.max_session, self.jobs or meta.max_session)
        return max(1, min(meta.max_session, self.jobs or cores() // session_processes(meta)))


def session_processes(meta: MetaSpec) -> int:
    """Return the number of busy processes of one Session: its own process, its rollout workers and its inference server."""
    sampler = meta.sampler
    return 1 if sampler is None or sampler.serial_mode else 1 + sampler.num_workers + (sampler.inference == "central")
