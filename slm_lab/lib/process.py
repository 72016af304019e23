"""Processes: environment variables, start method, groups, garbage collection, signals, and what a child has of its parent.

Signals: a child must neither die of a Ctrl-C that its parent handles, nor pass a blocked or ignored signal on to programs that it runs
itself: those would not react to terminate(). So the parent starts it with these signals blocked (`stop_signals_blocked`), and the child
installs handlers that do nothing before it unblocks them (`discard_stop_signals`): exec resets handlers, but neither masks nor SIG_IGN.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Literal


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        set_environment(before)


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables; None: remove."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in a child that is started inside this block.

    Children of the start methods spawn and forkserver import the parent's `__main__`. Ours need nothing of it, so a script without
    `if __name__ == "__main__"`, a notebook and `python -c` can start them.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


Method = Literal["forkserver", "spawn"]
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that the libraries of numpy and torch read when they are loaded; children have one thread."""


@dataclass
class ThisProcess:
    """How this process starts others, and what was changed in it for a time. The only state of a module in this package."""

    choose_start_method: Callable[[], Method] = lambda: "spawn"
    wanted: Literal["auto", "forkserver", "spawn"] = "auto"
    """meta.start_method of the spec that this process works for."""
    fallen_back: bool = False
    """The fork server cannot run here."""
    server_users: int = 0
    """Number of blocks that run and need the fork server."""
    gc_thresholds: tuple[int, int, int] | None = None
    """Thresholds of garbage collection before it was postponed."""


THIS_PROCESS = ThisProcess()


def start_method() -> Method:
    """Return the start method of multiprocessing for the next child process. A fork server that it needs is started."""
    return THIS_PROCESS.choose_start_method()


_GRACE_SECONDS = 3.0
"""Time that a process has to end by itself when its parent has died."""
_POLL_SECONDS = 0.5


def lead_group(owner: int) -> None:
    """Make this process the leader of a new group, which is killed soon after process `owner`, which started this one, has died.

    A terminal's Ctrl-C does not reach the group. The owner calls `kill_group` when this process has ended.
    """
    if not hasattr(os, "setpgid"):
        return
    os.setpgid(0, 0)
    threading.Thread(target=_follow, args=(owner,), daemon=True, name="follow-owner").start()


def _follow(owner: int) -> None:
    """Wait for the owner's death. The parent of a copy of the fork server is the server."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(ProcessLookupError):  # it is dead already
            select.select([os.pidfd_open(owner)], [], [])
    else:
        while os.getppid() == owner:
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill the processes of the group that `leader` leads or has led; none is left if it ended everything that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class ProcessState:
    """Environment variables, umask, cores and priority of the process that starts a child.

    A copy of a fork server has those of the server, which started earlier. They are restored where this object is unpickled, so before the
    arguments after it are loaded, and the modules that these import.
    """

    environ: dict[str, str]
    umask: int
    cores: frozenset[int] | None
    """None where the system does not tell."""
    priority: int

    @classmethod
    def of_this_process(cls) -> ProcessState:
        umask = os.umask(0o022)
        os.umask(umask)
        cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        priority = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
        return cls(dict(os.environ), umask, cores, priority)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.environ, self.umask, self.cores, self.priority)

    def restore(self) -> None:
        """Give this process the same."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.umask(self.umask)
        with suppress(OSError):
            if self.cores is not None:
                os.sched_setaffinity(0, self.cores)
            if hasattr(os, "setpriority"):
                os.setpriority(os.PRIO_PROCESS, 0, self.priority)


def _restored(*fields: Any) -> ProcessState:
    state = ProcessState(*fields)
    state.restore()
    return state


_OBJECTS = 200_000
"""New objects between two collections while they are postponed; `import torch` leaves some 250,000."""


def postpone_collection() -> None:
    """Let many objects be made before they are searched for garbage, until `freeze_objects`.

    Most objects that an import makes stay. To search them for garbage again and again takes a tenth of the time of `import torch`.
    """
    if THIS_PROCESS.gc_thresholds is None and gc.isenabled():
        THIS_PROCESS.gc_thresholds = gc.get_threshold()
        gc.set_threshold(_OBJECTS, *THIS_PROCESS.gc_thresholds[1:])


def freeze_objects() -> None:
    """Exclude the objects that exist from later collections, which take 1.5 % of A2C's time otherwise, and end `postpone_collection`."""
    gc.freeze()
    if THIS_PROCESS.gc_thresholds is not None:
        gc.set_threshold(*THIS_PROCESS.gc_thresholds)
        THIS_PROCESS.gc_thresholds = None


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
