"""Functions for files: atomic replacement, JSON with a checksum, permissions, and paths in messages."""

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
    """Replace the content of `path` atomically. If OSError is raised, the file keeps its old content and no temporary file is left.

    The temporary file is in the folder of `path`, because a rename is atomic only within a file system. The name of the temporary file is
    short, because the name of `path` may have the maximum length. With `sync=True`, the new content survives a power failure.
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
    """Return an object as the content of an indented JSON file, for files that users read."""
    return (json.dumps(content, indent=2, ensure_ascii=ensure_ascii) + "\n").encode()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with an additional key "crc32", which contains the CRC-32 checksum of the content."""
    return {**content, "crc32": zlib.crc32(json.dumps(content).encode())}


def checked_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file without its key "crc32". Raises ValueError if the checksum does not match the content."""
    plain = {key: value for key, value in content.items() if key != "crc32"}
    if "crc32" in content and content["crc32"] != zlib.crc32(json.dumps(plain).encode()):
        raise ValueError("its content does not match its checksum (crc32)")
    return plain


def nonfinite_to_none(value: Any) -> Any:
    """Return a copy of nested dicts and lists in which None replaces NaN and infinity, which JSON does not support."""
    if isinstance(value, dict):
        return {key: nonfinite_to_none(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_none(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unwritable_reason(folder: Path) -> str | None:
    """Return the reason why no file can be created in an existing folder, or None if files can be created."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    read_only = False
    with suppress(OSError):
        read_only = has_feature("sysconf") and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    return os.strerror(errno.EROFS).lower() if read_only else "no permission"


def display_path(path: Path) -> Path:
    """Return a path for messages, which is relative to the working directory if `path` is inside the working directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
