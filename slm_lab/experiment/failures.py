"""Why a Session failed, in words."""

from __future__ import annotations

import errno
import traceback

from slm_lab.experiment.observers.dev_checks import DevCheckError
from slm_lab.experiment.process.interrupt import Blocked


class WorkerFailed(Exception):
    """A process that a Session needs failed, or died too often. The message says why, with that process's traceback."""


def cause(error: BaseException) -> str:
    """The message of an error that explains itself (a check of mode dev, a worker, an env that blocks or returns an invalid reward, a full
    disk), else the traceback; with the frame and the env."""
    if isinstance(error, (DevCheckError, WorkerFailed, Blocked)) or type(error).__name__ == "InvalidReward":  # its module loads gymnasium
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the data folder is full ({error.strerror})"
    return "".join(traceback.format_exception(error))
