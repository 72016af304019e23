"""A Session in a process of its own: a task of an executor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slm_lab.experiment.events import Emit, Event, Notice, SessionEnded
from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.execute.local.child import SharedFd
from slm_lab.experiment.execute.local.interrupt import watchdog
from slm_lab.experiment.execute.local.user_code import build_errors
from slm_lab.experiment.files.lock import SessionLock
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import LocalSink, RunSink
from slm_lab.experiment.plan import Interrupted, Plan, UserError
from slm_lab.lib.log import NoticeHandler, logger
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.store import SharedArrays, Store
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

if TYPE_CHECKING:
    from slm_lab.experiment.collect.workers.worker_pool import OpenPool

STOP_GRACE = 5.0
"""Seconds after a stop request for which an env may block before it is interrupted."""


OpenStore = Callable[[Spec, int, Callable[[], EnvInfo], bool], Store]
"""open_store(spec, index, info, fresh): the arrays of Sessions that train one net, as Session `index` sees them. `info` returns that of its
env, once it is built; `fresh`: training has not begun."""
OpenSink = Callable[[RunPaths, int, int, int, Emit], RunSink]
"""open_sink(paths, trial, index, restart, emit): the sink of Session `index`, from its process number `restart`; events other than rows go
to `emit`."""


@dataclass(frozen=True)
class SessionTask:
    """Which Session a process runs."""

    spec: Spec
    index: int
    trial: int
    plan: Plan
    open_store: OpenStore | None = None
    """For meta.distributed."""
    fresh: bool = True
    """Training has not begun in any process; or the Session, which trains a net of its own, begins with its last checkpoint."""
    resumed: RunPaths | None = None
    """The run whose last checkpoint the Session continues from."""
    open_sink: OpenSink | None = None
    """None: the process sees the folder of the run, and writes its tables there."""
    open_pool: OpenPool | None = None
    """Starts the rollout workers; None: processes of this machine. (This module imports no torch: the trial's own process needs none.)"""
    locks: bool = True
    """Whether the process sees the folder of the run, and locks its Session there."""


def shared_arrays(spec: Spec, fd: int, index: int = 0, *, fresh: bool = True) -> SharedArrays:
    """The arrays in file `fd` as Session number `index` of a spec with meta.distributed sees them."""
    meta = spec.meta
    return SharedArrays(fd, index, meta.max_session, synced=meta.distributed == "synced", locked=meta.hogwild_lock, fresh=fresh)


def shared_memory(file: SharedFd, spec: Spec, index: int, info: Callable[[], EnvInfo], fresh: bool) -> SharedArrays:
    """The OpenStore of processes of one machine, whose arrays are in a file in memory."""
    return shared_arrays(spec, file.fd, index, fresh=fresh)


def run_session(context: Context, task: SessionTask) -> None:
    """Build a Session, wait for the order to begin (its RunPaths), and train.

    Messages: ("ready", choices), ("event", Event) for each event but rows, then ("event", SessionEnded); instead of SessionEnded
    ("user_error", error) or ("failed", cause).
    """
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    logger.addHandler(NoticeHandler(lambda text: context.send("event", Notice(text))))
    try:
        with watchdog(context.heartbeat, context.stop, grace=STOP_GRACE):
            _run(context, task)
    except (SpecError, UserError) as error:
        context.send("user_error", error)
    except Interrupted:
        context.send("event", SessionEnded(task.index, "stopped"))
    except BaseException:
        with suppress(OSError):  # the disk is full
            logger.info("failed", exc_info=True)
        raise


def _run(context: Context, task: SessionTask) -> None:
    from slm_lab.experiment.collect.workers.worker_pool import open_pool
    from slm_lab.experiment.session.context import SessionContext
    from slm_lab.experiment.session.session import Session

    store = None if task.open_store is None else task.open_store(task.spec, task.index, lambda: session.parts.info, task.fresh)
    given = SessionContext(
        context.stop, context.beat, store, 0 if task.fresh else context.restart, task.resumed, task.open_pool or open_pool
    )
    session = Session(task.spec, task.index, task.plan, trial=task.trial, context=given)
    try:
        with build_errors(task.spec.env.name, context.stop):
            session.build()
        context.send("ready", session.parts.choices)
        paths = context.receive()
        if paths is None:
            context.send("event", SessionEnded(task.index, "stopped"))
            return
        assert isinstance(paths, RunPaths)
        context.send("event", _train(context, task, session, paths))  # before the env is closed, which may block
    finally:
        session.close()


def _train(context: Context, task: SessionTask, session: Any, paths: RunPaths) -> SessionEnded:
    # the lock is kept until this process ends: it may outlive the trial
    lock = SessionLock(paths.session_lock(task.index, task.trial)) if task.locks else None
    context.print_to(paths.session_log(task.index, task.trial))

    def forward(event: Event) -> None:
        context.send("event", event)

    sink: RunSink
    if task.open_sink is None:
        sink = LocalSink(paths, task.trial, forward)
    else:
        sink = task.open_sink(paths, task.trial, task.index, context.restart, forward)
    try:
        result = session.train(sink)
    finally:
        sink.close()
        if lock is not None:
            lock.release()
    return SessionEnded(task.index, "stopped" if result.interrupted else "done")
