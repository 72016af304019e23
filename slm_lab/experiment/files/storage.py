"""Access to files at URLs of any file system that fsspec supports (s3://, gs://, file://, …).

StoredPath has the methods of pathlib.Path that are needed for checkpoints. fsspec is a dependency of torch. The package for a protocol
(s3fs, gcsfs, adlfs, …) is imported when a URL with this protocol is used.
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
    """A file or folder at a URL. The methods of StoredPath raise only OSError, even if the library for the file system raises errors of
    other types."""

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
        """Return whether the file exists. If the store cannot be reached, OSError is raised.

        Returning False for an unreachable store would be wrong, since a Session that finds no checkpoint starts to train from the
        beginning.
        """
        with _convert_to_os_error():
            files, path = self._file_system()
            try:
                files.info(path)
            except FileNotFoundError:
                return False
        return True

    is_file = exists

    def iterdir(self) -> list[StoredPath]:
        """Return the files in this folder, or [] if the folder does not exist."""
        with _convert_to_os_error():
            files, path = self._file_system()
            try:
                names = files.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return [self / name.rstrip("/").rpartition("/")[2] for name in names]

    @contextmanager
    def open_for_reading(self) -> Iterator[IO[bytes]]:
        """Open the file for reading with random access."""
        with _convert_to_os_error():
            files, path = self._file_system()
            opened = files.open(path, "rb")
        with opened as file:
            yield file

    def replace(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the content of the file with the bytes that the function `write` writes.

        A reader sees either the old content or the complete new content. The new content is first written to a hidden file in the folder of
        the file. If the folder is missing, it is created. The complete hidden file is moved to the final name. File systems rename the
        hidden file. Object stores copy the hidden file on the server, and replace the object atomically. A process that is killed while
        writing leaves the hidden file behind, and the next call for the same file overwrites the hidden file.
        """
        with _convert_to_os_error():
            files, path = self._file_system()
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.tmp"
        try:
            with _convert_to_os_error():
                opened = _open_for_writing(files, temporary)
            with opened as file:
                write(file)
            with _convert_to_os_error():
                files.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                files.rm(temporary)
            raise

    def read_text(self) -> str:
        """Return the content of the file as text."""
        with self.open_for_reading() as file:
            return file.read().decode()

    def write_text(self, content: str) -> None:
        """Replace the content of the file with the text `content`."""
        self.replace(lambda file: file.write(content.encode()))

    def unlink(self) -> None:
        """Remove the file at the URL."""
        with _convert_to_os_error():
            files, path = self._file_system()
            files.rm(path)

    def _file_system(self) -> tuple[Any, str]:
        """Return the fsspec file system of the URL, and the path of the file in this file system.

        The cache of the file system is cleared, since other processes may have changed files.
        """
        import fsspec

        protocol = self.url.partition("::" if "::" in self.url else "://")[0]
        protocols = [*fsspec.available_protocols(), *fsspec.registry]
        if protocol not in protocols:
            near = difflib.get_close_matches(protocol, protocols, n=1)
            raise OSError(f"unknown protocol '{protocol}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        files, path = fsspec.url_to_fs(self.url)
        files.invalidate_cache()
        return files, path


@contextmanager
def _convert_to_os_error() -> Iterator[None]:
    """Convert all errors of a store to OSError while the with-block runs.

    Errors of other types are caused, for example, by a missing package for the protocol or by missing credentials.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {str(error).strip()}") from error


def _open_for_writing(files: Any, path: str) -> Any:
    """Open a file for writing, and create the folder of the file if the folder is missing.

    The parent of the folder must exist, so that no bucket of an object store is created.
    """
    try:
        return files.open(path, "wb")
    except FileNotFoundError:
        files.mkdir(path.rpartition("/")[0], create_parents=False)
        return files.open(path, "wb")


Location = Path | StoredPath
"""Location of a checkpoint: a local path, or a file at a URL."""
