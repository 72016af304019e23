"""The fork server: a process that has loaded torch, gymnasium and slm_lab, and of which every child process is a copy.

A child is ready in 0.02 s instead of 2 s and shares the memory of the loaded modules. The server is multiprocessing.forkserver of the
standard library; this module adds signal handling, environment and module path, the choice of the start method (meta.start_method), and
the fallback to spawn if the server cannot run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import slm_lab
from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice
from slm_lab.lib.process import (
    STOP_SIGNALS,
    THIS_PROCESS,
    THREAD_LIMITS,
    Method,
    environment,
    hidden_main,
    set_environment,
    stop_signals_blocked,
)
from slm_lab.spec.models.meta import StartMethod
from slm_lab.spec.report import Problem, SpecError

PRELOAD = (
    *("numpy", "torch", "torch.multiprocessing", "gymnasium", "slm_lab.experiment.session.session"),
    *("slm_lab.agent.algorithm.sil", "slm_lab.agent.algorithm.dqn", "slm_lab.agent.algorithm.soft_actor_critic"),
)
"""Modules that every child needs, and those of the algorithms, which are imported when an agent is built. No user module, and none that
starts a thread."""
_SAVED = "SLM_LAB_FORKSERVER"
"""Environment variable with the values of PYTHONPATH and PYTHONSAFEPATH for the server's children, and the id of its parent."""
ENDED = "it ended while it loaded"
"""Why it cannot run if one of its modules cannot be loaded."""
_SUPPORTED = hasattr(os, "pidfd_open")
"""Whether the system has what the fork server needs: Linux."""
_server: Any = forkserver._forkserver
_lock, _users_lock = threading.Lock(), threading.Lock()


def use_start_method(wanted: StartMethod) -> None:
    """Let the child processes of this process start as meta.start_method says. Raises SpecError if this system cannot."""
    if wanted == "forkserver" and not _SUPPORTED:
        message = "'forkserver' is not supported on this system; allowed: auto, spawn"
        raise SpecError("meta", [Problem("meta.start_method", message)])
    THIS_PROCESS.wanted = wanted
    THIS_PROCESS.choose_start_method = _method_of_next


def wanted_start_method() -> StartMethod:
    """Return how the child processes of a child are to start: meta.start_method, or by spawn if the fork server cannot run."""
    return "spawn" if THIS_PROCESS.fallen_back else THIS_PROCESS.wanted


def start_method() -> Method:
    """How child processes start: "forkserver" on Linux, "spawn" elsewhere, if the fork server cannot run, and if the spec says so."""
    return "forkserver" if _SUPPORTED and not THIS_PROCESS.fallen_back and THIS_PROCESS.wanted != "spawn" else "spawn"


def _method_of_next() -> Method:
    """Return the start method for a process that this module does not start itself, once the server has shown that it can start one."""
    for _ in range(2):
        ensure_server()
        if start_method() == "spawn" or _answers():
            return start_method()
        stop_server()
    use_spawn(ENDED)
    return start_method()


def _answers() -> bool:
    process: Any = multiprocessing.get_context("forkserver").Process(target=os.getpid)  # type: ignore[attr-defined,unused-ignore]
    try:
        with stop_signals_blocked(), hidden_main():
            process.start()
            process.join()
    except (OSError, EOFError):
        return False
    return True


def use_spawn(reason: str) -> None:
    """Start children by spawn from now on. Raises UserError if meta.start_method does not allow it."""
    if THIS_PROCESS.wanted == "forkserver":
        raise UserError(f"meta.start_method: forkserver: the fork server cannot run ({reason}); use auto or spawn")
    if not THIS_PROCESS.fallen_back:
        notice(f"the fork server cannot run ({reason}); child processes use the spawn start method, which is slower")
    THIS_PROCESS.fallen_back = True


def ensure_server() -> None:
    """Start the fork server if none runs, without waiting until it has loaded. Call it early, before torch is imported."""
    with stop_signals_blocked():
        resource_tracker.ensure_running()  # its start unblocks signals
    if start_method() == "spawn":
        return
    if "ensure_running" not in vars(_server):
        _server.ensure_running = _start_server  # called for every process that starts
    try:
        _server.ensure_running()
    except OSError as error:  # no temporary folder, or its path is too long for a socket
        use_spawn(error.strerror or str(error))


def _start_server() -> None:
    with _lock:
        with stop_signals_blocked():
            resource_tracker.ensure_running()  # its start unblocks signals
        _server.set_forkserver_preload(["slm_lab.experiment.execute.local.preload"])
        with stop_signals_blocked(), environment(_server_environment()):
            type(_server).ensure_running(_server)


@contextmanager
def server_in_use() -> Iterator[None]:
    """End the fork server that was started meanwhile at the end of this block, unless it is inside another one."""
    with _users_lock:
        THIS_PROCESS.server_users += 1
    try:
        yield
    finally:
        with _users_lock:
            THIS_PROCESS.server_users -= 1
            last = THIS_PROCESS.server_users == 0
        if last:
            stop_server()


def stop_server() -> None:
    """End the fork server, if this process has started one. Children that still run are not affected."""
    with _lock:
        if (pid := _server._forkserver_pid) is None:
            return
        with suppress(OSError):  # the process, or its socket, does not exist any more
            os.kill(pid, signal.SIGKILL)
            _server._stop()
        _server._forkserver_pid = _server._forkserver_address = None


def inherit_server() -> None:
    """Let the processes that this child starts come from the server that it came from itself; the standard library would start another."""
    _server.ensure_running = resource_tracker.ensure_running


def default_signals() -> None:
    """Give this process default handlers of the stop signals and an empty signal mask; pending stop signals are dropped."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops a pending one
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def restore_environment() -> int:
    """In the server: restore the variables that were set for it alone, and return the id of the process that started it.

    That one may have died meanwhile, and then os.getppid() returns another.
    """
    saved = json.loads(os.environ.pop(_SAVED))
    set_environment(saved["environment"])
    return int(saved["parent"])


def _server_environment() -> dict[str, str]:
    """One thread, and the module path of this process but for the working directory, whose files could hide a library's modules."""
    saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    package = str(Path(slm_lab.__file__).resolve().parent.parent)
    path = [entry for entry in sys.path if os.path.isabs(entry) and entry != package]
    return {
        **dict.fromkeys(THREAD_LIMITS, "1"),
        "PYTHONPATH": os.pathsep.join([*path, package]),
        "PYTHONSAFEPATH": "1",
        _SAVED: json.dumps({"environment": saved, "parent": os.getpid()}),
    }
