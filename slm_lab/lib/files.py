"""Files that are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Replace the content of `path` atomically. Raises OSError, with the old content kept and nothing left behind.

    The temporary file is in the same folder, where a rename is atomic; its name is short, since that of `path` may have the maximum length.
    With `sync` the new content survives a power failure.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        if sync:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
