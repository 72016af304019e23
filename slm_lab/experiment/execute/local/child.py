"""The code of a local task that runs in the child process."""

from __future__ import annotations

import atexit
import errno
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slm_lab.experiment.execute.executor import Context, Target
from slm_lab.experiment.execute.heartbeat import Heartbeat
from slm_lab.experiment.execute.local import fork_server as server
from slm_lab.experiment.execute.local.user_code import describe_failure
from slm_lab.experiment.files.lock import ORPHAN_SECONDS
from slm_lab.lib.process import InheritedState
from slm_lab.spec.models.meta import StartMethod

_PRINTED_BYTES = 2**20
"""Maximum number of bytes of earlier output that are copied to a log."""


class SharedFd:
    """A file descriptor that can be passed to a child as an argument. In the child, `fd` is a duplicate that the child owns."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_fd, (reduction.DupFd(self.fd),)


def _received_fd(duplicate: Any) -> SharedFd:
    fd: int = duplicate.detach()
    os.set_inheritable(fd, False)
    return SharedFd(fd)


class ChildSetup:
    """State of the parent process that a child applies when the child starts.

    A ChildSetup is the first argument of the child, and the state is applied when the ChildSetup is unpickled, before the later arguments
    are unpickled.

    Args:
        printed: file descriptor to which the child's stdout and stderr are redirected.
        start_method: start method (meta.start_method) of the processes that the child starts.
    """

    def __init__(self, printed: int, start_method: StartMethod) -> None:
        self.printed, self.start_method = printed, start_method

    def __reduce__(self) -> tuple[Any, ...]:
        return _apply_setup, (SharedFd(self.printed), InheritedState.of_this_process(), self.start_method)


def _apply_setup(printed: SharedFd, state: InheritedState, start_method: StartMethod) -> None:
    os.setpgid(0, 0)
    server.reset_stop_signals()
    redirect_output_to_fd(printed.fd)
    faulthandler.enable()
    sys.excepthook = sys.__excepthook__
    server.use_start_method(start_method)
    if _is_forked_from_server():
        server.use_parents_fork_server()


def _is_forked_from_server() -> bool:
    """Return whether this process was forked from the fork server."""
    return "slm_lab.experiment.execute.local.preload" in sys.modules


def redirect_output_to_fd(fd: int) -> None:
    """Redirect stdout and stderr, including the descriptors 1 and 2 that C libraries use, to the descriptor `fd`, and close `fd`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class ChildContext(Context):
    """The Context of a local task. A stop is also requested when the parent process has ended."""

    def __init__(self, name: str, restart: int, connection: Connection, heartbeat: Heartbeat) -> None:
        super().__init__(name, restart, heartbeat)
        self.orphaned = False
        """Whether the parent process has ended."""
        self._connection, self._sending = connection, threading.Lock()
        threading.Thread(target=self._receive_orders, name="orders", daemon=True).start()

    def send(self, kind: str, *content: Any) -> None:
        """Send a message to the parent process. Any thread may call this method. If the parent has ended, the message is dropped.

        If user code has closed the connection to the parent, this process exits, since the parent would otherwise wait forever for
        messages.
        """
        try:
            with self._sending:
                self._connection.send((kind, *content))
        except OSError as error:
            if error.errno == errno.EBADF:
                os.write(2, b"the env, or what it uses, closed file descriptors that it did not open\n")
                os._exit(1)

    def redirect_output(self, path: Path) -> None:
        """Redirect the output of this process to the end of the file `path`. Earlier output that was kept in memory is appended first."""
        path = path.absolute()
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with suppress(OSError):  # descriptor 1 is not readable if it is already a log
            os.write(fd, os.pread(1, _PRINTED_BYTES, 0))
        redirect_output_to_fd(fd)
        self.send("_output", path)

    def _receive_orders(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    kind, order = self._connection.recv()
                    if kind == "stop":
                        self.request_stop()
                    elif kind == "signal":
                        self.on_signal(order)
                    else:
                        self.orders.put(order)
        finally:
            self.orphaned = True
            self.request_stop()
            time.sleep(ORPHAN_SECONDS)
            os.killpg(0, signal.SIGKILL)


def main(setup: None, name: str, restart: int, connection: Connection, heartbeat: SharedFd, target: Target, args: tuple[Any, ...]) -> None:
    """Run the target of a task in the child process.

    If the target raises an exception, the message ("failed", cause) is sent (see user_code.describe_failure), and the process ends with
    exit code 1 or with the code of the SystemExit.
    """
    os.set_inheritable(connection.fileno(), False)
    context, code = ChildContext(name, restart, connection, Heartbeat(heartbeat.fd)), 0
    os.close(heartbeat.fd)
    try:
        target(context, *args)
    except BaseException as error:  # also SystemExit: exit code 0 without a message would mean an end without a result
        context.send("failed", describe_failure(error))
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1
    finally:
        context.send("_end")
        for left in multiprocessing.active_children():
            left.kill()  # sys.exit would wait until the child ends
        if _is_forked_from_server():
            atexit._run_exitfuncs()  # a process that was forked from the fork server would end without calling its exit hooks
        if context.orphaned:
            os.killpg(0, signal.SIGKILL)
    sys.exit(code)
