"""Named arrays in memory that several processes share.

A part (a trainer, a target network, a normaliser, the clock) has plain arrays. Its method `shared_arrays` returns, by name, the arrays that
several processes may train together. `SharedArrays` allocates these arrays: every process of a trial passes the same names and gets the
same memory for them, regardless of the order in which the parts were built. A Session that trains alone has no store.

To change an array that other processes change too, a part uses a *section*: one of its methods, passed to `Store.run` with plain
arguments. In shared memory, `run` calls this method under a lock. If the store is in another process (experiment/cluster), `run` calls the
method with the same name of the same part in that process, and updates this process's copies of the part's arrays.

The memory is one anonymous file that every process maps. The file has no name, so that it is deleted when the last process ends. The locks
are record locks of the operating system, which are released when the process that holds them dies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Literal, NamedTuple, Protocol, Self, TypeVar, get_args

import numpy as np

from slm_lab.lib.system import has_feature

Combine = Literal["step", "merge", "single", "own"]
"""How the writes of several processes to one array combine:
step: each process applies its gradient step in place; only if the store is locked, steps happen one at a time;
merge: each process reads, adds its own data and writes, under the lock "statistics";
single: one process writes at a time; if a second process wants to write at the same time, it skips its write;
own: each process has its own row and writes only this row."""
Lock = Literal["update", "statistics", "target", "allocate", "barrier", "gate", "snapshot", "save"]
_LOCK_BYTES: dict[Lock, int] = {lock: number for number, lock in enumerate(get_args(Lock))}
"""Lock → byte of the file that represents it."""
MOMENT = "_moment"
"""Suffix of the names of arrays that contain times in seconds of perf_counter. These times are meaningless after a restart of the machine,
so a snapshot leaves them out."""
SectionLock = Literal["update", "statistics", "target"]
"""Lock of a section. "update" does not lock unless meta.hogwild_lock is true."""
Result = TypeVar("Result")
_SAVED = f"saved{MOMENT}"
"""Array with the time of the last save."""
_ALIGNMENT = 64
"""Bytes; a cache line."""
_RANGE = 2**21
"""Maximum number of elements of a vector that is not divided among processes. Each additional process needs another message: on two busy
cores, pushes of 1.7 M parameters to two processes took 1.4 times as long as pushes to one process."""
_PROCESSES = 8
"""Maximum number of processes that a vector is divided among."""
_VECTOR = 64
"""A range begins at a multiple of this number of elements. Vector instructions then work on the same elements as without the division;
otherwise the last bit of a result could differ."""


class Division(NamedTuple):
    """How a parameter server of several processes divides a vector: process k stores the elements bounds[k] to bounds[k + 1]."""

    bounds: tuple[int, ...]

    @property
    def processes(self) -> int:
        """Number of processes that store a range."""
        return len(self.bounds) - 1

    def range(self, process: int) -> slice:
        """Return the range of a process; empty for a process without a range."""
        ends = (*self.bounds, *[self.bounds[-1]] * 2)
        return slice(*ends[min(process, self.processes) :][:2])


def divided(size: int, starts: Sequence[int] = (0,)) -> Division:
    """Divide a vector into ranges of about the same size. The number of ranges depends only on the size of the vector.

    Args: starts: index of the first element of each part that is stepped separately, ascending; ranges are aligned to the start of their
    part.
    """
    number = min(max(-(-size // _RANGE), 1), _PROCESSES)
    boundaries = [size * k // number for k in range(1, number)]
    begins = [max(start for start in (0, *starts) if start <= boundary) for boundary in boundaries]
    return Division(
        (0, *(begin + (boundary - begin) // _VECTOR * _VECTOR for begin, boundary in zip(begins, boundaries, strict=True)), size)
    )


class SharedArray(NamedTuple):
    """An array that several processes may train together."""

    values: np.ndarray
    """Initial values. With `combine="own"`, these are the values of one process; the shared array has an additional first axis for
    processes."""
    combine: Combine
    division: Division | None = None
    """Division of the vector that the array belongs to; None: every process of a parameter server stores the full array."""
    begin: int = 0
    """Index of the array's first element in that vector."""

    def part(self, process: int) -> slice:
        """Return the part of a divided array that a process of a parameter server stores."""
        assert self.division is not None
        whole = self.division.range(process)
        return slice(max(whole.start - self.begin, 0), max(whole.stop - self.begin, 0))


Named = dict[str, SharedArray]
Arrays = Mapping[str, np.ndarray]


class Shareable(Protocol):
    """A part that can be trained by several processes."""

    def shared_arrays(self) -> Named:
        """Return the arrays to share, by name."""

    def attach(self, store: Store, arrays: Arrays) -> None:
        """Use the given arrays of `store` from now on. Their names are those that `shared_arrays` returned."""


