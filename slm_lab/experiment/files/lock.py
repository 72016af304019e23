"""The lock of a run folder, by which only one process at a time writes to the folder."""

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
"""Time in seconds for a child process to save its work after its parent died."""
ENDED = "was killed or exited"
"""Text about a process that did not release its lock."""


class _FileLock:
    """A lock of the operating system (flock). It is released when the process that holds it ends, even if the process is killed.

    The content of the lock file describes the process that holds the lock, or that was killed while it held the lock. If the system or the
    file system does not support locks, nothing is locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file = os.fstat(self.fd)

    def acquire(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` seconds for the lock; return whether it was acquired."""
        deadline = time.monotonic() + seconds
        while not _lock(self.fd):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    @property
    def holder(self) -> dict[str, Any]:
        """The process that holds the lock, or that was killed while it held the lock."""
        return _holder(self.fd)

    @holder.setter
    def holder(self, holder: dict[str, Any]) -> None:
        content = json.dumps(holder).encode() if holder else b""
        with suppress(OSError):  # the disk is full; the lock is still valid
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)  # pwrite is not available on Windows
            os.write(self.fd, content)

    def release(self) -> None:
        """Release the lock."""
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
        """Whether the descriptor still refers to the lock file. If an env has closed it, another file may have the same descriptor."""
        try:
            return os.path.samestat(os.fstat(self.fd), self._file)
        except OSError:
            return False


class RunLock(_FileLock):
    """The lock of a run, which is held by the process that trains the run.

    The constructor acquires the lock, and waits until the Sessions of a killed process have ended. It raises UserError if another process
    holds the lock, or OSError if the lock file cannot be created.

    Args: what: what the folder belongs to, for messages, if it is not a run.
    """

    def __init__(self, path: Path, what: str = "run") -> None:
        super().__init__(path)
        try:
            if not self.acquire(0.3):  # another process that calls `in_use` holds the lock briefly
                raise UserError(f"the {what} in {path.parent} is in use by {_shown(self.holder)}; wait until it ends, or stop it")
            self.killed: str | None = _shown(self.holder) if self.holder else None
            """The process that held the lock last, if it ended without releasing the lock; else None."""
            for other in sorted(path.parent.glob(f"{path.name}_*")):
                self._wait_for(other)
        except BaseException:
            self.close()
            raise
        self.holder = {
            "pid": os.getpid(),
            "host": platform.node(),
            "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        }

    def _wait_for(self, path: Path) -> None:
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
    """The lock of a Session or of a trial of a search, which is held by its process. That process may outlive a killed parent briefly."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.acquire()


@contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Lock a folder during the with-block, so that `in_use(folder)` returns True. No effect on systems that cannot lock folders."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        yield
        return
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def in_use(path: Path) -> bool:
    """Return whether a process holds a lock.

    Args: path: the lock file of a run folder, or a folder that `mark_in_use` locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # no lock file: a run of SLM Lab
        return False
    try:
        return not _lock(fd, shared=True)
    finally:
        os.close(fd)


def unfinished_notice(root: Path, lock: Path) -> str | None:
    """Return a notice if the process of a run has ended without releasing the lock of the run folder; else None."""
    try:
        with lock.open("rb") as file:
            holder = _holder(file.fileno())
    except OSError:  # no lock file: a run of SLM Lab
        return None
    if not holder or in_use(lock):
        return None
    return f"{root} is unfinished: its last start, {_shown(holder)}, {ENDED}"


def _holder(fd: int) -> dict[str, Any]:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        return dict(json.loads(os.read(fd, 4096)))
    except (OSError, ValueError, TypeError):
        return {}


def _lock(fd: int, *, shared: bool = False) -> bool:
    """Lock a file without waiting; return whether it was locked. Always returns True on systems without such locks."""
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


def _shown(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('began')}"
