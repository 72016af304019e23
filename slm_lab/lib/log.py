"""Messages to the user: notices of one line, errors that are shown without a traceback, and functions that describe an error as text."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("slm_lab")


def notice(text: str) -> None:
    """Log a notice, which is one line for the user. Notices are written to stderr unless the application configures logging otherwise."""
    logger.warning(text)


class NoticeHandler(logging.Handler):
    """Logging handler that passes the text of each notice to the function `on_notice`."""

    def __init__(self, on_notice: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.on_notice = on_notice

    def emit(self, record: logging.LogRecord) -> None:
        self.on_notice(record.getMessage())


@contextmanager
def capture_notices(on_notice: Callable[[str], None]) -> Iterator[None]:
    """Context in which the function `on_notice` is called with the text of each notice."""
    handler = NoticeHandler(on_notice)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class PlainError(Exception):
    """Base class of errors of which users see only the message, without a traceback."""


class NotWritable(PlainError, OSError):
    """Raised if a file of a run cannot be written, because the run folder has become read-only."""


class UserCodeExited(BaseException):
    """Exception that is raised if user code calls os._exit.

    UserCodeExited is not a subclass of Exception, so that `except Exception` in user code does not catch UserCodeExited.
    """


def explain_exit(error: BaseException) -> str | None:
    """Return a message that says which code ended the program and how (sys.exit, os._exit, KeyboardInterrupt or GeneratorExit).

    The message contains the file and the line. For all other errors, return None.
    """
    match error:
        case SystemExit():
            text = f"sys.exit({'' if error.code is None else repr(error.code)}) was called"
        case UserCodeExited():
            text = str(error)
        case KeyboardInterrupt() | GeneratorExit():
            text = f"{type(error).__name__} was raised (by code, not by a signal)"
        case _:
            return None
    return text + error_location(error)


def error_summary(error: BaseException) -> str:
    """Return the type, the message and the location of an error, such as "ValueError: no map (file maps.py, line 11)".

    The location is the innermost frame of user code in the traceback. It is left out if the traceback contains no user code.
    """
    try:
        message = str(error)
    except Exception:  # raised by the error's own __str__
        message = "the message cannot be shown"
    frames = _user_frames(error)
    return f"{type(error).__name__}: {message}" + (f" (file {frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def error_location(error: BaseException) -> str:
    """Return the location of an error as the end of a message, such as " in maps.py, line 11".

    The location is the innermost frame of user code in the traceback, or the innermost frame if there is no user code. The returned text is
    empty if the error has no traceback.
    """
    frames = _user_frames(error) or list(traceback.extract_tb(error.__traceback__))
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return those frames in the traceback of an error whose code belongs neither to slm_lab nor to the standard library."""
    package, library = Path(__file__).parents[1], Path(traceback.__file__).parent
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        parents = Path(frame.filename).parents
        installed = "site-packages" in (parent.name for parent in parents)
        if package not in parents and (installed or library not in parents) and not frame.filename.startswith("<"):
            frames.append(frame)
    return frames
