"""A Session in a process of its own: the child's side."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slm_lab.experiment.engine import cause
from slm_lab.experiment.engine.spawned import CommonFile
from slm_lab.experiment.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.lib.heap import PRIVATE, Heap
from slm_lab.lib.log import logger
from slm_lab.spec.base import SpecError
from slm_lab.spec.spec import Spec

_ORPHAN_SECONDS = 20.0
"""So long may a Session take to save itself after its parent died."""


_SENDING = threading.Lock()
"""Notices may come from any thread, and a message must not be cut in two by another."""


class _Orders:
    """What the parent said so far. Listens in a thread; when the parent is gone, the Session saves itself and ends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.stop = Stop()
        self.paths: RunPaths | None = None
        self.go = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while (order := self.connection.recv()) != "stop":
                self.paths = order
                self.go.set()
            self.stop.requested = True
            self.go.set()
            self.connection.recv()  # returns only by EOFError: the parent is gone
        self.stop.requested = True
        self.go.set()
        time.sleep(_ORPHAN_SECONDS)
        os._exit(1)

    def wait(self) -> RunPaths | None:
        """The files to write, or None to end before beginning."""
        self.go.wait()
        return self.paths


class _Notices(logging.Handler):
    """Sends what is logged to the parent's screen."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.WARNING)
        self.connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        _send(self.connection, "notice", record.getMessage())


@dataclass(frozen=True)
class Task:
    """Which Session a process is to run."""

    spec: Spec
    index: int
    trial: int
    plan: Plan
    common: CommonFile | None = None
    """Where the global net lies, for meta.distributed."""
    fresh: bool = True
    """Training has not begun anywhere."""
    restart: int = 0
    """Processes that died in this Session's place."""

    def heap(self) -> Heap:
        from slm_lab.experiment.sessions import common_heap  # torch comes with it

        return PRIVATE if self.common is None else common_heap(self.spec, self.common.fd, self.index, fresh=self.fresh)


def main(task: Task, connection: Connection, scratch: Path) -> None:
    """Run a Session. Messages to the parent: ready, progress, notice, then one of done, user_error, failed.

    What the process prints goes to `scratch`, and to the Session's log once the run is open. Signals that ask for an end
    reach the whole process group, but are blocked here from the start: the parent passes them on as an order.
    """
    print_to(scratch)
    faulthandler.enable()
    orders = _Orders(connection)
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    logger.addHandler(_Notices(connection))
    try:
        _run(task, orders, scratch)
    except (SpecError, UserError) as error:
        _send(connection, "user_error", error)
    except BaseException as error:
        _send(connection, "failed", cause(error))
        with suppress(OSError):  # the disk is full
            logger.info("failed", exc_info=True)
        sys.exit(1)
    finally:
        for left in active_children():
            left.kill()  # exit would wait for it after a SIGTERM, which it blocks too


def _run(task: Task, orders: _Orders, scratch: Path) -> None:
    from slm_lab.experiment.sessions import make_session

    report = partial(_send, orders.connection, "progress")
    session = make_session(
        task.spec, task.index, task.plan, trial=task.trial, stop=orders.stop, report=report, heap=task.heap(), restart=task.restart
    ).build()
    _send(orders.connection, "ready", session.env.backend)
    paths = orders.wait()
    if paths is None:
        session.close()
        _send(orders.connection, "done", True)
        return
    log = paths.session_log(task.index, task.trial)
    with log.open("ab") as file:
        file.write(scratch.read_bytes())
    print_to(log)
    result = session.run(paths)
    _send(orders.connection, "done", result.interrupted)


def _send(connection: Connection, kind: str, *content: Any) -> None:
    with _SENDING, suppress(OSError):  # a parent that is gone needs no news; _Orders ends the Session
        connection.send((kind, *content))


def print_to(path: Path) -> None:
    """Let file descriptors 1 and 2, also those of C libraries, append to `path`."""
    with path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
