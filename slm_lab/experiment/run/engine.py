"""Engines: functions that run the Sessions of a trial. To add an engine, add an entry to ENGINES."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slm_lab.experiment.events import Emit, Notice, SessionEnded
from slm_lab.experiment.events import Event as RunEvent
from slm_lab.experiment.execute.heartbeat import Heartbeat
from slm_lab.experiment.execute.local.fork_server import start_method
from slm_lab.experiment.execute.local.interrupt import restore_handlers, watchdog
from slm_lab.experiment.execute.local.user_code import convert_build_errors, describe_failure, is_from_user_code
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.run.sessions import Engine, Sessions, SessionsJob, local_host
from slm_lab.experiment.session.session_process import STOP_GRACE, make_shared_arrays
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.log import logger, notice
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

if TYPE_CHECKING:
    from slm_lab.experiment.session.session import Session

T = TypeVar("T")

_SESSION_BYTES = {"forkserver": 30 * 2**20, "spawn": 160 * 2**20}
"""Start method → memory in bytes of a Session's process, without memory that is shared with other processes.

The numbers of bytes were measured with A3C on CartPole. No other Session needs much less memory than a Session of this training. Processes
that are forked from the fork server share the memory of torch. Together with the processes of the trial and the fork server, 2 Sessions
take 382 MB and 8 Sessions take 566 MB.
"""


def run_inline(job: SessionsJob) -> list[SessionEnded]:
    """Run the only Session of a job in the current process, and return how the Session ended."""
    from slm_lab.experiment.files.sink import LocalSink
    from slm_lab.experiment.session.build import SessionContext
    from slm_lab.experiment.session.session import Session

    with monitor_progress(job.spec, job.stop, job.emit) as beat:
        context = SessionContext(job.stop, beat, resumed=job.resumed)
        session = Session(job.spec, 0, job.plan, trial=job.trial, context=context)
        try:
            with convert_build_errors(job.spec, job.stop):
                session.build()
            restore_handlers()
            if job.stop.requested:
                return [SessionEnded(0, "stopped")]
            paths = job.open_run(session.parts.chosen_settings)
            with _log_to_file(paths.session_log(0, job.trial)):
                sink, end = LocalSink(paths, job.trial, job.emit, job.spec.meta.track), SessionEnded(0, "failed")
                try:
                    result = session.train(sink)
                except BaseException as error:  # an env may raise any exception
                    if not is_from_user_code(error):
                        raise
                    logger.info("failed", exc_info=True)
                    end = SessionEnded(0, "failed", describe_failure(error))
                else:
                    end = SessionEnded(0, "stopped" if result.interrupted else "done")
                finally:
                    sink.close(end.status)
            job.emit(end)
            return [end]
        finally:
            session.close()


@contextmanager
def monitor_progress(spec: Spec, stop: Stop, emit: Emit) -> Iterator[Beat]:
    """Monitor the progress of this process while the with-block builds and steps envs. The yielded function records progress.

    If no progress is recorded for meta.stall_notice seconds, a Notice is emitted. If no progress is recorded for meta.stall_limit seconds,
    the with-block is interrupted with an error.
    """
    heartbeat, meta = Heartbeat(), spec.meta

    def stalled(seconds: float, phase: str) -> None:
        emit(Notice(f"no progress for {seconds:.0f} s ({phase})"))

    with watchdog(heartbeat, stop, grace=STOP_GRACE, report=stalled, stall_notice=meta.stall_notice, stall_limit=meta.stall_limit):
        yield heartbeat.beat


class _LogHandler(logging.FileHandler):
    """A handler for log files that ignores write errors, which occur for example if the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def _log_to_file(path: Path) -> Iterator[None]:
    """Write log records also to the log file of a Session while the with-block runs."""
    handler = _LogHandler(path, encoding="utf-8")
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


def run_processes(job: SessionsJob) -> list[SessionEnded]:
    """Run each Session of a job in a separate process of this machine. Raises UserError on Windows.

    The plan of the job limits the number of concurrent Sessions.
    """
    if not has_feature("groups"):
        advice = "on Windows set meta.max_session=1 and meta.distributed=false"
        raise UserError(f"several sessions and meta.distributed require Linux or macOS; {advice}")
    if job.spec.meta.distributed:
        _check_memory(job.spec)
    with local_host(job) as host:
        return Sessions(job, host).run()


