"""A child process of the supervisor: the child's side."""

from __future__ import annotations

import atexit
import faulthandler
import io
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from slm_lab.experiment.plan import Stop
from slm_lab.experiment.process import server
from slm_lab.experiment.process.heartbeat import WAITING, Heartbeat

ORPHAN_SECONDS = 20.0
"""Time that a child has to save its work after its parent died."""
_PRINTED_BYTES = 2**20
"""Copied at most of what a child printed before it prints to a log."""

Target = Callable[..., None]
"""target(context, *args): what a child does. A function of a module that can be imported, not of the user's script."""


class SharedFd:
    """A file descriptor handed to a child among its arguments. In the child `fd` is a copy that belongs to the child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_fd, (reduction.DupFd(self.fd),)


def _received_fd(copy: Any) -> SharedFd:
    fd: int = copy.detach()
    os.set_inheritable(fd, False)
    return SharedFd(fd)


class Setup:
    """What a child is to have of its parent at the start. It is applied where it is unpickled, before what comes after it is loaded.

    Args: printed: descriptor that the child's stdout and stderr go to.
    """

    def __init__(self, printed: int) -> None:
        self.printed = printed

    def __reduce__(self) -> tuple[Any, ...]:
        umask = os.umask(0o022)
        os.umask(umask)
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        priority = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
        return _set_up, (SharedFd(self.printed), dict(os.environ), umask, cores, priority)


def _set_up(printed: SharedFd, environ: dict[str, str], umask: int, cores: set[int] | None, priority: int) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    server.default_signals()
    print_to_fd(printed.fd)
    os.close(printed.fd)
    faulthandler.enable()
    sys.excepthook = sys.__excepthook__
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
    os.umask(umask)
    with suppress(OSError):
        if cores is not None:
            os.sched_setaffinity(0, cores)
    with suppress(OSError):
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, 0, priority)
    if preload := sys.modules.get("slm_lab.experiment.process.preload"):
        preload.plain_process.adopted = True
        server.inherit_server()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))


def print_to_fd(fd: int) -> None:
    """Let descriptors 1 and 2, also those of C libraries, write to `fd`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


class ChildContext:
    """What the target of a child process works with.

    Attributes:
        name: the child's name.
        restart: how many processes did this work before and died.
        stop: requested once the parent said so, or is gone.
        heartbeat: of this process; `beat(phase)` is its method.
    """

    def __init__(self, name: str, restart: int, connection: Connection, heartbeat: Heartbeat) -> None:
        self.name, self.restart, self.heartbeat, self.beat = name, restart, heartbeat, heartbeat.beat
        self.stop = Stop()
        self.orphaned = False
        """The parent is gone."""
        self._connection, self._sending = connection, threading.Lock()
        self._orders: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def send(self, kind: str, *content: Any) -> None:
        """Send the parent a message, from any thread. A parent that is gone is no error."""
        with self._sending, suppress(OSError):
            self._connection.send((kind, *content))

    def receive(self, timeout: float | None = None) -> Any:
        """The parent's next order; None once a stop is requested and no order is left. Raises TimeoutError. The phase becomes "waiting"."""
        self.beat(WAITING)
        try:
            order = self._orders.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if order is None:
            self._orders.put(None)  # for the next call
        return order

    def print_to(self, path: Path) -> None:
        """Append what this process prints to `path` from now on, and what it printed so far where that was kept in memory."""
        path = path.absolute()
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with suppress(OSError):  # not readable: it is a log already
            os.write(fd, os.pread(1, _PRINTED_BYTES, 0))
        print_to_fd(fd)
        os.close(fd)
        self.send("_output", path)

    def _listen(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    kind, order = self._connection.recv()
                    if kind == "stop":
                        self._request_stop()
                    else:
                        self._orders.put(order)
        finally:
            self.orphaned = True
            self._request_stop()
            time.sleep(ORPHAN_SECONDS)
            end_group()

    def _request_stop(self) -> None:
        self.stop.requested = True
        self._orders.put(None)


def end_group() -> None:
    """End this process and all that it has started."""
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(
    setup: None,
    name: str,
    restart: int,
    connection: Connection,
    memory: SharedFd,
    size: int,
    index: int,
    target: Target,
    args: tuple[Any, ...],
) -> None:
    """Run a target. An exception that it raises becomes the message ("failed", traceback), and exit code 1."""
    os.set_inheritable(connection.fileno(), False)
    mapped = mmap.mmap(memory.fd, size)
    os.close(memory.fd)
    context, code = ChildContext(name, restart, connection, Heartbeat(mapped, index)), 0
    try:
        target(context, *args)
    except SystemExit:
        raise
    except BaseException as error:
        context.send("failed", "".join(traceback.format_exception(error)))
        code = 1
    finally:
        context.send("_end")
        for left in multiprocessing.active_children():
            left.kill()  # exit would wait for it
        if "slm_lab.experiment.process.preload" in sys.modules:
            atexit._run_exitfuncs()  # a copy of the fork server ends without
        if context.orphaned:
            end_group()
    sys.exit(code)
