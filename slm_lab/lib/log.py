"""Messages to the user: notices of one line each, and errors that are shown without a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("slm_lab")


def notice(text: str) -> None:
    """Log one line for the user, on stderr unless the application configures logging otherwise."""
    logger.warning(text)


class NoticeHandler(logging.Handler):
    """Logging handler that calls `on_notice` with the text of each notice."""

    def __init__(self, on_notice: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.on_notice = on_notice

    def emit(self, record: logging.LogRecord) -> None:
        self.on_notice(record.getMessage())


@contextmanager
def capture_notices(on_notice: Callable[[str], None]) -> Iterator[None]:
    """Call `on_notice` with the text of each notice while the block runs."""
    handler = NoticeHandler(on_notice)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class PlainError(Exception):
    """An error that is shown as its message, without a traceback."""


class NotWritable(PlainError, OSError):
    """A file of the run cannot be written: the folder has become read-only."""
