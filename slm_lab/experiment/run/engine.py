"""Engines: how the Sessions of a trial run. A further one is a line in ENGINES."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slm_lab.experiment.events import Emit, End, Notice
from slm_lab.experiment.events import Event as RunEvent
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.experiment.execute.local.failures import cause
from slm_lab.experiment.execute.local.fork_server import start_method
from slm_lab.experiment.execute.local.heartbeat import Heartbeat
from slm_lab.experiment.execute.local.interrupt import restore_handlers, watchdog
from slm_lab.experiment.execute.local.supervisor import Child, Died, Event, Message, Stalled, Supervisor
from slm_lab.experiment.execute.local.user_code import build_errors, from_user_code
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.run.job import SAVING, STOP_SECONDS, Engine, Job
from slm_lab.experiment.session.session_process import STOP_GRACE, SessionTask, run_session, shared_arrays
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.log import logger, notice
from slm_lab.lib.store import SharedArrays, shared_file
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import Spec

if TYPE_CHECKING:
    from slm_lab.experiment.session.session import Session

T = TypeVar("T")

_CLOSE_SECONDS = 15.0
"""Time that a Session's process has to close its envs and exit after it has reported its end."""
_WORKER_BYTES = {"forkserver": 30 * 2**20, "spawn": 160 * 2**20}
"""Memory of a Session's process that is not shared with others: measured with A3C of CartPole, about the least that any takes. Copies of
the fork server share torch: 2 workers take 382 MB together with trial and server, 8 workers 566."""


def run_inline(job: Job) -> list[End]:
    """Run one Session in this process."""
    from slm_lab.experiment.files.sink import LocalSink
    from slm_lab.experiment.session.context import SessionContext
    from slm_lab.experiment.session.session import Session

    with watched(job.spec, job.stop, job.emit) as beat:
        context = SessionContext(job.stop, beat, resumed=job.resumed)
        session = Session(job.spec, 0, job.plan, trial=job.trial, context=context)
        try:
            with build_errors(job.spec.env.name, job.stop):
                session.build()
            restore_handlers()
            if job.stop.requested:
                return [End(0, "stopped")]
            paths = job.open_run(session.parts.choices)
            with _logged_to(paths.session_log(0, job.trial)):
                sink = LocalSink(paths, job.trial, job.emit)
                try:
                    result = session.train(sink)
                except BaseException as error:  # an env may raise anything
                    if not from_user_code(error):
                        raise
                    logger.info("failed", exc_info=True)
                    end = End(0, "failed", cause(error))
                else:
                    end = End(0, "stopped" if result.interrupted else "done")
                finally:
                    sink.close()
            job.emit(end)
            return [end]
        finally:
            session.close()


@contextmanager
def watched(spec: Spec, stop: Stop, emit: Emit) -> Iterator[Beat]:
    """Watch the heartbeat of this process, which builds and steps the envs of a spec in the block, by meta.stall_notice and stall_limit."""
    heartbeat, meta = Heartbeat(), spec.meta

    def stalled(seconds: float, phase: str) -> None:
        emit(Notice(f"no progress for {seconds:.0f} s ({phase})"))

    with watchdog(heartbeat, stop, grace=STOP_GRACE, report=stalled, stall_notice=meta.stall_notice, stall_limit=meta.stall_limit):
        yield heartbeat.beat


