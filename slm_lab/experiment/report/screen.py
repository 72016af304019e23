"""Terminal output that does not raise an OSError on write, but stores the error."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TextIO, cast

from slm_lab.lib.system import has_feature

if TYPE_CHECKING:
    from rich.console import Console

_SPARE_FROM = 256
"""Lowest file descriptor number for the copies of stdout and stderr. Libraries that close all low descriptors rarely close a descriptor
above this number."""
_spares: dict[int, int] = {}
"""File descriptor of a standard stream (1 or 2) → file descriptor of the copy of this stream."""


def copy_standard_streams() -> None:
    """Copy the file descriptors of stdout and stderr, so that Screen can reopen a standard stream that an env has closed."""
    if not has_feature("fcntl"):
        return
    import fcntl

    with suppress(OSError):
        for number in (1, 2):
            if number not in _spares:
                _spares[number] = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _SPARE_FROM)


def console_on(stream: TextIO) -> Console:
    """Return a rich console that writes to a Screen. If NO_COLOR is set, the console writes no styles, not even bold and dim."""
    from rich.console import Console

    return Console(
        file=cast(IO[str], Screen(stream)), color_system=None if os.environ.get("NO_COLOR") else "auto", highlight=False, soft_wrap=True
    )


class Screen:
    """A text stream that stores the first OSError and then stops writing. Characters that the stream's encoding lacks are replaced.

    If `copy_standard_streams` was called before, a Screen reopens a standard stream that was closed.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None
        self._number = 1 if stream is sys.stdout else 2 if stream is sys.stderr else None

    @property
    def encoding(self) -> str:
        return self.stream.encoding

    def isatty(self) -> bool:
        return not self.stream.closed and self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self._write(text)
            except (OSError, ValueError) as error:
                self._handle_write_error(error, text)
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
            except (OSError, ValueError) as error:
                self._handle_write_error(error)

    def _handle_write_error(self, error: OSError | ValueError, text: str = "") -> None:
        """Handle an error on write: if the stream was closed, reopen the stream, else store the error and stop writing."""
        if isinstance(error, OSError) and error.errno != errno.EBADF:
            self._stop(error)
        elif isinstance(error, OSError) or self.stream.closed:
            if not self._reopen(text):
                self._stop(OSError(errno.EBADF, "the stream was closed"))
        else:
            raise error

    def _reopen(self, text: str) -> bool:
        """Reopen the standard stream, and write `text` to the stream. Return whether the stream was reopened and the text was written."""
        number, spare = self._number, _spares.get(self._number or 0)
        if number is None or spare is None:
            return False
        try:
            os.dup2(spare, number)
            self.stream = open(number, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            return False
        setattr(sys, "stdout" if number == 1 else "stderr", self.stream)
        return True

    def _stop(self, error: OSError) -> None:
        self.error = error
        with suppress(OSError, ValueError):  # the stream has no file descriptor, or was closed
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())  # so that Python's flush of the stream at exit raises no error
            os.close(null)
