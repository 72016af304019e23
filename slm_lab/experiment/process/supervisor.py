"""A run's child processes as their parent sees them: orders go to them; messages, stalls and deaths come from them."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slm_lab.experiment.process import child as child_side
from slm_lab.experiment.process.child import Setup, SharedFd, Target
from slm_lab.experiment.process.heartbeat import CAPACITY, MEMORY_BYTES, PHASES, Heartbeat, StallTimer
from slm_lab.experiment.process.server import (
    THREAD_LIMITS,
    ensure_server,
    environment,
    hidden_main,
    start_method,
    stop_server,
    stop_signals_blocked,
    use_spawn,
)
from slm_lab.lib.store import shared_file

_TICK = 0.5
"""Seconds between two looks at heartbeats and deadlines."""
_END_SECONDS = 10.0
"""Time that a child has to exit once its target has returned."""
_REAP_SECONDS = 5.0
"""Time that the system has to end a process that was killed."""
_PRINTED_BYTES = 2**20
"""Kept of what a child prints without a log, at most: it lies in memory."""
_TAIL_LINES, _TAIL_BYTES = 20, 2**16
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
"""Begin of a line that slm_lab logged, whether the process died or not."""


class Message(NamedTuple):
    """What a child sent."""

    child: Child
    kind: str
    content: tuple[Any, ...]


class Died(NamedTuple):
    """A child's process has ended, for whatever reason; it is reaped, and what it started is killed."""

    child: Child
    reason: str
    """"killed by SIGKILL (often: out of memory)", "ended with exit code 3", "did not end within 60 seconds", …"""
    output: str
    """The last lines that it printed."""
    code: int | None
    """Exit code, negative for a signal, None where it cannot be known."""


class Stalled(NamedTuple):
    """A child's heartbeat has not changed for long. The process goes on."""

    child: Child
    seconds: float
    phase: str
    level: Literal["notice", "limit"]


Event = Message | Died | Stalled
