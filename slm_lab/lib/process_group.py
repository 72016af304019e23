"""Process groups: a child process and the programs that it runs end together. Without effect on Windows."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

_GRACE_SECONDS = 3.0
"""Time that a process has to end by itself when its parent has died."""
_POLL_SECONDS = 0.5


def lead_group(owner: int) -> None:
    """Make this process the leader of a new group, which is killed soon after process `owner`, which started this one, has died.

    A terminal's Ctrl-C does not reach the group. The owner calls `kill_group` when this process has ended.
    """
    if not hasattr(os, "setpgid"):
        return
    os.setpgid(0, 0)
    threading.Thread(target=_follow, args=(owner,), daemon=True, name="follow-owner").start()


def _follow(owner: int) -> None:
    """Wait for the owner's death. The parent of a copy of the fork server is the server."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(ProcessLookupError):  # it is dead already
            select.select([os.pidfd_open(owner)], [], [])
    else:
        while os.getppid() == owner:
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill the processes of the group that `leader` leads or has led; none is left if it ended everything that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
