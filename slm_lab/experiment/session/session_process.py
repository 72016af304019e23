"""Run a Session in its own process, as a task of an executor."""

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
from slm_lab.experiment.execute.local.user_code import convert_build_errors
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
"""Maximum time in seconds that an env may block after a stop request before the env is interrupted."""


OpenStore = Callable[[Spec, int, Callable[[], EnvInfo], bool], Store]
"""Function open_store(spec, index, info, fresh), which returns the Store of Session `index` with the arrays that all Sessions of one net
share. The function `info` returns the EnvInfo of the Session's env when the env is built. The flag `fresh` is True if training of the net
has not begun yet."""
OpenSink = Callable[[RunPaths, int, int, int, Emit], RunSink]
"""Function open_sink(paths, trial, index, restart, emit), which returns the sink of Session `index` for the process that was started after
`restart` restarts. The sink passes events other than rows to `emit`."""


@dataclass(frozen=True)
class SessionTask:
    """Arguments of a process that runs a Session."""

    spec: Spec
    index: int
    trial: int
    plan: Plan
    open_store: OpenStore | None = None
    """Function that opens the shared arrays of meta.distributed, or None if the Session trains a separate net."""
    fresh: bool = True
    """True if no process has begun to train the net yet, and also if the Session trains a separate net and starts from its last
    checkpoint."""
    resumed: RunPaths | None = None
    """The run from whose last checkpoint the Session continues, or None if the Session starts from the beginning."""
    open_sink: OpenSink | None = None
    """Function that opens the sink, or None if the process can access the run folder and writes the Session's tables to the run folder."""
    open_pool: OpenPool | None = None
    """Function that starts the rollout workers, or None if rollout workers are processes on this machine. (The default is None because this
    module must not import torch, which the process of the trial does not need.)"""
    locks: bool = True
    """Whether the process can access the run folder and must lock the Session there, so that no other process runs the Session."""


def make_shared_arrays(spec: Spec, fd: int, index: int = 0, *, fresh: bool = True) -> SharedArrays:
    """Return the Store of Session `index` of a spec with meta.distributed. The shared arrays are in the file with the descriptor `fd`."""
    meta = spec.meta
    return SharedArrays(fd, index, meta.max_session, synced=meta.distributed == "synced", locked=meta.hogwild_lock, fresh=fresh)


def open_shared_memory_store(file: SharedFd, spec: Spec, index: int, info: Callable[[], EnvInfo], fresh: bool) -> SharedArrays:
    """Return the Store of a Session whose shared arrays are in shared memory, for Sessions that all run on one machine.

    With a fixed first argument (functools.partial), the function has the type OpenStore.
    """
    return make_shared_arrays(spec, file.fd, index, fresh=fresh)


def run_session(context: Context, task: SessionTask) -> None:
    """Build a Session, wait for the RunPaths from the parent process, and train. The process of a Session runs this function.

    When the Session is built, the process sends the message ("ready", settings) with the settings that the Session chose for this machine
    (SessionParts.chosen_settings). During training, the process sends ("event", Event) for each event except the rows of the tables, which
    the sink of the Session writes. The last message is ("event", SessionEnded), ("user_error", error) or ("failed", cause).
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
    from slm_lab.experiment.session.build import SessionContext
    from slm_lab.experiment.session.session import Session

    store = None if task.open_store is None else task.open_store(task.spec, task.index, lambda: session.parts.env_info, task.fresh)
    given = SessionContext(
        context.stop, context.beat, store, 0 if task.fresh else context.restart, task.resumed, task.open_pool or open_pool
    )
    session = Session(task.spec, task.index, task.plan, trial=task.trial, context=given)
    try:
        with convert_build_errors(task.spec, context.stop):
            session.build()
        context.send("ready", session.parts.chosen_settings)
        paths = context.receive()
        if paths is None:
            context.send("event", SessionEnded(task.index, "stopped"))
            return
        assert isinstance(paths, RunPaths)
        context.send("event", _train(context, task, session, paths))  # sent before the env is closed, since closing may block
    finally:
        session.close()


def _train(context: Context, task: SessionTask, session: Any, paths: RunPaths) -> SessionEnded:
    # hold the lock until this process ends, since the process may outlive the trial
    lock = SessionLock(paths.session_lock(task.index, task.trial)) if task.locks else None
    context.redirect_output(paths.session_log(task.index, task.trial))

    def forward(event: Event) -> None:
        context.send("event", event)

    sink: RunSink
    if task.open_sink is None:
        sink = LocalSink(paths, task.trial, forward, task.spec.meta.track)
    else:
        sink = task.open_sink(paths, task.trial, task.index, context.restart, forward)
    end = SessionEnded(task.index, "failed")
    try:
        end = SessionEnded(task.index, "stopped" if session.train(sink).interrupted else "done")
    finally:
        sink.close(end.status)
        if lock is not None:
            lock.release()
    return end
