"""What starts and watches processes: the one protocol for this machine and for a cluster.

A task is a function, `target(context, *args)`, that runs in a process of its own. It exchanges messages with the process that started it,
shows by beats that it makes progress, and is asked to stop, in the same way wherever it runs. Implementations: LocalExecutor, RayExecutor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from slm_lab.experiment.execute.heartbeat import Heartbeat
from slm_lab.experiment.plan import Stop

Target = Callable[..., None]
"""target(context, *args): what a task runs. A function of an importable module, not of the user's script."""


def ignore(signal: Any) -> None:
    """Be the `Context.on_signal` of a target that sets none."""


@dataclass(frozen=True)
class Resources:
    """What a task occupies of its node. Local tasks share the machine: whoever starts them limits how many run at a time."""

    cores: float = 1.0
    gpus: float = 0.0


class Context(Protocol):
    """What the target of a task works with, in its process."""

    name: str
    restart: int
    """Number of processes of this task that ended before this one."""
    stop: Stop
    """Requested when the executor requests it or its process has ended."""
    heartbeat: Heartbeat
    """Of this process; `beat(phase)` is its method."""
    beat: Callable[[int], None]
    on_signal: Callable[[Any], None]
    """Called with each signal (Task.signal) in another thread; set by the target, and without effect until then. It must not raise."""

    def send(self, kind: str, *content: Any) -> None:
        """Send a message, from any thread."""

    def receive(self) -> Any:
        """Wait for the next order (Task.send) and return it; None if a stop is requested and no order is left."""

    def print_to(self, path: Path) -> None:
        """Append the output of this process to the file `path` of the executor's machine from now on."""


class Task(Protocol):
    """A task, whose process can be replaced by another one. Started by `Executor.start`."""

    name: str
    restart: int

    def send(self, order: Any) -> None:
        """Send an order, which `Context.receive` returns. Without effect if the process has ended."""

    def signal(self, content: Any) -> bool:
        """Call `Context.on_signal` at once, whatever the target does meanwhile. Return False, without effect, if the last signal is still
        on its way."""

    def stop(self, grace: float) -> None:
        """Request a stop; the process is killed if it has not ended within `grace` seconds."""


class Message(NamedTuple):
    """A message of a task. ("failed", cause): its target has raised an exception."""

    task: Any
    kind: str
    content: tuple[Any, ...]


class Died(NamedTuple):
    """The process of a task has ended, for whatever reason, and so have the processes that it started."""

    task: Any
    reason: str
    """"killed by SIGKILL (often: out of memory)", "ended with exit code 3", "did not end within 60 seconds", …"""
    output: str
    """The last lines that it printed, if they are known and are in no log."""
    code: int | None = None
    """Exit code, negative for a signal; None if it is not known."""
    lost: bool = False
    """Its node is gone: the task itself has not failed."""

    @property
    def text(self) -> str:
        """Name of the task and reason."""
        return f"{self.task.name}: {self.reason}" if self.lost else f"{self.task.name} {self.reason}"


class Stalled(NamedTuple):
    """The heartbeat of a task has not changed for longer than a limit; the process keeps running."""

    task: Any
    seconds: float
    phase: str
    level: Literal["notice", "limit"]
    output: str = ""
    """The last lines that it printed, if they are known and are in no log; for the level "limit"."""


Event = Message | Died | Stalled


class Executor(Protocol):
    """Owns the tasks of one run, in one thread at a time. Stalls are reported after the limits that it is made with."""

    def start(self, name: str, target: Target, *args: Any, resources: Resources = ...) -> Task:
        """Start a task. Raises OSError if the system cannot create a process."""

    def restart(self, task: Any, *args: Any) -> None:
        """Start a new process for a task, with new arguments if any are given, after killing the old one. Raises OSError."""

    def events(self, timeout: float) -> Iterator[Event]:
        """Wait until something happens, no longer than `timeout` seconds; yield the events, of each task first its messages.

        The caller may restart, stop and kill tasks meanwhile.
        """

    def wake(self) -> None:
        """Let the `events` of another thread return soon, or the next call of it."""

    def share(self, content: Any) -> Any:
        """Return what `Task.send` and `Task.signal` of several tasks take in place of `content`, which so goes to each node only once."""

    def stop(self, grace: float) -> None:
        """Request a stop of all tasks; those that have not ended within `grace` seconds are killed by `events`."""

    def kill(self, task: Any) -> None:
        """Kill a task and all that it started, at once. No event reports it."""

    def close(self) -> None:
        """Kill all tasks."""


def run_task(executor: Executor, name: str, target: Target, *args: Any, stop: Stop) -> Sequence[Message]:
    """Run a single task to its end and return its messages. Raises UserError or SpecError if it sends ("user_error", error),
    TaskFailed if it fails, KeyboardInterrupt if a stop is requested."""
    messages: list[Message] = []
    task = executor.start(name, target, *args)
    while True:
        for event in executor.events(0.5):
            match event:
                case Message(_, "user_error", (error,)):
                    executor.kill(task)
                    raise error
                case Message(_, "failed", (cause,)):
                    executor.kill(task)
                    raise TaskFailed(f"{name} failed: {cause}")
                case Message():
                    messages.append(event)
                case Died(code=0):
                    return messages
                case Died():
                    raise TaskFailed(f"{event.text}\n{event.output}".strip())
        if stop.requested:
            executor.kill(task)
            raise KeyboardInterrupt


class TaskFailed(Exception):
    """A task ended without its result."""
