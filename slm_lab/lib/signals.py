"""Signals that ask a process to end, around the start of a child process.

A child must neither die of a Ctrl-C that its parent handles, nor pass a blocked or ignored signal on to programs that it runs itself:
those would not react to terminate(). So the parent starts it with these signals blocked (`stop_signals_blocked`), and the child installs
handlers that do nothing before it unblocks them (`discard_stop_signals`): exec resets handlers, but neither masks nor SIG_IGN.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS: list[signal.Signals] = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Ctrl-C, kill, a terminal that closes."""


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Delay STOP_SIGNALS until the end of this block; a process started inside begins with them blocked.

    The signal mask alone is not enough: it belongs to this thread, so the kernel delivers the signal to another one (those of BLAS and
    OpenMP do not block it), and Python then runs the handler in the main thread, inside the block. An exception raised there, between the
    start of a process and the assignment of its pid, would leave that process running. And the start of multiprocessing's resource tracker
    unblocks SIGINT and SIGTERM. So the handlers are replaced, too.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    delayed: list[int] = []
    handlers = _replace_handlers(lambda number, frame: delayed.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        for replaced, handler in handlers.items():
            signal.signal(replaced, handler)
        for number in dict.fromkeys(delayed):
            signal.raise_signal(number)  # pending until the next line
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _replace_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install `handler` for STOP_SIGNALS and return the previous handlers. Only the main thread may do so: in others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    replaced = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}  # None: not installed by Python
    for number in replaced:
        signal.signal(number, handler)
    return replaced


def discard_stop_signals() -> None:
    """Let STOP_SIGNALS have no effect on this process, while programs that it runs get the default actions. For the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, _discard)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _discard(number: int, frame: object) -> None: ...
