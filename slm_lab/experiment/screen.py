"""Terminal output that never raises: an OSError on write is recorded."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


class Screen:
    """A stream that stops writing after the first OSError, and keeps that error. Characters that it cannot encode are replaced."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    @property
    def encoding(self) -> str:
        return self.stream.encoding

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self._write(text)
            except OSError as error:
                self._stop(error)
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "replace").decode(encoding))

    def flush(self) -> None:
        if self.error is None:
            try:
                self.stream.flush()
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.error = error
        with suppress(OSError, ValueError):  # the stream has no file descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())  # so that the flush at exit raises no error
            os.close(null)
