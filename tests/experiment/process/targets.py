"""Functions that the child processes of the tests run; they are in a module because a child does not run the test's own module."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import slm_lab
from slm_lab.experiment.execute.heartbeat import EVALUATING, STEPPING, WAITING
from slm_lab.experiment.execute.local import child as child_side
from slm_lab.experiment.execute.local.child import ChildContext, SharedFd
from slm_lab.experiment.execute.local.interrupt import UserCodeBlocked, watchdog


def state(context: ChildContext, *args: Any) -> None:
    """Send the state of the process: its arguments, environment, signals, cores and modules."""
    umask = os.umask(0)
    os.umask(umask)
    signals = {number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
    context.send(
        "state",
        {
            "args": args,
            "restart": context.restart,
            "leads_group": os.getpgid(0) == os.getpid(),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "ignored": signals - {"SIGPIPE", "SIGXFSZ"},
            "cwd": os.getcwd(),
            "umask": umask,
            "cores": os.sched_getaffinity(0),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "environ": dict(os.environ),
            "torch": "torch" in sys.modules,
            "main": getattr(sys.modules["__main__"], "__file__", None),
            "package": slm_lab.__file__,
            "from_server": child_side._is_forked_from_server(),
            "random": random.random(),
        },
    )


class Variable:
    """An object that is unpickled as the current value of an environment variable."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getenv, (self.name,)


def imports(context: ChildContext, name: str) -> None:
    """Send the VALUE of a user's module, whether it was loaded before, and the current folder."""
    before = name in sys.modules
    context.send("value", importlib.import_module(name).VALUE, before, os.getcwd())


def threads(context: ChildContext) -> None:
    import torch

    context.send("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])


def simulator(context: ChildContext) -> None:
    """Start a simulator, end it and wait for it, as an env does; the wait would never return if signals were blocked or ignored."""
    for end in (subprocess.Popen.terminate, lambda process: process.send_signal(signal.SIGINT)):
        process = subprocess.Popen(["sleep", "1000"])
        end(process)
        process.wait()
        context.send("ended")
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    fork.start()
    fork.terminate()
    fork.join()
    context.send("ended")


def leave(context: ChildContext, then: str) -> None:
    """Start a simulator that outlives this process."""
    context.send("started", subprocess.Popen(["sleep", "1000"]).pid)
    if then == "wait":
        context.receive()
    elif then == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif then == "block":
        time.sleep(1000)


def orphan(context: ChildContext, then: str, seconds: float) -> None:
    """Run `leave` with another time limit for saving its work."""
    child_side.ORPHAN_SECONDS = seconds
    leave(context, then)


def block(context: ChildContext, how: str) -> None:
    context.send("pid", os.getpid())
    if context.restart:
        return
    for _ in range(100):
        context.beat(STEPPING)
    if how == "sleep":
        time.sleep(1000)
    elif how == "gil":
        sum(iter(int, 1))  # type: ignore[arg-type]
    elif how == "wait":
        context.beat(WAITING)
        time.sleep(1000)


def interrupted(context: ChildContext) -> None:
    """Block, and save the work when a stop is requested."""
    try:
        with watchdog(context.heartbeat, context.stop, grace=0.3):
            context.beat(EVALUATING)
            context.send("begun")
            threading.Lock().acquire() and threading.Event().wait(1000)
    except UserCodeBlocked as error:
        context.send("saved", str(error))


def many(context: ChildContext, count: int) -> None:
    for number in range(count):
        context.send("number", number, b"x" * (number % 1000))
    os.kill(os.getpid(), signal.SIGKILL)


def torn(context: ChildContext) -> None:
    """Die in the middle of a message, while a forked process keeps the pipe open."""
    context.send("whole")
    if os.fork() == 0:
        time.sleep(1000)
    os.write(context._connection.fileno(), struct.pack("!i", 1000) + b"half")
    os.write(2, b"caf\xc3\xa9 \xff torn at \xc3")
    os.kill(os.getpid(), signal.SIGKILL)


def talk(context: ChildContext, lines: int, path: Path | None = None) -> None:
    for number in range(lines):
        os.write(1, b"line %07d\n" % number)
    if path is not None:
        context.redirect_output(path)
        os.write(2, b"in the log\n2026-01-01 00:00:00,000 logged\nlast")
    sys.exit(3)


def fail(context: ChildContext) -> None:
    raise ValueError("the reason")


def echo(context: ChildContext) -> None:
    """Send back each message."""
    context.send("ready", context.restart)
    while (order := context.receive()) is not None:
        context.send("echo", order, context.stop.requested)
    context.send("stopped", context.stop.requested)


def deaf(context: ChildContext) -> None:
    context.send("ready")
    while True:
        time.sleep(1)


def hang_at_exit(context: ChildContext) -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    context.send("done")


def exit_hook(context: ChildContext, path: Path) -> None:
    sys.stdout.write("buffered")
    atexit.register(path.write_text, "was here")


def read_fd(context: ChildContext, shared: SharedFd) -> None:
    context.send("read", os.pread(shared.fd, 100, 0), os.get_inheritable(shared.fd))


def _plain(connection: Any) -> None:
    import numpy as np

    connection.send((os.getppid(), os.getpgid(0), float(np.random.random()), "torch" in sys.modules))
    os.write(1, b"from the plain process\n")


def starts_processes(context: ChildContext) -> None:
    """Start processes by the default start method, as AsyncVectorEnv does."""
    answers = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=_plain, args=(theirs,))
        process.start()
        answers.append(ours.recv())
        process.join()
    context.send("plain", os.getppid(), os.getpid(), answers, multiprocessing.get_start_method())


def spin(context: ChildContext) -> None:
    """Work until a stop is requested."""
    while not context.stop.requested:
        context.beat(STEPPING)
        time.sleep(0.01)


def nothing(context: ChildContext) -> None:
    """Return immediately."""


def silent(context: ChildContext) -> None:
    """Send a message without a heartbeat, as a process that is still loading does."""
    context.send("loading")
    time.sleep(60)


def crash(context: ChildContext) -> None:
    """Crash by a fault in native code."""
    import ctypes

    ctypes.string_at(0)


def close_all(context: ChildContext) -> None:
    """Close descriptors that this function did not open, then send a message."""
    os.closerange(3, 256)
    context.send("lost")
    time.sleep(1000)


def close_all_and_wait(context: ChildContext) -> None:
    os.closerange(3, 256)
    time.sleep(1000)


def exit_0(context: ChildContext) -> None:
    sys.exit(0)
