"""Why a Session failed, in words."""

from __future__ import annotations

import errno
import traceback

from slm_lab.experiment.process.interrupt import Blocked
from slm_lab.lib.errors import PlainError


class WorkerFailed(PlainError):
    """A process that a Session needs failed, or died too often. The message says why, with that process's traceback."""


def cause(error: BaseException) -> str:
    """The message of an error that explains itself (a check of mode dev, a worker, an env that blocks or returns an invalid reward, a full
    disk, a read-only file system), else the traceback; with the frame and the env."""
    if isinstance(error, (PlainError, Blocked)):
        text = str(error).rstrip()
        return ("\n" if "\n" in text else " ").join([text, *getattr(error, "__notes__", ())])
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the data folder is full ({error.strerror})"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"the data folder is on a read-only file system ({error.strerror})"
    return "".join(traceback.format_exception(error))
