"""Handle user code that ends the process, closes the files of the process, or never returns from close(). Describe failures as text."""

from __future__ import annotations

import errno
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from slm_lab.experiment.execute.local.interrupt import UserCodeBlocked, time_limit
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.lib.log import PlainError, UserCodeExited, error_location, error_summary, explain_exit, logger, notice
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError


class WorkerFailed(PlainError):
    """Exception that is raised if a process that a Session needs has failed or has died too often.

    The error message contains the reason and the traceback of the failed process.
    """


def describe_failure(error: BaseException) -> str:
    """Return the cause of a failure as text: a message if the error is self-explanatory, else the traceback.

    An error is self-explanatory if it comes from a check of mode dev, a failed worker, an env that blocks or returns an invalid reward, a
    full disk, a limit on the size of files, a read-only file system, a closed file descriptor, or sys.exit. Notes that were added to the
    error, such as the frame and the env, are appended to the text.
    """
    if isinstance(error, (PlainError, UserCodeBlocked)):
        return _append_notes(str(error).rstrip(), error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the data folder is full ({error.strerror})"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"a file exceeds the limit on the size of files, see `ulimit -f` ({error.strerror}{error_location(error)})"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"the data folder is on a read-only file system ({error.strerror})"
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        closed = "a file descriptor of the process is closed: the env, or what it uses, closes descriptors that it did not open"
        return _append_notes(f"{closed} ({error.strerror}{error_location(error)})", error)
    if (explanation := explain_exit(error)) is not None:
        return _append_notes(explanation, error)
    return "".join(traceback.format_exception(error))


def _append_notes(text: str, error: BaseException) -> str:
    return ("\n" if "\n" in text else " ").join([text, *getattr(error, "__notes__", ())])


CLOSE_SECONDS = 10.0
"""Maximum time in seconds for closing an env."""


@contextmanager
def os_exit_raises() -> Iterator[None]:
    """Context manager in which os._exit raises UserCodeExited in this process, so that a run fails with an error instead of ending without
    a trace.

    An exit by C code cannot be caught. In forked copies of the process (os.fork), os._exit works as usual. The context manager has no
    effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, pid = os._exit, os.getpid()

    def raise_or_exit(status: int) -> NoReturn:
        if os.getpid() == pid:
            raise UserCodeExited(f"os._exit({status!r}) was called")
        before(status)

    os._exit = raise_or_exit
    try:
        yield
    finally:
        os._exit = before


def is_from_user_code(error: BaseException) -> bool:
    """Return whether an error was raised by code and not because of a signal (Ctrl-C or the signals of `stop_on_signal`)."""
    if not isinstance(error, KeyboardInterrupt):
        return True
    by_python = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not (isinstance(error, Interrupted) or by_python)


@contextmanager
def convert_build_errors(spec: Spec, stop: Stop) -> Iterator[None]:
    """Context manager that raises SpecError if the env of a spec, which is built in the block, blocks or ends the program.

    If the env blocks after a stop was requested, the context manager raises Interrupted instead.
    """
    try:
        yield
    except UserCodeBlocked as error:
        if stop.requested:
            raise Interrupted("", stop.number) from None
        raise build_error(spec, f"{error} (meta.stall_limit)") from None
    except (SystemExit, UserCodeExited, KeyboardInterrupt, GeneratorExit) as error:
        if not is_from_user_code(error):
            raise
        raise build_error(spec, str(explain_exit(error))) from error


def build_error(spec: Spec, cause: str) -> SpecError:
    """Return the error that is raised if the env of a spec cannot be built because of `cause`."""
    return SpecError(spec.name, [Problem("env.name", f"{spec.env.name} cannot be built: {cause}")])


def close_env(close: Callable[[], None]) -> None:
    """Call the close() method of an env. If close() fails or does not return within CLOSE_SECONDS, only show a notice.

    A failing close() is not an error of the run, since no result depends on the closing of an env.
    """
    try:
        with time_limit(CLOSE_SECONDS, "the env's close()"):
            close()
    except UserCodeBlocked as error:
        notice(str(error))
    except (Exception, SystemExit, UserCodeExited, KeyboardInterrupt, GeneratorExit) as error:
        if not is_from_user_code(error):
            raise
        notice(f"the env's close() failed: {explain_exit(error) or error_summary(error)}")
        logger.info("close() failed", exc_info=True)
