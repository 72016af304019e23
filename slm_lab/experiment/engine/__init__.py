"""How the Sessions of a trial run: in this process, or each in its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from slm_lab.experiment.paths import RunPaths
from slm_lab.experiment.plan import Stop

OpenRun = Callable[[str], RunPaths]
"""open_run(resolved backend): make the run's folder, once the first Session has shown that the spec can be built."""


@dataclass(frozen=True)
class Outcome:
    """How a Session ended."""

    index: int
    status: Literal["done", "stopped", "failed"]
    """stopped: saved early, as asked."""
    detail: str = ""
    """failed: the traceback, or the signal's name."""


@contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """Turn the first Ctrl-C (or SIGTERM) into a request to stop; a second one raises KeyboardInterrupt at once.

    Outside the main thread signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
