"""The fork server, a process that has loaded torch, gymnasium and slm_lab, and from which child processes are forked.

A forked child is ready in 0.02 s instead of 2 s and shares the memory of the loaded modules. The server is multiprocessing.forkserver of
the standard library. This module adds signal handling, environment variables, the module path, the choice of the start method
(meta.start_method), and the fallback to the spawn start method if the server cannot run.
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
    hide_main_module,
    set_environment,
    stop_signals_blocked,
    temporary_environment,
)
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.meta import StartMethod
from slm_lab.spec.report import Problem, SpecError

PRELOAD = (
    *("numpy", "torch", "torch.multiprocessing", "gymnasium", "slm_lab.experiment.session.session"),
    *("slm_lab.agent.algorithm.sil", "slm_lab.agent.algorithm.dqn", "slm_lab.agent.algorithm.soft_actor_critic"),
    *("slm_lab.agent.algorithm.td3", "slm_lab.agent.algorithm.tqc"),
)
"""Modules that the fork server imports: the modules that every child needs, and the modules of algorithms. User modules and modules that
start a thread are not allowed."""
_SAVED = "SLM_LAB_FORKSERVER"
"""Name of the environment variable through which the fork server receives the values of PYTHONPATH and PYTHONSAFEPATH for its children, and
the id of its parent process."""
ENDED = "it ended while it loaded its modules"
"""Reason that `use_spawn` reports if the fork server has ended because one of its modules cannot be loaded."""
_server: Any = forkserver._forkserver
_lock, _users_lock = threading.Lock(), threading.Lock()


def use_start_method(requested: StartMethod) -> None:
    """Set the start method (meta.start_method) for the children of this process. Raises SpecError if this system does not support the start
    method."""
    if requested == "forkserver" and not has_feature("forkserver"):
        message = "'forkserver' is not supported on this system; allowed: auto, spawn"
        raise SpecError("meta", [Problem("meta.start_method", message)])
    THIS_PROCESS.requested_method = requested
    THIS_PROCESS.choose_start_method = _start_method_after_check


def inherited_start_method() -> StartMethod:
    """Return the setting of meta.start_method to pass to a child process, or "spawn" if the fork server cannot run."""
    return "spawn" if THIS_PROCESS.forkserver_unavailable else THIS_PROCESS.requested_method


def start_method() -> Method:
    """Return the start method of child processes, "forkserver" or "spawn".

    The start method is "spawn" if the system does not support the fork server, if the fork server cannot run, or if meta.start_method is
    "spawn".
    """
    allowed = THIS_PROCESS.requested_method != "spawn" and not THIS_PROCESS.forkserver_unavailable
    return "forkserver" if allowed and has_feature("forkserver") else "spawn"


def _start_method_after_check() -> Method:
    """Test whether the fork server runs, and return the start method for a process that code outside this package starts."""
    for _ in range(2):
        ensure_server()
        if start_method() == "spawn" or _server_answers():
            return start_method()
        stop_server()
    use_spawn(ENDED)
    return start_method()


def _server_answers() -> bool:
    """Start a short test process from the fork server, and return whether the start succeeded."""
    process: Any = multiprocessing.get_context("forkserver").Process(target=os.getpid)  # type: ignore[attr-defined,unused-ignore]
    try:
        with stop_signals_blocked(), hide_main_module():
            process.start()
            process.join()
    except (OSError, EOFError):
        return False
    return True


def use_spawn(reason: str) -> None:
    """Use the spawn start method for all further child processes. Raises UserError if meta.start_method is "forkserver"."""
    if THIS_PROCESS.requested_method == "forkserver":
        raise UserError(f"meta.start_method: forkserver: the fork server cannot run ({reason}); use auto or spawn")
    if not THIS_PROCESS.forkserver_unavailable:
        notice(f"the fork server cannot run ({reason}); child processes use the spawn start method, which is slower")
    THIS_PROCESS.forkserver_unavailable = True


def ensure_server() -> None:
    """Start the fork server if it is not running, without waiting until the server has loaded its modules.

    Call `ensure_server` early, before torch is imported.
    """
    if not has_feature("groups"):  # child processes are not supported on this system, which the engine reports
        return
    with stop_signals_blocked():
        resource_tracker.ensure_running()  # starting the tracker unblocks signals
    if start_method() == "spawn":
        return
    if "ensure_running" not in vars(_server):
        _server.ensure_running = _start_server  # multiprocessing calls this function for every process that it starts
    try:
        _server.ensure_running()
    except OSError as error:  # no temporary folder, or its path is too long for a socket
        use_spawn(error.strerror or str(error))


def _start_server() -> None:
    with _lock:
        with stop_signals_blocked():
            resource_tracker.ensure_running()  # starting the tracker unblocks signals
        _server.set_forkserver_preload(["slm_lab.experiment.execute.local.preload"])
        with stop_signals_blocked(), temporary_environment(_server_environment()):
            type(_server).ensure_running(_server)


@contextmanager
def server_in_use() -> Iterator[None]:
    """Context manager that stops the fork server at the end of the block, unless another `server_in_use` block is still open."""
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
    """Stop the fork server if this process has started a fork server. Running child processes are not affected."""
    with _lock:
        if (pid := _server._forkserver_pid) is None:
            return
        with suppress(OSError):  # the process, or its socket, does not exist any more
            os.kill(pid, signal.SIGKILL)
            _server._stop()
        _server._forkserver_pid = _server._forkserver_address = None


def use_parents_fork_server() -> None:
    """Make this child process start its own children from the fork server that started it, instead of starting another fork server."""
    _server.ensure_running = resource_tracker.ensure_running


def reset_stop_signals() -> None:
    """Reset the stop signals to their default handlers and clear the signal mask. Pending stop signals are dropped."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops a pending signal
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def restore_environment() -> int:
    """In the fork server, restore the environment variables that were set only for the server, and return the id of the server's parent.

    If the parent process has died, os.getppid() returns an id other than the returned id.
    """
    saved = json.loads(os.environ.pop(_SAVED))
    set_environment(saved["environment"])
    return int(saved["parent"])


def _server_environment() -> dict[str, str]:
    """Return the environment variables of the fork server.

    The returned variables limit numerical libraries to one thread, and set the module path of this process without the working directory,
    since files in the working directory could hide modules.
    """
    saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    package = str(Path(slm_lab.__file__).resolve().parent.parent)
    path = [entry for entry in sys.path if os.path.isabs(entry) and entry != package]
    return {
        **dict.fromkeys(THREAD_LIMITS, "1"),
        "PYTHONPATH": os.pathsep.join([*path, package]),
        "PYTHONSAFEPATH": "1",
        _SAVED: json.dumps({"environment": saved, "parent": os.getpid()}),
    }
