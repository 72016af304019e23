"""Interface for starting and monitoring processes, on this machine (LocalExecutor) and on a cluster (RayExecutor).

A task is a function, `target(context, *args)`, that runs in a separate process. A task receives orders from the process that started the
task, sends messages to this process, shows progress by heartbeats, and can be requested to stop.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple, Self

from slm_lab.experiment.execute.heartbeat import WAITING, Heartbeat, StallLevel
from slm_lab.experiment.plan import Stop

Target = Callable[..., None]
"""The function that a task runs: target(context, *args). The function must be defined in an importable module, not in the user's script."""


@dataclass(frozen=True)
class Resources:
    """Resources that a task reserves on a node of a cluster.

    A LocalExecutor reserves no resources, and its caller limits the number of concurrent tasks.
    """

    cores: float = 1.0
    gpus: float = 0.0


class Context(ABC):
    """First argument of the target of a task, with which the target communicates with the executor.

    Attributes:
        restart: number of earlier processes of this task.
        stop: the stop request, which is set by the executor or because the executor's process has ended.
        heartbeat: heartbeat of this process, with the method `beat(phase)`.
        on_signal: callback that receives signals (Task.signal) in another thread. The target may replace the default callback, which does
            nothing. `on_signal` must not raise an exception.
    """

    def __init__(self, name: str, restart: int, heartbeat: Heartbeat | None = None) -> None:
        self.name, self.restart, self.stop, self.heartbeat = name, restart, Stop(), heartbeat or Heartbeat()
        self.beat = self.heartbeat.beat
        self.on_signal: Callable[[Any], None] = lambda signal: None
        self.orders: SimpleQueue[Any] = SimpleQueue()
        """Queue of the orders that have arrived. None is put into the queue after the last order."""

    @abstractmethod
    def send(self, kind: str, *content: Any) -> None:
        """Send a message to the executor. Any thread may call this method."""

    def receive(self) -> Any:
        """Wait for the next order (Task.send), in the phase "waiting", and return the order.

        Returns None if a stop is requested and no order is left.
        """
        self.beat(WAITING)
        order = self.orders.get()
        if order is None:
            self.orders.put(None)  # for the next call of `receive`
        return order

    def request_stop(self) -> None:
        """Request a stop of this process. No orders arrive after the stop request."""
        self.stop.requested = True
        self.orders.put(None)

    @abstractmethod
    def redirect_output(self, path: Path) -> None:
        """Redirect the output of this process to the end of the file `path` on the executor's machine."""


