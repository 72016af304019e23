"""The lock of a run folder, which ensures that only one process at a time writes to the folder."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice
from slm_lab.lib.system import has_feature

ORPHAN_SECONDS = 20.0
"""Maximum time in seconds that a child process has to save its state after its parent process died."""
ENDED = "was killed or exited"
"""Part of the messages about a process that ended without releasing its lock."""


class _FileLock:
    """A lock on a file that at most one process can hold (flock). The operating system releases the lock when the process that holds it
    ends.

    The content of the lock file describes the process that holds the lock, or that ended without releasing the lock. If the operating
    system or the file system does not support file locks, each attempt to acquire a lock succeeds without effect.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file = os.fstat(self.fd)

    def acquire(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` seconds for the lock, and return whether the lock was acquired."""
        deadline = time.monotonic() + seconds
        while not _try_lock(self.fd):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    @property
    def holder(self) -> dict[str, Any]:
        """Description of the process that holds the lock, or that ended without releasing the lock, or {} if there is no such process."""
        return _read_holder(self.fd)

    @holder.setter
    def holder(self, holder: dict[str, Any]) -> None:
        content = json.dumps(holder).encode() if holder else b""
        with suppress(OSError):  # the disk is full; the lock is still valid
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)  # pwrite is not available on Windows
            os.write(self.fd, content)

    def release(self) -> None:
        """Clear the content of the lock file, and release the lock."""
        if self.fd >= 0:
            if self._is_open:
                self.holder = {}
            else:
                with suppress(OSError):
                    self.path.write_bytes(b"")
            self.close()

    def close(self) -> None:
        if self._is_open:
            os.close(self.fd)
        self.fd = -1

    @property
    def _is_open(self) -> bool:
        """Whether the file descriptor `fd` still refers to the lock file. If the code of an env has closed `fd`, the number of `fd` may now
        belong to another file."""
        try:
            return os.path.samestat(os.fstat(self.fd), self._file)
        except OSError:
            return False


class RunLock(_FileLock):
    """The lock of a run folder, which the process that trains the run holds.

    The constructor acquires the lock, and waits until the Sessions of a killed process have ended. The constructor raises UserError if
    another process holds the lock, or OSError if the lock file cannot be created.

    Args: what: noun for the owner of the folder in messages, such as "run" or "study".
    """

    def __init__(self, path: Path, what: str = "run") -> None:
        super().__init__(path)
        try:
            if not self.acquire(0.3):  # another process that calls `in_use` holds the lock briefly
                raise UserError(f"the {what} in {path.parent} is in use by {_describe_holder(self.holder)}; wait until it ends, or stop it")
            self.killed: str | None = _describe_holder(self.holder) if self.holder else None
            """Text about the previous process if it ended without releasing the lock, or None otherwise."""
            for other in sorted(path.parent.glob(f"{path.name}_*")):
                self._wait_for_session(other)
        except BaseException:
            self.close()
            raise
        self.holder = {
            "pid": os.getpid(),
            "host": platform.node(),
            "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        }

    def _wait_for_session(self, path: Path) -> None:
        lock = _FileLock(path)
        try:
            if lock.acquire():
                return
            notice(f"waiting for a session of {self.killed or 'the last start'} to save its state and end")
            if not lock.acquire(ORPHAN_SECONDS + 5.0):
                raise UserError(f"the run in {path.parent} is in use: a session of {self.killed or 'the last start'} has not ended")
        finally:
            lock.close()


class SessionLock(_FileLock):
    """The lock that the process of a Session, of a trial in a search, or of a run in a study holds while the process runs.

    The process that holds a SessionLock may continue to run for a short time after its parent process was killed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.acquire()


@contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder while the with-block runs, so that `in_use(folder)` returns True. On systems that cannot lock
    folders, `mark_in_use` has no effect."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        yield
        return
    try:
        _try_lock(fd)
        yield
    finally:
        os.close(fd)


def in_use(path: Path) -> bool:
    """Return whether any process holds the lock of a file or folder.

    Args: path: the lock file of a run folder, or a folder that `mark_in_use` locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # no lock file: a run of SLM Lab
        return False
    try:
        return not _try_lock(fd, shared=True)
    finally:
        os.close(fd)


def unfinished_notice(root: Path, lock: Path) -> str | None:
    """Return a notice if the process that trained a run has ended without releasing the lock of the run folder, or None otherwise."""
    try:
        with lock.open("rb") as file:
            holder = _read_holder(file.fileno())
    except OSError:  # no lock file: a run of SLM Lab
        return None
    if not holder or in_use(lock):
        return None
    return f"{root} is unfinished: its last start, {_describe_holder(holder)}, {ENDED}"


def _read_holder(fd: int) -> dict[str, Any]:
    """Return the content of a lock file, or {} if the file is empty or damaged."""
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        return dict(json.loads(os.read(fd, 4096)))
    except (OSError, ValueError, TypeError):
        return {}


def _try_lock(fd: int, *, shared: bool = False) -> bool:
    """Try to lock an open file without waiting, and return whether the file was locked. On systems without file locks, return True."""
    if not has_feature("fcntl"):
        return True
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('began')}"
