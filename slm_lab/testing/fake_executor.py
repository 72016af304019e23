"""An Executor without processes, for tests of code that decides which tasks to start and how to handle messages and deaths."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from slm_lab.experiment.execute.executor import Context, Died, Executor, Message, Task


class FakeTask(Task):
    """A task that runs in a thread. The thread of a killed task goes on, but its messages are ignored."""

    context: _FakeContext

    def send(self, order: Any) -> None:
        self.context.orders.put(order)

    def signal(self, content: Any) -> bool:
        """Call `Context.on_signal` in this thread."""
        self.context.on_signal(content)
        return True

    def stop(self, grace: float) -> None:
        """Request a stop; the task counts as killed if it has not ended within `grace` seconds."""
        self.context.request_stop()
        self.end_within(grace)


class _FakeContext(Context):
    """The Context of one run of a FakeTask."""

    def __init__(self, task: FakeTask) -> None:
        super().__init__(task.name, task.restart)
        self._task, self._args, self._inbox = task, task.args, task.inbox

    def send(self, kind: str, *content: Any) -> None:
        self._inbox.append(Message(self._task, kind, content))

    def print_to(self, path: Path) -> None: ...

    def run(self) -> None:
        """Run the target to its end."""
        code = 0
        try:
            self._task.target(self, *self._args)
        except BaseException as error:
            code = 1
            self.send("failed", f"{type(error).__name__}: {error}")
        self._inbox.append(Died(self._task, f"ended with exit code {code}", "", code))


class FakeExecutor(Executor):
    """Runs tasks in threads of this process.

    Attributes:
        started: the names of all tasks that were started or restarted, in order.
        tasks: the tasks that have not ended.
    """

    task_type = FakeTask

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def _launch(self, task: FakeTask) -> None:
        self.started.append(task.name)
        task.context = _FakeContext(task)
        threading.Thread(target=task.context.run, name=task.name, daemon=True).start()

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not any(task.inbox or time.monotonic() > task.deadline for task in self.tasks) and time.monotonic() < deadline:
            if self._woken.wait(0.001):
                break
        self._woken.clear()

    def end(self, task: FakeTask, reason: str = "killed by SIGKILL", *, lost: bool = False) -> None:
        """End a task now, as if its process had been killed or its node had been lost."""
        task.inbox.append(Died(task, reason, "", lost=lost))

    def _end(self, task: FakeTask) -> None: ...
