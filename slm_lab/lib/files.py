"""Files that are replaced atomically, and JSON with a checksum."""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from slm_lab.lib.system import has_feature


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Replace the content of `path` atomically. If this raises OSError, the old content is kept and no temporary file is left.

    The temporary file is in the same folder, because a rename is atomic only within a file system. Its name is short, because the name of
    `path` may have the maximum length. With `sync=True` the new content survives a power failure.
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


def indented_json(content: Any, *, ensure_ascii: bool = False) -> bytes:
    """Return the content of a JSON file that users read."""
    return (json.dumps(content, indent=2, ensure_ascii=ensure_ascii) + "\n").encode()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with its CRC-32 added as "crc32"."""
    return {**content, "crc32": zlib.crc32(json.dumps(content).encode())}


def without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content without the checksum that `with_checksum` may have added. Raises ValueError if the checksum does not match."""
    plain = {key: value for key, value in content.items() if key != "crc32"}
    if "crc32" in content and content["crc32"] != zlib.crc32(json.dumps(plain).encode()):
        raise ValueError("its content does not match its checksum (crc32)")
    return plain


def nonfinite_to_none(value: Any) -> Any:
    """Replace numbers that are not finite by None, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: nonfinite_to_none(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_none(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def not_writable(folder: Path) -> str | None:
    """Return the reason why no file can be created in an existing folder; None if files can be created."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    read_only = False
    with suppress(OSError):
        read_only = has_feature("sysconf") and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    return os.strerror(errno.EROFS).lower() if read_only else "no permission"


def display_path(path: Path) -> Path:
    """Return a path for messages: relative to the working directory if the path is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
