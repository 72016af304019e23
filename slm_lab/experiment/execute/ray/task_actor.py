"""The Ray actor in which a task runs on a node of a Ray cluster."""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

from slm_lab.experiment.execute.executor import Context, Target
from slm_lab.experiment.execute.heartbeat import StallTimer
from slm_lab.experiment.execute.local.child import redirect_output_to_fd
from slm_lab.experiment.execute.local.user_code import describe_failure
from slm_lab.experiment.execute.ray.connect import pack, unpack
from slm_lab.lib.log import logger

_TICK = 0.2
"""Time in seconds between two checks of the heartbeat."""
_POLL_SECONDS = 5.0
"""Maximum time in seconds that a call of `TaskActor.take_messages` waits for messages."""
_MOST_BYTES = 2**20
"""Maximum number of bytes of a log that are sent in one message."""
STARTED, LOG, STALLED = "_started", "_log", "_stalled"
"""Kinds of messages that the executor handles and does not yield as events of the kind Message."""


class Limits(NamedTuple):
    """Number of seconds without a heartbeat after which a stall is reported, for the levels "notice" and "limit", or None to never report a
    stall of the level."""

    stall_notice: float | None
    stall_limit: float | None


class SentMessage(NamedTuple):
    """A message from the task to the executor. Small content is packed (see `pack`)."""

    kind: str
    content: tuple[Any, ...] | bytes


class TakenMessages(NamedTuple):
    """Result of `TaskActor.take_messages`: messages that the task has sent."""

    messages: list[SentMessage]
    ended: bool
    """Whether the target of the task has ended and no messages are left."""


class RayContext(Context):
    """The Context of a task on a node of a Ray cluster."""

    def __init__(self, name: str, restart: int) -> None:
        super().__init__(name, restart)
        self.messages: SimpleQueue[SentMessage] = SimpleQueue()
        self._log, self._sent = Path(), 0
        self._printed: IO[bytes] | None = None
        """`_log`: path of the log. `_printed`: local file with the output of this process. `_sent`: number of bytes of the output that were
        sent."""
        self._forwarding = threading.Lock()

    def send(self, kind: str, *content: Any) -> None:
        packed = pack(content)  # in this thread, since packing in another thread would interrupt this one
        self.messages.put(SentMessage(kind, packed))

    def redirect_output(self, path: Path) -> None:
        """Redirect the output of this process to a temporary file, and send the lines of the file to the executor, which appends the lines
        to `path`.

        (A pipe instead of a file would block a program that prints while it holds the GIL.)
        """
        self._log, self._printed = path, tempfile.TemporaryFile("ab+")  # noqa: SIM115  # until the process ends
        redirect_output_to_fd(os.dup(self._printed.fileno()))
        threading.Thread(target=self._forward_always, name="log", daemon=True).start()
        import ray

        node = ray.get_runtime_context().get_node_id()
        logger.info("process %d on node %s of %s, restart %d", os.getpid(), node, platform.node(), self.restart)

    def _forward_always(self) -> None:
        while True:
            time.sleep(_TICK)
            self.send_printed_lines()

    def send_printed_lines(self) -> None:
        """Send the lines that this process has printed since the last call."""
        if self._printed is None:
            return
        with self._forwarding:
            text = os.pread(self._printed.fileno(), _MOST_BYTES, self._sent)
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) == _MOST_BYTES else 0)
            if end:
                self._sent += end
                self.send(LOG, self._log, text[:end].decode(errors="replace"))


class TaskActor:
    """Ray actor that runs the target of one task. While the method `run` is executing, other threads call the other methods.

    Args:
        restart: number of earlier processes of the task.
        folder: working directory of the executor's process.
        limits: stall limits of the executor.
    """

    def __init__(self, name: str, restart: int, folder: Path, limits: Limits) -> None:
        self.context, self.limits = RayContext(name, restart), limits
        self._timer, self._ended = StallTimer(self.context.heartbeat), False
        self._orders, self._arrival = 0, threading.Condition()
        """`_orders`: number of orders that have arrived. `_arrival`: condition that is notified when orders arrive."""
        with suppress(OSError):  # this node has no such folder
            os.chdir(folder)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for "package.module:Name" in a spec

    def run(self, target: Target, args: tuple[Any, ...]) -> None:
        """Run the target until it ends. If the target raises an exception, send the message ("failed", cause)."""
        self.context.send(STARTED)
        try:
            target(self.context, *args)
        except BaseException as error:
            logging.getLogger(__name__).info("failed", exc_info=True)
            self.context.send("failed", describe_failure(error))
        finally:
            self.context.send_printed_lines()
            self._ended = True

    def take_messages(self, *numbered: Any) -> TakenMessages | bytes:
        """Wait at most _POLL_SECONDS for messages from the task, and return a packed TakenMessages object that contains these messages.

        Args: numbered: arguments of `receive_orders`, which is called first, or () if there are no orders.
        """
        if numbered:
            self.receive_orders(*numbered)
        return pack(self._wait_for_messages())

    def _wait_for_messages(self) -> TakenMessages:
        messages: list[SentMessage] = []
        deadline = time.monotonic() + _POLL_SECONDS
        while not messages and time.monotonic() < deadline:
            ended = self._ended
            with suppress(Empty):
                messages.append(self.context.messages.get(block=not ended, timeout=_TICK))
                while True:
                    messages.append(self.context.messages.get_nowait())
            if (stall := self._timer.check_stall(*self.limits)) is not None:
                messages.append(SentMessage(STALLED, stall))
            if ended:
                return TakenMessages(messages, self.context.messages.empty())
        return TakenMessages(messages, False)

    def receive_orders(self, number: int, *orders: Any) -> None:
        """Pass packed orders (messages of the executor) to the target.

        Args: number: number of earlier orders. The call waits for the earlier orders, which may arrive in another thread.
        """
        with self._arrival:
            self._arrival.wait_for(lambda: self._orders == number)
            for order in map(unpack, orders):
                if order is None:  # may arrive before the call of `stop`, which another thread executes
                    self.context.stop.requested = True
                self.context.orders.put(order)
            self._orders += len(orders)
            self._arrival.notify_all()

    def signal(self, content: Any) -> None:
        """Pass a packed signal to the target."""
        self.context.on_signal(unpack(content))

    def stop(self) -> None:
        """Request a stop of the target.

        The executor also sends None as an order, so that `Context.receive` returns None if the target waits for an order.
        """
        self.context.stop.requested = True
