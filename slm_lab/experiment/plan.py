"""How to run, as against what to run (the spec): the choices of the command line, handed on as arguments."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slm_lab.spec.meta import MetaSpec

Report = Callable[[int, int, float, "dict[str, float | int | None] | None"], None]
"""report(number of the table, frame, frames per second, the row just made or None): progress of a Session, or of one of its policies."""


class UserError(Exception):
    """Something the user can put right: shown without a traceback, exit code 2."""


class TrialFailed(Exception):
    """A Session failed. The others ran to their end; `metrics` are theirs, {} where there are none."""

    def __init__(self, message: str, metrics: dict[str, Any]) -> None:
        super().__init__(message)
        self.metrics = metrics


class Interrupted(KeyboardInterrupt):
    """A signal ended the run early; `code` is the exit code that says which (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.code = 128 + (number or signal.SIGINT)


class Stop:
    """A request to end early, set by a signal or by the parent process, read by the loop between two steps."""

    __slots__ = ("number", "requested")

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        """Of the signal that asked."""


@dataclass(frozen=True)
class Plan:
    """Mode, place and means of a run."""

    mode: Literal["train", "dev"] = "train"
    data_dir: Path = Path("data")
    """Where the run's folder is made."""
    device: str | None = None
    """cpu, cuda or cuda:N; None: as agent.net.gpu says."""
    jobs: int | None = None
    """Sessions at a time; None: as many as there are cores."""

    def at_once(self, meta: MetaSpec) -> int:
        """How many Sessions run at a time: all of those that train one net; else as many as there are cores for their processes."""
        if meta.distributed:
            return meta.max_session
        sampler, processes = meta.sampler, 1
        if sampler is not None and not sampler.serial_mode:
            processes += sampler.num_workers + (sampler.inference == "central")
        return max(1, min(meta.max_session, self.jobs or cores() // processes))


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
