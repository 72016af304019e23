"""The parameter server: one or several processes that store the shared arrays of all Sessions that train one net.

For each Session, the server has copies of the Session's components that have shared arrays: agent, normalizers and counters (argument
`part` in this module). The server's copies are attached to shared memory as in a run with all Sessions on one machine. On one machine, a
Session calls a method of a component under a lock (Store.run_locked). On a cluster, the Session instead sends the name and the arguments of
the method, such as a gradient, to the server, which calls the method of its copy. The results on a cluster are equal, bit for bit, to the
results on one machine.

The vectors of a large net are divided among several server processes (lib.store.divided). Each server process has separate copies of the
components and calls the same methods of these copies. The vectors of the copies contain only the index range of the process. The first
process also stores all arrays that are not divided. This module does not import ray.
"""

from __future__ import annotations

import os
import pickle
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import numpy as np

from slm_lab.experiment.execute.ray.connect import ActorHandle, pack
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.session.session_process import make_shared_arrays
from slm_lab.lib.log import PlainError
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import MOMENT, Arrays, Named, Shareable, SharedArrays, create_shared_file
from slm_lab.spec.models.spec import Spec

_MAX_INLINE_BYTES = 64
"""Maximum size in bytes of an array that every answer contains. For an array with one row per Session ("own"), _MAX_INLINE_BYTES limits the
size of one row."""


class NotAttached(PlainError):
    """Error that is raised if a Session is not attached to the parameter server, for example because the server was restarted."""


class ServerStatus(NamedTuple):
    """The status of one process of the parameter server."""

    generation: int | None
    """Number passed to ParameterServer.begin, or None if `begin` has not been called since the last start of the process."""
    processes: int
    """Number of server processes among which the arrays are divided, or 1 until the first Session is attached."""
    others: Sequence[ActorHandle]
    """All server processes except the first process, in order."""


class AttachReply(NamedTuple):
    """The answer to `ParameterServer.attach`, with the array values from which a Session creates its copies of the arrays."""

    generation: int
    arrays: dict[str, np.ndarray]


class Answer(NamedTuple):
    """The answer of a server process to a call of a Session."""

    result: Any
    arrays: dict[str, np.ndarray]
    """Arrays that the call may have changed, and all small arrays (see _MAX_INLINE_BYTES)."""


