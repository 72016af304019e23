"""Runs the trials of a search one after another, in a process that Ray started. This module does not import ray.

A trial runs in a thread, and each of its Sessions in a process of its own, also if there is only one: a copy of the fork server of the
search, which loads torch once for all trials. So a Session that is killed is a failed Session, as in any run, and this process needs no
torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from slm_lab.experiment.execute.local.fork_server import server_in_use, use_server
from slm_lab.experiment.files.lock import SessionLock
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Interrupted, Plan, Stop, TrialFailed, UserError
from slm_lab.experiment.report.run import read_json
from slm_lab.experiment.run.search.reports import ReportReader
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.resume import read_run
from slm_lab.spec.base import SpecError
from slm_lab.spec.spec import Spec

_POLL = 0.1
"""Seconds between two looks at the tables."""


@dataclass(frozen=True)
class TrialJob:
    """A trial to run, or to continue if it has been started before."""

    spec: Spec
    paths: RunPaths
    """Of the search, which holds the lock of the folder."""
    trial: int
    plan: Plan
    metric: str
    baseline: float | None
    after: int = 0
    """Frame of the last report that the search has."""
    sets: tuple[str, ...] = ()
    """Changes to its saved spec."""
    take_over: int | None = None
    """Trial from whose checkpoints it continues, instead of its own."""


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended."""

    status: Literal["finished", "stopped", "failed"]
    metrics: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    retry: bool = True
    """Whether a failed trial may succeed at another attempt; not if its spec is invalid."""
    lost: bool = False
    """The node that ran it is gone: the trial continues elsewhere, and has not failed."""


@dataclass(frozen=True)
class Update:
    """What has happened in a trial."""

    frame: int
    reports: tuple[tuple[int, float], ...] = ()
    """(frame, metric)."""
    outcome: Outcome | None = None


class TrialWorker:
    """Runs one trial at a time.

    Args:
        server: the fork server of the search, see process.server.shared_server; {} on another machine.
        folder: current folder of the search.
    """

    def __init__(self, server: Mapping[str, Any], folder: Path | None = None) -> None:
        if folder is not None:
            with suppress(OSError):  # this node has no such folder
                os.chdir(folder)
            if str(folder) not in sys.path:
                sys.path.append(str(folder))  # for "package.module:Name" in a spec
        self._processes = ExitStack()
        self._processes.enter_context(server_in_use())  # for all its trials
        use_server(server)
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    def begin(self, job: TrialJob) -> None:
        """Start a trial. The one before must have ended."""
        assert self._thread is None
        self._stop, self._outcome = Stop(), None
        self._reader = ReportReader(job.paths, job.trial, job.spec, job.metric, job.baseline, job.after)
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"trial {job.trial}", daemon=True)
        self._thread.start()

    def update(self, stop: bool = False, seconds: float = 0.5) -> Update:
        """Return what is new, after waiting for at most `seconds`. With `stop`, let the Sessions save themselves and end."""
        assert self._thread is not None
        if stop:
            self._stop.requested = True
        deadline = time.monotonic() + seconds
        while True:
            ended = not self._thread.is_alive()
            reports = self._read()
            if ended:
                self._thread = None
                return Update(self._reader.frame, reports, self._outcome)
            if reports or time.monotonic() >= deadline:
                return Update(self._reader.frame, reports)
            self._thread.join(_POLL)

    def _read(self) -> tuple[tuple[int, float], ...]:
        with suppress(OSError, ValueError, KeyError):  # a table that is being cut back to a checkpoint
            return tuple(self._reader.read())
        return ()

    def _run(self, job: TrialJob) -> None:
        lock = SessionLock(job.paths.trial_lock(job.trial))
        stop = self._stop
        try:
            with job.paths.trial_log(job.trial).open("a", encoding="utf-8") as log:
                self._outcome = run_trial(job, stop, Console(file=log, width=200, highlight=False, soft_wrap=True))
        except BaseException:
            self._outcome = Outcome("failed", cause=traceback.format_exc())
        finally:
            lock.release()

    def close(self) -> None:
        """End the fork server, if this process has started one."""
        self._processes.close()


def run_trial(job: TrialJob, stop: Stop, console: Console) -> Outcome:
    """Run a trial to its end and return how that was; the files are those of any trial."""
    try:
        return Outcome("finished", make_trial(job, stop, console).run().metrics)
    except Interrupted:
        return Outcome("stopped", read_json(job.paths.trial_metrics(job.trial)) or {})
    except TrialFailed as error:
        return Outcome("failed", error.metrics, str(error))
    except (SpecError, UserError) as error:
        return Outcome("failed", cause=str(error), retry=False)
    except BaseException:
        return Outcome("failed", cause=traceback.format_exc())


def make_trial(job: TrialJob, stop: Stop, console: Console) -> Trial:
    """Return the trial of a job: the one that has been started before, resumed, or a new one."""
    common: dict[str, Any] = {"plan": job.plan, "index": job.trial, "folder": job.paths, "stop": stop, "console": console}
    if job.take_over is not None:
        copy_checkpoints(job.paths, job.take_over, job.trial)
    if job.paths.trial_spec(job.trial).is_file():
        found = read_run(job.paths, job.sets, job.trial)
        return Trial(found.spec, resumption=found, **common)
    return Trial(job.spec, **common)


def copy_checkpoints(paths: RunPaths, source: int, trial: int) -> None:
    """Let a trial continue from the last checkpoints of another one; its tables are then cut back to their frames.

    Nothing is copied if the other one has finished meanwhile: then no frame would be left to train.
    """
    from slm_lab.experiment.files import bundle as state

    files = [file for file in paths.checkpoints(source) if file.name.endswith(("ckpt-last.pt", "ckpt-best.pt"))]
    if any(state.read_header(file, check=True).get("done") for file in files):
        return
    prefix = f"{paths.stem}_t{source}_"
    for file in files:
        bundle = state.load(file)
        if "tables" in bundle:
            bundle["tables"] = None  # positions in the other trial's files
        state.save(file.with_name(f"{paths.stem}_t{trial}_{file.name.removeprefix(prefix)}"), bundle)
