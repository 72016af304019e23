"""How the Sessions of a trial run: in this process, or each in its own."""

from __future__ import annotations

import errno
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from slm_lab.experiment.observers.dev_checks import DevCheckError
from slm_lab.experiment.paths import RunPaths
from slm_lab.experiment.plan import Stop

OpenRun = Callable[[str], RunPaths]
"""open_run(resolved backend): make the run's folder, once the first Session has shown that the spec can be built."""


class WorkerFailed(Exception):
    """A process that a Session needs failed, or died too often. The message says why, with that process's traceback."""


@dataclass(frozen=True)
class Outcome:
    """How a Session ended."""

    index: int
    status: Literal["done", "stopped", "failed"]
    """stopped: saved early, as asked."""
    detail: str = ""
    """failed: the cause, or the traceback, or the signal's name."""


STOP_SIGNALS: list[signal.Signals] = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Those that ask for an end: Ctrl-C, kill, a terminal that closes."""
_ONE_EVENT = 0.2
"""Signals within so many seconds are one: `timeout` sends SIGTERM to a process and to its group, systemd SIGTERM and SIGHUP."""


@contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop; a second one raises KeyboardInterrupt at once.

    Outside the main thread signals stay as they are, and so does a SIGHUP that is ignored (nohup).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first = 0.0

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if not stop.requested:
            first, stop.number, stop.requested = time.monotonic(), number, True
        elif time.monotonic() > first + _ONE_EVENT:
            raise KeyboardInterrupt

    ignored = [number for number in STOP_SIGNALS if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS if number not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Hold back what asks for an end in this thread and, for good, in a process that is started meanwhile."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cause(error: BaseException) -> str:
    """Why a Session failed: in its own words where the disk is full, a check of mode dev or a process of it failed, else the traceback."""
    if isinstance(error, (DevCheckError, WorkerFailed)):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the data folder is full ({error.strerror})"
    return "".join(traceback.format_exception(error))
