"""The process of a Session on a node of the cluster, which Ray has started. This module does not import ray."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_lab.experiment.collect.workers.ray_pool import open_pool
from slm_lab.experiment.events import End, Event, Notice
from slm_lab.experiment.execute.local.failures import cause
from slm_lab.experiment.execute.local.heartbeat import WAITING, Heartbeat
from slm_lab.experiment.execute.local.interrupt import Blocked, watchdog
from slm_lab.experiment.execute.ray.remote import Remote
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Interrupted, Plan, Stop, UserError
from slm_lab.experiment.session.cluster.remote_arrays import RemoteArrays
from slm_lab.experiment.session.cluster.remote_sink import RemoteSink
from slm_lab.experiment.session.context import SessionContext
from slm_lab.experiment.session.session_process import STOP_GRACE
from slm_lab.lib.log import logger
from slm_lab.spec.base import SpecError
from slm_lab.spec.spec import Spec


@dataclass(frozen=True)
class ClusterTask:
    """Which Session a process runs."""

    spec: Spec
    index: int
    trial: int
    plan: Plan
    folder: Path
    """Current folder of the driver."""
    restart: int = 0
    """Number of processes that died before this one."""
    resumed: RunPaths | None = None
    """The run that the Session continues."""
    begun: bool = False
    """An earlier process has trained."""

    @property
    def fresh(self) -> bool:
        """Other Sessions that train the same net have not begun either."""
        return not (self.begun and self.spec.meta.distributed)


@dataclass(frozen=True)
class Ready:
    """A Session was built, or not."""

    pid: int
    choices: Mapping[str, str | int] | None = None
    error: SpecError | UserError | None = None
    """What the user can correct."""
    failure: str = ""


class SessionWorker:
    """Builds a Session and trains it. `stop` is called from another thread meanwhile.

    Args:
        sink: the SinkServer.
        server: the ParameterServer of Sessions that train one net.
    """

    def __init__(self, task: ClusterTask, sink: Remote, server: Remote | None = None) -> None:
        self.task, self.sink, self.server = task, sink, server
        self.node = sink.node
        self._stop, self._heartbeat = Stop(), Heartbeat()
        self._session: Any = None
        with suppress(OSError):  # this node has no such folder
            os.chdir(task.folder)
        if str(task.folder) not in sys.path:
            sys.path.append(str(task.folder))  # for "package.module:Name" in a spec
        logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
        logger.setLevel(logging.INFO)
        logger.addHandler(_Notices(self._report))

    def _report(self, event: Event) -> None:
        self.sink.send("report", self.task.index, self.task.restart, event)

    def stop(self) -> None:
        """Let the Session save itself and end."""
        self._stop.requested = True

    def build(self) -> Ready:
        """Build the Session and load its last state."""
        from slm_lab.experiment.session.session import Session

        task = self.task
        store: RemoteArrays | None = None
        if self.server is not None:
            store = RemoteArrays(self.server, task.spec, task.index, lambda: session.parts.info, fresh=task.fresh)
        restart = 0 if task.fresh else task.restart
        context = SessionContext(self._stop, self._heartbeat.beat, store, restart, task.resumed, open_pool)
        self._session = session = Session(task.spec, task.index, task.plan, trial=task.trial, context=context)
        try:
            with watchdog(self._heartbeat, self._stop, grace=STOP_GRACE, stall_limit=task.spec.meta.stall_limit):
                session.build()
        except (SpecError, UserError) as error:
            return Ready(os.getpid(), error=error)
        except (Exception, Blocked, Interrupted) as error:
            return Ready(os.getpid(), failure=cause(error))
        self._heartbeat.beat(WAITING)
        return Ready(os.getpid(), session.parts.choices)

    def train(self, paths: RunPaths) -> End:
        """Train to the end."""
        task, session = self.task, self._session
        log = _Log(self.sink, paths.session_log(task.index, task.trial))
        log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(log)
        logger.info("process %d on node %s of %s, restart %d", os.getpid(), self.node, platform.node(), task.restart)
        meta = task.spec.meta

        def stalled(seconds: float, phase: str) -> None:
            self._report(Notice(f"session {task.index}: no progress for {seconds:.0f} s ({phase})"))

        limits = {"stall_notice": meta.stall_notice, "stall_limit": meta.stall_limit}
        try:
            with watchdog(self._heartbeat, self._stop, grace=STOP_GRACE, report=stalled, **limits):
                sink = RemoteSink(self.sink, task.index, task.restart, paths, task.trial)
                result = session.train(sink)
                sink.close()
        except (Exception, Blocked, Interrupted) as error:
            logger.info("failed", exc_info=True)
            return End(task.index, "failed", cause(error))
        return End(task.index, "stopped" if result.interrupted else "done")

    def close(self) -> None:
        """Release envs and processes."""
        if self._session is not None:
            self._session.close()


class _Log(logging.Handler):
    """Sends what is logged to the process that writes the logs."""

    def __init__(self, sink: Remote, path: Path) -> None:
        super().__init__()
        self.sink, self.path = sink, path

    def emit(self, record: logging.LogRecord) -> None:
        self.sink.send("log", self.path, self.format(record))


class _Notices(logging.Handler):
    """Sends what is logged as events."""

    def __init__(self, report: Any) -> None:
        super().__init__(logging.WARNING)
        self.report = report

    def emit(self, record: logging.LogRecord) -> None:
        self.report(Notice(record.getMessage()))
