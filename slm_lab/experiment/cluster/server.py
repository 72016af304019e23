"""A parameter server: the arrays of Sessions that train one net, in a process of its own. This module does not import ray.

The server holds for each Session a copy of its parts (agent, normalizers, counts), attached to the same shared arrays as those of Sessions
in processes of one machine are. A Session on another node sends what its part would do under a lock (Store.run): the name of a method
and its arguments, such as a gradient. The server calls the method of its copy. So both compute the same, bit for bit, whatever the part is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np

from slm_lab.experiment.session_process import shared_arrays
from slm_lab.experiment.storage import Location
from slm_lab.lib.errors import PlainError
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import MOMENT, Arrays, Combine, Shareable, SharedArrays, prefixed, shared_file
from slm_lab.spec.spec import Spec

_SMALL = 64
"""Bytes up to which an array, of "own" ones the row of a process, comes with every answer."""


class NotAttached(PlainError):
    """The server was restarted and does not know the Session any more."""


class Place(NamedTuple):
    """What a Session must know of an array to have a copy."""

    shape: tuple[int, ...]
    dtype: str
    combine: Combine


class Answer(NamedTuple):
    """What the server sends back."""

    result: Any
    arrays: dict[str, np.ndarray]
    """Those that a call may have changed, and all small ones."""


class _View(SharedArrays):
    """The arrays as one Session's copies use them. `parts` collects the copies by their full names."""

    parts: dict[str, Shareable]
    answers: dict[str, dict[str, np.ndarray]]
    """Of each part: the arrays that an answer to it has."""
    name = ""

    def at(self, name: str, part: Shareable) -> Self:
        view = object.__new__(type(self))
        view.__dict__ = {**self.__dict__, "name": f"{self.name}/{name}".lstrip("/")}
        self.parts[view.name] = part
        return view


class ParameterServer:
    """Serves the Sessions of one trial, one message after the other.

    Args: seeds: of the first Session, with whose weights all start.
    """

    def __init__(self, spec: Spec, seeds: Seeds) -> None:
        import torch

        torch.set_num_threads(1)
        self.spec, self.seeds = spec, seeds
        self.fd = shared_file()
        self._views: dict[int, _View] = {}
        self._combine: dict[str, Combine] = {}
        self._saver: int | None = None
        self._saved = -np.inf

    def where(self) -> tuple[str, int]:
        """Return the name of the machine, and the process."""
        return os.uname().nodename, os.getpid()

    def attach(self, index: int, info: EnvInfo, checkpoint: Location | None = None) -> tuple[dict[str, Place], dict[str, np.ndarray]]:
        """Make the copies of a Session's parts; return the places of all arrays and their values.

        Args: checkpoint: of the shared arrays; loaded if this is the first Session since the server was started, and there is one.
        """
        first = not self._views
        view = self._view(index, info, fresh=first)
        if first and checkpoint is not None and checkpoint.exists():
            from slm_lab.experiment import state

            saved = state.load(checkpoint)["arrays"]
            view.restore({name: tensor.numpy() for name, tensor in saved.items()})
        if self._saver == index:  # the process before this one died while it was saving
            self._saver = None
        arrays = self._shared(view)
        return {name: Place(array.shape, array.dtype.str, self._combine[name]) for name, array in arrays.items()}, arrays

    def _view(self, index: int, info: EnvInfo, *, fresh: bool) -> _View:
        from slm_lab.agent.build import build_agent
        from slm_lab.env.normalize import make_normalizers
        from slm_lab.experiment.session import shared_parts
        from slm_lab.lib.clock import Clock
        from slm_lab.lib.episodes import EpisodeWindow

        clock = Clock()
        normalizers = make_normalizers(self.spec.env, info, self.spec.agent.algorithm.gamma)
        parts = shared_parts(clock, EpisodeWindow(), normalizers, build_agent(self.spec, info, self.seeds, clock))
        self._combine = {name: array.combine for name, array in prefixed(parts).items()}
        plain = shared_arrays(self.spec, self.fd, index, fresh=fresh)
        view = object.__new__(_View)
        view.__dict__ = {**plain.__dict__, "parts": {}, "answers": {}}
        view.attach(parts)
        self._views[index] = view
        return view

    def _shared(self, view: _View) -> dict[str, np.ndarray]:
        """Return the arrays that Sessions may have copies of: all but times, since clocks of nodes are never compared."""
        return {name: array for name, array in view.arrays.items() if not name.endswith(MOMENT)}

    def run(self, index: int, part: str, method: str, args: Sequence[Any], own: Arrays) -> Answer:
        """Call a method of a part; answer with the part's arrays.

        Args: own: array → row that the Session has written.
        """
        view = self._with_rows(index, own)
        result = getattr(view.parts[part], method)(*args)
        return Answer(result, self._answer(view, part))

    def pull(self, index: int, part: str, own: Arrays) -> Answer:
        """Answer with the part's arrays."""
        view = self._with_rows(index, own)
        return Answer(None, self._answer(view, part))

    def exchange(self, index: int, own: Arrays) -> Answer:
        """Answer with the rows of all Sessions."""
        view = self._with_rows(index, own)
        rows = {name: array for name, array in self._shared(view).items() if self._combine[name] == "own"}
        return Answer(None, rows | self._small(view))

    def write(self, index: int, arrays: Arrays, own: Arrays) -> None:
        """Overwrite arrays."""
        view = self._with_rows(index, own)
        for name, array in arrays.items():
            view.arrays[name][...] = array

    def snapshot(self, index: int, own: Arrays) -> dict[str, np.ndarray]:
        """Return all arrays."""
        return self._shared(self._with_rows(index, own))

    def begin_save(self, index: int, interval: float | None) -> bool:
        """Return whether the Session may save the arrays now: no other one does, or has less than `interval` seconds ago."""
        if self._saver not in (None, index) or (interval is not None and time.monotonic() < self._saved + interval):
            return False
        self._saver = index
        return True

    def end_save(self, index: int) -> None:
        """The Session has saved the arrays, or failed to."""
        if self._saver == index:
            self._saver, self._saved = None, time.monotonic()

    def _with_rows(self, index: int, own: Arrays) -> _View:
        if index not in self._views:
            raise NotAttached(f"session {index} is not attached")
        view = self._views[index]
        for name, row in own.items():
            view.arrays[name][index] = row
        return view

    def _answer(self, view: _View, part: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part, without those of the parts in it, and all small ones."""
        if part not in view.answers:
            own = {name: array for name, array in self._shared(view).items() if name.rpartition("/")[0] == part}
            view.answers[part] = own | self._small(view)
        return view.answers[part]

    def _small(self, view: _View) -> dict[str, np.ndarray]:
        sizes = {name: array.nbytes // (len(array) if self._combine[name] == "own" else 1) for name, array in self._shared(view).items()}
        return {name: view.arrays[name] for name, size in sizes.items() if size <= _SMALL}


@contextmanager
def closing(server: ParameterServer) -> Iterator[ParameterServer]:
    """Release the memory of a server in this process afterwards."""
    try:
        yield server
    finally:
        os.close(server.fd)


def copies(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return copies of arrays."""
    return {name: array.copy() for name, array in arrays.items()}
