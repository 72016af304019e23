"""Named arrays in memory that several processes share, for Sessions that train one net together.

A *part* of a Session (a trainer, a target network, a normaliser, the clock) has ordinary arrays. The method `shared_arrays` of a part
returns a dict of the arrays that several processes may train together. The class `SharedArrays` allocates the arrays that processes share.
Every process of a trial passes the same names to `SharedArrays` and gets the same memory for each name, regardless of the order in which
the parts were built. A Session that trains a net in one process has no store of shared arrays.

To change an array that other processes also change, a part of a Session uses a *section*: one of the part's methods, which is passed to
`Store.run_locked` with its arguments. If the store is in shared memory, `Store.run_locked` calls the section under a lock. If the store is
in another process (experiment/session/cluster), `Store.run_locked` calls the same method of the same part in the other process, and then
updates the copies of the part's arrays in the calling process.

The shared memory is one anonymous file that every process maps. The anonymous file has no name, so that the operating system deletes the
file when the last process ends. The locks are record locks of the operating system, which are released when the process that holds them
dies.
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
"""Rule by which several processes write to one array.
With "step", each process applies its gradient steps in place, one process at a time if `Store.locked` is true.
With "merge", each process reads the array, adds its own data and writes the array, under the lock "statistics".
With "single", one process writes at a time, and a second process that wants to write at the same time skips its write.
With "own", the array has one row per process, and each process writes only its own row."""
Lock = Literal["update", "statistics", "target", "allocate", "barrier", "gate", "snapshot", "save"]
_LOCK_BYTES: dict[Lock, int] = {lock: number for number, lock in enumerate(get_args(Lock))}
"""Maps each lock to the byte of the shared file that represents the lock."""
MOMENT = "_moment"
"""Suffix of the names of arrays that contain times in seconds of perf_counter. Times of perf_counter are meaningless after a restart of the
machine, so that snapshots do not contain these arrays."""
SectionLock = Literal["update", "statistics", "target"]
"""Lock that `Store.run_locked` holds while it calls a section. The lock "update" has an effect only if meta.hogwild_lock is true."""
Result = TypeVar("Result")
_SAVED = f"saved{MOMENT}"
"""Name of the shared array that contains the time at which all shared arrays were last saved."""
_ALIGNMENT = 64
"""Number of bytes of a cache line, to which shared arrays are aligned."""
_RANGE = 2**21
"""Number of elements above which a parameter vector is divided among several processes of a parameter server. Each additional process of a
parameter server requires another message per update. On two busy cores, sending 1.7 M parameters to two processes took 1.4 times as long as
sending them to one process."""
_PROCESSES = 8
"""Maximum number of processes among which a parameter vector is divided."""
_VECTOR = 64
"""The boundaries between the ranges of a divided parameter vector are aligned to multiples of this number of elements. With aligned
boundaries, vector instructions process the same groups of elements as without the division, so that results do not differ in the last
bit."""


class Division(NamedTuple):
    """Division of a parameter vector among the processes of a parameter server.

    Process k of the parameter server stores the elements `bounds[k]` to `bounds[k + 1] − 1` of the vector.
    """

    bounds: tuple[int, ...]

    @property
    def processes(self) -> int:
        """Number of processes that store a range of the parameter vector."""
        return len(self.bounds) - 1

    def process_range(self, process: int) -> slice:
        """Return the range of the parameter vector that a process stores, or an empty slice for a process that stores no range."""
        ends = (*self.bounds, *[self.bounds[-1]] * 2)
        return slice(*ends[min(process, self.processes) :][:2])


def divide_vector(size: int, starts: Sequence[int] = (0,)) -> Division:
    """Divide a parameter vector into ranges of about the same size. The number of ranges depends only on `size`.

    Args: size: number of elements of the vector. starts: indices of the first elements of the optimizer groups, in ascending order. The
    boundaries of ranges are aligned relative to the start of the optimizer group in which they lie.
    """
    number = min(max(-(-size // _RANGE), 1), _PROCESSES)
    boundaries = [size * k // number for k in range(1, number)]
    begins = [max(start for start in (0, *starts) if start <= boundary) for boundary in boundaries]
    return Division(
        (0, *(begin + (boundary - begin) // _VECTOR * _VECTOR for begin, boundary in zip(begins, boundaries, strict=True)), size)
    )


class SharedArray(NamedTuple):
    """An array that several processes may train together: the initial values of the array, and the rule by which processes write to the
    array."""

    values: np.ndarray
    """Initial values of the array. With `combine="own"`, `values` are the values of one process, and the shared array has an additional
    first axis for processes."""
    combine: Combine
    division: Division | None = None
    """Division of the parameter vector to which the array belongs, or None if every process of a parameter server stores the full array."""
    begin: int = 0
    """Index of the array's first element in the parameter vector."""

    def process_slice(self, process: int) -> slice:
        """Return the slice of this array that the given process of the parameter server stores.

        This method requires that `division` is not None.
        """
        assert self.division is not None
        whole = self.division.process_range(process)
        return slice(max(whole.start - self.begin, 0), max(whole.stop - self.begin, 0))