class Store(Protocol):
    """Interface of a store for parts and Sessions: SharedArrays, or a store in another process."""

    index: int
    """Index of this process."""
    workers: int
    """Number of processes."""
    synced: bool
    """Whether a process refreshes its copy of the parameters only after its own updates (meta.distributed "synced")."""
    locked: bool
    """Whether only one process updates at a time (meta.hogwild_lock)."""
    fresh: bool
    """Whether training has not begun."""
    remote: bool
    """Whether the arrays of this process are copies of arrays in another process."""
    serves: int | None
    """Index of this process among the processes of a parameter server, which only apply updates; None for any other process."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays in the store, by full name."""

    def at(self, name: str, part: Shareable) -> Store:
        """Return the store for one part. Args: name: name of this part within the part that the present store belongs to."""

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        """Allocate the shared arrays of these parts, and attach the parts to them. Raises MemoryError if there is not enough memory."""

    def run(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result:
        """Call `section`, a method of an attached part, while holding the lock."""

    def run_if_free(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result | None:
        """Do the same as `run`, but return None without calling `section` if another process holds the lock."""

    def step(self, section: Callable[..., Result], grad: np.ndarray, *args: object) -> Result:
        """Call `section` in the process that stores the arrays, with the gradient [P] of the part's vector.

        If the vector is divided, `section` is called once for each range, in the process that stores the range.
        """

    def updating(self) -> AbstractContextManager[None]:
        """Return the context for one update of the parameters, in the process of the store. It is exclusive if the store is locked."""

    def pull(self, seconds: float = 0.0) -> bool:
        """Update this process's copies of the part's arrays if they are older than `seconds`; return whether they were updated."""

    def take_traffic(self) -> tuple[int, int]:
        """Return the number of bytes of arrays sent to the store's process since the last call, and the number received from it."""

    def exchange(self) -> None:
        """Make this process's rows of "own" arrays visible to other processes, and the rows of other processes visible to this process."""

    def publish(self) -> None:
        """Make what this process wrote outside of sections visible to other processes. Call this before training begins."""

    def barrier(self) -> None:
        """Issue a memory barrier: for other processes, all reads and writes before this call precede all reads and writes after it."""

    def saving(self, interval: float | None) -> AbstractContextManager[bool]:
        """Prevent other processes from saving the arrays until the block ends; see SharedArrays."""

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of all arrays, made while no process changes them. The copies are valid until the next call."""

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Overwrite the arrays with the result of `snapshot`. Raises ValueError if names or shapes differ."""


def is_shared(store: Store | None) -> bool:
    """Return whether several processes train the arrays of `store`. Such arrays are saved with the store, not with each part's state."""
    return store is not None and store.workers > 1


def prefixed(parts: Mapping[str, Shareable]) -> Named:
    """Return the shared arrays of several parts. The name of the part is the prefix of each name: "critics/params"."""
    return {f"{prefix}/{name}": array for prefix, part in parts.items() for name, array in part.shared_arrays().items()}


def attach_parts(parts: Mapping[str, Shareable], store: Store, arrays: Arrays) -> None:
    """Attach each part to its arrays, which are selected by the prefixes that `prefixed` adds."""
    for prefix, part in parts.items():
        part.attach(
            store.at(prefix, part),
            {name.removeprefix(f"{prefix}/"): array for name, array in arrays.items() if name.startswith(f"{prefix}/")},
        )


class SharedArrays:
    """Store of one process of a trial. The arrays are in memory that all processes of the trial share.

    Args:
        fd: descriptor of the file (`shared_file`).
        fresh: whether to write the initial values, which are the same in every process. If False, the arrays are left unchanged.
    """

    remote = False
    serves: int | None = None

    def __init__(
        self, fd: int, index: int = 0, workers: int = 1, *, synced: bool = False, locked: bool = False, fresh: bool = True
    ) -> None:
        self.fd, self.index, self.workers, self.synced, self.locked, self.fresh = fd, index, workers, synced, locked, fresh
        self.arrays: dict[str, np.ndarray] = {}
        """All arrays in the store, by full name."""
        self._writing = False
        self._copies: dict[str, np.ndarray] = {}

    def at(self, name: str, part: Shareable) -> Self:
        """Return this store: all parts use the same memory."""
        return self

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        attach_parts(parts, self, self.allocate(prefixed(parts)))

    def allocate(self, named: Named) -> dict[str, np.ndarray]:
        """Map these arrays into memory, in the order of their names. Every process calls this once, with the same names and shapes.

        Raises MemoryError if this machine does not have enough memory.
        """
        assert not self.arrays
        named = {**named, _SAVED: SharedArray(np.zeros(1), "single")}
        shapes = {name: (*([self.workers] if one.combine == "own" else []), *one.values.shape) for name, one in sorted(named.items())}
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            size = int(np.prod(shape, dtype=np.int64)) * named[name].values.dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._record_lock("allocate"):  # two processes that grow the file at the same time could truncate each other's part
            _grow(self.fd, end)
        memory = mmap.mmap(self.fd, end)  # closing a descriptor of the file would release this process's locks, so the file stays mapped
        for name, shape in shapes.items():
            values = named[name].values
            array = np.frombuffer(memory, values.dtype, int(np.prod(shape, dtype=np.int64)), offsets[name]).reshape(shape)
            if self.fresh:
                np.copyto(array[self.index] if named[name].combine == "own" else array, values)
            self.arrays[name] = array
        return dict(self.arrays)

    def run(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result:
        with self.updating() if lock == "update" else self.exclusive(lock):
            return section(*args)

    def run_if_free(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result | None:
        with self.exclusive(lock, wait=False) as mine:
            return section(*args) if mine else None

    def step(self, section: Callable[..., Result], grad: np.ndarray, *args: object) -> Result:
        raise TypeError("updates are applied in this process")

    def pull(self, seconds: float = 0.0) -> bool:
        """Do nothing and return False: shared memory needs no copies. `exchange` and `publish` do nothing for the same reason."""
        return False

    def take_traffic(self) -> tuple[int, int]:
        return 0, 0

    def exchange(self) -> None: ...

    def publish(self) -> None: ...

    @contextmanager
    def exclusive(self, lock: SectionLock, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock until the block ends. With `wait=False`, yield False instead of waiting if another process holds the lock."""
        with self._writes(), self._record_lock(lock, wait=wait) as mine:
            yield mine

    @contextmanager
    def updating(self) -> Iterator[None]:
        with self._writes(), self._record_lock("update") if self.locked else nullcontext():
            yield

    @contextmanager
    def saving(self, interval: float | None) -> Iterator[bool]:
        """Prevent other processes from saving the arrays until the block ends.

        Yields False if another process is saving the arrays, or saved them less than `interval` seconds ago. With `interval=None`, waits
        for the other process and always yields True.
        """
        with self._record_lock("save", wait=interval is None) as mine:
            saved = self.arrays[_SAVED]
            if not mine or (interval is not None and saved[0] and perf_counter() < saved[0] + interval):
                yield False
            else:
                yield True
                saved[0] = perf_counter()

    def barrier(self) -> None:
        with self._record_lock("barrier"):  # taking and releasing a lock of the kernel (1 µs) is a barrier on every processor
            pass

    def snapshot(self) -> dict[str, np.ndarray]:
        """Copy the arrays; meanwhile other processes wait only if they want to change an array."""
        if not self._copies:  # write to the memory once here: the first access to new memory takes twice as long as the copy
            self._copies = {name: np.ones_like(array) for name, array in self.arrays.items() if not name.endswith(MOMENT)}
        with self._record_lock("gate"), self._record_lock("snapshot"):
            for name, copy in self._copies.items():
                np.copyto(copy, self.arrays[name])
        return dict(self._copies)

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        own = {name: array for name, array in self.arrays.items() if not name.endswith(MOMENT)}
        if {name: array.shape for name, array in own.items()} != {name: array.shape for name, array in saved.items()}:
            raise ValueError("the shared arrays have other names or shapes than those saved")
        for name, array in own.items():
            np.copyto(array, saved[name])

    @contextmanager
    def _writes(self) -> Iterator[None]:
        """Prevent other processes from taking a snapshot until the block ends. If a snapshot is waiting, a new block begins after it."""
        if self._writing:
            yield
            return
        with ExitStack() as held:
            with self._record_lock("gate", shared=True):
                held.enter_context(self._record_lock("snapshot", shared=True))
            self._writing = True
            try:
                yield
            finally:
                self._writing = False

    @contextmanager
    def _record_lock(self, lock: Lock, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
        import fcntl  # POSIX only; a spec can be read and one Session trained without it

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.lockf(self.fd, kind | (0 if wait else fcntl.LOCK_NB), 1, _LOCK_BYTES[lock])
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _LOCK_BYTES[lock])


def shared_file() -> int:
    """Return the descriptor of a new anonymous file for `SharedArrays`."""
    if has_feature("memfd"):
        return os.memfd_create("slm_lab")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _grow(fd: int, size: int) -> None:
    now = os.fstat(fd).st_size
    if now >= size:
        return
    try:
        if has_feature("fallocate"):
            os.posix_fallocate(fd, now, size - now)  # fails if memory is insufficient; after ftruncate the process would crash later
        else:
            os.ftruncate(fd, size)
    except OSError as error:
        raise MemoryError(f"cannot allocate {(size - now) / 2**20:,.0f} MiB of shared memory: {error.strerror}") from error
