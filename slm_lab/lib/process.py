"""Functions for processes: environment variables, start method, process groups, garbage collection, signals, and the state that child
processes inherit.

A child process must not end on a Ctrl-C that the parent process handles. If the child blocked or ignored STOP_SIGNALS, the programs that
the child runs would also block or ignore these signals, and would not react to terminate(). The system call exec resets signal handlers,
but resets neither signal masks nor SIG_IGN. The parent starts the child with STOP_SIGNALS blocked (`stop_signals_blocked`), and the child
first installs handlers that do nothing and then unblocks the signals (`discard_stop_signals`).
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
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Return a context in which environment variables have the values `values`. At the end of the context, the previous values are
    restored."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        set_environment(before)


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables. If a value is None, the environment variable is removed."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Return a context in which multiprocessing starts child processes that do not run the user's script again.

    With the start methods spawn and forkserver, child processes import the parent's module `__main__`. The child processes of this package
    do not need the module `__main__`. Without the import of `__main__`, child processes can be started by a script without `if __name__ ==
    "__main__"`, by a notebook or by `python -c`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


Method = Literal["forkserver", "spawn"]
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that set the number of threads of the libraries that numpy and torch use. The libraries read these variables when
they are loaded. This package sets these variables to 1 for child processes."""


@dataclass
class ThisProcess:
    """State of this process: settings for starting child processes, and temporarily changed settings.

    The instance THIS_PROCESS is the only module-level state of this package.
    """

    choose_start_method: Callable[[], Method] = lambda: "spawn"
    requested_method: Literal["auto", "forkserver", "spawn"] = "auto"
    """Value of meta.start_method in the spec that this process runs."""
    forkserver_unavailable: bool = False
    """Whether the fork server of multiprocessing cannot run on this machine."""
    server_users: int = 0
    """Number of active contexts that need multiprocessing's fork server."""
    gc_thresholds: tuple[int, int, int] | None = None
    """Thresholds of garbage collection before `delay_garbage_collection`, or None if garbage collection is not delayed."""


THIS_PROCESS = ThisProcess()


def choose_start_method() -> Method:
    """Return the start method of multiprocessing for the next child process. If the method is forkserver, start the fork server."""
    return THIS_PROCESS.choose_start_method()


_GRACE_SECONDS = 3.0
"""Time in seconds between the death of the process that owns a process group and the killing of the process group."""
_POLL_SECONDS = 0.5


def start_process_group(owner: int) -> None:
    """Make this process the leader of a new process group, which is killed soon after the death of `owner`.

    A Ctrl-C in the terminal does not reach the new process group. The process `owner` must call `kill_group` when this process has ended.

    Args: owner: pid of the process that requested the start of this process.
    """
    if not has_feature("groups"):
        return
    os.setpgid(0, 0)
    threading.Thread(target=_kill_group_after_owner, args=(owner,), daemon=True, name="follow-owner").start()


def _kill_group_after_owner(owner: int) -> None:
    """Wait until the process `owner` has died, and then kill the process group of this process.

    The parent of this process may be the fork server instead of `owner`.
    """
    if has_feature("pidfd"):
        with contextlib.suppress(ProcessLookupError):  # the owner is dead already
            select.select([os.pidfd_open(owner)], [], [])
    else:
        while os.getppid() == owner:
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill all processes of the process group whose leader is or was the process `leader`."""
    if has_feature("groups"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class InheritedState:
    """Environment variables, umask, CPU cores and priority that a child process inherits from the process that starts it.

    A child process that the fork server creates has the state of the fork server, which was started earlier. Unpickling an InheritedState
    in the child process applies the state of the starting process. If the InheritedState is the first argument of the child process, the
    state is applied before other arguments are unpickled. Unpickling other arguments may import modules.
    """

    environ: dict[str, str]
    umask: int
    cores: frozenset[int] | None
    """CPU cores that the starting process may use, or None if the system does not report the cores."""
    priority: int

    @classmethod
    def of_this_process(cls) -> InheritedState:
        umask = os.umask(0o022)
        os.umask(umask)
        cores = frozenset(os.sched_getaffinity(0)) if has_feature("affinity") else None
        priority = os.getpriority(os.PRIO_PROCESS, 0) if has_feature("priority") else 0
        return cls(dict(os.environ), umask, cores, priority)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_and_apply, (self.environ, self.umask, self.cores, self.priority)

    def apply(self) -> None:
        """Apply the environment variables, umask, CPU cores and priority to the current process."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.umask(self.umask)
        with suppress(OSError):
            if self.cores is not None:
                os.sched_setaffinity(0, self.cores)
            if has_feature("priority"):
                os.setpriority(os.PRIO_PROCESS, 0, self.priority)


def _unpickle_and_apply(*fields: Any) -> InheritedState:
    state = InheritedState(*fields)
    state.apply()
    return state


_OBJECTS = 200_000
"""Number of new objects after which garbage is collected, if `delay_garbage_collection` is in effect. (`import torch` creates about 250,000
objects that stay alive.)"""


def delay_garbage_collection() -> None:
    """Make garbage collection less frequent until `freeze_objects` is called. Call this function before imports that create many objects.

    Most objects that an import creates stay alive. Repeatedly scanning these objects for garbage takes a tenth of the time of `import
    torch`.
    """
    if THIS_PROCESS.gc_thresholds is None and gc.isenabled():
        THIS_PROCESS.gc_thresholds = gc.get_threshold()
        gc.set_threshold(_OBJECTS, *THIS_PROCESS.gc_thresholds[1:])


def freeze_objects() -> None:
    """Exclude all existing objects from garbage collection, and restore the thresholds that `delay_garbage_collection` changed.

    If existing objects are not excluded, garbage collection takes 1.5 % of the training time of A2C.
    """
    gc.freeze()
    if THIS_PROCESS.gc_thresholds is not None:
        gc.set_threshold(*THIS_PROCESS.gc_thresholds)
        THIS_PROCESS.gc_thresholds = None


STOP_SIGNALS: list[signal.Signals] = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""The signals that Ctrl-C, the command kill and a closed terminal send."""


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Return a context that delays STOP_SIGNALS until the end of the context. A child process that is started in the context begins with
    STOP_SIGNALS blocked.

    This context sets the signal mask and also replaces the signal handlers, for two reasons. First, a signal mask applies to one thread
    only. The kernel delivers a blocked signal to another thread that does not block the signal, such as a thread of BLAS or OpenMP, and
    Python then runs the signal handler in the main thread, inside this context. If the signal handler raised an exception after the start
    of a child process but before the assignment of the child's pid, the child process would keep running. Second, starting
    multiprocessing's resource tracker unblocks SIGINT and SIGTERM.
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
    """Install the signal handler `handler` for STOP_SIGNALS and return a dict from each signal to its previous handler.

    Signals that are ignored, or whose handler was not installed by Python, keep their handlers. In threads other than the main thread, this
    function does nothing and returns an empty dict.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    replaced = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}  # None: not installed by Python
    for number in replaced:
        signal.signal(number, handler)
    return replaced


def discard_stop_signals() -> None:
    """Install signal handlers that do nothing for STOP_SIGNALS, and unblock these signals. Call this function in the main thread.

    Programs that this process runs later still react to STOP_SIGNALS.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore_signal)
        if has_feature("signals"):
            signal.siginterrupt(number, False)
    if has_feature("signals"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _ignore_signal(number: int, frame: object) -> None: ...
