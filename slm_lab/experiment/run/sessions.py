"""Run the Sessions of a trial as tasks of an executor, on this machine or on a cluster."""

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
from slm_lab.experiment.execute.executor import Event, Executor, Message, Resources, Task, TaskDied, TaskStalled
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.experiment.execute.local.local_executor import LocalExecutor
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.session.session_process import SessionTask, open_shared_memory_store, run_session
from slm_lab.lib.store import create_shared_file
from slm_lab.spec.models.spec import Spec

OpenRun = Callable[[Mapping[str, str | int]], RunPaths]
"""Type of the function open_run(choices), which creates the run folder and returns its paths.

`open_run` is called after the first Session has been built. `choices` are the chosen_settings of the first Session's SessionParts.
"""
STOP_SECONDS = 60.0
"""Maximum time in seconds for a Session to save its state after Ctrl-C."""
SAVING = "saving checkpoints (Ctrl-C again quits without saving)"


@dataclass(frozen=True)
class SessionsJob:
    """The Sessions of a trial that an engine runs, and the data that the Sessions need."""

    spec: Spec
    plan: Plan
    trial: int
    open_run: OpenRun
    emit: Emit
    """Function that receives all events of the Sessions except table rows."""
    stop: Stop
    sessions: tuple[int, ...] = ()
    """Indices of the Sessions to run, or () to run all Sessions of the trial."""
    resumed: RunPaths | None = None
    """The paths of the run that the Sessions continue, or None for a new run."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the Sessions that the job runs."""
        return self.sessions or tuple(range(self.spec.meta.max_session))


Engine = Callable[[SessionsJob], list[SessionEnded]]
"""Type of a function that runs all Sessions of a job, and returns how each Session ended.

An engine raises SpecError or UserError if the spec cannot be built or the run folder cannot be created. When an engine returns, all
processes that the engine started have ended.
"""


_CLOSE_SECONDS = 15.0
"""Maximum time in seconds that the process of a Session has to close its envs and exit after it has reported the end of the Session."""
_LOST = 10
"""Maximum number of lost processes of a Session that do not count as deaths of the Session's process.

A process counts as lost if its node is lost before the process has built the Session. Ray may place several processes on dead nodes.
"""


class SessionHost(Protocol):
    """Protocol of the place where the Sessions of a job run: this machine or a cluster."""

    @property
    def executor(self) -> Executor: ...

    @property
    def concurrent(self) -> int:
        """Maximum number of Sessions that run concurrently."""

    @property
    def resources(self) -> Resources:
        """Resources that each Session reserves."""

    @property
    def restarts(self) -> bool:
        """Whether a Session that trains a separate net is restarted from its last checkpoint if its process dies."""

    def task(self, index: int) -> SessionTask:
        """Return the task that runs the Session `index`."""

    def poll(self, paths: RunPaths | None) -> None:
        """Handle events that do not belong to the task of a Session, such as those of a parameter server.

        Args: paths: paths of the run, or None before the run folder exists.
        """


@dataclass
class _RunningSession:
    """A Session whose task is running in a process."""

    task: SessionTask
    deaths: int = 0
    """Number of processes of the Session that died. Processes that were lost before the Session was built are not counted (see _LOST)."""
    choices: Mapping[str, str | int] | None = None
    """The chosen_settings of the Session's SessionParts, or None until the Session is built."""
    begun: bool = False
    end: SessionEnded | None = None
    """How the Session ended, or None until the Session has reported its end. The process may still run after the Session has reported its
    end."""


