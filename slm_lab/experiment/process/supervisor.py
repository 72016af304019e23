"""A run's child processes as their parent sees them: orders go to them; messages, stalls and deaths come from them."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slm_lab.experiment.process import child as child_side
from slm_lab.experiment.process.child import Setup, SharedFd, Target
from slm_lab.experiment.process.heartbeat import CAPACITY, MEMORY_BYTES, PHASES, Heartbeat, StallTimer
from slm_lab.experiment.process.server import (
    THREAD_LIMITS,
    ensure_server,
    environment,
    start_method,
    stop_server,
    use_spawn,
)
from slm_lab.lib.main_module import hidden_main
from slm_lab.lib.signals import stop_signals_blocked
from slm_lab.lib.store import shared_file

_TICK = 0.5
"""Seconds between two looks at heartbeats and deadlines."""
_END_SECONDS = 10.0
"""Time that a child has to exit once its target has returned."""
_REAP_SECONDS = 5.0
"""Time that the system has to end a process that was killed."""
_PRINTED_BYTES = 2**20
"""Kept of what a child prints without a log, at most: it lies in memory."""
_TAIL_LINES, _TAIL_BYTES = 20, 2**16
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
"""Begin of a line that slm_lab logged, whether the process died or not."""


class Message(NamedTuple):
    """What a child sent."""

    child: Child
    kind: str
    content: tuple[Any, ...]


class Died(NamedTuple):
    """A child's process has ended, for whatever reason; it is reaped, and what it started is killed."""

    child: Child
    reason: str
    """"killed by SIGKILL (often: out of memory)", "ended with exit code 3", "did not end within 60 seconds", …"""
    output: str
    """The last lines that it printed."""
    code: int | None
    """Exit code, negative for a signal, None where it cannot be known."""


class Stalled(NamedTuple):
    """A child's heartbeat has not changed for long. The process goes on."""

    child: Child
    seconds: float
    phase: str
    level: Literal["notice", "limit"]


Event = Message | Died | Stalled


