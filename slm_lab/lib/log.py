"""Messages to the user: notices, which are single lines, errors that are shown without a traceback, and descriptions of errors."""

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
    """Return a text that says what user code did and where, if the error is not a subclass of Exception. For other errors, return None."""
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
    """Return the type and the message of an error and the innermost line of user code in its traceback (if there is one), such as
    "ValueError: no map (file maps.py, line 11)"."""
    try:
        message = str(error)
    except Exception:  # raised by the error's own __str__
        message = "the message cannot be shown"
    frames = _user_frames(error)
    return f"{type(error).__name__}: {message}" + (f" (file {frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def error_location(error: BaseException) -> str:
    """Return the file and the line of the innermost user code in the traceback of an error as text to append to a message, such as
    " in maps.py, line 11". Without user code in the traceback, the innermost line counts. The text is empty without a traceback."""
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