class Sessions:
    """Runner of the Sessions of a job, which stores the waiting Sessions, the running Sessions, and how the other Sessions ended.

    The process of each Session builds envs and agent immediately. The run folder is created when the first Session is built, and each
    Session starts to train when its process receives the paths of the run folder. Sessions that train one net start to train together. If
    the process of a Session with a shared net dies, a new process continues the Session with the same shared arrays.
    """

    def __init__(self, job: SessionsJob, host: SessionHost) -> None:
        self.job, self.host, self.executor = job, host, host.executor
        self.waiting = deque(job.indices)
        self.running: dict[Any, _RunningSession] = {}
        """Task of the executor → the Session that this task runs."""
        self.ends: list[SessionEnded] = []
        self.paths: RunPaths | None = None
        self.deadline: float | None = None

    def run(self) -> list[SessionEnded]:
        """Run all Sessions until they have ended, and return how each Session ended."""
        while self.waiting or self.running:
            if self.job.stop.requested:
                self._stop()
            while self.waiting and len(self.running) < self.host.concurrent:
                self._start(self.waiting.popleft())
            for event in self.executor.events(0.2):
                self._handle(event)
            self.host.poll(self.paths)
            self._begin()
        return self.ends

    def _start(self, index: int) -> None:
        task = self.host.task(index)
        self.running[self.executor.start(f"session {index}", run_session, task, resources=self.host.resources)] = _RunningSession(task)

    def _handle(self, event: Event) -> None:
        session, stopping = self.running[event.task], self.job.stop.requested
        match event:
            case Message(_, "ready", (choices,)):
                session.choices = choices
            case Message(task, "event", (SessionEnded() as end,)):
                session.end = end
                task.stop(_CLOSE_SECONDS)
            case Message(_, "event", (reported,)):
                self.job.emit(reported)
            case Message(_, "user_error", (error,)):
                if self.paths is None:
                    raise error
                session.end = SessionEnded(session.task.index, "failed", str(error))
            case Message(_, "failed", (reason,)):
                session.end = SessionEnded(session.task.index, "stopped" if stopping and session.choices is None else "failed", reason)
            case TaskStalled(task, seconds, phase, "notice"):
                self.job.emit(Notice(f"{task.name}: no progress for {seconds:.0f} s ({phase})"))
            case TaskStalled(task, seconds, phase, _):
                self.executor.kill(task)
                self._handle_death(TaskDied(task, f"made no progress for {seconds:.0f} s ({phase}; meta.stall_limit)", ""))
            case TaskDied():
                self._handle_death(event)

    def _handle_death(self, died: TaskDied) -> None:
        """Handle the death of a Session's process. The Session is restarted if it can be continued, and otherwise recorded as failed."""
        task, most = died.task, self.job.spec.meta.max_restart
        session, reason = self.running[task], died.reason
        deaths = session.deaths + (not (died.lost and session.choices is None and task.restart < most + _LOST))
        restarts = self.host.restarts or self.job.spec.meta.distributed
        if session.end is None and restarts and deaths <= most and not self.job.stop.requested:
            if deaths > session.deaths:
                self.job.emit(Notice(f"{died.description}; restarting it ({deaths} of {most})"))
            try:
                self._restart(task, replace(session, deaths=deaths, choices=None, begun=False))
            except OSError as error:  # for example, no memory for a process; the other Sessions continue
                reason = f"{reason}; a new process could not be started: {error.strerror or error}"
            else:
                return
        self._end_session(
            task, session.end or SessionEnded(session.task.index, "failed", "\n".join([reason, *([died.output] if died.output else [])]))
        )

    def _restart(self, task: Task, session: _RunningSession) -> None:
        """Start a new process for a Session whose process has died.

        If several Sessions train one net, the new process joins the other Sessions. A Session that trains a separate net continues from its
        last checkpoint.
        """
        begun = self.paths is not None
        session.task = replace(
            session.task, fresh=not (begun and self.job.spec.meta.distributed), resumed=self.paths or session.task.resumed
        )
        self.executor.restart(task, session.task)
        self.running[task] = session

    def _begin(self) -> None:
        """Send the paths of the run folder to the Sessions that have been built. When a Session receives the paths, it starts to train.

        Before the first paths are sent, the run folder is created. If all Sessions train one net, the paths are sent only when all Sessions
        have been built.
        """
        ready = [(task, session) for task, session in self.running.items() if session.choices is not None and not session.begun]
        if self.job.stop.requested:  # signals are delayed while processes are started, so a stop may have been requested
            return
        if self.job.spec.meta.distributed and self.paths is None and len(ready) < len(self.running):
            return
        for task, session in ready:
            assert session.choices is not None
            self.paths = self.paths or self.job.open_run(session.choices)
            session.begun = True
            task.send(self.paths)

    def _end_session(self, task: Task, end: SessionEnded) -> None:
        self.executor.kill(task)
        del self.running[task]
        self.ends.append(end)
        self.job.emit(end)

    def _stop(self) -> None:
        """Ask the Sessions that train to save their state. End the Sessions that do not train yet, since they have no state to save."""
        self.waiting.clear()
        if self.deadline is None:
            self.deadline = time.monotonic() + STOP_SECONDS
            if any(session.begun for session in self.running.values()):
                self.job.emit(Notice(SAVING))
            for task, session in list(self.running.items()):
                if session.begun:
                    task.stop(STOP_SECONDS)
                else:
                    self._end_session(task, SessionEnded(session.task.index, "stopped"))


class _LocalHost:
    """The SessionHost that runs each Session in a child process of the current process."""

    resources = Resources()
    restarts = False

    def __init__(self, job: SessionsJob, executor: LocalExecutor, memory: SharedFd | None) -> None:
        self.job, self.executor, self.concurrent = job, executor, job.plan.concurrent_sessions(job.spec.meta)
        self.open_store = None if memory is None else partial(open_shared_memory_store, memory)

    def task(self, index: int) -> SessionTask:
        job = self.job
        return SessionTask(job.spec, index, job.trial, job.plan, self.open_store, resumed=job.resumed)

    def poll(self, paths: RunPaths | None) -> None: ...


@contextmanager
def local_host(job: SessionsJob) -> Iterator[SessionHost]:
    """Yield the SessionHost of this machine. If the Sessions of the job train one net, shared memory for this net is created."""
    meta = job.spec.meta
    memory = SharedFd(create_shared_file()) if meta.distributed else None
    try:
        with LocalExecutor(meta.stall_notice, meta.stall_limit) as executor:
            yield _LocalHost(job, executor, memory)
    finally:
        if memory is not None:
            os.close(memory.fd)
