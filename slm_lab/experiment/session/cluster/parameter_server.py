"""A parameter server: processes that store the arrays of the Sessions that train one net. This module does not import ray.

For each Session the server has a copy of the Session's parts (agent, normalizers, counts), attached to shared arrays as in a run with all
Sessions on one machine. When a Session on another node would call a method of a part under a lock (Store.run), it sends the method's name
and arguments, such as a gradient, and the server calls the method of its copy. The results are therefore equal, bit for bit, to those on
one machine.

The vectors of a large net are divided among several processes (lib.store.divided). Each process has its own copies of the parts, whose
vectors contain only the range of this process, and calls the same methods of these copies. The first process also stores all arrays that
are not divided.
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

from slm_lab.experiment.execute.ray.connect import Remote, pack
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.session.session_process import shared_arrays
from slm_lab.lib.log import PlainError
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import MOMENT, Arrays, Named, Shareable, SharedArrays, shared_file
from slm_lab.spec.models.spec import Spec

_MAX_INLINE_BYTES = 64
"""Maximum size in bytes of the arrays that every answer contains; for "own" arrays, the maximum size of one row."""


class NotAttached(PlainError):
    """The Session is not attached to the server, for example because the server was restarted."""


class ServerStatus(NamedTuple):
    """The status of a process of the server, for the driver and Sessions."""

    generation: int | None
    """See ParameterServer.begin. None before `begin` is called, which includes the time after a restart of the process."""
    processes: int
    """Number of processes among which the arrays are divided; 1 until the first Session is attached."""
    others: Sequence[Remote]
    """The processes of the server after the first one, in order."""


class AttachReply(NamedTuple):
    """The answer to `attach`: the values with which a Session creates its copies of the arrays."""

    generation: int
    arrays: dict[str, np.ndarray]


class Answer(NamedTuple):
    """The answer of the server to a call."""

    result: Any
    arrays: dict[str, np.ndarray]
    """Arrays that the call may have changed, and all small arrays."""


class _View(SharedArrays):
    """The shared arrays as used by the copies of one Session's parts. `parts` contains the copies by full name."""

    serves: int
    parts: dict[str, Shareable]
    named: Named
    answers: dict[str, dict[str, np.ndarray]]
    """Part → the arrays that an answer for this part contains."""
    name = ""

    def at(self, name: str, part: Shareable) -> Self:
        view = object.__new__(type(self))
        view.__dict__ = {**self.__dict__, "name": f"{self.name}/{name}".lstrip("/")}
        self.parts[view.name] = part
        return view

    def allocate(self, named: Named) -> dict[str, np.ndarray]:
        """Map the arrays to shared memory; for divided arrays, map only the range that this process stores."""
        self.named = named
        return super().allocate(
            {name: one if one.division is None else one._replace(values=self.part(name, one.values)) for name, one in named.items()}
        )

    def part(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the part of an array that this process stores."""
        one = self.named[name]
        return array if one.division is None else array[one.part(self.serves)]

    @property
    def sent(self) -> dict[str, np.ndarray]:
        """The arrays that this process sends to Sessions: its ranges of divided arrays and, if it is the first process, all other arrays.

        Times are not sent, since the clocks of different nodes are not comparable.
        """
        arrays = {name: array for name, array in self.arrays.items() if not name.endswith(MOMENT)}
        return {name: array for name, array in arrays.items() if self.serves == 0 or self.named[name].division is not None}

    @property
    def small(self) -> dict[str, np.ndarray]:
        """The small arrays that every answer of the first process contains. They exclude divided vectors, which are sent only with their
        part."""
        arrays = {name: array for name, array in self.sent.items() if self.named[name].division is None}
        sizes = {name: array.nbytes // (len(array) if self.named[name].combine == "own" else 1) for name, array in arrays.items()}
        return {name: arrays[name] for name, size in sizes.items() if size <= _MAX_INLINE_BYTES}

    def answer(self, part: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part without the arrays of its sub-parts, and all small arrays."""
        if part not in self.answers:
            own = {name: array for name, array in self.sent.items() if name.rpartition("/")[0] == part}
            self.answers[part] = own | self.small
        return self.answers[part]


class ParameterServer:
    """Serves the Sessions of one trial after `begin`, one message at a time.

    Args:
        seeds: seeds of the first Session, whose initial weights all Sessions use.
        number: number of this process among those that share the arrays.
    """

    def __init__(self, spec: Spec, seeds: Seeds, number: int = 0) -> None:
        import torch

        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # gradients are only read, without a copy
        self.spec, self.seeds, self.number = spec, seeds, number
        self.fd = shared_file()
        self._views: dict[int, _View] = {}
        self._generation: int | None = None
        self._from: Arrays | None = None
        self._others: Sequence[Remote] = ()
        self._processes = 1
        self._saver: int | None = None
        self._saved = -np.inf

    def begin(self, generation: int, arrays: Arrays | None = None) -> None:
        """Forget all Sessions, and start to serve the arrays of a snapshot, or the initial arrays if `arrays` is None.

        Args: generation: the same number for all processes of the server.
        """
        self._views, self._generation, self._from, self._saver = {}, generation, arrays, None
        os.close(self.fd)
        self.fd = shared_file()

    def join(self, others: Sequence[Remote]) -> None:
        """Store the other processes of the server. `status` tells Sessions about them."""
        self._others = others

    def status(self) -> ServerStatus:
        return ServerStatus(self._generation, self._processes, self._others)

    def where(self) -> tuple[str, int]:
        """Return the name of the machine and the id of this process."""
        return platform.node(), os.getpid()

    def attach(self, index: int, info: EnvInfo) -> AttachReply:
        """Create the copies of a Session's parts; return the values of all arrays. Raises NotAttached before `begin`."""
        if self._generation is None:
            raise NotAttached("the parameter server has not begun")
        view = self._view(index, info)
        if self._saver == index:  # the Session's previous process died while it was saving
            self._saver = None
        self._processes = max(1 if one.division is None else one.division.processes for one in view.named.values())
        return AttachReply(self._generation, view.sent)

    def _view(self, index: int, info: EnvInfo) -> _View:
        from slm_lab.agent.build import build_agent
        from slm_lab.env.normalize import make_normalizers
        from slm_lab.experiment.session.build import shared_parts
        from slm_lab.lib.clock import Clock
        from slm_lab.lib.episodes import EpisodeWindow

        clock, first = Clock(), not self._views
        normalizers = make_normalizers(self.spec.env, info, self.spec.agent.algorithm.gamma)
        parts = shared_parts(clock, EpisodeWindow(), normalizers, build_agent(self.spec, info, self.seeds, clock))
        plain = shared_arrays(self.spec, self.fd, index, fresh=first)
        view = object.__new__(_View)
        view.__dict__ = {**plain.__dict__, "serves": self.number, "parts": {}, "answers": {}}
        view.attach(parts)
        if first and self._from is not None:
            view.restore({name: view.part(name, array) for name, array in self._from.items()})
            self._from = None
        self._views[index] = view
        return view

    def run(self, index: int, part: str, method: str, args: Sequence[Any], own: Arrays) -> Answer:
        """Call a method of a part; return an Answer with the part's arrays.

        Args: own: name of an "own" array → the row of the Session, if the Session has changed it.
        """
        view = self._with_rows(index, own)
        result = getattr(view.parts[part], method)(*args)
        return Answer(result, view.answer(part))

    def run_packed(self, message: bytes) -> bytes | Answer:
        """Call `run` with pickled arguments. The answer is also pickled, unless it is large."""
        answer = self.run(*pickle.loads(message))
        return pack(answer)

    def pull(self, index: int, part: str, own: Arrays) -> Answer:
        """Return an Answer with the part's arrays."""
        return Answer(None, self._with_rows(index, own).answer(part))

    def exchange(self, index: int, own: Arrays) -> Answer:
        """Return an Answer with the rows of all Sessions."""
        view = self._with_rows(index, own)
        rows = {name: array for name, array in view.sent.items() if view.named[name].combine == "own"}
        return Answer(None, rows | view.small)

    def write(self, index: int, arrays: Arrays, own: Arrays) -> None:
        """Overwrite arrays."""
        view = self._with_rows(index, own)
        for name, array in arrays.items():
            view.arrays[name][...] = array

    def snapshot(self, index: int, own: Arrays) -> dict[str, np.ndarray]:
        """Return all arrays."""
        return self._with_rows(index, own).sent

    def begin_save(self, index: int, interval: float | None) -> bool:
        """Return whether the Session may save the arrays now: no other Session is saving or has saved less than `interval` seconds ago."""
        if self._saver not in (None, index) or (interval is not None and time.monotonic() < self._saved + interval):
            return False
        self._saver = index
        return True

    def end_save(self, index: int) -> None:
        """Record that the Session has saved the arrays or failed to save them."""
        if self._saver == index:
            self._saver, self._saved = None, time.monotonic()

    def _with_rows(self, index: int, own: Arrays) -> _View:
        if index not in self._views:
            raise NotAttached(f"session {index} is not attached")
        view = self._views[index]
        for name, row in own.items():
            view.arrays[name][index] = row
        return view


@contextmanager
def closing(server: ParameterServer) -> Iterator[ParameterServer]:
    """Release the memory of a server in this process when the block ends."""
    try:
        yield server
    finally:
        os.close(server.fd)


class ParameterServers:
    """Starts the processes of a parameter server. If one is restarted, all processes return to the last snapshot.

    Args:
        start: starts the ParameterServer process with a given number; the engine restarts it if it dies.
        checkpoint: returns the file with the last snapshot of the arrays; None if there is none yet.
        restarted: called with the number of a restarted process, before all processes return to the snapshot.
    """

    def __init__(self, start: Callable[[int], Remote], checkpoint: Callable[[], Location | None], restarted: Callable[[int], None]) -> None:
        self._start, self._checkpoint, self._restarted = start, checkpoint, restarted
        self.generation = 0
        self.servers: list[Remote] = []
        self._asked: list[Any] = []
        """The pending status call to each process."""
        self._add()

    @property
    def first(self) -> Remote:
        return self.servers[0]

    def poll(self) -> None:
        """Handle restarted processes, and start missing ones. Returns immediately unless a process was restarted."""
        statuses: dict[int, ServerStatus] = {}
        done = [number for number, server in enumerate(self.servers) if server.done(self._asked[number])]
        for number in done:
            with suppress(Exception):  # the process has died too often; Sessions fail with the same error
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
        """Make all processes serve the last snapshot. Restarted processes come last, so that no Session continues before all are ready."""
        for number in restarted:
            self._restarted(number)
        path, arrays = self._checkpoint(), None
        if path is not None and path.exists():
            from slm_lab.experiment.files import bundle as state

            arrays = {name: tensor.numpy() for name, tensor in state.load(path)["arrays"].items()}
        self.generation += 1
        for number in sorted(range(len(self.servers)), key=lambda number: (number in restarted, number)):
            with suppress(Exception):  # as in poll
                self.servers[number].call("begin", self.generation, arrays)
        if len(self.servers) > 1:
            self.first.send("join", self.servers[1:])