class Task(ABC):
    """A task started by `Executor.start`. `Executor.restart` replaces the process of a task by a new process.

    Attributes:
        restart: number of earlier processes of this task.
        inbox: events that have arrived but were not yielded by `Executor.events` yet. A TaskDied event is always the last event of `inbox`.
        deadline: time at which the process will be killed, in seconds of monotonic().
        kill_reason: reason in the TaskDied event if the process is killed at the deadline.
    """

    def __init__(self, name: str, target: Target, args: tuple[Any, ...], resources: Resources) -> None:
        self.name, self.target, self.args, self.resources, self.restart = name, target, args, resources, 0
        self.inbox: deque[Event] = deque()
        self.deadline, self.kill_reason = float("inf"), ""

    @abstractmethod
    def send(self, order: Any) -> None:
        """Send an order (any picklable object) to the process, in which `Context.receive` returns the order. An order to an ended process
        is ignored."""

    @abstractmethod
    def signal(self, content: Any) -> bool:
        """Call `Context.on_signal` in the process of the task immediately, even while the target is busy.

        If the previous signal has not been delivered yet, the new signal is not sent and False is returned.
        """

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Request a stop of the process. The process is killed if it has not ended within `grace` seconds."""

    def limit_deadline(self, seconds: float) -> None:
        """Set the deadline of the process to `seconds` seconds from now, unless the current deadline is earlier."""
        if time.monotonic() + seconds < self.deadline:
            self.deadline, self.kill_reason = time.monotonic() + seconds, f"did not end within {seconds:.0f} seconds"


class Message(NamedTuple):
    """Event that contains a message from a task. The message ("failed", cause) means that the target has raised an exception."""

    task: Any
    kind: str
    content: tuple[Any, ...]


class TaskDied(NamedTuple):
    """Event that reports that the process of a task, with all processes that it started, has ended for any reason."""

    task: Any
    reason: str
    """Reason as text, such as "killed by SIGKILL (often: out of memory)", "ended with exit code 3" or "did not end within 60 seconds"."""
    output: str
    """Last lines that the process printed, or "" if the lines are unknown or in a log."""
    code: int | None = None
    """Exit code of the process, negative if a signal ended the process, or None if the exit code is unknown."""
    lost: bool = False
    """Whether the process ended because its node was lost. If `lost` is True, the task itself has not failed."""

    @property
    def description(self) -> str:
        """Text that contains the name of the task and the reason."""
        return f"{self.task.name}: {self.reason}" if self.lost else f"{self.task.name} {self.reason}"


class TaskStalled(NamedTuple):
    """Event that reports that the heartbeat of a task has not changed for longer than a limit. The process of the task keeps running."""

    task: Any
    seconds: float
    phase: str
    level: StallLevel
    output: str = ""
    """Last lines that the process printed. `output` is "" for the level "notice", and if the lines are unknown or in a log."""


Event = Message | TaskDied | TaskStalled


class Executor(ABC):
    """Base class of executors, which start, monitor and end the tasks of one run.

    Only one thread at a time may call the methods, except `wake`, which any thread may call.
    """

    task_type: ClassVar[type[Any]]
    """Class of the tasks of this executor."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []
        """Tasks whose processes have not ended."""
        self._woken = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, name: str, target: Target, *args: Any, resources: Resources = Resources()) -> Task:
        """Start a task that runs target(context, *args), and return the task. Raises OSError if the system cannot create a process."""
        task: Task = type(self).task_type(name, target, args, resources)
        self._start(task)
        return task

    def restart(self, task: Any, *args: Any) -> None:
        """Kill the process of a task and start a new process for the task. If `args` are given, they replace the task's arguments.

        Raises OSError if the system cannot create a process.
        """
        self.kill(task)
        task.restart += 1
        task.args = args or task.args
        self._start(task)

    def _start(self, task: Any) -> None:
        task.deadline, task.kill_reason = float("inf"), ""
        self._start_process(task)
        self.tasks.append(task)

    @abstractmethod
    def _start_process(self, task: Any) -> None:
        """Start a process for a task."""

    def events(self, timeout: float) -> Iterator[Event]:
        """Wait at most `timeout` seconds for events of the tasks, and yield the events.

        The messages of a task are yielded before other events of the task. The caller may restart, stop and kill tasks during the
        iteration.
        """
        self._wait(timeout)
        for task in list(self.tasks):
            self._collect(task)
            while task.inbox and task in self.tasks:
                event = task.inbox.popleft()
                if isinstance(event, TaskDied):
                    self.kill(task)
                yield event

    @abstractmethod
    def _wait(self, timeout: float) -> None:
        """Wait for an event or a call of `wake`, for at most `timeout` seconds."""

    def _collect(self, task: Any) -> None:
        """Add the new events of a task to its inbox."""
        if time.monotonic() > task.deadline and not any(isinstance(event, TaskDied) for event in task.inbox):
            task.inbox.append(TaskDied(task, task.kill_reason, ""))

    def wake(self) -> None:
        """Make the running call of `events` in another thread return soon. If no call of `events` is running, the next call of `events`
        returns soon."""
        self._woken.set()

    def put_shared(self, content: Any) -> Any:
        """Return an object to pass to `Task.send` or `Task.signal` in place of `content`. `content` is sent only once to each node."""
        return content

    def stop(self, grace: float) -> None:
        """Request all tasks to stop. The method `events` kills the tasks that have not ended within `grace` seconds."""
        for task in self.tasks:
            task.stop(grace)

    def kill(self, task: Any) -> None:
        """Kill the process of a task and all processes that it started, immediately and without an event."""
        self._kill_process(task)
        task.inbox = deque()
        if task in self.tasks:
            self.tasks.remove(task)

    @abstractmethod
    def _kill_process(self, task: Any) -> None:
        """Kill the process of a task, and all processes that it started, unless the process has ended."""

    def close(self) -> None:
        """Kill all tasks."""
        for task in list(self.tasks):
            self.kill(task)


def run_task(executor: Executor, name: str, target: Target, *args: Any, stop: Stop) -> Sequence[Message]:
    """Run a single task until it ends, and return its messages.

    Raises the error (UserError or SpecError) if the task sends the message ("user_error", error), TaskFailed if the task fails, and
    KeyboardInterrupt if a stop is requested.
    """
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
                case TaskDied(code=0):
                    return messages
                case TaskDied():
                    raise TaskFailed(f"{event.description}\n{event.output}".strip())
        if stop.requested:
            executor.kill(task)
            raise KeyboardInterrupt


class TaskFailed(Exception):
    """Exception that is raised if a task has ended without a result."""
