"""Write files atomically: a file is complete or absent, and one that cannot be written never ends a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from slm_lab.lib.log import notice

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileWriter:
    """Writes files one after another. A failure is a notice; once the disk is full the rest is skipped and counted in one notice."""

    def __init__(self) -> None:
        self.full = False
        self._missing: dict[str, int] = {}

    def write(self, what: str | None, *files: tuple[Path, Callable[[], bytes]]) -> None:
        """Make and write the `files` of one item; `what` ("graph not drawn") counts it when the disk is full, None does not."""
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
        """Report in one notice what was skipped on a full disk."""
        if self.full:
            kinds = (f"{count} {what if count == 1 else what.replace(' not', 's not')}" for what, count in self._missing.items())
            notice(f"disk full: {', '.join(kinds)}")


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically. Raises OSError, with the old content kept and nothing left behind.

    The temporary file is in the same folder, where a rename is atomic; its name is short, since that of `path` may have the maximum length.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
