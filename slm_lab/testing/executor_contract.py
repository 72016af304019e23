"""`ExecutorContract`, tests that every Executor must pass, and `FakeExecutor`, an Executor that runs tasks in threads.

If your tests define a subclass of ExecutorContract, pytest runs the contract tests on your executor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.execute.executor import Context, Event, Executor, Message, Task, TaskDied


class FakeTask(Task):
    """Task of a FakeExecutor, which runs in a thread.

    The thread of a killed task continues, but messages that the thread sends are ignored.
    """

    context: _FakeContext

    def send(self, order: Any) -> None:
        self.context.orders.put(order)

    def signal(self, content: Any) -> bool:
        """Call the task's `Context.on_signal` with `content`, in the thread of the caller."""
        self.context.on_signal(content)
        return True

    def stop(self, grace: float) -> None:
        """Ask the task to stop. If the task has not ended within `grace` seconds, it counts as killed."""
        self.context.request_stop()
        self.limit_deadline(grace)


class _FakeContext(Context):
    """Context object that the target of a FakeTask receives, for one run of the task."""

    def __init__(self, task: FakeTask) -> None:
        super().__init__(task.name, task.restart)
        self._task, self._args, self._inbox = task, task.args, task.inbox

    def send(self, kind: str, *content: Any) -> None:
        self._inbox.append(Message(self._task, kind, content))

    def redirect_output(self, path: Path) -> None: ...

    def run(self) -> None:
        """Call the target of the task. When the target has returned or raised an exception, report the death of the task."""
        code = 0
        try:
            self._task.target(self, *self._args)
        except BaseException as error:
            code = 1
            self.send("failed", f"{type(error).__name__}: {error}")
        self._inbox.append(TaskDied(self._task, f"ended with exit code {code}", "", code))


class FakeExecutor(Executor):
    """Executor for tests, which runs tasks in threads of this process.

    Attributes:
        started: the names of all tasks that were started or restarted, in order.
        tasks: the tasks that have not ended.
    """

    task_type = FakeTask

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def _start_process(self, task: FakeTask) -> None:
        self.started.append(task.name)
        task.context = _FakeContext(task)
        threading.Thread(target=task.context.run, name=task.name, daemon=True).start()

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not any(task.inbox or time.monotonic() > task.deadline for task in self.tasks) and time.monotonic() < deadline:
            if self._woken.wait(0.001):
                break
        self._woken.clear()

    def report_death(self, task: FakeTask, reason: str = "killed by SIGKILL", *, lost: bool = False) -> None:
        """Report the death of a task, as if its process had been killed or, with `lost=True`, its node had been lost. The thread of the
        task continues."""
        task.inbox.append(TaskDied(task, reason, "", lost=lost))

    def _kill_process(self, task: FakeTask) -> None: ...


_SECONDS = 60.0
"""Maximum number of seconds for which a test waits for an event. On an idle machine, waits are much shorter."""


def echo(context: Context, first: str) -> None:
    """Target of a task that sends `first`, then each order (message of the executor to the task), and finally whether the end of the task
    was requested."""
    context.send("first", first, context.name, context.restart)
    while (order := context.receive()) is not None:
        context.send("order", order)
    context.send("stopped", context.stop.requested)


def fail(context: Context) -> None:
    """Target of a task that sends a message and then raises an error."""
    context.send("before")
    raise ValueError("broken on purpose")


def write(context: Context, path: Path) -> None:
    """Target of a task that prints a line to a file and then waits for an order."""
    context.redirect_output(path)
    print("a line")  # noqa: T201
    context.receive()


def stay(context: Context) -> None:
    """Target of a task that ignores the request to stop."""
    context.send("here")
    while True:
        time.sleep(0.05)


def listen(context: Context) -> None:
    """Target of a task that sends the sum of each signal's content, and that does not receive orders."""
    context.on_signal = lambda content: context.send("sum", int(content.sum()))
    context.send("here")
    while not context.stop.requested:
        time.sleep(0.01)


