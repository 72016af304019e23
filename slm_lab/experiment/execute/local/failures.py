"""Why a Session failed, in words."""

from __future__ import annotations

import errno
import traceback

from slm_lab.experiment.execute.local.interrupt import Blocked
from slm_lab.experiment.execute.local.user_code import explained, place
from slm_lab.lib.errors import PlainError


class WorkerFailed(PlainError):
    """A process that a Session needs failed, or died too often. The message says why, with that process's traceback."""


def cause(error: BaseException) -> str:
    """The message of an error that explains itself (a check of mode dev, a worker, an env that blocks or returns an invalid reward, a full
    disk, a read-only file system, a closed file descriptor, sys.exit), else the traceback; with the frame and the env."""
    if isinstance(error, (PlainError, Blocked)):
        return _noted(str(error).rstrip(), error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the data folder is full ({error.strerror})"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"the data folder is on a read-only file system ({error.strerror})"
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        closed = "a file descriptor of the process is closed: the env, or what it uses, closes descriptors that it did not open"
        return _noted(f"{closed} ({error.strerror}{place(error)})", error)
    if (did := explained(error)) is not None:
        return _noted(did, error)
    return "".join(traceback.format_exception(error))


def _noted(text: str, error: BaseException) -> str:
    return ("\n" if "\n" in text else " ").join([text, *getattr(error, "__notes__", ())])
