"""How this process starts child processes. experiment.process decides it; env, which starts its own, asks here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Method = Literal["forkserver", "spawn"]
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that the libraries of numpy and torch read when they are loaded; children have one thread."""


def _spawn() -> Method:
    return "spawn"


_choose: Callable[[], Method] = _spawn


def start_method() -> Method:
    """Return the start method of multiprocessing for the next child process. A fork server that it needs is started."""
    return _choose()


def choose_start_method(choose: Callable[[], Method]) -> None:
    """Let `start_method` return what `choose` returns."""
    global _choose
    _choose = choose
