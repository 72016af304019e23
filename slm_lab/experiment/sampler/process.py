"""A rollout worker in a process of its own."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import active_children, current_process
from multiprocessing.connection import Connection, Listener
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from slm_lab.experiment.engine import cause
from slm_lab.experiment.engine.spawned import CommonFile, Spawned
from slm_lab.lib.heap import CommonHeap, common_file

if TYPE_CHECKING:
    from slm_lab.experiment.sampler.worker import RolloutWorker, Setting

SERVER = -1
"""In place of a worker's number: central inference."""
_NICE = 5
"""In async mode the learner goes first: where cores are fewer than processes, what it needs limits the run more often than the envs do, and
workers that ran ahead of it only wait."""
_TAIL = 20
"""Lines shown of what a killed process printed."""
_PRINTED_BYTES = 2**20
"""Kept of what a process prints, at most: it lies in memory."""


class WorkerProcess(Spawned):
    """The learner's side of rollout worker number `index`, or of central inference (SERVER)."""

    def __init__(self, index: int, memory: CommonFile) -> None:
        self.index, self.printed = index, common_file()
        fcntl.fcntl(self.printed, fcntl.F_SETFL, fcntl.fcntl(self.printed, fcntl.F_GETFL) | os.O_APPEND)  # so that it can be cut short
        self.name = "inference" if index == SERVER else f"rollout worker {index}"
        self.setting: Setting | None = None
        super().__init__(self.name, main, (memory, CommonFile(self.printed)))

    def begin(self, setting: Setting) -> None:
        """Let it build its envs: the process was begun before it was known from what, since it takes seconds to load everything."""
        self.setting = setting
        self.send(setting)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        yield from super().messages()
        if os.fstat(self.printed).st_size > _PRINTED_BYTES:
            last = self._last_printed()
            os.ftruncate(self.printed, 0)
            os.write(self.printed, last)

    def _last_printed(self) -> bytes:
        return os.pread(self.printed, 2**16, max(0, os.fstat(self.printed).st_size - 2**16))

    def death(self) -> tuple[str, str]:
        """Why it ended that has not said so itself, and the last that it printed."""
        lines = self._last_printed().decode(errors="replace").splitlines()
        return self.how_it_ended(), "".join(f"\n{line}" for line in lines[-_TAIL:])

    def kill(self) -> None:
        super().kill()
        if self.printed >= 0:
            os.close(self.printed)
            self.printed = -1


def main(memory: CommonFile, printed: CommonFile, connection: Connection) -> None:
    """Receive a Setting, and do as it says until told to stop or the learner is gone.

    A worker receives numbers of slots to collect into. Messages: ready; rollout, with the slot's number and a Collected, for each;
    failed, with the cause.
    """
    for number in (1, 2):
        os.dup2(printed.fd, number)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    orders: SimpleQueue[Any] = SimpleQueue()
    worker: list[RolloutWorker] = []

    def listen() -> None:
        with suppress(EOFError, OSError):
            while (order := connection.recv()) is not None:
                orders.put(order)
            for one in worker:
                one.stopping = True
            orders.put(None)
            connection.recv()  # returns only by EOFError
        for child in active_children():
            child.kill()
        os._exit(1)  # the learner is gone

    threading.Thread(target=listen, daemon=True).start()
    try:
        setting = orders.get()
        if setting is not None:
            heap = CommonHeap(memory.fd, 0, 1, synced=False, fresh=False)
            if setting.spec.meta.sampler.async_rl:
                os.nice(_NICE)
            if setting.index == SERVER:
                _serve(setting, heap, connection)
            else:
                _collect(setting, heap, connection, orders, worker)
    except BaseException as error:
        _send(connection, "failed", cause(error))
        sys.exit(1)
    finally:
        for left in active_children():
            left.kill()


def _serve(setting: Setting, heap: CommonHeap, connection: Connection) -> None:
    from slm_lab.experiment.sampler.inference import InferenceServer

    server = InferenceServer(setting, heap)
    with Listener(setting.address, "AF_UNIX", backlog=256, authkey=current_process().authkey) as listener:
        _send(connection, "ready")
        server.serve(listener)


def _collect(setting: Setting, heap: CommonHeap, connection: Connection, orders: SimpleQueue[Any], worker: list[RolloutWorker]) -> None:
    import numpy as np

    from slm_lab.experiment.sampler.inference import CentralInference
    from slm_lab.experiment.sampler.worker import RolloutWorker
    from slm_lab.lib.rng import worker_seeds

    seed = worker_seeds(setting.seeds, setting.index, setting.restart).env
    random.seed(seed)  # for envs that draw from the streams that all have in common
    np.random.seed(seed)
    one = RolloutWorker(setting, heap)
    if setting.address:
        one.inference = CentralInference(setting.address, setting.index, one.common.mail[setting.index], one.newest)
    worker.append(one)
    _send(connection, "ready")
    while (slot := orders.get()) is not None:
        report = one.collect(slot)
        if not one.stopping:
            _send(connection, "rollout", slot, report)
    one.close()


def _send(connection: Connection, *message: Any) -> None:
    with suppress(OSError):  # the learner is gone; the listening thread ends the process
        connection.send(message)
