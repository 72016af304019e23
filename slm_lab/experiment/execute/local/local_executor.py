"""The executor of this machine, which runs each task in a child process. The code that runs in child processes is in child.py."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import struct
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slm_lab.experiment.execute.executor import Executor, Message, Resources, Target, Task, TaskDied, TaskStalled
from slm_lab.experiment.execute.heartbeat import HEARTBEAT_BYTES, Heartbeat, StallTimer
from slm_lab.experiment.execute.local import child as child_side
from slm_lab.experiment.execute.local.child import ChildSetup, SharedFd
from slm_lab.experiment.execute.local.fork_server import ENDED, ensure_server, inherited_start_method, start_method, stop_server, use_spawn
from slm_lab.lib.process import THREAD_LIMITS, hide_main_module, kill_group, stop_signals_blocked, temporary_environment
from slm_lab.lib.store import create_shared_file
from slm_lab.lib.system import has_feature

_TICK = 0.5
"""Maximum time in seconds between two checks of heartbeats and deadlines."""
_END_SECONDS = 10.0
"""Maximum time in seconds for a child to exit after its target has returned."""
_EXIT_SECONDS = 2.0
"""Maximum time in seconds for a process to exit after its pipe was closed, on systems without process descriptors (pidfd)."""
_REAP_SECONDS = 5.0
"""Maximum time in seconds for the system to end a killed process."""
_UNKNOWN = 255
"""Exit code that the standard library reports for a child if the fork server, which knows the child's real exit code, was killed."""
_PRINTED_BYTES = 2**20
"""Maximum number of bytes of a child's output that are kept in memory while the child has no log file."""
_TAIL_LINES, _TAIL_BYTES = 20, 2**16
_MEANINGS = {
    "SIGKILL": "often: out of memory",
    "SIGSEGV": "invalid memory access in native code, such as a simulator",
    "SIGBUS": "invalid memory access in native code, or a full /dev/shm",
    "SIGABRT": "native code ended the process, such as a failed assertion",
    "SIGFPE": "invalid arithmetic in native code",
    "SIGILL": "native code for another processor",
}
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
"""Pattern of the start of an output line that slm_lab has logged. A line with this start does not explain why a process died."""


