"""Named arrays in memory that several processes share.

A part (a trainer, a target network, a normaliser, the clock) holds plain arrays and lists by name those that several processes may
train together. `SharedArrays` places them: each process of a trial lists the same names, and finds the same memory behind them, in
whatever order they were built. A lone Session has no store at all.

The memory is one anonymous file that every process maps. It has no name, so nothing is left of it when the last process is gone; the
locks are the system's record locks, which a process releases when it dies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple, Protocol

import numpy as np

Combine = Literal["step", "merge", "single", "own"]
"""How several writers combine in one array:
step: each applies its gradient step in place, one after the other only if the store is locked;
merge: each reads, adds what it knows and writes, under the lock "statistics";
single: one writer at a time, and a second one that comes meanwhile does nothing;
own: each process has a row of its own and writes only that."""
Lock = Literal["update", "statistics", "target", "allocate", "barrier"]
_LOCK_BYTES: dict[Lock, int] = {"update": 0, "statistics": 1, "target": 2, "allocate": 3, "barrier": 4}
"""The byte of the file that stands for each lock."""
_ALIGNMENT = 64
"""Bytes; a cache line."""


class SharedArray(NamedTuple):
    """An array that several processes may train together."""

    values: np.ndarray
    """Initial values; with combine "own" those of one process, and the shared array has an axis of processes in front."""
    combine: Combine


Named = dict[str, SharedArray]
Arrays = Mapping[str, np.ndarray]


class Shareable(Protocol):
    """A part that can be trained by several processes."""

    def shared_arrays(self) -> Named:
        """The arrays to share, by name."""

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        """Use the arrays of `store`, by the names of `shared_arrays`, from now on."""


def prefixed(parts: Mapping[str, Shareable]) -> Named:
    """The arrays of several parts, each name with its part's in front: "critics/params"."""
    return {f"{prefix}/{name}": array for prefix, part in parts.items() for name, array in part.shared_arrays().items()}


def attach_parts(parts: Mapping[str, Shareable], store: SharedArrays, arrays: Arrays) -> None:
    """Hand each part its arrays, by the names that `prefixed` gave them."""
    for prefix, part in parts.items():
        part.attach(store, {name.removeprefix(f"{prefix}/"): array for name, array in arrays.items() if name.startswith(f"{prefix}/")})


class SharedArrays:
    """One process's view of the arrays that the processes of a trial share.

    Args:
        fd: descriptor of the file (`shared_file`).
        index, workers: which of how many processes this is.
        synced: a process brings its copy of the parameters up to date only after its own updates (meta.distributed "synced").
        locked: updates of the parameters happen one after the other (meta.hogwild_lock).
        fresh: training has not begun: initial values are written, the same by every process. Otherwise the arrays stay as they are.
    """

    def __init__(
        self, fd: int, index: int = 0, workers: int = 1, *, synced: bool = False, locked: bool = False, fresh: bool = True
    ) -> None:
        self.fd, self.index, self.workers, self.synced, self.locked, self.fresh = fd, index, workers, synced, locked, fresh
        self.arrays: dict[str, np.ndarray] = {}
        """Every array placed here, by its full name."""

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        """Place the arrays of these parts and let the parts use them. Raises MemoryError if this machine has no room for them."""
        attach_parts(parts, self, self.place(prefixed(parts)))

    def place(self, named: Named) -> dict[str, np.ndarray]:
        """Map these arrays, laid out in the order of their names. To be called once, by every process with the same names and shapes.

        Raises MemoryError if this machine has no room for them.
        """
        assert not self.arrays
        shapes = {name: (*([self.workers] if one.combine == "own" else []), *one.values.shape) for name, one in sorted(named.items())}
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            size = int(np.prod(shape, dtype=np.int64)) * named[name].values.dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end == 0:
            return {name: named[name].values for name in shapes}
        with self.exclusive("allocate"):  # two processes that grow the file at once could truncate what the other has added
            _grow(self.fd, end)
        memory = mmap.mmap(self.fd, end)  # closing a descriptor of the file would release this process's locks, so it stays mapped
        for name, shape in shapes.items():
            values = named[name].values
            array = np.frombuffer(memory, values.dtype, int(np.prod(shape, dtype=np.int64)), offsets[name]).reshape(shape)
            if self.fresh:
                np.copyto(array[self.index] if named[name].combine == "own" else array, values)
            self.arrays[name] = array
        return dict(self.arrays)

    def exclusive(self, lock: Lock) -> AbstractContextManager[object]:
        """Keep every other process out until the block ends."""
        return self._record_lock(lock, wait=True)

    def claim(self, lock: Lock) -> AbstractContextManager[bool]:
        """True, and every other process is kept out, unless another process holds the lock: then False."""
        return self._record_lock(lock, wait=False)

    def update(self) -> AbstractContextManager[object]:
        """One update of the parameters: exclusive if the store is locked."""
        return self.exclusive("update") if self.locked else nullcontext()

    def barrier(self) -> None:
        """Order this process's reads and writes before against those after, as other processes see them (about 1 µs)."""
        with self.exclusive("barrier"):  # taking and releasing a lock of the kernel is a barrier on every processor
            pass

    @contextmanager
    def _record_lock(self, lock: Lock, wait: bool) -> Iterator[bool]:
        import fcntl  # POSIX only; a spec can be read and one Session trained without it

        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _LOCK_BYTES[lock])
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _LOCK_BYTES[lock])


def shared_file() -> int:
    """The descriptor of a new anonymous file for `SharedArrays`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("slm_lab")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _grow(fd: int, size: int) -> None:
    now = os.fstat(fd).st_size
    if now >= size:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, now, size - now)  # fails if memory is short; ftruncate would end the process later
        else:
            os.ftruncate(fd, size)
    except OSError as error:
        raise MemoryError(f"cannot allocate {(size - now) / 2**20:,.0f} MiB of shared memory: {error.strerror}") from error
