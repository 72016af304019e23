"""An Executor without processes, for tests of decisions: what to start, and what to make of messages and deaths."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from slm_lab.experiment.execute.executor import Died, Event, Message, Resources, Target, ignore
from slm_lab.experiment.execute.heartbeat import WAITING, Heartbeat
from slm_lab.experiment.plan import Stop


class FakeTask:
    """A task that runs in a thread. A killed one runs on, but nothing more is taken from it."""

    def __init__(self, name: str, target: Target, args: tuple[Any, ...], restart: int = 0) -> None:
        self.name, self.target, self.args, self.restart = name, target, args, restart
        self.begin()

    def begin(self) -> None:
        """Begin to run in a new thread."""
        self.stop_request, self.heartbeat = Stop(), Heartbeat()
        self.beat = self.heartbeat.beat
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.events: deque[Event] = deque()
        self.deadline = float("inf")
        self.context = _FakeContext(self, self.events)
        threading.Thread(target=_run, args=(self, self.context, self.events), name=self.name, daemon=True).start()

    def send(self, order: Any) -> None:
        """Send an order."""
        self.orders.put(order)

    def signal(self, content: Any) -> bool:
        """Call `Context.on_signal` in this thread."""
        self.context.on_signal(content)
        return True

    def stop(self, grace: float) -> None:
        """Request a stop; the task counts as killed if it has not ended within `grace` seconds."""
        self.stop_request.requested = True
        self.orders.put(None)
        self.deadline = min(self.deadline, time.monotonic() + grace)


class _FakeContext:
    """The Context of one run of a FakeTask."""

    def __init__(self, task: FakeTask, events: deque[Event]) -> None:
        self.name, self.restart, self.stop = task.name, task.restart, task.stop_request
        self.heartbeat, self.beat = task.heartbeat, task.beat
        self.on_signal: Callable[[Any], None] = ignore
        self._task, self._orders, self._events = task, task.orders, events

    def send(self, kind: str, *content: Any) -> None:
        self._events.append(Message(self._task, kind, content))

    def receive(self) -> Any:
        self.beat(WAITING)
        order = self._orders.get()
        if order is None:
            self._orders.put(None)  # for the next call
        return order

    def print_to(self, path: Path) -> None: ...


def _run(task: FakeTask, context: _FakeContext, events: deque[Event]) -> None:
    code = 0
    try:
        task.target(context, *task.args)
    except BaseException as error:
        code = 1
        context.send("failed", f"{type(error).__name__}: {error}")
    events.append(Died(task, f"ended with exit code {code}", "", code))


class FakeExecutor:
    """Runs tasks in threads of this process.

    Attributes:
        started: the names of all tasks that were started or restarted, in order.
        tasks: those that have not ended.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.tasks: list[FakeTask] = []
        self._woken = threading.Event()

    def start(self, name: str, target: Target, *args: Any, resources: Resources = Resources()) -> FakeTask:  # noqa: B008  # it is frozen
        """Start a task."""
        self.started.append(name)
        self.tasks.append(FakeTask(name, target, args))
        return self.tasks[-1]

    def restart(self, task: FakeTask, *args: Any) -> None:
        """Start a task again, with new arguments if any are given."""
        self.kill(task)
        self.started.append(task.name)
        task.restart, task.args = task.restart + 1, args or task.args
        task.begin()
        self.tasks.append(task)

    def events(self, timeout: float) -> Iterator[Event]:
        """Yield what has happened, after waiting for at most `timeout` seconds; of each task its death comes last."""
        deadline = time.monotonic() + timeout
        while not any(task.events or time.monotonic() > task.deadline for task in self.tasks) and time.monotonic() < deadline:
            if self._woken.wait(0.001):
                break
        self._woken.clear()
        for task in list(self.tasks):
            while task.events and task in self.tasks:
                event = task.events.popleft()
                if isinstance(event, Died):
                    self.kill(task)
                yield event
            if task in self.tasks and time.monotonic() > task.deadline:
                self.kill(task)
                yield Died(task, "did not end in time", "")

    def wake(self) -> None:
        """Let `events` of another thread return, or its next call."""
        self._woken.set()

    def share(self, content: Any) -> Any:
        """Return the content itself."""
        return content

    def end(self, task: FakeTask, reason: str = "killed by SIGKILL", *, lost: bool = False) -> None:
        """Let the process of a task end now, as if it was killed, or its node was lost."""
        task.events.append(Died(task, reason, "", lost=lost))

    def stop(self, grace: float) -> None:
        """Request a stop of all tasks."""
        for task in self.tasks:
            task.stop(grace)

    def kill(self, task: FakeTask) -> None:
        """End a task. No event reports it."""
        task.events = deque()
        if task in self.tasks:
            self.tasks.remove(task)

    def close(self) -> None:
        """End all tasks."""
        for task in list(self.tasks):
            self.kill(task)
