"""Files of a finished run: each is whole or not there, and one that cannot be written never ends a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from slm_lab.lib.log import notice

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Writer:
    """Writes files one after another. A failure is a notice; after a full disk the rest is not even tried, and one notice tells all."""

    def __init__(self) -> None:
        self.full = False
        self._missing: dict[str, int] = {}

    def write(self, what: str | None, *files: tuple[Path, Callable[[], bytes]]) -> None:
        """Make and write the `files` of one thing, of which `what` says the kind ("graph not drawn"); None: not to be counted."""
        for path, content in files:
            if self.full:
                break
            try:
                replace_file(path, content())
            except Exception as error:
                self.full = isinstance(error, OSError) and error.errno in _FULL
                if not self.full:
                    notice(f"{path.name} failed: {type(error).__name__}: {error}")
        if self.full and what:
            self._missing[what] = self._missing.get(what, 0) + 1

    def close(self) -> None:
        """Tell what a full disk left out."""
        if self.full:
            kinds = (f"{count} {what if count == 1 else what.replace(' not', 's not')}" for what, count in self._missing.items())
            notice(f"disk full: {', '.join(kinds)}")


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` in one step: it has its old content or all of the new. Raises OSError, with nothing left behind.

    The temporary file lies in the same folder, since only there a rename is one step; its name is short, since `path` may have the
    longest a disk takes.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
