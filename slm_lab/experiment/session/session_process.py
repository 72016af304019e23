"""A Session in a child process."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass

from slm_lab.experiment.events import End, Event, Notice
from slm_lab.experiment.execute.local.child import ChildContext, SharedFd
from slm_lab.experiment.execute.local.interrupt import watchdog
from slm_lab.experiment.execute.local.user_code import build_errors
from slm_lab.experiment.files.lock import SessionLock
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Interrupted, Plan, UserError
from slm_lab.lib.log import logger
from slm_lab.lib.store import SharedArrays
from slm_lab.spec.base import SpecError
from slm_lab.spec.spec import Spec

STOP_GRACE = 5.0
"""Seconds after a stop request for which an env may block before it is interrupted."""


@dataclass(frozen=True)
class SessionTask:
    """Which Session a process runs."""

    spec: Spec
    index: int
    trial: int
    plan: Plan
    memory: SharedFd | None = None
    """Of the shared arrays, for meta.distributed."""
    fresh: bool = True
    """Training has not begun in any process."""
    resumed: RunPaths | None = None
    """The run that the Session continues."""

    def store(self) -> SharedArrays | None:
        """This Session's view of the shared arrays."""
        return None if self.memory is None else shared_arrays(self.spec, self.memory.fd, self.index, fresh=self.fresh)


def shared_arrays(spec: Spec, fd: int, index: int = 0, *, fresh: bool = True) -> SharedArrays:
    """The arrays in file `fd` as Session number `index` of a spec with meta.distributed sees them."""
    meta = spec.meta
    return SharedArrays(fd, index, meta.max_session, synced=meta.distributed == "synced", locked=meta.hogwild_lock, fresh=fresh)


class _Notices(logging.Handler):
    """Sends what is logged as events."""

    def __init__(self, context: ChildContext) -> None:
        super().__init__(logging.WARNING)
        self.context = context

    def emit(self, record: logging.LogRecord) -> None:
        self.context.send("event", Notice(record.getMessage()))


def run_session(context: ChildContext, task: SessionTask) -> None:
    """Build a Session, wait for the order to begin (its RunPaths), and train.

    Messages: ("ready", choices), ("event", Event) for each event but rows, then ("event", End); instead of End ("user_error", error) or
    ("failed", cause).
    """
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    logger.addHandler(_Notices(context))
    try:
        with watchdog(context.heartbeat, context.stop, grace=STOP_GRACE):
            _run(context, task)
    except (SpecError, UserError) as error:
        context.send("user_error", error)
    except Interrupted:
        context.send("event", End(task.index, "stopped"))
    except BaseException:
        with suppress(OSError):  # the disk is full
            logger.info("failed", exc_info=True)
        raise


def _run(context: ChildContext, task: SessionTask) -> None:
    from slm_lab.experiment.files.sink import LocalSink
    from slm_lab.experiment.session.context import SessionContext
    from slm_lab.experiment.session.session import Session

    given = SessionContext(context.stop, context.beat, task.store(), context.restart, task.resumed)
    session = Session(task.spec, task.index, task.plan, trial=task.trial, context=given)
    try:
        with build_errors(task.spec.env.name, context.stop):
            session.build()
        context.send("ready", session.parts.choices)
        paths = context.receive()
        if paths is None:
            context.send("event", End(task.index, "stopped"))
            return
        assert isinstance(paths, RunPaths)
        lock = SessionLock(paths.session_lock(task.index, task.trial))  # kept until this process ends: it may outlive the trial
        context.print_to(paths.session_log(task.index, task.trial))

        def forward(event: Event) -> None:
            context.send("event", event)

        sink = LocalSink(paths, task.trial, forward)
        try:
            result = session.train(sink)
        finally:
            sink.close()
            lock.release()
        context.send("event", End(task.index, "stopped" if result.interrupted else "done"))  # before the env is closed, which may block
    finally:
        session.close()
