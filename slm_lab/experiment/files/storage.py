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
    """A file or folder at a URL. Every method raises OSError, also where the file system's own functions raise something else."""

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
        with _os_errors():
            files, path = self._files()
            try:
                files.info(path)
            except FileNotFoundError:
                return False
        return True

    is_file = exists

    def iterdir(self) -> list[StoredPath]:
        """Return the files in a folder; [] if there is none."""
        with _os_errors():
            files, path = self._files()
            try:
                names = files.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return [self / name.rstrip("/").rpartition("/")[2] for name in names]

    @contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Open the file for reading at any position."""
        with _os_errors():
            files, path = self._files()
            opened = files.open(path, "rb")
        with opened as file:
            yield file

    def replace(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the file by what `write` writes; a reader finds the old one or the new one, never a part.

        A hidden file in the same folder, which is made if there is none, is written and then moved. File systems rename it; object stores
        copy it on the server, and an object there is replaced whole. A process that is killed while it writes leaves the hidden file, which
        the next call overwrites.
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
        """Return the file system, with nothing cached of what others may have changed, and the path in it."""
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
    """Raise OSError for any other error of a store: no package for the protocol, no credentials, …"""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {str(error).strip()}") from error


def _opened(files: Any, path: str) -> Any:
    """Open a file for writing, and make its folder if there is none. What contains the folder must exist: a bucket would be made too."""
    try:
        return files.open(path, "wb")
    except FileNotFoundError:
        files.mkdir(path.rpartition("/")[0], create_parents=False)
        return files.open(path, "wb")


Location = Path | StoredPath
"""Where a checkpoint is."""
