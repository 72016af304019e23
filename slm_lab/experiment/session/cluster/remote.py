"""Objects with which a Session accesses arrays in a parameter server and tables on another machine."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from slm_lab.experiment.events import Emit, Event, Mode, Row, Status
from slm_lab.experiment.execute.ray.connect import PACKED, ActorHandle, unpack
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import CheckpointKind, LocalSink, Position, RunSink, Spans
from slm_lab.experiment.session.cluster.parameter_server import Answer, AttachReply, NotAttached, ServerStatus
from slm_lab.lib.log import PlainError
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.store import MOMENT, Arrays, Division, Named, Result, SectionLock, Shareable, attach_parts, prefixed_arrays
from slm_lab.spec.models.spec import Spec

_POLL = 0.05
"""Time in seconds between two attempts of a Session to save while another Session saves, or to attach while the server is not ready."""


_ARGS = 3
"""Position of the argument `args` among the arguments of ParameterServer.run."""


class _Call(NamedTuple):
    """A call of a method of one process of the parameter server."""

    process: int
    arguments: tuple[Any, ...] = ()


class _ArrayCopies:
    """A Session's copies of the shared arrays, and the Session's connections to the processes of the parameter server."""

    def __init__(self, first: ActorHandle, index: int, workers: int) -> None:
        self.servers, self.index, self.workers = [first], index, workers
        self.info: EnvInfo | None = None
        self.named: Named = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.sent: dict[str, np.ndarray] = {}
        """Name of an array with one row per Session → row of this Session that was last sent to or received from the server."""
        self.received = 0.0
        """Time of the server's last answer, in seconds of monotonic()."""
        self.pushed = self.pulled = 0
        """Number of bytes of arrays that were sent to the server (pushed) and received from the server (pulled)."""

    def allocate(self, named: Named) -> None:
        """Create the Session's copies of the arrays, and fill them with the server's values.

        The copy of a divisible vector is the array of the Session's component itself, so that an answer updates the component directly.
        """
        self.named = named
        for name, one in named.items():
            rows = (self.workers,) if one.combine == "own" else ()
            self.arrays[name] = np.zeros((*rows, *one.values.shape), one.values.dtype) if one.division is None else one.values
        self.divisions = {
            name.rpartition("/")[0]: one.division for name, one in named.items() if one.division is not None and one.division.processes > 1
        }
        """Full name of a component whose vectors are divided among several server processes → division of the vectors."""
        for process, attached in enumerate(self._attach()):
            self.update_copies(process, attached.arrays)

    def _attach(self) -> list[AttachReply]:
        """Wait until all server processes serve the same snapshot of the arrays, and attach the Session to each server process."""
        processes = max((division.processes for division in self.divisions.values()), default=1)
        while True:
            statuses: list[ServerStatus] = self._call_concurrently("status", [_Call(process) for process in range(len(self.servers))])
            self.servers[1:] = statuses[0].others
            begun = {status.generation for status in statuses}
            if len(statuses) == len(self.servers) and len(begun) == 1 and None not in begun:
                with suppress(NotAttached):  # a process died in the meantime
                    calls = [_Call(process, (self.index, self.info)) for process in range(len(self.servers))]
                    attached: list[AttachReply] = self._call_concurrently("attach", calls)
                    if len(attached) == processes and len({reply.generation for reply in attached}) == 1:
                        break
            time.sleep(_POLL)
        own = {name: array for name, array in attached[0].arrays.items() if self.named[name].combine == "own"}
        self.sent = {name: np.array(array[self.index]) for name, array in own.items()}
        return attached

    def call_servers(self, method: str, *stages: Sequence[_Call]) -> list[Any]:
        """Call a method of server processes, and return the results. The index and the changed rows of the Session are added to the
        arguments of each call.

        The calls of one stage run concurrently, and the stages run one after another.
        """
        while True:
            try:
                return [
                    result for calls in stages for result in self._call_concurrently(method, list(map(self._with_session_arguments, calls)))
                ]
            except NotAttached:  # all processes of the server have returned to a snapshot, or will do so
                for process, attached in enumerate(self._attach()):
                    own_or_divided = (name for name in attached.arrays if name in self.sent or self.named[name].division is not None)
                    self.update_copies(process, {name: attached.arrays[name] for name in attached.arrays.keys() - set(own_or_divided)})

    def call_first_server(self, method: str, *arguments: Any) -> Any:
        """Call a method of the first server process, and return the result."""
        return self.call_servers(method, [_Call(0, arguments)])[0]

    def _with_session_arguments(self, call: _Call) -> _Call:
        return _Call(call.process, (self.index, *call.arguments, self._changed_rows() if call.process == 0 else {}))

    def _changed_rows(self) -> dict[str, np.ndarray]:
        """Return the rows of this Session that have changed since the rows were last sent to the server."""
        changed = {name: self.arrays[name][self.index] for name in self.sent}
        changed = {name: row for name, row in changed.items() if not np.array_equal(row, self.sent[name])}
        for name, row in changed.items():
            np.copyto(self.sent[name], row)
            self.pushed += row.nbytes
        return changed

    def _call_concurrently(self, method: str, calls: Sequence[_Call]) -> list[Any]:
        """Call a method of several server processes concurrently, and return the results in order.

        If a process answers NotAttached, NotAttached is raised after the answers of all processes have arrived.
        """
        pending = [_start_call(self.servers[process], method, arguments) for process, arguments in calls]
        results, refusal = [], None
        for (process, _), call in zip(calls, pending, strict=True):
            try:
                results.append(unpack(self.servers[process].result(call)))
            except NotAttached as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return results

    def update_copies(self, process: int, arrays: Arrays) -> None:
        """Update the Session's copies with the arrays that the server process `process` has sent."""
        for name, array in arrays.items():
            one, copy = self.named[name], self.arrays[name]
            np.copyto(copy if one.division is None else copy[one.process_slice(process)], array)
            self.pulled += array.nbytes
            if name in self.sent:
                np.copyto(self.sent[name], array[self.index])
        self.received = time.monotonic()

    def take_answers(self, answers: Sequence[Answer]) -> None:
        for process, answer in enumerate(answers):
            self.update_copies(process, answer.arrays)

    def arrays_of_process(self, arrays: Arrays, process: int) -> dict[str, np.ndarray]:
        """Return the arrays, or ranges of divided arrays, that the server process `process` stores."""
        pieces, parts = {}, tuple(f"{part}/" for part in self.divisions)
        for name, array in arrays.items():
            one = self.named[name]
            if one.division is not None:
                pieces[name] = array[one.process_slice(process)]
            elif process == 0 or name.startswith(parts):
                pieces[name] = array
        return pieces

    def write(self, arrays: Arrays) -> None:
        """Overwrite arrays of the server processes with the given arrays."""
        self.call_servers("write", [_Call(process, (self.arrays_of_process(arrays, process),)) for process in range(len(self.servers))])


