"""Bounded interruption of this process: stop requests by signal, and an end to user code that blocks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slm_lab.experiment.plan import Stop
from slm_lab.experiment.process.heartbeat import PHASES, USER_CODE, Heartbeat, StallTimer
from slm_lab.lib.signals import STOP_SIGNALS

_ONE_EVENT = 0.2
"""Signals within so many seconds are one: `timeout` sends SIGTERM to a process and to its group, systemd SIGTERM and SIGHUP."""
_WAKE: int | None = getattr(signal, "SIGURG", None)
"""Interrupts a system call of the main thread. Ignored by default, so that one which comes late does no harm."""
_POLL = 0.1
"""Seconds between two looks of the watchdog thread."""


class Blocked(BaseException):
    """User code did not return in time. No Exception, so that `except Exception` in the user's code lets it pass."""


@contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop; a second one raises KeyboardInterrupt at once.

    Outside the main thread signals stay as they are, and so does a SIGHUP that is ignored (nohup).
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
            raise KeyboardInterrupt

    ignored = [number for number in STOP_SIGNALS if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS if number not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
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
    """Watch the heartbeat of this process from a thread while the block runs in the main thread.

    Raises Blocked in the main thread where it stays in user code (a phase of USER_CODE, without a beat) for `grace` seconds after a
    stop was requested, or for `stall_limit` seconds; again after as many seconds where the user's code catches it.
    Calls `report(seconds, phase)` from the thread, once per stall, after `stall_notice` seconds.

    In another thread than the main one, and on systems without such signals, it only reports. A C function that neither returns
    nor lets signals interrupt it cannot be ended in its own process.
    """
    done, timer, over = threading.Event(), StallTimer(heartbeat), False
    verdict: tuple[int, str] | None = None
    """The heartbeat that the main thread must still have to be blocked, and why."""

    def check() -> str | None:
        return verdict[1] if not over and verdict is not None and verdict[0] == heartbeat.value else None

    with _raising(check) as wake:

        def watch() -> None:
            nonlocal verdict
            noticed, raised, stopped = 0.0, -1e9, None
            while not done.wait(_POLL):
                seconds, now, phase = timer.seconds(), time.monotonic(), heartbeat.phase
                if stop.requested and stopped is None:
                    stopped = now
                if report is not None and stall_notice is not None and seconds >= stall_notice and noticed < stall_notice:
                    report(seconds, PHASES[phase])
                noticed = seconds
                limits = [] if stopped is None else [(min(seconds, now - stopped), grace, "after a stop was requested")]
                limits += [] if stall_limit is None else [(seconds, stall_limit, "without a sign of life")]
                for lasted, limit, text in limits:
                    if phase in USER_CODE and lasted >= limit and now >= raised + limit:
                        raised, verdict = now, (heartbeat.value, f"the env has been {PHASES[phase]} for {seconds:.0f} seconds, {text}")
                        wake()

        thread = threading.Thread(target=watch, name="watchdog", daemon=True)
        thread.start()
        try:
            try:
                yield
            finally:
                over = True
        finally:
            done.set()
            thread.join()


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise Blocked where the block, run in the main thread, takes longer; `what` names it in the message."""
    done, deadline, over = threading.Event(), time.monotonic() + seconds, False

    def check() -> str | None:
        return f"{what} did not return within {seconds:g} seconds" if not over and time.monotonic() >= deadline else None

    with _raising(check) as wake:

        def watch() -> None:
            delay = seconds
            while not done.wait(delay):
                wake()
                delay = 1.0

        threading.Thread(target=watch, name="time limit", daemon=True).start()
        try:
            try:
                yield
            finally:
                over = True
        finally:
            done.set()


@contextmanager
def _raising(check: Callable[[], str | None]) -> Iterator[Callable[[], None]]:
    """Yield a function by which any thread lets the main thread call `check`, and raise Blocked with the text that it returns."""
    if _WAKE is None or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    number, main = signal.Signals(_WAKE), threading.get_ident()
    before = signal.getsignal(number)

    def handle(received: int, frame: object) -> None:
        if (text := check()) is not None:
            raise Blocked(text)
        if callable(before):
            before(received, frame)  # type: ignore[arg-type]

    signal.signal(number, handle)
    try:
        yield lambda: signal.pthread_kill(main, number)
    finally:
        signal.signal(number, before)
