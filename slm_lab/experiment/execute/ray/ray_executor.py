"""The executor of a Ray cluster, which runs each task in an actor on a node of the cluster."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.execute.executor import Executor, Message, Resources, Target, Task, TaskDied, TaskStalled
from slm_lab.experiment.execute.ray.connect import LOST_NODE, ActorHandle, death_reason, node_strategy, pack, unpack
from slm_lab.experiment.execute.ray.task_actor import LOG, STALLED, STARTED, Limits, TaskActor
from slm_lab.lib.log import notice

_WAKE_SECONDS = 0.1
"""Maximum time in seconds until a waiting call of `RayExecutor.events` reacts to `RayExecutor.wake`."""
_PENDING_SECONDS = 20.0
"""Time in seconds after which a notice reports a task that waits for free resources."""


class RayTask(Task):
    """A task that runs in a Ray actor. After a restart, the task runs in a new actor."""

    def __init__(self, name: str, target: Target, args: tuple[Any, ...], resources: Resources) -> None:
        super().__init__(name, target, args, resources)
        self.actor: Any = None
        self.taken: Any = None
        """Future of the running call of `TaskActor.take_messages`, or None if no call is running."""
        self.outbox: list[Any] = []
        """Packed orders that will be sent with the next call of the actor."""
        self.ordered = 0
        """Number of orders that were sent to the actor."""
        self.signalled: Any = None
        """Future of the call of `TaskActor.signal` with the last signal."""
        self.started: float | None = None
        """Time at which the actor was requested, in seconds of monotonic(), or None when the actor runs."""
        self.failed = False
        """Whether the target has raised an exception."""

    def request_messages(self) -> None:
        """Request the messages of the actor, and send the orders of the outbox with the request."""
        self.taken = self.actor.take_messages.options(concurrency_group="mail").remote(*self._take_unsent_orders())

    def _take_unsent_orders(self) -> tuple[Any, ...]:
        """Empty the outbox. Returns (number of orders sent earlier, *orders of the outbox), or () if the outbox was empty."""
        number, orders = self.ordered, self.outbox
        self.ordered, self.outbox = number + len(orders), []
        return (number, *orders) if orders else ()

    def send(self, order: Any) -> None:
        self.outbox.append(_ray_argument(order))
        if self.taken is not None:  # otherwise the next call of `take_messages` sends the order
            self.actor.receive_orders.options(concurrency_group="control").remote(*self._take_unsent_orders())

    def signal(self, content: Any) -> bool:
        import ray

        if self.signalled is not None and not ray.wait([self.signalled], timeout=0)[0]:
            return False
        self.signalled = self.actor.signal.options(concurrency_group="control").remote(_ray_argument(content))
        return True

    def stop(self, grace: float) -> None:
        self.actor.stop.options(concurrency_group="control").remote()
        self.send(None)
        self.limit_deadline(grace)


class _SharedContent(NamedTuple):
    """Result of `RayExecutor.put_shared`, to be passed to `RayTask.send` or `RayTask.signal`."""

    argument: Any
    """The packed content, or a reference to the content in Ray's object store."""


def _ray_argument(content: Any) -> Any:
    return content.argument if isinstance(content, _SharedContent) else pack(content)