class Child:
    """One piece of work done by a process, and after its death by the next one. Made by `Supervisor.start`.

    Attributes:
        restart: processes that died over this work.
        pid: of the process, and the number of its process group.
        output: the log that it prints to; None: what it prints is kept in memory.
    """

    def __init__(self, name: str, target: Target, args: tuple[Any, ...], output: Path | None, threads: int) -> None:
        self.name, self.target, self.args, self.output, self.threads = name, target, args, output, threads
        self.restart, self.pid = 0, -1
        self.inbox: deque[Message] = deque()
        self._printed = -1 if output is not None else _printed_file()
        self._running = False

    # ---- start

    def start(self, memory_fd: int, memory: mmap.mmap, index: int) -> None:
        """Start the process. Raises OSError where the system has no room for one."""
        self.heartbeat = Heartbeat(memory, index)
        self._timer, self._noticed, self._limited = StallTimer(self.heartbeat), False, False
        self._deadline, self._verdict = float("inf"), ""
        self._buffer = bytearray()
        for attempt in range(3):
            ensure_server()
            method = start_method()
            try:
                self._launch(method, SharedFd(memory_fd), index)
            except (OSError, EOFError) as error:  # EOFError: the fork server died meanwhile
                if method == "spawn":
                    raise
                stop_server()
                if attempt > 0:
                    use_spawn(str(error) or "it ended while it loaded")
            else:
                return

    def _launch(self, method: str, memory: SharedFd, index: int) -> None:
        printed = self._printed
        if self.output is not None:
            printed = os.open(self.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        ours, theirs = multiprocessing.Pipe()
        try:
            args = (Setup(printed), self.name, self.restart, theirs, memory, MEMORY_BYTES, index, self.target, self.args)
            process = multiprocessing.get_context(method).Process(target=child_side.main, args=args, name=self.name)  # type: ignore[attr-defined]
            with stop_signals_blocked(), hidden_main(), environment(dict.fromkeys(THREAD_LIMITS, str(self.threads))):
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if self.output is not None:
                os.close(printed)
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # nobody else polls or joins it
        self._process, self._method, self._connection = process, method, ours
        self._socket: socket.socket | None = socket.socket(fileno=ours.fileno())
        self.pid, self._pidfd = process.pid, -1
        with suppress(AttributeError, OSError):  # not on this system, or dead already
            self._pidfd = os.pidfd_open(self.pid)
        self._running = True

    # ---- talk

    def send(self, order: Any) -> None:
        """Hand the child an order (`ChildContext.receive`). A child that is gone is no error."""
        self._send("order", order)

    def stop(self, grace: float) -> None:
        """Request a stop; kill the child where it has not ended within `grace` seconds."""
        self._send("stop", None)
        self._end_within(grace)

    def _send(self, kind: str, order: Any) -> None:
        if self._running:
            with suppress(OSError):  # it has just died
                self._connection.send((kind, order))

    def _end_within(self, seconds: float) -> None:
        if time.monotonic() + seconds < self._deadline:
            self._deadline, self._verdict = time.monotonic() + seconds, f"did not end within {seconds:.0f} seconds"

    def tail(self) -> str:
        """The last lines that the child printed, without those that slm_lab logged."""
        try:
            fd = self._printed if self.output is None else os.open(self.output, os.O_RDONLY)
        except OSError:
            return ""
        try:
            text = _last_bytes(fd).decode(errors="replace")
        finally:
            if self.output is not None:
                os.close(fd)
        return "\n".join([line for line in text.splitlines() if line and not _LOGGED.match(line)][-_TAIL_LINES:])

    # ---- what Supervisor asks

    @property
    def waitable(self) -> list[Any]:
        """What to wait for: its messages, and its death."""
        if not self._running:
            return []
        return [self._pidfd if self._pidfd >= 0 else self._process.sentinel, *([self._socket] if self._socket is not None else [])]

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        if not self._running:
            return True
        return bool(wait([self._pidfd], 0)) if self._pidfd >= 0 else self._process.exitcode is not None

    @property
    def overdue(self) -> bool:
        """Whether it should have ended by now."""
        return time.monotonic() > self._deadline

    def take_messages(self) -> None:
        """Move what has arrived to the inbox, without waiting for the rest of a message that is not whole."""
        with suppress(BlockingIOError):
            while self._socket is not None:
                try:
                    data = self._socket.recv(2**16, socket.MSG_DONTWAIT)
                except ConnectionError:
                    data = b""
                if not data:
                    self._socket.detach()
                    self._socket = None
                self._buffer += data
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from("!i", self._buffer)  # the format of multiprocessing.connection, below 2 GiB
            if len(self._buffer) < 4 + size:
                break
            kind, *content = pickle.loads(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            if kind == "_output":
                self.output = content[0]
            elif kind == "_end":
                self._end_within(_END_SECONDS)
            else:
                self.inbox.append(Message(self, kind, tuple(content)))
        if self.output is None and os.fstat(self._printed).st_size > _PRINTED_BYTES:
            last = _last_bytes(self._printed)
            os.ftruncate(self._printed, 0)
            os.write(self._printed, last)

    def stall(self, notice: float | None, limit: float | None) -> Stalled | None:
        """A stall that has not been reported yet."""
        seconds = self._timer.seconds()
        if limit is not None and seconds >= limit and not self._limited:
            self._limited = self._noticed = True
            return Stalled(self, seconds, PHASES[self.heartbeat.phase], "limit")
        if notice is not None and seconds >= notice and not self._noticed:
            self._noticed = True
            return Stalled(self, seconds, PHASES[self.heartbeat.phase], "notice")
        if seconds == 0:
            self._limited = self._noticed = False
        return None

    def end(self) -> int | None:
        """Kill the process and all that it started, reap it and take its last messages. Returns its exit code."""
        if not self._running:
            return None
        if not self.dead:
            with suppress(ProcessLookupError):
                if self._pidfd >= 0:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                else:
                    self._process.kill()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        code = self._reap()
        self.take_messages()
        self._running = False
        if self._socket is not None:
            self._socket.detach()
            self._socket = None
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        return code

    def _reap(self) -> int | None:
        process, popen = self._process, self._process._popen
        wait([self._pidfd if self._pidfd >= 0 else process.sentinel], _REAP_SECONDS)
        if self._method == "spawn":
            process.join(_REAP_SECONDS)
            code: int | None = process.exitcode
        else:
            from multiprocessing import forkserver

            code = None
            if wait([process.sentinel], _REAP_SECONDS):
                with suppress(EOFError, OSError):  # the fork server is gone, and with it the exit code
                    code = forkserver.read_signed(process.sentinel)
            popen.returncode = 255 if code is None else code
        with suppress(ValueError):  # it cannot be killed: nothing can be done
            process.close()
        return code

    def reason(self, code: int | None, overdue: bool) -> str:
        """Why the process ended."""
        if overdue:
            return self._verdict
        if code is None:
            return "ended with an unknown exit code (its fork server was killed)"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}" + (" (often: out of memory)" if code == -signal.SIGKILL else "")

    def forget(self) -> None:
        """Close what the child keeps from one process to the next."""
        if self._printed >= 0:
            os.close(self._printed)
            self._printed = -1


class Supervisor:
    """Owns the child processes of one run, in one thread at a time.

    Args:
        stall_notice, stall_limit: seconds without a heartbeat after which `events` yields a Stalled; None: never.
    """

    def __init__(self, stall_notice: float | None = 30.0, stall_limit: float | None = None) -> None:
        self.stall_notice, self.stall_limit = stall_notice, stall_limit
        self.children: list[Child] = []
        """Those whose processes run."""
        self._all: dict[Child, int] = {}
        """Every child, with its number in the memory of heartbeats."""
        self._numbers = count()
        self._memory_fd = shared_file()
        os.ftruncate(self._memory_fd, MEMORY_BYTES)
        self._memory = mmap.mmap(self._memory_fd, MEMORY_BYTES)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, name: str, target: Target, *args: Any, output: Path | None = None, threads: int = 1) -> Child:
        """Start a child that runs target(context, *args), with a limit of `threads` for numpy and torch. Raises OSError.

        Args: output: file to which its stdout and stderr are appended; None: they are kept in memory, for `Died.output`.
        """
        child = Child(name, target, args, None if output is None else output.absolute(), threads)
        number = next(self._numbers)
        assert number < CAPACITY, "too many children"
        try:
            child.start(self._memory_fd, self._memory, number)
        except BaseException:
            child.forget()
            raise
        self._all[child] = number
        self.children.append(child)
        return child

    def restart(self, child: Child, *args: Any) -> None:
        """Start a new process for a child, with new arguments if any are given, after killing the old one. Raises OSError."""
        self.kill(child)
        child.restart += 1
        child.args = args or child.args
        child.start(self._memory_fd, self._memory, self._all[child])
        self.children.append(child)

    def events(self, timeout: float, also: Sequence[Connection | socket.socket | int] = ()) -> Iterator[Event]:
        """Wait until something happens, or one of `also` is ready, but no longer than `timeout` seconds and hardly more than 0.5.

        Yields what happened: of each child first all that it sent, then its death. The caller may restart, stop and kill
        children meanwhile.
        """
        pending = any(child.inbox or not child._running for child in self.children)
        wait([*also, *(item for child in self.children for item in child.waitable)], 0 if pending else min(timeout, _TICK))
        for child in list(self.children):
            dead = child.dead  # asked first: whatever it sent before it ended has then arrived
            child.take_messages()
            over = dead or child.overdue
            code = child.end() if over else None
            while child.inbox and child in self.children:
                yield child.inbox.popleft()
            if child not in self.children:
                continue
            if over:
                self.children.remove(child)
                yield Died(child, child.reason(code, not dead), child.tail(), code)
            elif (stalled := child.stall(self.stall_notice, self.stall_limit)) is not None:
                yield stalled

    def stop(self, grace: float) -> None:
        """Request a stop of all children; those that have not ended within `grace` seconds are killed by `events`."""
        for child in self.children:
            child.stop(grace)

    def kill(self, child: Child) -> None:
        """Kill a child and all that it started, at once. No event tells of it."""
        child.end()
        child.inbox.clear()
        if child in self.children:
            self.children.remove(child)

    def close(self) -> None:
        """Kill all children and all that they started."""
        for child in list(self.children):
            self.kill(child)
        for child in self._all:
            child.forget()
        self._all.clear()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1


def _printed_file() -> int:
    """An anonymous file that is appended to, so that it can be cut."""
    fd = shared_file()
    with suppress(ImportError):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _last_bytes(fd: int) -> bytes:
    return os.pread(fd, _TAIL_BYTES, max(0, os.fstat(fd).st_size - _TAIL_BYTES))
