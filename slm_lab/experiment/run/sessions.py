"""The Sessions of a trial as tasks of an executor, on this machine or on a cluster."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from slm_lab.experiment.events import Emit, Notice, SessionEnded
from slm_lab.experiment.execute.executor import Died, Event, Executor, Message, Resources, Stalled, Task
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.session.session_process import SessionTask, run_session, shared_memory
from slm_lab.lib.store import shared_file
from slm_lab.spec.models.spec import Spec

OpenRun = Callable[[Mapping[str, str | int]], RunPaths]
"""open_run(Session.choices): make the run's folder, once the first Session has shown that the spec can be built."""
STOP_SECONDS = 60.0
"""Time that a Session has to save itself after Ctrl-C."""
SAVING = "saving checkpoints (Ctrl-C again quits without saving)"


@dataclass(frozen=True)
class Job:
    """The Sessions of a trial and what they need to run."""

    spec: Spec
    plan: Plan
    trial: int
    open_run: OpenRun
    emit: Emit
    """Takes the events of all Sessions but rows."""
    stop: Stop
    sessions: tuple[int, ...] = ()
    """Those to run; () stands for all."""
    resumed: RunPaths | None = None
    """The run that the Sessions continue; None for a new one."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The Sessions to run."""
        return self.sessions or tuple(range(self.spec.meta.max_session))


Engine = Callable[[Job], list[SessionEnded]]
"""Runs every Session of a job and returns how each ended. Raises SpecError or UserError if the spec cannot be built or the run's
folder cannot be made. No process outlives the call."""


_CLOSE_SECONDS = 15.0
"""Time that a Session's process has to close its envs and exit after it has reported its end."""
_LOST = 10
"""Maximum number of processes of a Session whose node is lost before they have built it: Ray had placed them on dead nodes."""


class Place(Protocol):
    """Where Sessions run, and what they need there."""

    @property
    def executor(self) -> Executor: ...

    @property
    def concurrent(self) -> int:
        """Maximum number of concurrent Sessions."""

    @property
    def resources(self) -> Resources:
        """Of each Session."""

    @property
    def restarts(self) -> bool:
        """Whether a Session that trains a net of its own, too, is restarted from its last checkpoint if its process ends."""

    def task(self, index: int) -> SessionTask:
        """Return the task of a Session that has not begun."""

    def look(self, paths: RunPaths | None) -> None:
        """Handle what has happened beside the tasks. Args: paths: of the run, once it has begun."""


@dataclass
class _Running:
    """A Session whose task runs."""

    task: SessionTask
    deaths: int = 0
    """Number of its processes that ended, without those that were lost before they were ready."""
    choices: Mapping[str, str | int] | None = None
    """Once it is built."""
    begun: bool = False
    end: SessionEnded | None = None
    """Once it has reported its end; its process still runs."""