def _start_call(server: ActorHandle, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "run" and not any(isinstance(arg, np.ndarray) and arg.nbytes > PACKED for arg in arguments[_ARGS]):
        message = pickle.dumps(arguments, 5)
        if len(message) < 2 * PACKED:
            return server.start("run_packed", message)
    return server.start(method, *arguments)


class RemoteArrays:
    """The Store of a Session whose shared arrays are in a parameter server. The Session works on copies of the arrays (`arrays`).

    Each answer of the server to a message of this Session updates the copies. "Own" arrays are those with one row per Session; a message
    contains this Session's row of an own array only if the row has changed.

    If the vectors of a component are divided among several server processes, the number of updates is counted separately for each range,
    and the first process stores all other arrays of the component. If two Sessions push gradients at the same time, different server
    processes may apply the gradients in different orders.

    Args:
        server: handle of the first process of a ParameterServer.
        info: function that returns the EnvInfo of the Session's env, called when the Session is built.
        fresh: whether training of the net has not begun yet.
    """

    remote = True
    serves: int | None = None

    def __init__(self, server: ActorHandle, spec: Spec, index: int, info: Callable[[], EnvInfo], fresh: bool = True) -> None:
        meta = spec.meta
        self.index, self.workers, self.synced, self.locked, self.fresh = index, meta.max_session, meta.distributed == "synced", False, fresh
        self._copies, self._info, self._name = _ArrayCopies(server, index, meta.max_session), info, ""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Full name → the Session's copy of the array, for all shared arrays."""
        return self._copies.arrays

    def store_for_part(self, name: str, part: Shareable) -> Self:
        store = object.__new__(type(self))
        store.__dict__ = {**self.__dict__, "_name": f"{self._name}/{name}".lstrip("/")}
        return store

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        self._copies.info = self._info()
        self._copies.allocate(prefixed_arrays(parts))
        attach_parts(parts, self, dict(self._copies.arrays))

    @property
    def _division(self) -> Division:
        """Division of the vectors of this store's component among the server processes."""
        return self._copies.divisions.get(self._name, Division((0, 0)))

    def run_locked(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result:
        calls = [_Call(process, (self._name, section.__name__, args)) for process in range(self._division.processes)]
        if lock == "target" and len(calls) > 1:
            # call the first process last: other Sessions detect the change in the arrays of this process, and then pull all arrays
            *others, first = self._copies.call_servers("run", calls[1:], calls[:1])
            answers = [first, *others]
        else:
            answers = self._copies.call_servers("run", calls)
        self._copies.take_answers(answers)
        result: Result = answers[0].result
        return result

    def run_if_free(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result | None:
        return self.run_locked(lock, section, *args)

    def step(self, section: Callable[..., Result], grad: np.ndarray, *args: object) -> Result:
        copies, division = self._copies, self._division
        grads = [grad] if division.processes == 1 else [grad[division.process_range(process)] for process in range(division.processes)]
        calls = [_Call(process, (self._name, section.__name__, (part, *args))) for process, part in enumerate(grads)]
        answers = copies.call_servers("run", calls)
        copies.pushed += grad.nbytes + len(calls) * sum(arg.nbytes for arg in args if isinstance(arg, np.ndarray))
        copies.take_answers(answers)
        result: Result = answers[0].result
        return result

    def updating(self) -> AbstractContextManager[None]:
        raise TypeError("updates are applied in the process of the store")

    def pull(self, seconds: float = 0.0) -> bool:
        copies = self._copies
        if time.monotonic() < copies.received + seconds:
            return False
        copies.take_answers(copies.call_servers("pull", [_Call(process, (self._name,)) for process in range(self._division.processes)]))
        return True

    def take_traffic(self) -> tuple[int, int]:
        copies = self._copies
        traffic = copies.pushed, copies.pulled
        copies.pushed = copies.pulled = 0
        return traffic

    def exchange(self) -> None:
        self._copies.take_answers([self._copies.call_first_server("read_session_rows")])

    def publish(self) -> None:
        copies = self._copies
        copies.write({name: array for name, array in copies.arrays.items() if copies.named[name].combine != "own"})

    def barrier(self) -> None:
        """Do nothing, since the writes of other Sessions arrive with the server's answers to the messages of this process."""

    @contextmanager
    def saving(self, interval: float | None) -> Iterator[bool]:
        first = self._copies.servers[0]
        while not (mine := first.call("begin_save", self.index, interval)) and interval is None:
            time.sleep(_POLL)
        try:
            yield mine
        finally:
            if mine:
                first.call("end_save", self.index)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of all shared arrays.

        The ranges of a divided vector are consistent with each other only if no other Session pushes gradients during the call.
        """
        copies = self._copies
        answers: list[Arrays] = copies.call_servers("snapshot", [_Call(process) for process in range(len(copies.servers))])
        copies.pulled += sum(array.nbytes for arrays in answers for array in arrays.values())
        return {  # arrays returned by Ray are read-only
            name: np.array(array) if copies.named[name].division is None else np.concatenate([arrays[name] for arrays in answers])
            for name, array in answers[0].items()
        }

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        copies = self._copies
        own = {name: array.shape for name, array in copies.arrays.items() if not name.endswith(MOMENT)}
        if own != {name: array.shape for name, array in saved.items()}:
            raise ValueError("the shared arrays have other names or shapes than those saved")
        copies.write(saved)
        for name, array in saved.items():
            np.copyto(copies.arrays[name], array)
            if name in copies.sent:
                np.copyto(copies.sent[name], array[self.index])


class Superseded(PlainError):
    """Error that tells the process of a Session to end, because a newer process of the same Session has taken over."""


class SinkServer:
    """Actor that writes the tables of all Sessions of a trial to the run folder."""

    def __init__(self) -> None:
        self._sinks: dict[int, LocalSink] = {}
        self._restarts: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}

    def begin(self, session: int, restart: int, paths: RunPaths, trial: int, track: Sequence[str] = ()) -> None:
        """Start to accept rows of a Session, but only from the process of the Session that was started after `restart` restarts.

        Raises Superseded if a process that was started after more restarts has called `begin`.
        """
        if restart < self._restarts.get(session, 0):
            raise Superseded(f"session {session} was restarted elsewhere")
        if (before := self._sinks.pop(session, None)) is not None:
            before.close("failed")
        self._errors.pop(session, None)
        self._restarts[session] = restart
        self._sinks[session] = LocalSink(paths, trial, track=track)

    def write(self, session: int, restart: int, event: Row) -> None:
        """Pass a row to the Session's LocalSink. If writing fails, the next `call_sink_method` of the Session raises the error."""
        if restart != self._restarts.get(session):
            return
        try:
            self._sinks[session](event)
        except Exception as error:
            self._errors.setdefault(session, error)

    def call_sink_method(self, session: int, restart: int, method: str, *args: Any) -> Any:
        """Call a method of the Session's LocalSink, and return the result. Raises Superseded if the caller is an older process of the
        Session."""
        if restart != self._restarts[session]:
            raise Superseded(f"session {session} was restarted elsewhere")
        if (error := self._errors.pop(session, None)) is not None:
            raise error
        return getattr(self._sinks[session], method)(*args)


class RemoteSink(RunSink):
    """Sink for the rows and checkpoints of a Session that may run on any node of a cluster.

    Rows are sent to a SinkServer, and checkpoints are written directly from the node of the Session.

    Args:
        server: handle of the SinkServer.
        restart: number of earlier processes of the Session.
        emit: function that receives all events except rows.
        track: names of the experiment trackers.
    """

    def __init__(
        self, server: ActorHandle, paths: RunPaths, trial: int, session: int, restart: int, emit: Emit, *, track: Sequence[str] = ()
    ) -> None:
        self.server, self.session, self.restart, self.emit = server, session, restart, emit
        self.files = LocalSink(paths, trial)
        """Sink that writes checkpoints directly from this node."""
        server.call("begin", session, restart, paths, trial, track)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Row):
            self.server.call_async("write", self.session, self.restart, event)
        else:
            self.emit(event)

    def open_table(self, table: int) -> None:
        self._call("open_table", table)

    def save(self, table: int, which: CheckpointKind, bundle: dict[str, Any]) -> None:
        self.files.save(table, which, bundle)

    def save_shared(self, bundle: dict[str, Any]) -> None:
        self.files.save_shared(bundle)

    def sync_and_get_positions(self, session: int) -> Position:
        position: Position = self._call("sync_and_get_positions", session)
        return position

    def truncate_tables(self, session: int, position: Position | None = None, frame: int = 0) -> None:
        self._call("truncate_tables", session, position, frame)

    def read_rows(self, table: int, mode: Mode) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = self._call("read_rows", table, mode)
        return rows

    def append_extra_row(self, session: int, name: Literal["pbt", "elo"], columns: tuple[str, ...], row: Mapping[str, Any]) -> None:
        self._call("append_extra_row", session, name, columns, row)

    def save_timeline(self, session: int, spans: Spans) -> None:
        self._call("save_timeline", session, spans)

    def close(self, status: Status = "done") -> None:
        self._call("close", status)

    def _call(self, method: str, *args: Any) -> Any:
        return self.server.call("call_sink_method", self.session, self.restart, method, *args)