class RayExecutor(Executor):
    """Executor that runs tasks on the nodes of the Ray cluster to which this process is connected.

    A task starts when its resources are free on a node.

    Args:
        stall_notice, stall_limit: number of seconds without a heartbeat after which `events` yields TaskStalled with the level "notice" or
            "limit", or None to never yield the level.
    """

    task_type = RayTask

    def __init__(self, stall_notice: float | None = 30.0, stall_limit: float | None = None) -> None:
        import ray

        super().__init__()
        self._ray: Any = ray
        self._limits = Limits(stall_notice, stall_limit)
        self._servers: list[Any] = []
        self._noticed = False

    def _start_process(self, task: RayTask) -> None:
        remote = self._ray.remote(
            num_cpus=task.resources.cores,
            num_gpus=task.resources.gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"control": 1, "mail": 1},
            enable_task_events=False,  # only Ray's dashboard needs task events
        )(TaskActor)
        task.actor = remote.remote(task.name, task.restart, Path(os.getcwd()), self._limits)
        task.actor.run.remote(task.target, task.args)
        task.started, task.failed = time.monotonic(), False
        task.taken, task.outbox, task.ordered, task.signalled = None, [], 0, None

    def start_server_actor(self, kind: type, *args: Any, node: str | None = None, **options: Any) -> ActorHandle:
        """Start an actor that only answers calls and reserves no core, and return its handle. The actor is killed by `close`.

        Args:
            kind: class of the actor.
            node: id of the node on which the actor should run, or None for any node.
            options: options of the Ray actor, such as max_restarts.
        """
        strategy = "SPREAD" if node is None else node_strategy(node, soft=bool(options.get("max_restarts")))
        actor = self._ray.remote(num_cpus=0, scheduling_strategy=strategy, **options)(kind).remote(*args)
        self._servers.append(actor)
        return ActorHandle(actor)

    def _wait(self, timeout: float) -> None:
        for task in self.tasks:
            if task.taken is None:
                task.request_messages()
        taken = {task.taken: task for task in self.tasks}
        for future in self._wait_for_futures(list(taken), timeout):
            self._read(taken[future], future)
        self._notice_pending()

    def _wait_for_futures(self, futures: list[Any], timeout: float) -> list[Any]:
        """Wait at most `timeout` seconds until a future is ready or `wake` is called, and return the futures that are ready."""
        end = time.monotonic() + timeout
        done: list[Any] = []
        if not futures:
            self._woken.wait(timeout)
        while futures and not (done or self._woken.is_set()):
            seconds = min(end - time.monotonic(), _WAKE_SECONDS)
            done, _ = self._ray.wait(futures, num_returns=1, timeout=max(0.0, seconds))
            if seconds < _WAKE_SECONDS:
                break
        self._woken.clear()
        if done:  # collect all futures that are ready; otherwise the first task would always be served first
            done, _ = self._ray.wait(futures, num_returns=len(futures), timeout=0)
        return done

    def _read(self, task: RayTask, future: Any) -> None:
        """Add the messages that a task has sent to the inbox of the task.

        Args: future: completed future of a call of `TaskActor.take_messages`.
        """
        task.taken = None
        try:
            messages, ended = unpack(self._ray.get(future))
        except self._ray.exceptions.RayError as error:
            reason = death_reason(error)
            lost = reason == LOST_NODE
            task.inbox.append(TaskDied(task, reason if lost else f"ended: {reason}", "", lost=lost))
            return
        task.failed |= any(kind == "failed" for kind, _ in messages)
        for kind, packed in messages:
            content = unpack(packed)
            if kind == STARTED:
                task.started = None
            elif kind == LOG:
                path, text = content
                with suppress(OSError), path.open("a", encoding="utf-8") as file:  # for example, the disk is full
                    file.write(text)
            elif kind == STALLED:
                task.inbox.append(TaskStalled(task, *content))
            else:
                task.inbox.append(Message(task, kind, content))
        if ended:
            task.inbox.append(TaskDied(task, f"ended with exit code {int(task.failed)}", "", int(task.failed)))

    def _notice_pending(self) -> None:
        late = [task for task in self.tasks if task.started is not None and time.monotonic() > task.started + _PENDING_SECONDS]
        if late and not self._noticed:
            self._noticed = True
            notice(f"{', '.join(task.name for task in late)} still {'wait' if len(late) > 1 else 'waits'} for a free core of the cluster")

    def put_shared(self, content: Any) -> Any:
        """Return an object to send in place of `content`. Large arrays are put into Ray's object store and sent to each node only once."""
        packed = pack(content)
        return _SharedContent(packed if isinstance(packed, bytes) else self._ray.put(content))

    def _kill_process(self, task: RayTask) -> None:
        self._ray.kill(task.actor)

    def close(self) -> None:
        """Kill all tasks and servers."""
        super().close()
        for server in self._servers:
            self._ray.kill(server)
        self._servers.clear()