class Sessions:
    """The Sessions of a job: those that wait, those that run, and how the others ended.

    Each process builds its envs and agent at once. The run folder is created when the first one is ready; each begins to train when it is
    told the folder. Sessions that train one net begin together, and one that dies is restarted, attached to the same shared arrays.
    """

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place, self.executor = job, place, place.executor
        self.waiting = deque(job.indices)
        self.running: dict[Any, _Running] = {}
        """By their tasks."""
        self.ends: list[SessionEnded] = []
        self.paths: RunPaths | None = None
        self.deadline: float | None = None

    def run(self) -> list[SessionEnded]:
        """Run all Sessions to their end."""
        while self.waiting or self.running:
            if self.job.stop.requested:
                self._stop()
            while self.waiting and len(self.running) < self.place.concurrent:
                self._start(self.waiting.popleft())
            for event in self.executor.events(0.2):
                self._handle(event)
            self.place.look(self.paths)
            self._begin()
        return self.ends

    def _start(self, index: int) -> None:
        task = self.place.task(index)
        self.running[self.executor.start(f"session {index}", run_session, task, resources=self.place.resources)] = _Running(task)

    def _handle(self, event: Event) -> None:
        one, stopping = self.running[event.task], self.job.stop.requested
        match event:
            case Message(_, "ready", (choices,)):
                one.choices = choices
            case Message(task, "event", (SessionEnded() as end,)):
                one.end = end
                task.stop(_CLOSE_SECONDS)
            case Message(_, "event", (reported,)):
                self.job.emit(reported)
            case Message(_, "user_error", (error,)):
                if self.paths is None:
                    raise error
                one.end = SessionEnded(one.task.index, "failed", str(error))
            case Message(_, "failed", (reason,)):
                one.end = SessionEnded(one.task.index, "stopped" if stopping and one.choices is None else "failed", reason)
            case Stalled(task, seconds, phase, "notice"):
                self.job.emit(Notice(f"{task.name}: no progress for {seconds:.0f} s ({phase})"))
            case Stalled(task, seconds, phase, _):
                self.executor.kill(task)
                self._died(Died(task, f"made no progress for {seconds:.0f} s ({phase}; meta.stall_limit)", ""))
            case Died():
                self._died(event)

    def _died(self, died: Died) -> None:
        """The process of a Session has ended: its Session is over, or is restarted if it can be continued."""
        task, most = died.task, self.job.spec.meta.max_restart
        one, reason = self.running[task], died.reason
        deaths = one.deaths + (not (died.lost and one.choices is None and task.restart < most + _LOST))
        restarts = self.place.restarts or self.job.spec.meta.distributed
        if one.end is None and restarts and deaths <= most and not self.job.stop.requested:
            if deaths > one.deaths:
                self.job.emit(Notice(f"{died.text}; restarting it ({deaths} of {most})"))
            try:
                self._restart(task, replace(one, deaths=deaths, choices=None, begun=False))
            except OSError as error:  # no memory, no process: the others continue
                reason = f"{reason}; a new process could not be started: {error.strerror or error}"
            else:
                return
        self._end(task, one.end or SessionEnded(one.task.index, "failed", "\n".join([reason, *([died.output] if died.output else [])])))

    def _restart(self, task: Task, one: _Running) -> None:
        """Start a new process for a Session: that of a shared net joins the others, another one continues from its last checkpoint."""
        begun = self.paths is not None
        one.task = replace(one.task, fresh=not (begun and self.job.spec.meta.distributed), resumed=self.paths or one.task.resumed)
        self.executor.restart(task, one.task)
        self.running[task] = one

    def _begin(self) -> None:
        """Order those to begin that are ready; those that train one net, together."""
        ready = [(task, one) for task, one in self.running.items() if one.choices is not None and not one.begun]
        if self.job.stop.requested:  # it may have come while processes were started, when signals are held back
            return
        if self.job.spec.meta.distributed and self.paths is None and len(ready) < len(self.running):
            return
        for task, one in ready:
            assert one.choices is not None
            self.paths = self.paths or self.job.open_run(one.choices)
            one.begun = True
            task.send(self.paths)

    def _end(self, task: Task, end: SessionEnded) -> None:
        self.executor.kill(task)
        del self.running[task]
        self.ends.append(end)
        self.job.emit(end)

    def _stop(self) -> None:
        """Let those that have begun save themselves; the others have nothing to save."""
        self.waiting.clear()
        if self.deadline is None:
            self.deadline = time.monotonic() + STOP_SECONDS
            if any(one.begun for one in self.running.values()):
                self.job.emit(Notice(SAVING))
            for task, one in list(self.running.items()):
                if one.begun:
                    task.stop(STOP_SECONDS)
                else:
                    self._end(task, SessionEnded(one.task.index, "stopped"))


class _ThisMachine:
    """The Place of child processes of this one."""

    resources = Resources()
    restarts = False

    def __init__(self, job: Job, executor: LocalExecutor, memory: SharedFd | None) -> None:
        self.job, self.executor, self.concurrent = job, executor, job.plan.concurrent_sessions(job.spec.meta)
        self.open_store = None if memory is None else partial(shared_memory, memory)

    def task(self, index: int) -> SessionTask:
        job = self.job
        return SessionTask(job.spec, index, job.trial, job.plan, self.open_store, resumed=job.resumed)

    def look(self, paths: RunPaths | None) -> None: ...


@contextmanager
def this_machine(job: Job) -> Iterator[Place]:
    """Yield the Place of this machine, with memory for a shared net if the job needs it."""
    meta = job.spec.meta
    memory = SharedFd(shared_file()) if meta.distributed else None
    try:
        with LocalExecutor(meta.stall_notice, meta.stall_limit) as executor:
            yield _ThisMachine(job, executor, memory)
    finally:
        if memory is not None:
            os.close(memory.fd)
