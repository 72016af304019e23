"""Code that the fork server runs before it forks its first child. The fork server preloads only the module `preload`, which no other module
imports.

The fork server starts with the stop signals blocked, so that no Ctrl-C can reach the server before it is in a new process group. An error
in `preload` ends the fork server silently, so that the parent process uses the spawn start method (fork_server.py).
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
from types import ModuleType, TracebackType

from slm_lab.experiment.execute.local.fork_server import PRELOAD, reset_stop_signals, restore_environment
from slm_lab.lib.process import delay_garbage_collection, freeze_objects

_SERVER = os.getpid()


def _initialise_child(module: ModuleType) -> None:
    """Initialise a forked child that the executor did not start, such as an env process of AsyncVectorEnv, as if it had been spawned.

    The child joins the process group of the process that requested the child, prints to the files of the requesting process, has separate
    random numbers, and runs its exit hooks, which a process that was forked from the fork server would otherwise skip.
    """
    if os.getpgid(0) == os.getpid():  # the executor has started this child, which is already initialised
        return
    import numpy as np

    parent = process.current_process()._parent_pid  # type: ignore[attr-defined]
    with suppress(OSError):
        os.setpgid(0, os.getpgid(parent))
    for number in (1, 2):
        with suppress(OSError):
            fd = os.open(f"/proc/{parent}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            os.dup2(fd, number)
            os.close(fd)
    np.random.seed()
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=-100)


def _print_child_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error in a child that is not initialised yet, unless the error only means that the parent has ended."""
    if not issubclass(kind, EOFError | OSError | UnpicklingError):
        sys.__excepthook__(kind, error, trace)


def _remove_folder() -> None:
    """Remove the temporary folder of the fork server's socket if the parent, which normally removes the folder, was killed."""
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if os.getpid() == _SERVER and os.getppid() != _PARENT and isinstance(address, str) and Path(address).parent.name.startswith("pymp-"):
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def _import_preload_modules() -> None:
    """Import the modules of PRELOAD with stdout and stderr redirected to the null device, which hides warnings."""
    null, streams = os.open(os.devnull, os.O_RDWR), [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(null, number)
    delay_garbage_collection()
    for name in PRELOAD:
        import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a preloaded module has started a thread, and a process with threads cannot be forked")
    gc.collect()
    freeze_objects()
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    for fd in (null, *streams):
        os.close(fd)


os.setpgid(0, 0)
reset_stop_signals()
_PARENT = restore_environment()
try:
    _import_preload_modules()
except BaseException:
    os._exit(1)
sys.excepthook = _print_child_error
util.register_after_fork(sys.modules[__name__], _initialise_child)
atexit.register(_remove_folder)
