"""Where the numbers lie that learning changes: in this process alone, or in memory that all Sessions of a trial have in common.

The common memory is one anonymous file that every process maps. It has no name, so that nothing is left of it when the last process
is gone, however that one ended; and its locks are the system's own record locks, which a process gives up with its life.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np

Lock = Literal["update", "statistics", "target"]
_BYTE: dict[Lock, int] = {"update": 0, "statistics": 1, "target": 2}
"""The byte of the file that stands for each lock."""
_CHUNK = 2**18
"""Bytes that small arrays are mapped in together: each mapping keeps a descriptor open, of which a process may have some 1000."""
_ALIGNED = 64
"""Bytes; a cache line."""


class Heap:
    """This process's own memory."""

    common = False
    """Whether other Sessions see it too."""
    locked = False
    """Whether updates of the global nets go one after the other."""
    synced = False
    """Whether a Session brings its copy of the global nets up to date after its own updates only."""
    fresh = True
    """Whether what is placed here begins with its initial values."""
    sessions, index = 1, 0
    """How many Sessions have it in common, and which of them this is."""

    def array(self, initial: np.ndarray) -> np.ndarray:
        """The array to use in place of `initial`, of the same shape and dtype."""
        return initial

    def exclusive(self, lock: Lock) -> AbstractContextManager[object]:
        """No other Session is inside at the same time."""
        return nullcontext()

    def claim(self, lock: Lock) -> AbstractContextManager[bool]:
        """Whether no other Session is inside; then none comes in."""
        return nullcontext(True)

    def update(self) -> AbstractContextManager[object]:
        """One update of the global nets, one after the other where meta.hogwild_lock says so."""
        return nullcontext()

    def takes(self, numbers: np.ndarray | float) -> bool:
        """Whether numbers may go in: what is not finite in one Session stays its own."""
        return True


class CommonHeap(Heap):
    """The memory in common, as one Session sees it.

    Every Session must place the same arrays in the same order.

    Args:
        fd: of the file (`common_file`). index, sessions: which Session of how many.
        synced, locked: meta.distributed is "synced"; meta.hogwild_lock.
        fresh: the trial has not begun: initial values are written, the same by every Session. Else they stay as they are.
    """

    common = True

    def __init__(self, fd: int, index: int, sessions: int, *, synced: bool, locked: bool = False, fresh: bool = True) -> None:
        self.fd, self.index, self.sessions, self.synced, self.locked, self.fresh = fd, index, sessions, synced, locked, fresh
        self._end = self._used = 0
        self._chunk: mmap.mmap | None = None
        """Where small arrays are placed, up to `_used`."""
        self._kept: list[np.ndarray] = []
        """Every array placed here: closing the file of one would give up the locks that this process holds."""

    def array(self, initial: np.ndarray) -> np.ndarray:
        """Raises MemoryError where this machine has no room for it."""
        if initial.nbytes == 0:
            return initial
        size, place = initial.nbytes, 0
        if size > _CHUNK // 2:
            memory = self._map(size)
        else:
            if self._chunk is None or self._used + size > _CHUNK:
                self._chunk, self._used = self._map(_CHUNK), 0
            memory, place = self._chunk, self._used
            self._used += -(-size // _ALIGNED) * _ALIGNED
        there = np.frombuffer(memory, initial.dtype, initial.size, place).reshape(initial.shape)
        self._kept.append(there)
        if self.fresh:
            np.copyto(there, initial)
        return there

    def _map(self, size: int) -> mmap.mmap:
        begin, self._end = self._end, self._end + -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self.exclusive("statistics"):  # or two would grow the file at once, and one of them cut off what the other had added
            _grow(self.fd, self._end)
        return mmap.mmap(self.fd, size, offset=begin)

    def exclusive(self, lock: Lock) -> AbstractContextManager[object]:
        return self._lock(lock, wait=True)

    def claim(self, lock: Lock) -> AbstractContextManager[bool]:
        return self._lock(lock, wait=False)

    @contextmanager
    def _lock(self, lock: Lock, wait: bool) -> Iterator[bool]:
        import fcntl  # not on every system that can read a spec

        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _BYTE[lock])
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _BYTE[lock])

    def update(self) -> AbstractContextManager[object]:
        return self.exclusive("update") if self.locked else nullcontext()

    def takes(self, numbers: np.ndarray | float) -> bool:
        return bool(np.isfinite(numbers).all())


PRIVATE = Heap()


@dataclass(frozen=True)
class Place:
    """Where an agent computes, and where what it learns lies."""

    device: str = "cpu"
    heap: Heap = PRIVATE


HERE = Place()


def common_file() -> int:
    """The descriptor of a new anonymous file for a CommonHeap."""
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
            os.posix_fallocate(fd, now, size - now)  # says so where memory is short; ftruncate would end the process later
        else:
            os.ftruncate(fd, size)
    except OSError as error:
        raise MemoryError(f"{(size - now) / 2**20:,.0f} MiB more memory in common: {error.strerror}") from error
