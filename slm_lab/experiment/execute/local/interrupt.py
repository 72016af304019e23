"""Interrupt this process when it receives a stop signal, or when user code blocks for longer than a time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slm_lab.experiment.execute.heartbeat import PHASES, USER_CODE, Heartbeat, StallTimer
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.lib.process import STOP_SIGNALS
from slm_lab.lib.system import has_feature

_ONE_EVENT = 0.2
"""Number of seconds within which several signals count as one signal. (The command `timeout` sends SIGTERM both to a process and to its
process group, and systemd sends SIGTERM and SIGHUP.)"""
_POLL = 0.1
"""Number of seconds between two checks by the monitoring thread."""
_AGAIN = 1.0
"""Number of seconds after which `time_limit` raises UserCodeBlocked again if user code has caught the exception."""


class UserCodeBlocked(BaseException):
    """Exception that is raised if user code does not return in time.

    UserCodeBlocked is not a subclass of Exception, so that `except Exception` in user code does not catch UserCodeBlocked.
    """


_handlers: dict[int, Any] = {}
"""Signal handlers of the innermost `stop_on_signal` block."""


@contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """Context manager that converts the first Ctrl-C, SIGTERM or SIGHUP to a stop request. A second signal raises Interrupted immediately.

    Outside the main thread, signal handlers are not changed. If SIGHUP is ignored (nohup), it stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first = 0.0

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if not stop.requested:
            first, stop.number, stop.requested = time.monotonic(), number, True
        elif time.monotonic() > first + _ONE_EVENT:
            raise Interrupted("", stop.number)

    ignored = [number for number in STOP_SIGNALS if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN]
    outer = dict(_handlers)
    _handlers.clear()
    _handlers.update({number: handle for number in STOP_SIGNALS if number not in ignored})
    before = {number: signal.signal(number, handle) for number in _handlers}
    try:
        yield
    finally:
        _handlers.clear()
        _handlers.update(outer)
        for number, handler in before.items():
            signal.signal(number, handler)


def restore_handlers() -> None:
    """Reinstall the signal handlers of `stop_on_signal`, since a simulator may replace the handlers when the simulator is built."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in _handlers.items():
            signal.signal(number, handler)


@contextmanager
def watchdog(
    heartbeat: Heartbeat,
    stop: Stop,
    *,
    grace: float = 5.0,
    stall_notice: float | None = None,
    stall_limit: float | None = None,
    report: Callable[[float, str], None] | None = None,
) -> Iterator[None]:
    """Context manager that monitors the heartbeat of this process from a thread while the block runs in the main thread.

    Raises UserCodeBlocked in the main thread if user code (a phase of USER_CODE) runs without a beat for `grace` seconds after a stop
    request, or for `stall_limit` seconds. User code that catches UserCodeBlocked is interrupted again after the same time. After
    `stall_notice` seconds without a beat, the thread calls `report(seconds, phase)` once per stall.

    If the block runs outside the main thread, or if the system has no SIGURG, stalls are only reported. A C function that neither returns
    nor handles signals must be ended by another process.
    """
    timer, noticed, raised = StallTimer(heartbeat), 0.0, float("-inf")
    stopped: float | None = None
    verdict: tuple[int, str] | None = None
    """(value of the heartbeat when the main thread was last found blocked, reason), or None if it has not been found blocked yet."""

    def blocked() -> bool:
        nonlocal noticed, raised, stopped, verdict
        seconds, now, phase = timer.seconds_since_beat(), time.monotonic(), heartbeat.phase
        if stop.requested and stopped is None:
            stopped = now
        if report is not None and stall_notice is not None and noticed < stall_notice <= seconds:
            report(seconds, PHASES[phase])
        noticed = seconds
        limits = [] if stopped is None else [(min(seconds, now - stopped), grace, "after a stop was requested")]
        limits += [] if stall_limit is None else [(seconds, stall_limit, "without a heartbeat")]
        for lasted, limit, text in limits:
            if phase in USER_CODE and lasted >= limit and now >= raised + limit:
                raised, verdict = now, (heartbeat.beat_counter, f"the env has been {PHASES[phase]} for {seconds:.0f} seconds, {text}")
                return True
        return False

    with _interrupt_when_blocked(blocked, lambda: verdict[1] if verdict is not None and verdict[0] == heartbeat.beat_counter else None):
        yield


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Context manager that raises UserCodeBlocked if the block takes longer than `seconds` seconds in the main thread.

    Args: what: description of the block for the error message.
    """
    deadline = due = time.monotonic() + seconds

    def blocked() -> bool:
        nonlocal due
        if time.monotonic() < due:
            return False
        due = time.monotonic() + _AGAIN
        return True

    text = f"{what} did not return within {seconds:g} seconds"
    with _interrupt_when_blocked(blocked, lambda: text if time.monotonic() >= deadline else None):
        yield


@contextmanager
def _interrupt_when_blocked(blocked: Callable[[], bool], reason: Callable[[], str | None]) -> Iterator[None]:
    """Context manager that interrupts the main thread during the block when `blocked` returns True.

    A thread calls `blocked` every 0.1 s. If `blocked` returns True, the thread sends a signal to the main thread, which then calls `reason`
    and raises UserCodeBlocked with the returned text. If `reason` returns None, the main thread continues: either it is no longer blocked,
    or the thread of an enclosing block has sent the signal.
    """
    done, main, over = threading.Event(), threading.main_thread(), False
    wake = (
        signal.SIGURG if has_feature("signals") and threading.current_thread() is main else None
    )  # ignored by default, so that a late signal has no effect

    def watch() -> None:
        while not done.wait(_POLL):
            if blocked() and wake is not None:
                signal.pthread_kill(main.ident or 0, wake)

    def handle(number: int, frame: object) -> None:
        if not over and (text := reason()) is not None:
            raise UserCodeBlocked(text)
        if callable(before):
            before(number, frame)

    before: Any = None if wake is None else signal.signal(wake, handle)
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over = True
        done.set()
        if wake is not None:
            signal.signal(wake, before)
        thread.join()
