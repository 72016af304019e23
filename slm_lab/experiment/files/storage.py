"""Files at URLs of any file system that fsspec supports (s3://, gs://, file://, …), with the methods of pathlib.Path for checkpoints.

fsspec is a dependency of torch. The package of a protocol (s3fs, gcsfs, adlfs, …) is imported when a URL with that protocol is used.
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
    """A file or folder at a URL. Every method raises OSError, even if the file system's own functions raise other errors."""

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
        """Return whether the file exists. Errors of the store are raised, since otherwise a Session would start from the beginning."""
        with _os_errors():
            files, path = self._files()
            try:
                files.info(path)
            except FileNotFoundError:
                return False
        return True

    is_file = exists

    def iterdir(self) -> list[StoredPath]:
        """Return the files in the folder; [] if the folder does not exist."""
        with _os_errors():
            files, path = self._files()
            try:
                names = files.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return [self / name.rstrip("/").rpartition("/")[2] for name in names]

    @contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Open the file for reading with random access."""
        with _os_errors():
            files, path = self._files()
            opened = files.open(path, "rb")
        with opened as file:
            yield file

    def replace(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the content of the file with the output of `write`. A reader sees the old content or the new content, never a part.

        The content is first written to a hidden file in the same folder (created if missing), which is then moved. File systems rename the
        hidden file; object stores copy it on the server and replace the object atomically. A process that is killed while writing leaves
        the hidden file behind, and the next call overwrites it.
        """
        with _os_errors():
            files, path = self._files()
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.tmp"
        try:
            with _os_errors():
                opened = _opened(files, temporary)
            with opened as file:
                write(file)
            with _os_errors():
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
        with _os_errors():
            files, path = self._files()
            files.rm(path)

    def _files(self) -> tuple[Any, str]:
        """Return the file system and the path in it. The cache is cleared, since other processes may have changed files."""
        import fsspec

        protocol = self.url.partition("::" if "::" in self.url else "://")[0]
        known = [*fsspec.available_protocols(), *fsspec.registry]
        if protocol not in known:
            near = difflib.get_close_matches(protocol, known, n=1)
            raise OSError(f"unknown protocol '{protocol}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        files, path = fsspec.url_to_fs(self.url)
        files.invalidate_cache()
        return files, path


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert other errors of a store (such as a missing package for the protocol, or missing credentials) to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {str(error).strip()}") from error


def _opened(files: Any, path: str) -> Any:
    """Open a file for writing; create its folder if it is missing. The parent of the folder must exist, so that no bucket is created."""
    try:
        return files.open(path, "wb")
    except FileNotFoundError:
        files.mkdir(path.rpartition("/")[0], create_parents=False)
        return files.open(path, "wb")


Location = Path | StoredPath
"""Location of a checkpoint."""
