"""Processes: environment variables, start method, groups, garbage collection, and what a child has of its parent."""

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
from types import ModuleType
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