class _SessionArrays(SharedArrays):
    """The shared arrays that the server's copies of one Session's components use.

    The attribute `parts` maps the full name of a component to the server's copy of the component.
    """

    serves: int
    """Index of this server process."""
    parts: dict[str, Shareable]
    named: Named
    answers: dict[str, dict[str, np.ndarray]]
    """Full name of a component → the arrays that an answer for the component contains."""
    name = ""

    def store_for_part(self, name: str, part: Shareable) -> Self:
        view = object.__new__(type(self))
        view.__dict__ = {**self.__dict__, "name": f"{self.name}/{name}".lstrip("/")}
        self.parts[view.name] = part
        return view

    def allocate(self, named: Named) -> dict[str, np.ndarray]:
        """Map the arrays to shared memory. For an array that is divided among server processes, map only the range of this process."""
        self.named = named
        return super().allocate(
            {name: one if one.division is None else one._replace(values=self.own_range(name, one.values)) for name, one in named.items()}
        )

    def own_range(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the range of an array that this server process stores."""
        one = self.named[name]
        return array if one.division is None else array[one.process_slice(self.serves)]

    @property
    def sent_arrays(self) -> dict[str, np.ndarray]:
        """The arrays that this server process sends to Sessions.

        Every server process sends the ranges of divided arrays that it stores. The first process also sends all other arrays, except
        arrays that contain times, since the clocks of different nodes are not comparable.
        """
        arrays = {name: array for name, array in self.arrays.items() if not name.endswith(MOMENT)}
        return {name: array for name, array in arrays.items() if self.serves == 0 or self.named[name].division is not None}

    @property
    def small_arrays(self) -> dict[str, np.ndarray]:
        """The small arrays (see _MAX_INLINE_BYTES) that every answer of the first process contains. Divided vectors are not included."""
        arrays = {name: array for name, array in self.sent_arrays.items() if self.named[name].division is None}
        sizes = {name: array.nbytes // (len(array) if self.named[name].combine == "own" else 1) for name, array in arrays.items()}
        return {name: arrays[name] for name, size in sizes.items() if size <= _MAX_INLINE_BYTES}

    def answer_arrays(self, part: str) -> dict[str, np.ndarray]:
        """Return the arrays of a component, without the arrays of its sub-components, and all small arrays.

        Args: part: full name of the component.
        """
        if part not in self.answers:
            own = {name: array for name, array in self.sent_arrays.items() if name.rpartition("/")[0] == part}
            self.answers[part] = own | self.small_arrays
        return self.answers[part]


class ParameterServer:
    """One process of a parameter server, which handles the messages of the Sessions of one trial one after another.

    Args:
        seeds: seeds of the first Session, whose initial weights all Sessions use.
        number: index of this process among the server processes that share the arrays.
    """

    def __init__(self, spec: Spec, seeds: Seeds, number: int = 0) -> None:
        import torch

        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # gradients are only read, without a copy
        self.spec, self.seeds, self.number = spec, seeds, number
        self.fd = create_shared_file()
        self._views: dict[int, _SessionArrays] = {}
        self._generation: int | None = None
        self._from: Arrays | None = None
        self._others: Sequence[ActorHandle] = ()
        self._processes = 1
        self._saver: int | None = None
        self._saved = -np.inf

    def begin(self, generation: int, arrays: Arrays | None = None) -> None:
        """Detach all Sessions, and start to serve the arrays of a snapshot.

        Args:
            generation: number of times that the server was reset to a snapshot, which is the same for all server processes.
            arrays: the arrays of the snapshot, or None for the initial arrays.
        """
        self._views, self._generation, self._from, self._saver = {}, generation, arrays, None
        os.close(self.fd)
        self.fd = create_shared_file()

    def set_other_servers(self, others: Sequence[ActorHandle]) -> None:
        """Store the handles of the other server processes, so that the result of `status` contains these handles."""
        self._others = others

    def status(self) -> ServerStatus:
        return ServerStatus(self._generation, self._processes, self._others)

    def machine_and_pid(self) -> tuple[str, int]:
        """Return (name of this machine, id of this process)."""
        return platform.node(), os.getpid()

    def attach(self, index: int, info: EnvInfo) -> AttachReply:
        """Create the server's copies of the components of Session `index`, and return the values of all arrays.

        Raises NotAttached if `begin` has not been called.
        """
        if self._generation is None:
            raise NotAttached("the parameter server has not begun")
        view = self._create_session_arrays(index, info)
        if self._saver == index:  # the Session's previous process died while it was saving
            self._saver = None
        self._processes = max(1 if one.division is None else one.division.processes for one in view.named.values())
        return AttachReply(self._generation, view.sent_arrays)

    def _create_session_arrays(self, index: int, info: EnvInfo) -> _SessionArrays:
        from slm_lab.agent.build import build_agent
        from slm_lab.env.normalize import make_normalizers
        from slm_lab.experiment.session.build import shared_components
        from slm_lab.lib.clock import Clock
        from slm_lab.lib.episodes import EpisodeWindow

        clock, first = Clock(), not self._views
        normalizers = make_normalizers(self.spec.env, info, self.spec.agent.algorithm.gamma)
        parts = shared_components(clock, EpisodeWindow(), normalizers, build_agent(self.spec, info, self.seeds, clock))
        plain = make_shared_arrays(self.spec, self.fd, index, fresh=first)
        view = object.__new__(_SessionArrays)
        view.__dict__ = {**plain.__dict__, "serves": self.number, "parts": {}, "answers": {}}
        view.attach(parts)
        if first and self._from is not None:
            view.restore({name: view.own_range(name, array) for name, array in self._from.items()})
            self._from = None
        self._views[index] = view
        return view

    def run(self, index: int, part: str, method: str, args: Sequence[Any], own: Arrays) -> Answer:
        """Call a method of a component of Session `index`, and return an Answer with the component's arrays.

        Args:
            part: full name of the component.
            own: name of an array with one row per Session → new row of this Session, for the rows that the Session has changed.
        """
        view = self._update_session_rows(index, own)
        result = getattr(view.parts[part], method)(*args)
        return Answer(result, view.answer_arrays(part))

    def run_packed(self, message: bytes) -> bytes | Answer:
        """Call `run` with pickled arguments. The answer is also pickled, unless the answer is large."""
        answer = self.run(*pickle.loads(message))
        return pack(answer)

    def pull(self, index: int, part: str, own: Arrays) -> Answer:
        """Return an Answer with the arrays of a component. The arguments are explained in `run`."""
        return Answer(None, self._update_session_rows(index, own).answer_arrays(part))

    def read_session_rows(self, index: int, own: Arrays) -> Answer:
        """Return an Answer with the arrays that have one row per Session."""
        view = self._update_session_rows(index, own)
        rows = {name: array for name, array in view.sent_arrays.items() if view.named[name].combine == "own"}
        return Answer(None, rows | view.small_arrays)

    def write(self, index: int, arrays: Arrays, own: Arrays) -> None:
        """Overwrite arrays of the server.

        Args: arrays: full name of an array → new values.
        """
        view = self._update_session_rows(index, own)
        for name, array in arrays.items():
            view.arrays[name][...] = array

    def snapshot(self, index: int, own: Arrays) -> dict[str, np.ndarray]:
        """Return all arrays that this server process sends to Sessions."""
        return self._update_session_rows(index, own).sent_arrays

    def begin_save(self, index: int, interval: float | None) -> bool:
        """Return whether Session `index` may save the arrays now. If the Session may save, the server records that the Session is saving.

        A Session may save if no other Session is saving, and if the last save ended at least `interval` seconds ago.
        """
        if self._saver not in (None, index) or (interval is not None and time.monotonic() < self._saved + interval):
            return False
        self._saver = index
        return True

    def end_save(self, index: int) -> None:
        """Record that Session `index` has saved the arrays or has failed to save the arrays."""
        if self._saver == index:
            self._saver, self._saved = None, time.monotonic()

    def _update_session_rows(self, index: int, own: Arrays) -> _SessionArrays:
        if index not in self._views:
            raise NotAttached(f"session {index} is not attached")
        view = self._views[index]
        for name, row in own.items():
            view.arrays[name][index] = row
        return view


@contextmanager
def closing_server(server: ParameterServer) -> Iterator[ParameterServer]:
    """Context manager that releases the shared memory of a ParameterServer object in this process at the end of the block."""
    try:
        yield server
    finally:
        os.close(server.fd)


class ParameterServers:
    """Object that starts and monitors the processes of a parameter server.

    If a server process was restarted, all server processes return to the last snapshot of the arrays.

    Args:
        start: function that starts the ParameterServer process with the given index. The engine restarts a process that dies.
        checkpoint: function that returns the file with the last snapshot of the arrays, or None if no snapshot exists.
        restarted: function that is called with the index of a restarted process before all processes return to the snapshot.
    """

    def __init__(
        self, start: Callable[[int], ActorHandle], checkpoint: Callable[[], Location | None], restarted: Callable[[int], None]
    ) -> None:
        self._start, self._checkpoint, self._restarted = start, checkpoint, restarted
        self.generation = 0
        self.servers: list[ActorHandle] = []
        self._asked: list[Any] = []
        """The pending call of `ParameterServer.status` of each process."""
        self._start_server()

    @property
    def first(self) -> ActorHandle:
        return self.servers[0]

    def poll(self) -> None:
        """Handle server processes that were restarted, and start missing server processes. The method waits only if a process was
        restarted."""
        statuses: dict[int, ServerStatus] = {}
        done = [number for number, server in enumerate(self.servers) if server.is_done(self._asked[number])]
        for number in done:
            with suppress(Exception):  # the process has died too often; Sessions fail with the same error
                statuses[number] = self.servers[number].result(self._asked[number])
        processes = max((status.processes for status in statuses.values()), default=1)
        if restarted := [number for number, status in statuses.items() if status.generation is None]:
            self._return_to_snapshot(restarted)
        elif processes > len(self.servers):
            while len(self.servers) < processes:
                self._start_server()
            self.first.call_async("set_other_servers", self.servers[1:])
        for number in done:
            self._asked[number] = self.servers[number].start("status")

    def _start_server(self) -> None:
        server = self._start(len(self.servers))
        server.call_async("begin", self.generation)
        self.servers.append(server)
        self._asked.append(server.start("status"))

    def _return_to_snapshot(self, restarted: list[int]) -> None:
        """Make all server processes serve the last snapshot.

        Restarted server processes begin last, so that no Session continues before all server processes are ready.
        """
        for number in restarted:
            self._restarted(number)
        path, arrays = self._checkpoint(), None
        if path is not None and path.exists():
            from slm_lab.experiment.files import bundle as state

            arrays = {name: tensor.numpy() for name, tensor in state.load(path)["arrays"].items()}
        self.generation += 1
        for number in sorted(range(len(self.servers)), key=lambda number: (number in restarted, number)):
            with suppress(Exception):  # the process has died too often, as in `poll`
                self.servers[number].call("begin", self.generation, arrays)
        if len(self.servers) > 1:
            self.first.call_async("set_other_servers", self.servers[1:])