class _Log(logging.FileHandler):
    """A log that cannot be written (the disk is full) is not an error of its own."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Write what is logged to the Session's log too."""
    handler = _Log(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()


class _SessionProcesses:
    """The Sessions of a job, each in a child process: those that wait, those that run, and how the others ended.

    Each child builds its envs and agent at once. The run folder is created when the first one is ready; each begins to train when it is
    told the folder. Sessions that train one net begin together, and one that dies is restarted, attached to the same shared arrays.
    """

    def __init__(self, job: Job) -> None:
        meta = job.spec.meta
        self.job = job
        self.waiting = deque(job.indices)
        self.tasks: dict[Child, SessionTask] = {}
        """Of the Sessions that run."""
        self.choices: dict[Child, Mapping[str, str | int]] = {}
        """Of those that are ready."""
        self.begun: set[Child] = set()
        self.ended: dict[Child, End] = {}
        """Of those that have reported their end, but whose process still runs."""
        self.ends: list[End] = []
        self.paths: RunPaths | None = None
        self.deadline: float | None = None
        self.memory = SharedFd(shared_file()) if meta.distributed else None
        self.supervisor = Supervisor(meta.stall_notice, meta.stall_limit)

    def run(self) -> list[End]:
        concurrent_sessions = self.job.plan.concurrent_sessions(self.job.spec.meta)
        try:
            while self.waiting or self.tasks:
                if self.job.stop.requested:
                    self._stop()
                while self.waiting and len(self.tasks) < concurrent_sessions:
                    self._start(self.waiting.popleft())
                for event in self.supervisor.events(0.2):
                    self._handle(event)
                self._begin()
        finally:
            self.supervisor.close()
            if self.memory is not None:
                os.close(self.memory.fd)
        return self.ends

    def _start(self, index: int) -> None:
        job = self.job
        task = SessionTask(job.spec, index, job.trial, job.plan, self.memory, resumed=job.resumed)
        self.tasks[self.supervisor.start(f"session {index}", run_session, task)] = task

    def _handle(self, event: Event) -> None:
        match event:
            case Message(child, "ready", (choices,)):
                self.choices[child] = choices
            case Message(child, "event", (End() as end,)):
                self.ended[child] = end
                child.stop(_CLOSE_SECONDS)
            case Message(_, "event", (reported,)):
                self.job.emit(reported)
            case Message(child, "user_error", (error,)):
                if self.paths is None:
                    raise error
                self.ended[child] = End(self.tasks[child].index, "failed", str(error))
            case Message(child, "failed", (reason,)):
                self.ended[child] = End(self.tasks[child].index, "failed", reason)
            case Stalled(child, seconds, phase, "notice"):
                self.job.emit(Notice(f"{child.name}: no progress for {seconds:.0f} s ({phase})"))
            case Stalled(child, seconds, phase, _):
                self.supervisor.kill(child)
                self._died(child, f"made no progress for {seconds:.0f} s ({phase}; meta.stall_limit)", "")
            case Died(child, reason, output):
                self._died(child, reason, output)

    def _died(self, child: Child, reason: str, output: str) -> None:
        """The process of a Session has ended: its Session is over, or is restarted if other Sessions train the same net."""
        task, end = self.tasks[child], self.ended.pop(child, None)
        most = self.job.spec.meta.max_restart
        if end is None and task.memory is not None and child.restart < most and not self.job.stop.requested:
            self.job.emit(Notice(f"{child.name} {reason}; restarting it ({child.restart + 1} of {most})"))
            self.choices.pop(child, None)
            self.begun.discard(child)
            try:
                self.supervisor.restart(child, replace(task, fresh=self.paths is None, resumed=self.paths or task.resumed))
            except OSError as error:  # no memory, no process: the others continue
                reason = f"{reason}; a new process could not be started: {error.strerror or error}"
            else:
                return
        self._end(child, end or End(task.index, "failed", "\n".join([reason, *([output] if output else [])])))

    def _begin(self) -> None:
        """Order those to begin that are ready; those that train one net, together."""
        ready = [child for child in self.choices if child not in self.begun and child in self.tasks]
        if self.job.stop.requested:  # it may have come while processes were started, when signals are held back
            return
        if self.memory is not None and self.paths is None and len(ready) < len(self.tasks):
            return
        for child in ready:
            self.paths = self.paths or self.job.open_run(self.choices[child])
            self.begun.add(child)
            child.send(self.paths)

    def _end(self, child: Child, end: End) -> None:
        self.supervisor.kill(child)
        del self.tasks[child]
        self.ends.append(end)
        self.job.emit(end)

    def _stop(self) -> None:
        """Let those that have begun save themselves; the others have nothing to save."""
        self.waiting.clear()
        if self.deadline is None:
            self.deadline = time.monotonic() + STOP_SECONDS
            if self.begun:
                self.job.emit(Notice(SAVING))
            for child in list(self.tasks):
                if child in self.begun:
                    child.stop(STOP_SECONDS)
                else:
                    self._end(child, End(self.tasks[child].index, "stopped"))


def run_processes(job: Job) -> list[End]:
    """Run each Session in a process of its own, as many at a time as the plan allows. Raises UserError on Windows."""
    if sys.platform == "win32":
        advice = "on Windows set meta.max_session=1 and meta.distributed=false"
        raise UserError(f"several sessions and meta.distributed require Linux or macOS; {advice}")
    if job.spec.meta.distributed:
        _check_memory(job.spec)
    return _SessionProcesses(job).run()


def run_ray(job: Job) -> list[End]:
    """Run each Session on a node of the Ray cluster plan.cluster. Raises UserError if it cannot be used."""
    from slm_lab.experiment.run.cluster_sessions import run_on_cluster

    return run_on_cluster(job)


ENGINES: dict[str, Engine] = {"inline": run_inline, "processes": run_processes, "ray": run_ray}
"""Name → engine."""


def choose_engine(spec: Spec, plan: Plan | None = None) -> str:
    """The engine for a spec: one Session that trains a net of its own needs no other process."""
    if plan is not None and plan.cluster is not None:
        return "ray"
    return "inline" if spec.meta.max_session == 1 and not spec.meta.distributed else "processes"


def _check_memory(spec: Spec) -> None:
    """Raise SpecError if the processes of Sessions that train one net, which all run at once, do not fit this machine's memory."""
    sessions, available, worker = spec.meta.max_session, memory_bytes(), _WORKER_BYTES[start_method()]
    if sessions * worker > available:
        each, has, fit = worker / 2**20, available / 2**30, available // worker
        needed = f"{sessions} concurrent sessions (meta.distributed) need at least {each:.0f} MiB each"
        message = f"{needed}; this machine has {has:,.1f} GiB, enough for {fit}"
        raise SpecError(spec.name, [Problem("meta.max_session", message)])


@contextmanager
def _store_to_check(spec: Spec) -> Iterator[SharedArrays | None]:
    """Shared arrays with which one Session of the spec can be built; None if Sessions train nets of their own."""
    if not spec.meta.distributed:
        yield None
        return
    fd = shared_file()
    try:
        yield shared_arrays(spec, fd)
    finally:
        os.close(fd)


def check_builds(specs: list[Spec], plan: Plan, source: str) -> list[str]:
    """Make envs and agent of each spec once, and return a line on each: parameters, memory, and how long training takes (see build_report).

    Raises SpecError with the problems of all of them; `source` names the specs.
    """
    from slm_lab.experiment.run.build_report import build_report

    return _with_each_built(build_report, specs, plan, source)


def expected_times(specs: list[Spec], plan: Plan, source: str) -> list[float]:
    """Return about how many seconds a run of each spec trains, NaN if unknown. Otherwise as check_builds."""
    from slm_lab.experiment.run.build_report import expected_seconds

    return _with_each_built(expected_seconds, specs, plan, source)


def _with_each_built(report: Callable[[Session], T], specs: list[Spec], plan: Plan, source: str) -> list[T]:
    from slm_lab.experiment.run.build_report import quick
    from slm_lab.experiment.session.context import SessionContext
    from slm_lab.experiment.session.session import Session
    from slm_lab.experiment.training.resolve import completed, with_seed

    problems: list[Problem] = []
    reports: list[T] = []
    for spec in specs:
        prefix = f"{spec.name}." if len(specs) > 1 else ""
        try:
            with _store_to_check(spec) as store, watched(spec, stop := Stop(), _show_notice) as beat:
                with build_errors(spec.env.name, stop):
                    context = SessionContext(beat=beat, store=store)
                    session = Session(quick(completed(with_seed(spec, 0), beat)), plan=plan, context=context).build()
                try:
                    reports += [report(session)] if not problems else []
                finally:
                    session.close()
        except SpecError as error:
            problems += [replace(problem, path=f"{prefix}{problem.path}") for problem in error.problems]
    if problems:
        raise SpecError(source, problems)
    return reports


def _show_notice(event: RunEvent) -> None:
    if isinstance(event, Notice):
        notice(event.text)


def failures(ends: list[End]) -> dict[int, str]:
    """Index → cause of the Sessions that failed."""
    return {end.session: end.detail for end in ends if end.status == "failed"}