class ExecutorContract:
    """Tests that an executor must pass. A subclass defines `executor`, a pytest fixture that returns the executor.

    Attributes: prints: whether the executor supports `Context.redirect_output`, which writes the output of a task to a file.
    """

    prints = True

    def until(self, executor: Executor, done: Callable[[list[Event]], Any]) -> list[Event]:
        """Collect events of the executor until `done(events)` is true, and return these events."""
        events: list[Event] = []
        deadline = time.monotonic() + _SECONDS
        while not done(events):
            assert time.monotonic() < deadline, events
            events += executor.events(0.2)
        return events

    def test_messages_and_orders_arrive_in_order_and_death_comes_last(self, executor: Executor) -> None:
        task = executor.start("one", echo, "hello")
        for order in range(3):
            task.send(order)
        events = self.until(executor, lambda events: sum(isinstance(event, Message) for event in events) == 4)
        assert [(event.kind, event.content) for event in _messages(events)] == [
            ("first", ("hello", "one", 0)),
            *(("order", (order,)) for order in range(3)),
        ]
        task.stop(_SECONDS)
        *messages, died = self.until(executor, _has_died)
        assert [(event.kind, event.content) for event in _messages(messages)] == [("stopped", (True,))], (messages, died)
        assert isinstance(died, TaskDied)
        assert (died.task, died.code, died.lost) == (task, 0, False)

    def test_many_orders_arrive_in_order_while_messages_come(self, executor: Executor) -> None:
        task, number = executor.start("one", echo, "hello"), 0
        found: list[Any] = []
        deadline = time.monotonic() + _SECONDS
        while len(found) < 300:
            assert time.monotonic() < deadline, found[-1:]
            if number < len(found) + 4:
                task.send(number)
                number += 1
            found += [event.content for event in _messages(list(executor.events(0.001 * (number % 3)))) if event.kind == "order"]
        assert found == [(order,) for order in range(len(found))]

    def test_a_signal_does_not_wait_for_the_target(self, executor: Executor) -> None:
        task = executor.start("one", listen)
        self.until(executor, len)
        for size in (10, 10**6):
            shared = executor.put_shared(np.ones(size, np.int8))
            self.until(executor, lambda events: task.signal(shared))  # noqa: B023
            (message,) = _messages(self.until(executor, len))
            assert message.content == (size,)

    def test_shared_content_is_an_order_of_several_tasks(self, executor: Executor) -> None:
        tasks = [executor.start(name, echo, name) for name in ("one", "two")]
        self.until(executor, lambda events: len(events) == 2)
        for size in (10, 10**6):
            shared = executor.put_shared({"ones": np.ones(size, np.int8)})
            for task in tasks:
                task.send(shared)
            events = self.until(executor, lambda events: len(events) == 2)
            assert {event.task for event in events} == {*tasks}
            assert all(event.content[0]["ones"].sum() == size for event in _messages(events))

    def test_a_wait_for_events_can_be_ended(self, executor: Executor) -> None:
        """Test that `Executor.wake` ends a wait for events, both before the wait has begun and during the wait."""
        executor.start("one", echo, "hello")
        self.until(executor, len)
        for seconds in (0.0, 0.1):
            thread = threading.Timer(seconds, executor.wake)
            thread.start()
            if not seconds:
                thread.join()
            begin = time.monotonic()
            assert list(executor.events(0.45)) == []
            assert time.monotonic() < begin + 0.4
            thread.join()

    def test_an_error_is_a_message_and_then_a_death(self, executor: Executor) -> None:
        executor.start("one", fail)
        *messages, died = self.until(executor, _has_died)
        assert [event.kind for event in _messages(messages)] == ["before", "failed"]
        assert "broken on purpose" in list(_messages(messages))[-1].content[0]
        assert isinstance(died, TaskDied)
        assert died.code == 1

    def test_a_restarted_task_has_new_arguments_and_counts_its_processes(self, executor: Executor) -> None:
        task = executor.start("one", echo, "hello")
        self.until(executor, len)
        executor.restart(task, "again")
        events = self.until(executor, len)
        assert [event.content for event in _messages(events)] == [("again", "one", 1)]
        assert task.restart == 1

    def test_a_task_that_does_not_stop_is_killed(self, executor: Executor) -> None:
        task = executor.start("one", stay)
        self.until(executor, len)
        begin = time.monotonic()
        task.stop(0.5)
        events = self.until(executor, _has_died)
        assert isinstance(events[-1], TaskDied)
        assert events[-1].task == task
        assert time.monotonic() - begin >= 0.4

    def test_a_killed_task_is_not_reported_and_the_others_go_on(self, executor: Executor) -> None:
        killed, other = (executor.start(name, echo, name) for name in ("killed", "other"))
        self.until(executor, lambda events: len(events) == 2)
        executor.kill(killed)
        other.send("still here")
        events = self.until(executor, len)
        assert [(event.task, event.content) for event in _messages(events)] == [(other, ("still here",))]
        executor.stop(_SECONDS)
        events = self.until(executor, _has_died)
        assert {event.task for event in events} == {other}

    def test_output_goes_to_a_file(self, executor: Executor, tmp_path: Path) -> None:
        if not self.prints:
            return
        task, path = executor.start("one", write, tmp_path / "log.txt"), tmp_path / "log.txt"
        self.until(executor, lambda events: path.exists() and "a line" in path.read_text(encoding="utf-8"))
        task.stop(_SECONDS)
        self.until(executor, _has_died)


def _messages(events: list[Event]) -> Iterator[Message]:
    return (event for event in events if isinstance(event, Message))


def _has_died(events: list[Event]) -> bool:
    return any(isinstance(event, TaskDied) for event in events)
