"""Heartbeats: the current phase of a process, which another process can read without its cooperation.

A beat writes eight bytes to shared memory: the number of beats and the phase.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from itertools import count
from typing import Any, Literal
from weakref import WeakSet

from slm_lab.lib.system import has

PHASES = ("building", "resetting", "stepping", "training", "evaluating", "saving", "waiting", "closing")
BUILDING, RESETTING, STEPPING, TRAINING, EVALUATING, SAVING, WAITING, CLOSING = range(len(PHASES))
USER_CODE = frozenset({BUILDING, RESETTING, STEPPING, EVALUATING, CLOSING})
"""Phases spent in an env, which may block; an interruption in these phases leaves nothing half written."""
HEARTBEAT_BYTES = 8


class Heartbeat:
    """Heartbeat in the shared memory of file `fd`; by default in memory of this process alone.

    Attributes:
        beat: `beat(phase)`, called often by the process itself; a call takes 0.1 µs.
    """

    def __init__(self, fd: int = -1) -> None:
        cell: Any = memoryview(mmap.mmap(fd, HEARTBEAT_BYTES)).cast("q")
        self._cell = cell
        cell[0] = BUILDING
        beats = count(len(PHASES), len(PHASES))  # a power of two: the phase is in the lowest bits

        def beat(phase: int) -> None:
            cell[0] = next(beats) | phase

        def disown() -> None:
            nonlocal cell
            cell = _EndsCopy()

        self.beat, self._disown = beat, disown
        _heartbeats.add(self)

    @property
    def value(self) -> int:
        """Number that changes with every beat."""
        return int(self._cell[0])

    @property
    def phase(self) -> int:
        """Phase of the last beat; BUILDING before the first."""
        return int(self._cell[0]) % len(PHASES)


class _EndsCopy:
    """Replaces the memory of a heartbeat in a forked copy of the process, and ends the copy at its next beat."""

    def __setitem__(self, index: int, value: int) -> None:
        os.write(2, b"the env copied the process (os.fork), and the copy returned from the env; the copy is ended\n")
        os._exit(1)


def _disown_heartbeats() -> None:
    for heartbeat in list(_heartbeats):
        heartbeat._disown()


_heartbeats: WeakSet[Heartbeat] = WeakSet()
if has("fork"):
    os.register_at_fork(after_in_child=_disown_heartbeats)


StallLevel = Literal["notice", "limit"]


class StallTimer:
    """Measures how long a heartbeat has not changed."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._value, self._since = heartbeat.value, time.monotonic()
        self._reported = 0

    def seconds(self) -> float:
        """Return the seconds since a call last saw the heartbeat change; 0 in the phase "waiting", which has no limit."""
        value, now = self.heartbeat.value, time.monotonic()
        if value != self._value or self.heartbeat.phase == WAITING:
            self._value, self._since = value, now
        return now - self._since

    def stall(self, notice: float | None, limit: float | None) -> tuple[float, str, StallLevel] | None:
        """Return seconds, phase and level of a stall not returned yet, of at least `notice` or `limit` seconds (None: no limit); else None.

        Before the first beat only `notice` applies: loading torch may take long on a busy machine.
        """
        seconds, before = self.seconds(), self._reported
        over = self.heartbeat.value and seconds >= (limit or math.inf)
        self._reported = 2 if over else 1 if seconds >= (notice or math.inf) else 0
        if self._reported <= before:
            return None
        return seconds, PHASES[self.heartbeat.phase], "limit" if over else "notice"
