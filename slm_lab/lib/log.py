"""Messages to the user: notices, which are single lines, and errors that are shown without a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
