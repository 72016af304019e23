"""Heartbeats, with which a process shows its progress and its current phase to other processes through shared memory.

A beat writes eight bytes, which contain the number of beats and the phase.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from itertools import count
from typing import Any, Literal
from weakref import WeakSet

from slm_lab.lib.system import has_feature

PHASES = ("building", "resetting", "stepping", "training", "evaluating", "saving", "waiting", "closing")
BUILDING, RESETTING, STEPPING, TRAINING, EVALUATING, SAVING, WAITING, CLOSING = range(len(PHASES))
USER_CODE = frozenset({BUILDING, RESETTING, STEPPING, EVALUATING, CLOSING})
"""Phases in which code of an env runs. Such code may block. An interruption in a phase of USER_CODE leaves no partially written files."""
HEARTBEAT_BYTES = 8


class Heartbeat:
    """The heartbeat of a process.

    Args: fd: descriptor of the file whose shared memory contains the heartbeat, or −1 to keep the heartbeat in private memory of this
        process.

    Attributes:
        beat: function `beat(phase)`, which the monitored process calls often. A call of `beat` takes 0.1 µs.
    """

    def __init__(self, fd: int = -1) -> None:
        cell: Any = memoryview(mmap.mmap(fd, HEARTBEAT_BYTES)).cast("q")
        self._cell = cell
        cell[0] = BUILDING
        beats = count(len(PHASES), len(PHASES))  # in steps of a power of two, since the lowest bits contain the phase

        def beat(phase: int) -> None:
            cell[0] = next(beats) | phase

        def disown() -> None:
            nonlocal cell
            cell = _ForkedProcessExit()

        self.beat, self._disown = beat, disown
        _heartbeats.add(self)

    @property
    def beat_counter(self) -> int:
        """A number that changes with each beat."""
        return int(self._cell[0])

    @property
    def phase(self) -> int:
        """Phase of the last beat, or BUILDING before the first beat."""
        return int(self._cell[0]) % len(PHASES)


class _ForkedProcessExit:
    """Replacement for the memory of a heartbeat in a forked process. When the forked process calls `beat`, the process is ended."""

    def __setitem__(self, index: int, value: int) -> None:
        os.write(2, b"the env forked the process (os.fork), and the forked process returned from the env; it is ended\n")
        os._exit(1)


def _disable_inherited_heartbeats() -> None:
    for heartbeat in list(_heartbeats):
        heartbeat._disown()


_heartbeats: WeakSet[Heartbeat] = WeakSet()
if has_feature("fork"):
    os.register_at_fork(after_in_child=_disable_inherited_heartbeats)


StallLevel = Literal["notice", "limit"]


class StallTimer:
    """Timer that measures the time for which a heartbeat has not changed, and detects stalls."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._value, self._since = heartbeat.beat_counter, time.monotonic()
        self._reported = 0

    def seconds_since_beat(self) -> float:
        """Return the time in seconds for which the heartbeat has not changed, as observed by the calls of this method.

        Returns 0 in the phase "waiting", in which a process may wait without limit.
        """
        value, now = self.heartbeat.beat_counter, time.monotonic()
        if value != self._value or self.heartbeat.phase == WAITING:
            self._value, self._since = value, now
        return now - self._since

    def check_stall(self, notice: float | None, limit: float | None) -> tuple[float, str, StallLevel] | None:
        """Return (seconds, phase, level) if the heartbeat has not changed for at least `notice` or `limit` seconds, or None otherwise.

        A stall is returned only once for each level. Before the first beat, `limit` is not applied, since importing torch may take long on
        a busy machine.

        Args:
            notice: seconds after which the level "notice" is returned, or None to never return this level.
            limit: seconds after which the level "limit" is returned, or None to never return this level.
        """
        seconds, before = self.seconds_since_beat(), self._reported
        over = self.heartbeat.beat_counter and seconds >= (limit or math.inf)
        self._reported = 2 if over else 1 if seconds >= (notice or math.inf) else 0
        if self._reported <= before:
            return None
        return seconds, PHASES[self.heartbeat.phase], "limit" if over else "notice"
