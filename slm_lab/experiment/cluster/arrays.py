"""The Store of a Session whose shared arrays are in a parameter server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from slm_lab.experiment.cluster.remote import Remote
from slm_lab.experiment.cluster.server import Answer, NotAttached, Place
from slm_lab.experiment.storage import Location
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.store import MOMENT, Combine, Result, SectionLock, Shareable, attach_parts, prefixed
from slm_lab.spec.spec import Spec

_SAVE_POLL = 0.05
"""Seconds between two attempts to save while another Session saves."""


@dataclass
class _Copies:
    """This process's copies of the arrays, and the connection to the server."""

    server: Remote
    index: int
    info: EnvInfo | None = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    combine: dict[str, Combine] = field(default_factory=dict)
    sent: dict[str, np.ndarray] = field(default_factory=dict)
    """The rows of this process as the server has them."""
    checkpoint: Location | None = None
    """From which a server that was restarted takes the arrays."""
    received: float = 0.0
    """When the last answer came, in seconds of monotonic()."""

    def attach(self) -> dict[str, Place]:
        places, arrays = self.server.call("attach", self.index, self.info, self.checkpoint)
        self.sent = {name: np.array(arrays[name][self.index]) for name, place in places.items() if place.combine == "own"}
        for name, array in arrays.items():
            if name not in self.arrays:
                self.arrays[name], self.combine[name] = np.array(array), places[name].combine
        self.take({name: array for name, array in arrays.items() if self.combine[name] != "own"})
        return dict(places)

    def rows(self) -> dict[str, np.ndarray]:
        """Return the rows of this process that it has written since they were last sent."""
        changed = {name: self.arrays[name][self.index] for name in self.sent}
        changed = {name: row for name, row in changed.items() if not np.array_equal(row, self.sent[name])}
        for name, row in changed.items():
            np.copyto(self.sent[name], row)
        return changed

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the server with this process's index and rows."""
        try:
            return self.server.call(method, self.index, *args, self.rows())
        except NotAttached:
            self.attach()
            return self.server.call(method, self.index, *args, self.rows())

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Bring copies up to date."""
        for name, array in arrays.items():
            np.copyto(self.arrays[name], array)
            if name in self.sent:
                np.copyto(self.sent[name], array[self.index])
        self.received = time.monotonic()

    def answered(self, answer: Answer) -> Any:
        self.take(answer.arrays)
        return answer.result


class RemoteArrays:
    """The Store of Session `index`, whose arrays are in a parameter server; `arrays` are copies.

    Copies are brought up to date by the answers to this process's own messages. Its rows of "own" arrays go with each message.

    Args:
        server: a ParameterServer.
        info: of the Session's env; called when the Session is built.
        fresh: training has not begun.
    """

    remote = True

    def __init__(self, server: Remote, spec: Spec, index: int, info: Callable[[], EnvInfo], *, fresh: bool = True) -> None:
        meta = spec.meta
        self.index, self.workers, self.synced, self.locked, self.fresh = index, meta.max_session, meta.distributed == "synced", False, fresh
        self._copies, self._info, self._name = _Copies(server, index), info, ""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every array, by its full name."""
        return self._copies.arrays

    def checkpoint(self, path: Location) -> None:
        """Let the server, if it is restarted, take the arrays from a checkpoint of them."""
        self._copies.checkpoint = path

    def at(self, name: str, part: Shareable) -> Self:
        store = object.__new__(type(self))
        store.__dict__ = {**self.__dict__, "_name": f"{self._name}/{name}".lstrip("/")}
        return store

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        copies, named = self._copies, prefixed(parts)
        copies.info = self._info()
        for name, array in named.items():
            if name.endswith(MOMENT):  # of this process alone
                copies.arrays[name] = np.zeros((self.workers, *array.values.shape))
                copies.combine[name] = "own"
        copies.attach()
        assert copies.arrays.keys() == named.keys()
        attach_parts(parts, self, dict(copies.arrays))

    def run(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result:
        copies = self._copies
        result: Result = copies.answered(copies.ask("run", self._name, section.__name__, args))
        return result

    def run_if_free(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result | None:
        return self.run(lock, section, *args)

    def update(self) -> AbstractContextManager[None]:
        raise TypeError("updates are applied in the process of the store")

    def pull(self, seconds: float = 0.0) -> None:
        copies = self._copies
        if time.monotonic() >= copies.received + seconds:
            copies.answered(copies.ask("pull", self._name))

    def exchange(self) -> None:
        copies = self._copies
        copies.answered(copies.ask("exchange"))

    def publish(self) -> None:
        copies = self._copies
        copies.ask("write", {name: array for name, array in copies.arrays.items() if copies.combine[name] != "own"})

    def barrier(self) -> None:
        """Do nothing: this process sees others' writes with the answers to its messages."""

    @contextmanager
    def saving(self, interval: float | None) -> Iterator[bool]:
        server = self._copies.server
        while not (mine := server.call("begin_save", self.index, interval)) and interval is None:
            time.sleep(_SAVE_POLL)
        try:
            yield mine
        finally:
            if mine:
                server.call("end_save", self.index)

    def snapshot(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = self._copies.ask("snapshot")
        self._copies.take(arrays)
        return {name: np.array(array) for name, array in arrays.items()}  # what Ray returns is read-only

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        copies = self._copies
        own = {name: array.shape for name, array in copies.arrays.items() if not name.endswith(MOMENT)}
        if own != {name: array.shape for name, array in saved.items()}:
            raise ValueError("the shared arrays have other names or shapes than those saved")
        copies.ask("write", dict(saved))
        copies.take(saved)