Named = dict[str, SharedArray]
Arrays = Mapping[str, np.ndarray]


class Shareable(Protocol):
    """Interface of a part of a Session whose arrays several processes can train together."""

    def shared_arrays(self) -> Named:
        """Return a dict of the arrays that several processes may share."""

    def attach(self, store: Store, arrays: Arrays) -> None:
        """Replace the arrays of this object by shared arrays of `store`.

        Args: arrays: shared arrays with the names that `shared_arrays` returned.
        """


class Store(Protocol):
    """Interface of objects that store the shared arrays of several Sessions, either in shared memory (SharedArrays) or in another
    process."""

    index: int
    """Index of this process among the processes of the trial."""
    workers: int
    """Number of processes that share the arrays of the store."""
    synced: bool
    """Whether meta.distributed is "synced", so that a process refreshes its copy of the parameters only after its own updates."""
    locked: bool
    """Whether only one process at a time updates the parameters (meta.hogwild_lock)."""
    fresh: bool
    """Whether the shared arrays have their initial values, because training has not begun."""
    remote: bool
    """Whether the arrays in this process are copies of the shared arrays in another process."""
    serves: int | None
    """Index of this process among the processes of a parameter server, or None for other processes. The processes of a parameter server
    only apply updates."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Maps the names of all shared arrays, which include the prefixes of their parts, to the arrays."""

    def store_for_part(self, name: str, part: Shareable) -> Store:
        """Return the store that an inner part uses.

        Args: part: inner part, which belongs to the part of the Session that uses this store. name: prefix of the names of the inner part's
        arrays.
        """

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        """Allocate the shared arrays of parts of a Session, and attach each part to its arrays.

        Args: parts: dict from the prefix of the array names of each part to the part.

        Raises MemoryError if memory is insufficient.
        """

    def run_locked(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result:
        """Call `section`, a method of a part that is attached to the store, while holding the lock `lock`. Return the result of
        `section`."""

    def run_if_free(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result | None:
        """Call `section` while holding the lock `lock`, as `run_locked` does. If another process holds the lock, return None instead of
        waiting."""

    def step(self, section: Callable[..., Result], grad: np.ndarray, *args: object) -> Result:
        """Call `section` with the gradient `grad` [P] in the process that stores the shared arrays. Return the result of `section`.

        If the parameter vector is divided among several processes, `section` is called once in each process, for the range that the process
        stores.
        """

    def updating(self) -> AbstractContextManager[None]:
        """Return a context for one update of the shared parameters. The process of the store must run the update.

        If `locked` is true, only one process at a time can enter the context.
        """

    def pull(self, seconds: float = 0.0) -> bool:
        """If this process's copies of the shared arrays are older than `seconds`, update the copies. Return whether the copies were
        updated."""

    def take_traffic(self) -> tuple[int, int]:
        """Return two numbers of bytes of arrays: the bytes sent to the store's process, and the bytes received from the store's process,
        since the last call of this method."""

    def exchange(self) -> None:
        """Exchange the rows of arrays with `combine="own"`: this process's rows become visible to other processes, and the rows of other
        processes become visible to this process."""

    def publish(self) -> None:
        """Make array values that this process wrote without `run_locked` or `step` visible to other processes. Call this method before
        training begins."""

    def barrier(self) -> None:
        """Issue a memory barrier: for other processes, all reads and writes of this process before the call precede all reads and writes
        after the call."""

    def saving(self, interval: float | None) -> AbstractContextManager[bool]:
        """Return a context in which no other process saves the shared arrays, see SharedArrays.saving."""

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return a dict of copies of all shared arrays, which are made while no process changes the arrays.

        The returned copies are valid until the next call of `snapshot`.
        """

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Overwrite the shared arrays with arrays that `snapshot` returned. Raises ValueError if the names or shapes of the arrays
        differ."""


def is_shared(store: Store | None) -> bool:
    """Return whether several processes train the arrays of the store `store`.

    Arrays that several processes train are saved together in a snapshot of the store, instead of in the state of each part of a Session.
    """
    return store is not None and store.workers > 1


def prefixed_arrays(parts: Mapping[str, Shareable]) -> Named:
    """Return a dict of the shared arrays of several parts of a Session. The name of each array begins with the name of its part, as in
    "critics/params"."""
    return {f"{prefix}/{name}": array for prefix, part in parts.items() for name, array in part.shared_arrays().items()}


def attach_parts(parts: Mapping[str, Shareable], store: Store, arrays: Arrays) -> None:
    """Attach each part of a Session to its arrays in `arrays`, whose names begin with the prefixes that `prefixed_arrays` added."""
    for prefix, part in parts.items():
        part.attach(
            store.store_for_part(prefix, part),
            {name.removeprefix(f"{prefix}/"): array for name, array in arrays.items() if name.startswith(f"{prefix}/")},
        )


class SharedArrays:
    """Store whose arrays are in memory that all processes of a trial share. Each process has its own SharedArrays object.

    Args:
        fd: descriptor of the anonymous file that `create_shared_file` returned.
        fresh: whether to write the initial values of arrays, which are the same in every process. If `fresh` is False, the shared arrays
            keep their values.
    """

    remote = False
    serves: int | None = None

    def __init__(
        self, fd: int, index: int = 0, workers: int = 1, *, synced: bool = False, locked: bool = False, fresh: bool = True
    ) -> None:
        self.fd, self.index, self.workers, self.synced, self.locked, self.fresh = fd, index, workers, synced, locked, fresh
        self.arrays: dict[str, np.ndarray] = {}
        """Maps the names of all shared arrays, which include the prefixes of their parts, to the arrays."""
        self._writing = False
        self._copies: dict[str, np.ndarray] = {}

    def store_for_part(self, name: str, part: Shareable) -> Self:
        """Return this store, because all parts of a Session use the same memory."""
        return self

    def attach(self, parts: Mapping[str, Shareable]) -> None:
        attach_parts(parts, self, self.allocate(prefixed_arrays(parts)))

    def allocate(self, named: Named) -> dict[str, np.ndarray]:
        """Map the arrays `named` into shared memory, and return the mapped arrays by name. Every process calls this method once, with the
        same names and shapes.

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
        with self._record_lock("allocate"):  # without the lock, one process could truncate what another adds
            _grow_file(self.fd, end)
        memory = mmap.mmap(self.fd, end)  # closing a descriptor of the file would release this process's locks, so the file stays mapped
        for name, shape in shapes.items():
            values = named[name].values
            array = np.frombuffer(memory, values.dtype, int(np.prod(shape, dtype=np.int64)), offsets[name]).reshape(shape)
            if self.fresh:
                np.copyto(array[self.index] if named[name].combine == "own" else array, values)
            self.arrays[name] = array
        return dict(self.arrays)

    def run_locked(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result:
        with self.updating() if lock == "update" else self.hold_lock(lock):
            return section(*args)

    def run_if_free(self, lock: SectionLock, section: Callable[..., Result], *args: object) -> Result | None:
        with self.hold_lock(lock, wait=False) as mine:
            return section(*args) if mine else None

    def step(self, section: Callable[..., Result], grad: np.ndarray, *args: object) -> Result:
        raise TypeError("updates are applied in this process")

    def pull(self, seconds: float = 0.0) -> bool:
        """Return False, because processes use the shared memory without copies.

        The methods `exchange` and `publish` do nothing for the same reason: all processes use the same memory.
        """
        return False

    def take_traffic(self) -> tuple[int, int]:
        return 0, 0

    def exchange(self) -> None: ...

    def publish(self) -> None: ...

    @contextmanager
    def hold_lock(self, lock: SectionLock, *, wait: bool = True) -> Iterator[bool]:
        """Return a context that holds the lock `lock` and yields True. With `wait=False`, if another process holds the lock, the context
        yields False instead of waiting."""
        with self._block_snapshots(), self._record_lock(lock, wait=wait) as mine:
            yield mine

    @contextmanager
    def updating(self) -> Iterator[None]:
        with self._block_snapshots(), self._record_lock("update") if self.locked else nullcontext():
            yield

    @contextmanager
    def saving(self, interval: float | None) -> Iterator[bool]:
        """Return a context in which no other process saves the arrays. The context yields whether this process may save the shared arrays.

        The context yields False if another process is saving the arrays, or saved the arrays less than `interval` seconds ago. With
        `interval=None`, the context waits until the other process has saved the arrays, and always yields True.
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
        """Return a dict of copies of all shared arrays. While the arrays are copied, other processes wait only if they want to change an
        array."""
        if not self._copies:  # `ones_like` accesses the new memory; the first access takes twice as long as a copy
            self._copies = {name: np.ones_like(array) for name, array in self.arrays.items() if not name.endswith(MOMENT)}
        with self._record_lock("gate"), self._record_lock("snapshot"):
            for name, copy in self._copies.items():
                np.copyto(copy, self.arrays[name])
        return dict(self._copies)

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        own = {name: array for name, array in self.arrays.items() if not name.endswith(MOMENT)}
        if {name: array.shape for name, array in own.items()} != {name: array.shape for name, array in saved.items()}:
            raise ValueError("the shared arrays have other names or shapes than the saved arrays")
        for name, array in own.items():
            np.copyto(array, saved[name])

    @contextmanager
    def _block_snapshots(self) -> Iterator[None]:
        """Return a context in which no other process takes a snapshot.

        If another process is waiting to take a snapshot, the context begins after this snapshot.
        """
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
        import fcntl  # only POSIX systems have fcntl, which is not needed to read a spec or to train a single Session

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


def create_shared_file() -> int:
    """Create an anonymous file for the memory of `SharedArrays`, and return the file's descriptor."""
    if has_feature("memfd"):
        return os.memfd_create("slm_lab")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _grow_file(fd: int, size: int) -> None:
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
