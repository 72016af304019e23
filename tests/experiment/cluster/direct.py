"""Remote objects simulated in this process: arguments and results are pickled, as between processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from slm_lab.experiment.execute.ray.connect import ActorHandle
from slm_lab.experiment.session.cluster.parameter_server import ParameterServer, ParameterServers
from slm_lab.lib.rng import Seeds
from slm_lab.spec.models.spec import Spec

_KNOWN: WeakValueDictionary[int, Direct] = WeakValueDictionary()


class Direct:
    """A handle that calls an object in this process. As with Ray, arrays arrive read-only, and a handle is not copied."""

    def __init__(self, target: Any, before: Callable[[str], None] = lambda method: None) -> None:
        self.target, self.before = target, before
        self.calls: list[str] = []
        _KNOWN[id(self)] = self

    def __reduce__(self) -> Any:
        return _known, (id(self),)

    def call_async(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        return self.result(self.start(method, *args))

    def start(self, method: str, *args: Any) -> Any:
        self.before(method)
        self.calls.append(method)
        try:
            return _sent(getattr(self.target, method)(*_sent(args)))
        except Exception as error:
            return error

    def is_done(self, started: Any) -> bool:
        return True

    def result(self, started: Any) -> Any:
        if isinstance(started, Exception):
            raise started
        return started


def _known(number: int) -> Direct:
    return _KNOWN[number]


def _sent(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


class Served:
    """A parameter server in this process, with as many processes as the net needs, and its driver."""

    def __init__(self, spec: Spec, seeds: Seeds) -> None:
        self.spec, self.seeds = spec, seeds
        self.saved: Path | None = None
        """The last checkpoint."""
        self.restarted: list[int] = []
        self._polling = False
        self.driver = ParameterServers(self._start, lambda: self.saved, self.restarted.append)

    def _start(self, number: int) -> ActorHandle:
        return Direct(ParameterServer(self.spec, self.seeds, number), self._poll)

    def _poll(self, method: str) -> None:
        """Call the driver's `poll` whenever a Session asks for the status of the server."""
        if method == "status" and not self._polling and hasattr(self, "driver"):
            self._polling = True
            self.driver.poll()
            self._polling = False

    @property
    def first(self) -> ActorHandle:
        return self.driver.first

    def server(self, number: int) -> ParameterServer:
        remote = self.driver.servers[number]
        assert isinstance(remote, Direct)
        assert isinstance(remote.target, ParameterServer)
        return remote.target

    def kill(self, number: int) -> None:
        """Replace a process of the server by a new one."""
        os.close(self.server(number).fd)
        remote = self.driver.servers[number]
        assert isinstance(remote, Direct)
        remote.target = ParameterServer(self.spec, self.seeds, number)
        self.driver._asked[number] = remote.start("status")  # Ray resends the pending call to the new process

    def close(self) -> None:
        for number in range(len(self.driver.servers)):
            os.close(self.server(number).fd)
