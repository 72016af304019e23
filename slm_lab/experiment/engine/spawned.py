"""A spawned process as its parent sees it: orders go to it, messages and its death come from it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, reduction, resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from slm_lab.experiment.engine import signals_blocked

_THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What numpy's and torch's libraries read when they are loaded."""


class CommonFile:
    """The descriptor of a file that processes have in common, handed to a child among its arguments."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(copy: Any) -> CommonFile:
    return CommonFile(copy.detach())


class Spawned:
    """Runs target(*args, connection, *more), which sends its messages over the connection and receives orders.

    Signals that ask for an end are blocked in it from the start: its parent passes them on as orders.
    """

    def __init__(self, name: str, target: Callable[..., None], args: tuple[Any, ...], more: tuple[Any, ...] = ()) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.open = True
        self.process = context.Process(target=target, args=(*args, theirs, *more), name=name)
        with signals_blocked():
            resource_tracker.ensure_running()  # begun by the first process otherwise, and then unblocks signals on its way
        with signals_blocked(), _hidden_main(), _one_thread():
            self.process.start()
        theirs.close()

    @property
    def waitable(self) -> list[Connection | int]:
        """What to wait for: messages, and its death."""
        return [self.connection, self.process.sentinel] if self.open else [self.process.sentinel]

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """What has arrived."""
        try:
            while self.open and self.connection.poll():
                yield self.connection.recv()
        except (EOFError, OSError):
            self.open = False

    def send(self, order: Any) -> None:
        with suppress(OSError):  # it has just died; its sentinel says so
            self.connection.send(order)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def how_it_ended(self) -> str:
        """Why a process ended that has not said so itself."""
        code = self.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return how + (" (often: out of memory)" if code == -signal.SIGKILL else "")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let a process that is started meanwhile use one thread for numpy and torch, which it loads as soon as it begins."""
    before = {name: os.environ.get(name) for name in _THREAD_LIMITS}
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep spawn from running the user's script again in the child, which needs nothing of it.

    So a trial can be run from a script without `if __name__ == "__main__"`, a notebook or `python -c`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
