"""Signals that ask a process to end, around the start of a child process.

A child must neither die of a Ctrl-C that its parent handles, nor pass a blocked or ignored signal on to programs that it runs itself:
those would not react to terminate(). So the parent starts it with these signals blocked (`stop_signals_blocked`), and the child installs
handlers that do nothing before it unblocks them (`discard_stop_signals`): exec resets handlers, but neither masks nor SIG_IGN.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS: list[signal.Signals] = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Ctrl-C, kill, a terminal that closes."""


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block STOP_SIGNALS in this thread; a process started inside begins with them blocked.

    multiprocessing's resource tracker must be running already (as it is once a Queue or Lock for spawned processes exists): its start
    unblocks SIGINT and SIGTERM.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def discard_stop_signals() -> None:
    """Let STOP_SIGNALS have no effect on this process, while programs that it runs get the default actions. For the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, _discard)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _discard(number: int, frame: object) -> None: ...
