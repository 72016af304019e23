"""Heartbeats: what a process is doing, readable by another one without its cooperation.

`beat` is one store of eight bytes into memory that both map; the count of beats and the phase are in it.
"""

from __future__ import annotations

import mmap
import time
from itertools import count

PHASES = ("building", "resetting", "stepping", "training", "evaluating", "saving", "waiting", "closing")
BUILDING, RESETTING, STEPPING, TRAINING, EVALUATING, SAVING, WAITING, CLOSING = range(len(PHASES))
USER_CODE = frozenset({BUILDING, RESETTING, STEPPING, EVALUATING, CLOSING})
"""Phases spent in an env, which may block; an interruption there loses nothing that is half written."""
_CELL = 8
"""Integers from one process's cell to the next: a cache line, so that processes do not slow each other."""
MEMORY_BYTES = 64 * 1024
CAPACITY = MEMORY_BYTES // (8 * _CELL)
"""Processes that have room in one memory."""


class Heartbeat:
    """Heartbeat of process number `index` in shared `memory`; without memory, of this process alone.

    Attributes:
        beat: `beat(phase)`, to be called by the process itself, often: it costs 0.1 µs.
    """

    def __init__(self, memory: mmap.mmap | None = None, index: int = 0) -> None:
        cells = memoryview(memory or mmap.mmap(-1, 8 * _CELL)).cast("q")
        self._cell = cells[index * _CELL : index * _CELL + 1]
        self._cell[0] = BUILDING
        cell, counted, phases = self._cell, count(len(PHASES), len(PHASES)), len(PHASES)
        assert phases == 8

        def beat(phase: int) -> None:
            cell[0] = next(counted) | phase

        self.beat = beat

    @property
    def value(self) -> int:
        """Changes with every beat."""
        return self._cell[0]

    @property
    def count(self) -> int:
        """Beats so far."""
        return self._cell[0] // len(PHASES)

    @property
    def phase(self) -> int:
        """Phase of the last beat; BUILDING before the first."""
        return self._cell[0] % len(PHASES)


class StallTimer:
    """Measures for how long a heartbeat has not changed, as seen by whoever asks."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._value, self._since = heartbeat.value, time.monotonic()

    def seconds(self) -> float:
        """Seconds since the last change; 0 in the phase "waiting", which may last."""
        value, now = self.heartbeat.value, time.monotonic()
        if value != self._value or value % len(PHASES) == WAITING:
            self._value, self._since = value, now
        return now - self._since