class LocalTask(Task):
    """A task that runs in a child process. After a restart, the task runs in a new child process.

    Attributes:
        pid: id of the process and of its process group.
        output: log file of the process, or None if the output of the process is kept in memory.
    """

    def __init__(self, name: str, target: Target, args: tuple[Any, ...], resources: Resources) -> None:
        super().__init__(name, target, args, resources)
        self.pid = -1
        self.output: Path | None = None
        self._process: Any = None
        """The multiprocessing.Process of the task, or None if the process is not running."""

    # ---- start

    def start(self) -> None:
        """Start the child process. Raises OSError if the system cannot create a process."""
        for attempt in range(3):
            ensure_server()
            method = start_method()
            try:
                return self._launch(method)
            except (OSError, EOFError) as error:  # EOFError: the fork server has ended meanwhile
                if method == "spawn":
                    raise
                stop_server()
                if attempt > 0:
                    use_spawn(str(error) or ENDED)

    def _launch(self, method: str) -> None:
        printed, memory = create_shared_file(), create_shared_file()
        ours, theirs = multiprocessing.Pipe()
        try:
            import fcntl  # POSIX only; a Session without child processes does not need it

            fcntl.fcntl(printed, fcntl.F_SETFL, fcntl.fcntl(printed, fcntl.F_GETFL) | os.O_APPEND)  # the file may be truncated later
            os.ftruncate(memory, HEARTBEAT_BYTES)
            self.heartbeat = Heartbeat(memory)
            args = (
                ChildSetup(printed, inherited_start_method()),
                self.name,
                self.restart,
                theirs,
                SharedFd(memory),
                self.target,
                self.args,
            )
            process: Any = multiprocessing.get_context(method).Process(target=child_side.main, args=args, name=self.name)  # type: ignore[attr-defined]
            with stop_signals_blocked(), hide_main_module(), temporary_environment(dict.fromkeys(THREAD_LIMITS, "1")):
                process.start()
        except BaseException:
            ours.close()
            os.close(printed)
            raise
        finally:
            theirs.close()
            os.close(memory)
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # no other code may poll or join it
        self._process, self.pid, self._printed, self.output = process, process.pid, printed, None
        self._death = _open_exit_descriptor(process)
        self._connection: Connection | None = ours
        self._buffer, self.timer = bytearray(), StallTimer(self.heartbeat)

    # ---- communication

    def send(self, order: Any) -> None:
        self._send("order", order)

    def signal(self, content: Any) -> bool:
        self._send("signal", content)
        return True

    def stop(self, grace: float) -> None:
        self._send("stop", None)
        self.limit_deadline(grace)

    def _send(self, kind: str, order: Any) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the process has just died
                self._connection.send((kind, order))

    def tail(self) -> str:
        """Return the last lines of the output of the process, without the lines that slm_lab has logged."""
        lines = _last_bytes(self._printed).decode(errors="replace").splitlines()
        return "\n".join(
            [line for line in lines if line and not _LOGGED.match(line) and not line.startswith("Extension modules: ")][-_TAIL_LINES:]
        )

    # ---- methods that LocalExecutor calls

    @property
    def wait_handles(self) -> list[Any]:
        """Objects to pass to multiprocessing.connection.wait, which become ready when the process ends or has sent a message."""
        return [] if self._process is None else [self._death, *([self._connection] if self._connection is not None else [])]

    @property
    def has_ended_or_expired(self) -> bool:
        """Whether the process has ended or its deadline has passed."""
        return self._process is None or time.monotonic() > self.deadline or bool(wait([self._death], 0))

    def take_messages(self) -> None:
        """Add the messages that have arrived to the inbox, without waiting for the rest of an incomplete message."""
        while self._connection is not None and self._connection.poll():
            try:
                data = os.read(self._connection.fileno(), 2**16)
            except ConnectionError:
                data = b""
            if not data:
                self._connection.close()
                self._connection = None
            self._buffer += data
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from("!i", self._buffer)  # the format of multiprocessing.connection, below 2 GiB
            if len(self._buffer) < 4 + size:
                break
            kind, *content = pickle.loads(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            if kind == "_output":
                with suppress(OSError):  # the log has already been removed
                    log = os.open(content[0], os.O_RDONLY)
                    os.dup2(log, self._printed)
                    os.close(log)
                    self.output = content[0]
            elif kind == "_end":
                self.limit_deadline(_END_SECONDS)
            else:
                self.inbox.append(Message(self, kind, tuple(content)))
        if self.output is None and os.fstat(self._printed).st_size > _PRINTED_BYTES:
            last = _last_bytes(self._printed)
            os.ftruncate(self._printed, 0)
            os.write(self._printed, last)

    def _wait_for_exit(self) -> bool:
        """Wait at most _EXIT_SECONDS until the process, whose pipe is closed, exits. Returns whether the process has exited.

        A process with a closed pipe may still run, since user code may have closed the pipe.
        """
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._process.exitcode is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def end_process(self) -> None:
        """End the process, and read its last messages. The process and all processes that it started are killed if they still run."""
        if self._process is None:
            return
        overdue = not wait([self._death], 0)
        if not overdue and not has_feature("pidfd") and not self._wait_for_exit():
            overdue, self.kill_reason = True, "closed file descriptors that it did not open"
        if overdue:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        kill_group(self.pid)
        self._process.join(_REAP_SECONDS)
        code: int | None = self._process.exitcode
        self.take_messages()
        self.inbox.append(TaskDied(self, self.kill_reason if overdue else _exit_reason(code), self.tail(), code))
        with suppress(ValueError):  # the process could not be killed
            self._process.close()
        self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for fd in (self._death, self._printed):
            os.close(fd)


def _open_exit_descriptor(process: Any) -> int:
    """Return a new file descriptor that becomes readable when the process has ended."""
    if has_feature("pidfd"):
        with suppress(OSError):  # the process is dead already
            return os.pidfd_open(process.pid)
    return os.dup(process.sentinel)


class LocalExecutor(Executor):
    """Executor that runs each task in a child process. In each child process, numpy and torch use one thread.

    Args:
        stall_notice, stall_limit: number of seconds without a heartbeat after which `events` yields TaskStalled with the level "notice" or
            "limit", or None to never yield the level.
    """

    task_type = LocalTask

    def __init__(self, stall_notice: float | None = 30.0, stall_limit: float | None = None) -> None:
        super().__init__()
        self.stall_notice, self.stall_limit = stall_notice, stall_limit
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)

    def _start_process(self, task: LocalTask) -> None:
        task.start()

    def _wait(self, timeout: float) -> None:
        """Wait for an event or a call of `wake`, for at most `timeout` seconds or _TICK seconds."""
        pending = any(task.inbox for task in self.tasks)
        wait([self._wake_reader, *(item for task in self.tasks for item in task.wait_handles)], 0 if pending else min(timeout, _TICK))
        if self._woken.is_set():
            self._wake_reader.recv_bytes()
            self._woken.clear()

    def _collect(self, task: LocalTask) -> None:
        if task.has_ended_or_expired:
            task.end_process()
            return
        task.take_messages()
        if (stall := task.timer.check_stall(self.stall_notice, self.stall_limit)) is not None:
            task.inbox.append(TaskStalled(task, *stall, task.tail() if stall[-1] == "limit" else ""))

    def wake(self) -> None:
        if not self._woken.is_set():
            self._woken.set()
            self._wake_writer.send_bytes(b"")

    def _kill_process(self, task: LocalTask) -> None:
        task.end_process()


def _exit_reason(code: int | None) -> str:
    """Return a text with the reason why a process ended, given the exit code of a process that the executor has not killed."""
    if code == _UNKNOWN:
        return f"ended with exit code {_UNKNOWN} (or an unknown one, if the fork server was killed)"
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = _MEANINGS.get(name)
    return f"killed by {name}" + (f" ({meaning})" if meaning else "")


def _last_bytes(fd: int) -> bytes:
    return os.pread(fd, _TAIL_BYTES, max(0, os.fstat(fd).st_size - _TAIL_BYTES))
