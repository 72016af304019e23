"""What is written for the user, which must never end a run: its reader may leave, its disk fill up, its terminal close."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


class Screen:
    """A stream that falls silent at its first error, which it keeps."""

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
                self.stream.write(text)
            except OSError as error:
                self._fall_silent(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self.stream.flush()
            except OSError as error:
                self._fall_silent(error)

    def _fall_silent(self, error: OSError) -> None:
        self.error = error
        with suppress(OSError, ValueError):  # a stream without a file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # spares the flush at exit its error
            os.close(nowhere)
