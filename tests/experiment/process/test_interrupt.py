"""Tests that user code which blocks is interrupted, within one process."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from timeit import timeit
from typing import Any

import pytest

from slm_lab.experiment.execute.heartbeat import PHASES, RESETTING, SAVING, STEPPING, TRAINING, WAITING, Heartbeat, StallTimer
from slm_lab.experiment.execute.local.interrupt import UserCodeBlocked, stop_on_signal, time_limit, watchdog
from slm_lab.experiment.plan import Stop


def sleep() -> None:
    time.sleep(20)


def lock() -> None:
    one = threading.Lock()
    one.acquire()
    one.acquire()


def receive() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def wait() -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        try:
            process.wait()
        finally:
            process.kill()


def stubborn() -> None:
    for _ in range(2):
        with suppress(Exception):
            time.sleep(20)


def catches_once() -> None:
    try:
        time.sleep(20)
    except BaseException:
        time.sleep(20)


BLOCKING = [sleep, lock, receive, wait, stubborn, catches_once]


@pytest.mark.parametrize("block", BLOCKING)
def test_user_code_that_blocks_after_a_stop(block: Callable[[], None]) -> None:
    heartbeat, stop, before = Heartbeat(), Stop(), signal.getsignal(signal.SIGURG)
    threading.Timer(0.05, lambda: setattr(stop, "requested", True)).start()
    begin = time.monotonic()

    def run() -> None:
        with watchdog(heartbeat, stop, grace=0.2):
            heartbeat.beat(RESETTING)
            block()

    with pytest.raises(UserCodeBlocked, match=r"the env has been resetting for \d seconds, after a stop was requested"):
        run()
    assert 0.2 < time.monotonic() - begin < 2
    assert signal.getsignal(signal.SIGURG) is before
    assert threading.active_count() < 5


@pytest.mark.parametrize("phase", [SAVING, TRAINING, WAITING])
def test_no_other_code_is_interrupted(phase: int) -> None:
    heartbeat, stop = Heartbeat(), Stop()
    stop.requested = True
    with watchdog(heartbeat, stop, grace=0.1):
        heartbeat.beat(phase)
        time.sleep(0.35)


def test_user_code_that_returns_is_not_interrupted() -> None:
    heartbeat, stop = Heartbeat(), Stop()
    stop.requested = True
    with watchdog(heartbeat, stop, grace=0.3):
        for _ in range(10):
            heartbeat.beat(STEPPING)
            time.sleep(0.05)


def test_a_late_interruption_does_nothing() -> None:
    """An interruption has no effect if the main thread enters another phase between the decision and the signal."""
    heartbeat, stop, handler = Heartbeat(), Stop(), None
    stop.requested = True
    seen = []
    with watchdog(heartbeat, stop, grace=0.1):
        heartbeat.beat(STEPPING)
        handler = signal.getsignal(signal.SIGURG)
        assert callable(handler)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
        time.sleep(0.35)
        assert signal.SIGURG in signal.sigpending()
        heartbeat.beat(SAVING)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        seen.append("saved")
    assert seen == ["saved"]


def test_stalls_are_reported_once_each_and_end_at_the_limit() -> None:
    heartbeat, reports = Heartbeat(), []
    report: Any = lambda seconds, phase: reports.append((round(seconds, 1), phase))  # noqa: E731

    def run() -> None:
        with watchdog(heartbeat, Stop(), stall_notice=0.2, stall_limit=0.6, report=report):
            heartbeat.beat(TRAINING)
            time.sleep(0.4)
            heartbeat.beat(STEPPING)
            sleep()

    with pytest.raises(UserCodeBlocked, match="stepping for 1 seconds, without a heartbeat"):
        run()
    assert [phase for _, phase in reports] == ["training", "stepping"]
    assert all(0.2 <= seconds <= 0.5 for seconds, _ in reports)


def test_time_limit() -> None:
    begin = time.monotonic()
    with pytest.raises(UserCodeBlocked, match=r"env.close\(\) did not return within 0.2 seconds"), time_limit(0.2, "env.close()"):
        sleep()
    assert time.monotonic() < begin + 1
    with time_limit(0.2, "env.close()"):
        pass
    time.sleep(0.4)


def test_a_time_limit_inside_a_watchdog() -> None:
    heartbeat, stop = Heartbeat(), Stop()
    stop.requested = True
    with watchdog(heartbeat, stop, grace=0.5):
        with pytest.raises(UserCodeBlocked, match="close"), time_limit(0.2, "close"):
            sleep()
        heartbeat.beat(STEPPING)
        with pytest.raises(UserCodeBlocked, match="stop"), time_limit(5, "close"):
            sleep()


def test_outside_the_main_thread_nothing_is_interrupted() -> None:
    done, stop = [], Stop()
    stop.requested = True

    def run() -> None:
        with watchdog(Heartbeat(), stop, grace=0.1), time_limit(0.1, "close"), stop_on_signal(stop):
            time.sleep(0.4)
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]


def test_heartbeat() -> None:
    heartbeat = Heartbeat()
    assert (heartbeat.beat_counter, PHASES[heartbeat.phase]) == (0, "building")
    for phase in range(len(PHASES)):
        heartbeat.beat(phase)
        assert (heartbeat.beat_counter // len(PHASES), heartbeat.phase) == (phase + 1, phase)
    timer = StallTimer(heartbeat)
    time.sleep(0.1)
    assert timer.seconds_since_beat() >= 0.1
    heartbeat.beat(WAITING)
    assert timer.seconds_since_beat() == 0
    time.sleep(0.05)
    assert timer.seconds_since_beat() == 0
    assert min(timeit(lambda: heartbeat.beat(STEPPING), number=20_000) for _ in range(5)) / 20_000 < 2e-6


def test_the_first_signal_requests_a_stop() -> None:
    stop = Stop()
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal(stop):
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # counts as the same stop request
            assert (stop.requested, stop.number) == (True, signal.SIGTERM)
            time.sleep(0.25)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, hangup)
