"""What a child process has of its parent under every start method."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessState:
    """Environment variables, umask, cores and priority of the process that starts a child.

    A copy of a fork server has those of the server, which started earlier. They are restored where this object is unpickled, so before the
    arguments after it are loaded, and the modules that these import.
    """

    environ: dict[str, str]
    umask: int
    cores: frozenset[int] | None
    """None where the system does not tell."""
    priority: int

    @classmethod
    def of_this_process(cls) -> ProcessState:
        umask = os.umask(0o022)
        os.umask(umask)
        cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        priority = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
        return cls(dict(os.environ), umask, cores, priority)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.environ, self.umask, self.cores, self.priority)

    def restore(self) -> None:
        """Give this process the same."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.umask(self.umask)
        with suppress(OSError):
            if self.cores is not None:
                os.sched_setaffinity(0, self.cores)
            if hasattr(os, "setpriority"):
                os.setpriority(os.PRIO_PROCESS, 0, self.priority)


def _restored(*fields: Any) -> ProcessState:
    state = ProcessState(*fields)
    state.restore()
    return state
