"""Tests of delayed stop signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from slm_lab.lib.process import STOP_SIGNALS, stop_signals_blocked


@pytest.fixture
def other_thread() -> Iterator[None]:
    """Start a thread that blocks no signal, like those of BLAS: the kernel delivers to it the signals that the main thread blocks."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("other_thread")
def test_a_signal_takes_effect_after_the_block() -> None:
    reached = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with stop_signals_blocked(), stop_signals_blocked():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            reached.append("end of block")
        reached.append("after block")
    assert reached == ["end of block"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert signal.getsignal(signal.SIGINT) is handler


def test_blocked_in_another_thread() -> None:
    """In a thread that cannot set handlers, the signals are blocked by the mask of the thread."""
    masks: list[set[signal.Signals]] = []

    def use() -> None:
        with stop_signals_blocked():
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))  # type: ignore[arg-type]
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))  # type: ignore[arg-type]

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert set(STOP_SIGNALS) <= masks[0]
    assert not set(STOP_SIGNALS) & masks[1]
