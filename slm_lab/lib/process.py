"""Processes: environment variables, start method, groups, garbage collection, signals, and the state that a child takes from its parent.

Signals: a child must not end on a Ctrl-C that its parent handles. It must also not pass a blocked or ignored signal on to programs that it
runs, because these programs would then not react to terminate(). Therefore the parent starts the child with these signals blocked
(`stop_signals_blocked`), and the child installs handlers that do nothing before it unblocks the signals (`discard_stop_signals`). (exec
resets handlers, but neither masks nor SIG_IGN.)
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

from slm_lab.lib.system import has_feature


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
    """Set environment variables; remove those whose value is None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def hidden_main() -> Iterator[None]:
    """Prevent multiprocessing from running the user's script again in a child that is started inside this block.

    With the start methods spawn and forkserver, children import the parent's `__main__`. The children of this package do not need it.
    Without this import, they can be started by a script without `if __name__ == "__main__"`, by a notebook or by `python -c`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


Method = Literal["forkserver", "spawn"]
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables for the number of threads. The libraries of numpy and torch read them when they are loaded; children use one
thread."""


@dataclass
class ThisProcess:
    """Settings with which this process starts other processes, and temporarily changed settings.

    This is the only module-level state in this package.
    """

    choose_start_method: Callable[[], Method] = lambda: "spawn"
    requested_method: Literal["auto", "forkserver", "spawn"] = "auto"
    """meta.start_method of the spec that this process runs."""
    forkserver_unavailable: bool = False
    """Whether the fork server cannot run on this machine."""
    server_users: int = 0
    """Number of running blocks that need the fork server."""
    gc_thresholds: tuple[int, int, int] | None = None
    """Thresholds of garbage collection before it was delayed; None: it is not delayed."""


THIS_PROCESS = ThisProcess()


def start_method() -> Method:
    """Return the start method of multiprocessing for the next child process. Starts the fork server if needed."""
    return THIS_PROCESS.choose_start_method()


_GRACE_SECONDS = 3.0
"""Seconds that a process has to exit after the death of its owner, before it is killed."""
_POLL_SECONDS = 0.5


def lead_group(owner: int) -> None:
    """Make this process the leader of a new process group, which is killed soon after `owner`, the process that started it, has died.

    A terminal's Ctrl-C does not reach the group. The owner calls `kill_group` when this process has ended.
    """
    if not has_feature("groups"):
        return
    os.setpgid(0, 0)
    threading.Thread(target=_follow, args=(owner,), daemon=True, name="follow-owner").start()


def _follow(owner: int) -> None:
    """Kill the group after the owner's death. (The parent of a process may be the fork server instead of the owner.)"""
    if has_feature("pidfd"):
        with contextlib.suppress(ProcessLookupError):  # the owner is dead already
            select.select([os.pidfd_open(owner)], [], [])
    else:
        while os.getppid() == owner:
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill all processes of the group that `leader` leads or has led."""
    if has_feature("groups"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class ProcessState:
    """Environment variables, umask, cores and priority of the process that starts a child.

    A process forked from a fork server has the state of the server, which was started earlier. When this object is unpickled, it restores
    the state of the starting process. This happens before later arguments are unpickled and the modules that they need are imported.
    """

    environ: dict[str, str]
    umask: int
    cores: frozenset[int] | None
    """Cores that the process may use; None if the system does not report them."""
    priority: int

    @classmethod
    def of_this_process(cls) -> ProcessState:
        umask = os.umask(0o022)
        os.umask(umask)
        cores = frozenset(os.sched_getaffinity(0)) if has_feature("affinity") else None
        priority = os.getpriority(os.PRIO_PROCESS, 0) if has_feature("priority") else 0
        return cls(dict(os.environ), umask, cores, priority)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.environ, self.umask, self.cores, self.priority)

    def restore(self) -> None:
        """Apply this state to the current process."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.umask(self.umask)
        with suppress(OSError):
            if self.cores is not None:
                os.sched_setaffinity(0, self.cores)
            if has_feature("priority"):
                os.setpriority(os.PRIO_PROCESS, 0, self.priority)


def _restored(*fields: Any) -> ProcessState:
    state = ProcessState(*fields)
    state.restore()
    return state


_OBJECTS = 200_000
"""Number of new objects between two garbage collections while these are delayed; `import torch` leaves about 250,000 objects."""


def delay_garbage_collection() -> None:
    """Delay garbage collection until `freeze_objects`, while many objects are created.

    Most objects that an import creates stay alive. Scanning them repeatedly for garbage takes a tenth of the time of `import torch`.
    """
    if THIS_PROCESS.gc_thresholds is None and gc.isenabled():
        THIS_PROCESS.gc_thresholds = gc.get_threshold()
        gc.set_threshold(_OBJECTS, *THIS_PROCESS.gc_thresholds[1:])


def freeze_objects() -> None:
    """Exclude existing objects from garbage collection, which otherwise takes 1.5 % of A2C's time, and end `delay_garbage_collection`."""
    gc.freeze()
    if THIS_PROCESS.gc_thresholds is not None:
        gc.set_threshold(*THIS_PROCESS.gc_thresholds)
        THIS_PROCESS.gc_thresholds = None


STOP_SIGNALS: list[signal.Signals] = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals of Ctrl-C, kill and a closed terminal."""


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Delay STOP_SIGNALS until the end of this block; a process started inside the block starts with these signals blocked.

    The signal mask alone is not sufficient, because it belongs to this thread: the kernel delivers the signal to another thread (threads of
    BLAS and OpenMP do not block it), and Python then runs the handler in the main thread, inside the block. If the handler raised an
    exception between the start of a process and the assignment of its pid, that process would keep running. Also, starting
    multiprocessing's resource tracker unblocks SIGINT and SIGTERM. Therefore the handlers are replaced too.
    """
    if not has_feature("signals"):
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
    """Install `handler` for STOP_SIGNALS and return the previous handlers. In threads other than the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    replaced = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}  # None: not installed by Python
    for number in replaced:
        signal.signal(number, handler)
    return replaced


def discard_stop_signals() -> None:
    """Make STOP_SIGNALS have no effect on this process; programs that it runs get the default actions. Call this in the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, _discard)
        if has_feature("signals"):
            signal.siginterrupt(number, False)
    if has_feature("signals"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _discard(number: int, frame: object) -> None: ...