def run_ray(job: SessionsJob) -> list[SessionEnded]:
    """Run each Session of a job on a node of the Ray cluster `job.plan.cluster`. Raises UserError if the cluster cannot be used."""
    from slm_lab.experiment.run.cluster_sessions import cluster_host

    with cluster_host(job) as (spec, host):
        return Sessions(replace(job, spec=spec), host).run()


ENGINES: dict[str, Engine] = {"inline": run_inline, "processes": run_processes, "ray": run_ray}
"""Name of an engine → the function that runs the Sessions of a job."""


def choose_engine(spec: Spec, plan: Plan | None = None) -> str:
    """Return the name of the engine that runs the Sessions of a spec.

    The engine is "ray" if the plan names a cluster, "inline" for a single Session without meta.distributed, and otherwise "processes".
    """
    if plan is not None and plan.cluster is not None:
        return "ray"
    return "inline" if spec.meta.max_session == 1 and not spec.meta.distributed else "processes"


def _check_memory(spec: Spec) -> None:
    """Raise SpecError if the processes of all Sessions that train one net (meta.distributed) do not fit into the memory of this machine."""
    sessions, available, session_bytes = spec.meta.max_session, memory_bytes(), _SESSION_BYTES[start_method()]
    if sessions * session_bytes > available:
        each, has, fit = session_bytes / 2**20, available / 2**30, available // session_bytes
        needed = f"{sessions} concurrent sessions (meta.distributed) need at least {each:.0f} MiB each"
        message = f"{needed}; this machine has {has:,.1f} GiB, enough for {fit}"
        raise SpecError(spec.name, [Problem("meta.max_session", message)])


@contextmanager
def _shared_arrays_for_build(spec: Spec) -> Iterator[SharedArrays | None]:
    """Yield the shared arrays that a Session with meta.distributed needs to be built. For a spec without meta.distributed, yield None."""
    if not spec.meta.distributed:
        yield None
        return
    fd = create_shared_file()
    try:
        yield make_shared_arrays(spec, fd)
    finally:
        os.close(fd)


def check_builds(specs: list[Spec], plan: Plan, source: str) -> list[str]:
    """Build the envs and the agent of each spec once, and return a line per spec with parameters, memory and training time.

    Each line is the result of describe_build. Raises SpecError with the problems of all specs.

    Args: source: origin of the specs, which the SpecError names.
    """
    from slm_lab.experiment.run.build_report import describe_build

    return _build_each(describe_build, specs, plan, source)


def expected_times(specs: list[Spec], plan: Plan, source: str) -> list[float]:
    """Return the estimated training time of each spec in seconds, or NaN for a spec whose training time is unknown.

    The arguments and errors are those of check_builds.
    """
    from slm_lab.experiment.run.build_report import expected_seconds

    return _build_each(expected_seconds, specs, plan, source)


def _build_each(report: Callable[[Session], T], specs: list[Spec], plan: Plan, source: str) -> list[T]:
    """Build each spec once, call `report` with the built Session, and return the results. The argument `source` is that of check_builds."""
    from slm_lab.experiment.run.build_report import measurement_spec
    from slm_lab.experiment.session.build import SessionContext
    from slm_lab.experiment.session.session import Session
    from slm_lab.experiment.training.resolve import complete_spec

    problems: list[Problem] = []
    reports: list[T] = []
    for spec in specs:
        prefix = f"{spec.name}." if len(specs) > 1 else ""
        try:
            with _shared_arrays_for_build(spec) as store, monitor_progress(spec, stop := Stop(), _show_notice) as beat:
                with convert_build_errors(spec, stop):
                    context = SessionContext(beat=beat, store=store)
                    session = Session(measurement_spec(complete_spec(spec, beat)), plan=plan, context=context).build()
                try:
                    reports.append(report(session))
                finally:
                    session.close()
        except SpecError as error:
            problems += [replace(problem, path=f"{prefix}{problem.path}".rstrip(".")) for problem in error.problems]
    if problems:
        raise SpecError(source, problems)
    return reports


def _show_notice(event: RunEvent) -> None:
    if isinstance(event, Notice):
        notice(event.text)


def failures(ends: list[SessionEnded]) -> dict[int, str]:
    """Return the failed Sessions as a dict: index of the Session → cause of the failure."""
    return {end.session: end.detail for end in ends if end.status == "failed"}
