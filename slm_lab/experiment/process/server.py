"""The fork server: a process that has loaded torch, gymnasium and slm_lab once, and of which every child process is a copy.

A child is ready in some 0.02 s instead of 2 s and shares the memory of what is loaded. The server belongs to the standard library
(multiprocessing.forkserver); here is what it lacks: signals, environment, module path, and a way out where it cannot run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import process, resource_tracker
from pathlib import Path
from typing import Any, Literal

import slm_lab
from slm_lab.lib.log import notice
from slm_lab.lib.signals import STOP_SIGNALS, stop_signals_blocked

Method = Literal["forkserver", "spawn"]

PRELOAD = ("numpy", "torch", "torch.multiprocessing", "gymnasium", "slm_lab.experiment.session")
"""No module of the user's, and none that starts a thread."""
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What the libraries of numpy and torch read when they are loaded."""
_SAVED = "SLM_LAB_FORKSERVER"
"""Environment variable by which the server receives what PYTHONPATH and PYTHONSAFEPATH are for its children."""
_STOP_SECONDS = 2.0
"""Time that the server has to end once it is asked to."""
_lock = threading.Lock()
_fallen_back = False
"""The fork server cannot run here."""


def start_method() -> Method:
    """How child processes start: "forkserver" on Linux, "spawn" elsewhere and where the fork server cannot run."""
    return "spawn" if _fallen_back or not sys.platform.startswith("linux") or not _has_pidfd() else "forkserver"


def use_spawn(reason: str) -> None:
    """Start children by spawn from now on."""
    global _fallen_back
    if not _fallen_back:
        notice(f"the fork server cannot run ({reason}); child processes start by spawn, which takes seconds more")
    _fallen_back = True


def ensure_server() -> None:
    """Start the fork server where there is none, without waiting until it has loaded. Call it early, before torch is imported."""
    with stop_signals_blocked():
        resource_tracker.ensure_running()  # its start unblocks signals
    if start_method() == "spawn":
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if "ensure_running" not in vars(server):
        server.ensure_running = _start_server  # whoever starts a process calls it
    try:
        server.ensure_running()
    except OSError as error:  # no temporary folder, or its path is too long for a socket
        use_spawn(error.strerror or str(error))


def _start_server() -> None:
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with _lock:
        with stop_signals_blocked():
            resource_tracker.ensure_running()  # unblocks signals on its way
        server.set_forkserver_preload(["slm_lab.experiment.process.preload"])
        with stop_signals_blocked(), environment(_server_environment()):
            type(server).ensure_running(server)


def stop_server() -> None:
    """End the fork server, if this process has started one. Children that still run go on."""
    if not sys.platform.startswith("linux"):
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with _lock:
        if (pid := server._forkserver_pid) is None:
            return
        timer = threading.Timer(_STOP_SECONDS, _kill, (pid,))
        timer.start()
        try:
            server._stop()
        except OSError:  # its socket, or the process itself, is gone already
            server._forkserver_pid = server._forkserver_address = None
        finally:
            timer.cancel()
        folder = process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        if folder is not None and not os.path.isdir(folder):
            process.current_process()._config["tempdir"] = None  # type: ignore[attr-defined]


def inherit_server() -> None:
    """Let what this child starts come from the server that it came from itself; the standard library would start a second one."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    pid = os.getppid()

    def ensure_running() -> None:
        resource_tracker.ensure_running()
        if os.getppid() != pid:  # it was killed
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = server._forkserver_address = None
            server.ensure_running = _start_server
            _start_server()

    server.ensure_running = ensure_running


def default_signals() -> None:
    """Give this process default handlers and an empty signal mask; a signal to end that has come meanwhile is dropped."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops one that waits
    for number in signal.valid_signals():
        if number != getattr(signal, "SIGPIPE", None) and signal.getsignal(number) is signal.SIG_IGN:  # Python ignores SIGPIPE
            with suppress(OSError, ValueError):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        _set_environment(before)


def restore_environment() -> None:
    """In the server: undo what was set for it alone."""
    _set_environment(json.loads(os.environ.pop(_SAVED, "{}")))


def _server_environment() -> dict[str, str]:
    """One thread, and the module path of this process but for the working directory, whose files could hide a library's modules."""
    saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    package = str(Path(slm_lab.__file__).resolve().parent.parent)
    path = [entry for entry in sys.path if os.path.isabs(entry) and entry != package]
    return {
        **dict.fromkeys(THREAD_LIMITS, "1"),
        "PYTHONPATH": os.pathsep.join([*path, package]),
        "PYTHONSAFEPATH": "1",
        _SAVED: json.dumps(saved),
    }


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _has_pidfd() -> bool:
    """Whether the death of a process can be seen that is no child of this one."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
