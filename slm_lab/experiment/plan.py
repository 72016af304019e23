"""How to run a spec: the choices of the command line, passed on as arguments."""

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
    """Raise TypeError for what is not a Spec."""
    if not isinstance(spec, Spec):
        raise TypeError(f"expected a Spec, not a {type(spec).__name__}; slm_lab.load_spec makes one of a dict or a file")


class TrialFailed(Exception):
    """A Session failed. `metrics` are those of the others, {} if there are none."""

    def __init__(self, message: str, metrics: dict[str, Any]) -> None:
        super().__init__(message)
        self.metrics = metrics


class Interrupted(KeyboardInterrupt):
    """A signal ended the run early; `code` is the exit code for it (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.code = 128 + (number or signal.SIGINT)


class Stop:
    """A request to end early, set by a signal or by the parent process, and read by the training loop between two steps."""

    __slots__ = ("number", "requested")

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        """Of the signal that requested it."""


@dataclass(frozen=True)
class Plan:
    """Mode, data folder and resources of a run."""

    mode: Literal["train", "dev"] = "train"
    data_dir: Path = Path("data")
    """Folder in which the run's folder is made."""
    device: str | None = None
    """cpu, cuda or cuda:N; None: as agent.net.gpu says."""
    first_gpu: int = 0
    """GPU of Session 0 where neither `device` nor agent.net.cuda_id names one; those of further Sessions follow it."""
    jobs: int | None = None
    """Sessions at a time; None: as many as there are cores."""
    engine: str | None = None
    """A name in engine.ENGINES; None: as the spec needs."""
    cluster: str | None = None
    """Address of the Ray cluster that runs it: HOST:PORT, "auto" (the one that this machine is a node of), or "local" (one is started on
    this machine); None: this machine without Ray."""
    storage: str | None = None
    """URL below which the checkpoints of a new run on a cluster are written, where its nodes see no common folder; None: the run's folder.
    Of a run that is continued they stay where they are."""
    common_seeds: bool = False
    """Every trial of a search has the seeds of the first."""
    observers: tuple[Callable[..., Any], ...] = ()
    """Make the user's observers beside those of meta.observers (see observers.base.ObserverFactory)."""

    def concurrent_sessions(self, meta: MetaSpec) -> int:
        """Number of Sessions that run at a time: all if they train one net, else as many as there are cores for their processes.

        On a cluster at most as many as its nodes have resources for.
        """
        if meta.distributed:
            return meta.max_session
        if self.cluster is not None:
            return min(meta.max_session, self.jobs or meta.max_session)
        return max(1, min(meta.max_session, self.jobs or cores() // session_processes(meta)))


def session_processes(meta: MetaSpec) -> int:
    """Number of busy processes of one Session: itself, its rollout workers and its inference server."""
    sampler = meta.sampler
    return 1 if sampler is None or sampler.serial_mode else 1 + sampler.num_workers + (sampler.inference == "central")
