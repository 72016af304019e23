"""Tables of Sessions on other nodes.

Rows are sent to one process on the driver's node, which writes them to the run folder. Checkpoints, which can be large, are written by
the Session itself: to the run folder, which then must be visible to all nodes, or to the URL in Plan.storage. A Session whose node did not
answer and that was therefore replaced may still run. Its restart number is then outdated, and its rows are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from slm_lab.experiment.events import CheckpointWritten, Emit, Event, Mode, Row
from slm_lab.experiment.execute.ray.remote import Remote
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import CheckpointKind, LocalSink, Position, RunSink, Spans
from slm_lab.lib.log import PlainError


class Superseded(PlainError):
    """Another process has taken over the Session."""


class SinkServer:
    """Writes the tables of all Sessions of a trial."""

    def __init__(self) -> None:
        self._sinks: dict[int, LocalSink] = {}
        self._restarts: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}

    def begin(self, session: int, restart: int, paths: RunPaths, trial: int) -> None:
        """Accept rows from a Session from now on, but only from its process number `restart`."""
        if restart < self._restarts.get(session, 0):
            raise Superseded(f"session {session} was restarted elsewhere")
        if (before := self._sinks.pop(session, None)) is not None:
            before.close()
        self._errors.pop(session, None)
        self._restarts[session] = restart
        self._sinks[session] = LocalSink(paths, trial)

    def write(self, session: int, restart: int, event: Row | CheckpointWritten) -> None:
        """Pass an event to the Session's LocalSink. An error is stored and raised by the Session's next `call`."""
        if restart != self._restarts.get(session):
            return
        try:
            self._sinks[session](event)
        except Exception as error:
            self._errors.setdefault(session, error)

    def call(self, session: int, restart: int, method: str, *args: Any) -> Any:
        """Call a method of the Session's LocalSink."""
        if restart != self._restarts[session]:
            raise Superseded(f"session {session} was restarted elsewhere")
        if (error := self._errors.pop(session, None)) is not None:
            raise error
        return getattr(self._sinks[session], method)(*args)


class RemoteSink(RunSink):
    """The RunSink of a Session on any node. Events other than rows are passed to `emit`."""

    def __init__(self, server: Remote, paths: RunPaths, trial: int, session: int, restart: int, emit: Emit) -> None:
        self.server, self.session, self.restart, self.emit = server, session, restart, emit
        self.files = LocalSink(paths, trial)
        """Writes checkpoints directly from this node; rows are sent to the server."""
        server.call("begin", session, restart, paths, trial)

    def __call__(self, event: Event) -> None:
        if isinstance(event, (Row, CheckpointWritten)):
            self.server.send("write", self.session, self.restart, event)
        if not isinstance(event, Row):
            self.emit(event)

    def open(self, table: int, frame: int = 0) -> None:
        self._call("open", table, frame)

    def save(self, table: int, which: CheckpointKind, bundle: dict[str, Any]) -> None:
        self.files.save(table, which, bundle)

    def save_shared(self, bundle: dict[str, Any]) -> None:
        self.files.save_shared(bundle)

    def position(self, session: int) -> Position:
        position: Position = self._call("position", session)
        return position

    def rewind(self, session: int, position: Position | None = None, frame: int = 0) -> None:
        self._call("rewind", session, position, frame)

    def rows(self, table: int, mode: Mode) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = self._call("rows", table, mode)
        return rows

    def append(self, session: int, name: Literal["pbt"], columns: tuple[str, ...], row: Mapping[str, Any]) -> None:
        self._call("append", session, name, columns, row)

    def timeline(self, session: int, spans: Spans) -> None:
        self._call("timeline", session, spans)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *args: Any) -> Any:
        return self.server.call("call", self.session, self.restart, method, *args)
