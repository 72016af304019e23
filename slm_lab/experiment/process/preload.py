"""What the fork server loads before it makes its first child. Imported in the server alone, as the only module of its list.

The server starts with the signals that ask for an end blocked, so that no Ctrl-C can reach it before it has a process group of its own.
Whatever fails here ends the server silently; the parent then starts its children by spawn (server.py).
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, process, util
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType

from slm_lab.experiment.process.server import PRELOAD, default_signals, restore_environment

_SERVER, _PARENT = os.getpid(), os.getppid()


class _PlainProcess:
    """Makes a child that is none of the supervisor's (an env process of AsyncVectorEnv) what it would be under spawn.

    It joins the process group of the process that asked for it, prints where that one prints and has random numbers of its own.
    """

    adopted = False
    """Set in a child of the supervisor's, which has seen to all this itself."""

    def begin(self) -> None:
        if self.adopted:
            return
        import numpy as np

        parent = process.current_process()._parent_pid  # type: ignore[attr-defined]
        with suppress(OSError):
            os.setpgid(0, os.getpgid(parent))
        for number in (1, 2):
            with suppress(OSError):
                copy = os.open(f"/proc/{parent}/fd/{number}", os.O_WRONLY | os.O_APPEND)
                os.dup2(copy, number)
                os.close(copy)
        np.random.seed()


plain_process = _PlainProcess()


def _quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an error of a child that has not begun, unless it only means that its parent is gone."""
    if not issubclass(kind, EOFError | OSError | UnpicklingError):
        sys.__excepthook__(kind, error, trace)


def _remove_folder() -> None:
    """Remove the temporary folder of the server's socket, which the parent does itself unless it was killed."""
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if os.getpid() == _SERVER and os.getppid() != _PARENT and isinstance(address, str) and Path(address).parent.name.startswith("pymp-"):
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def _load() -> None:
    null, streams = os.open(os.devnull, os.O_RDWR), [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(null, number)
    for name in PRELOAD:
        import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a module that was loaded has started a thread, and a process with threads cannot be forked")
    gc.collect()
    gc.freeze()
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    for fd in (null, *streams):
        os.close(fd)


os.setpgid(0, 0)
default_signals()
restore_environment()
try:
    _load()
except BaseException:
    os._exit(1)
sys.excepthook = _quiet
util.register_after_fork(plain_process, _PlainProcess.begin)
atexit.register(_remove_folder)
