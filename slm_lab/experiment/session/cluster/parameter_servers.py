"""The driver's side of a parameter server: its processes, and what happens when one of them dies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slm_lab.experiment.execute.ray.remote import Remote
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.session.cluster.parameter_server import ServerStatus


class ParameterServers:
    """Starts the processes of a parameter server, and lets all of them begin anew when one was started again.

    Args:
        start: starts a ParameterServer, given its number; the engine starts it again if it dies.
        checkpoint: returns the file with the last snapshot of the arrays; None: there is none yet.
        restarted: called with the number of a process that was started again, before all begin anew.
    """

    def __init__(self, start: Callable[[int], Remote], checkpoint: Callable[[], Location | None], restarted: Callable[[int], None]) -> None:
        self._start, self._checkpoint, self._restarted = start, checkpoint, restarted
        self.generation = 0
        self.servers: list[Remote] = []
        self._asked: list[Any] = []
        """Status of each process, under way."""
        self._add()

    @property
    def first(self) -> Remote:
        return self.servers[0]

    def look(self) -> None:
        """Handle what has happened, without waiting unless a process was started again."""
        statuses: dict[int, ServerStatus] = {}
        done = [number for number, server in enumerate(self.servers) if server.done(self._asked[number])]
        for number in done:
            with suppress(Exception):  # it has died too often; Sessions fail with the same error
                statuses[number] = self.servers[number].result(self._asked[number])
        processes = max((status.processes for status in statuses.values()), default=1)
        if restarted := [number for number, status in statuses.items() if status.generation is None]:
            self._begin_anew(restarted)
        elif processes > len(self.servers):
            while len(self.servers) < processes:
                self._add()
            self.first.send("join", self.servers[1:])
        for number in done:
            self._asked[number] = self.servers[number].start("status")

    def _add(self) -> None:
        server = self._start(len(self.servers))
        server.send("begin", self.generation)
        self.servers.append(server)
        self._asked.append(server.start("status"))

    def _begin_anew(self, restarted: list[int]) -> None:
        """Let all processes serve from the last snapshot. Those that were started again come last: until then no Session goes on."""
        for number in restarted:
            self._restarted(number)
        path, arrays = self._checkpoint(), None
        if path is not None and path.exists():
            from slm_lab.experiment.files import bundle as state

            arrays = {name: tensor.numpy() for name, tensor in state.load(path)["arrays"].items()}
        self.generation += 1
        for number in sorted(range(len(self.servers)), key=lambda number: (number in restarted, number)):
            with suppress(Exception):  # as in look
                self.servers[number].call("begin", self.generation, arrays)
        if len(self.servers) > 1:
            self.first.send("join", self.servers[1:])
