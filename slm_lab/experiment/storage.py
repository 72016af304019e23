"""Files at a URL of any file system that fsspec knows (s3://, gs://, file://, …): what checkpoints need of pathlib.Path.

fsspec is a dependency of torch. The package of a protocol (s3fs, gcsfs, adlfs, …) is imported when a URL of it is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any


@dataclass(frozen=True)
class StoredPath:
    """A file or folder at a URL. Every method raises OSError, also where the file system raises something else."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StoredPath:
        return StoredPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    def with_name(self, name: str) -> StoredPath:
        return StoredPath(self.url.rstrip("/").rpartition("/")[0]) / name

    def exists(self) -> bool:
        """Return whether there is such a file. An error of the store is raised: a Session must not begin anew because of it."""
        with self._files() as (files, path):
            try:
                files.info(path)
            except FileNotFoundError:
                return False
        return True

    is_file = exists

    def iterdir(self) -> list[StoredPath]:
        """Return the files in a folder; [] if there is none."""
        with self._files() as (files, path):
            try:
                names = files.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return [self / name.rstrip("/").rpartition("/")[2] for name in names]

    @contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Open the file for reading at any position."""
        with self._files() as (files, path), files.open(path, "rb") as file:
            yield file

    def replace(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the file by what `write` writes; a reader finds the old one or the new one, never a part.

        A hidden file in the same folder is written and then moved. File systems rename it; object stores copy it on the server, and an
        object there is replaced whole. A process that is killed while it writes leaves the hidden file, which the next call overwrites.
        """
        with self._files() as (files, path):
            folder, _, name = path.rpartition("/")
            temporary = f"{folder}/.{name}.tmp"
            files.makedirs(folder, exist_ok=True)
            try:
                with files.open(temporary, "wb") as file:
                    write(file)
                files.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    files.rm(temporary)
                raise

    def read_text(self) -> str:
        """Return the content of the file."""
        with self.reading() as file:
            return file.read().decode()

    def write_text(self, content: str) -> None:
        """Replace the content of the file."""
        self.replace(lambda file: file.write(content.encode()))

    def unlink(self) -> None:
        """Remove the file."""
        with self._files() as (files, path):
            files.rm(path)

    @contextmanager
    def _files(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system, with nothing cached of what others may have changed, and the path in it."""
        import fsspec

        try:
            protocol = self.url.partition("::" if "::" in self.url else "://")[0]
            known = fsspec.available_protocols()
            if protocol not in known:
                near = difflib.get_close_matches(protocol, known, n=1)
                raise OSError(f"unknown protocol '{protocol}'" + (f"; did you mean '{near[0]}'?" if near else ""))
            files, path = fsspec.url_to_fs(self.url)
            files.invalidate_cache()
            yield files, path
        except OSError:
            raise
        except Exception as error:  # no package for the protocol, no credentials, …
            raise OSError(f"{type(error).__name__}: {str(error).strip()}") from error


Location = Path | StoredPath
"""Where a checkpoint is."""
