"""Sinks: objects that receive the events and the state of a Session, and store them in memory or in the files of a run folder."""

from __future__ import annotations

import csv
import errno
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from slm_lab.experiment.events import Emit, Event, Mode, Row, RowValues, Status
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.files.trackers import Trackers
from slm_lab.lib.log import NotWritable, notice

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
CheckpointKind = Literal["last", "best"] | int
"""Kind of a checkpoint: "last" (state of a Session), "best" (best weights of a policy), or an integer (weights of a policy at this
frame)."""
Spans = list[tuple[str, str, float, float]]
"""Activities of processes, each as a tuple (name of the process, kind of work, begin in seconds, end in seconds)."""
Position = dict[str, tuple[int, int]]
"""File name of each table of a Session → (size of the file in bytes, CRC-32 of the content)."""
_FORMATS = {"wall_t": ".3f", "fps": ".1f"}
_KEPT_BYTES = 2**28
"""Maximum size in bytes of a replaced "last" checkpoint that is kept as "previous"."""


class RunSink:
    """Base class of sinks, which receive the events and the state of a Session. The base class stores nothing."""

    def __call__(self, event: Event) -> None:
        """Receive an event of the Session."""

    def open_table(self, table: int) -> None:
        """Prepare to receive the rows of a table, for example by starting the experiment trackers of the table."""

    def save(self, table: int, which: CheckpointKind, bundle: dict[str, Any]) -> None:
        """Save a bundle (a dict of tensors and plain Python values) as a checkpoint, atomically. Raises OSError if writing fails."""

    def save_shared(self, bundle: dict[str, Any]) -> None:
        """Save the arrays that several Sessions share, atomically. Raises OSError if writing fails."""

    def sync_and_get_positions(self, session: int) -> Position:
        """Write the tables of a Session to disk, and return the size and checksum of each table, as needed by `truncate_tables`. Raises
        OSError if writing fails."""
        return {}

    def truncate_tables(self, session: int, position: Position | None = None, frame: int = 0) -> None:
        """Truncate the tables of a Session to `position` or, if `position` is None, to the rows up to `frame`.

        Raises OSError if a table cannot be changed. The files of the tables must not be open.
        """

    def read_rows(self, table: int, mode: Mode) -> list[dict[str, str]]:
        """Return the complete rows of a table. Each row is a dict: column → text."""
        return []

    def append_extra_row(self, session: int, name: Literal["pbt", "elo"], columns: tuple[str, ...], row: Mapping[str, Any]) -> None:
        """Append a row to the table "pbt" (population-based training) or "elo" (snapshots of self-play) of a Session."""

    def save_timeline(self, session: int, spans: Spans) -> None:
        """Save what each process of a Session did during a short period of time. Raises OSError if writing fails."""

    def close(self, status: Status = "done") -> None:
        """Close all files.

        Args: status: how the Session ended, which is reported to the experiment trackers.
        """


class MemorySink(RunSink):
    """Sink that stores the rows of tables in memory, and does not store state. `Session.run` uses this sink by default."""

    def __init__(self) -> None:
        self.row_events: list[Row] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Row):
            self.row_events.append(event)

    def table_rows(self, table: int, mode: Mode) -> list[RowValues]:
        """Return the stored training rows or evaluation rows of a table."""
        return [row.values for row in self.row_events if (row.table, row.mode) == (table, mode)]


class LocalSink(RunSink):
    """Sink that writes rows to CSV files and experiment trackers, writes checkpoints to a run folder, and passes other events to `forward`.

    A row is written as soon as it is received. The format of numbers is fixed, so that equal numbers are written as equal bytes.

    Args: track: names of the experiment trackers, see meta.track.
    """

    def __init__(self, paths: RunPaths, trial: int = 0, forward: Emit = lambda event: None, track: Sequence[str] = ()) -> None:
        self.paths, self.trial, self.forward, self.track = paths, trial, forward, track
        self.tables: dict[Path, CsvTable] = {}
        self.trackers: dict[int, Trackers] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Row(table, mode, values):
                texts = {name: _cell_text(name, value) for name, value in values.items()}
                self._append(self.paths.session_df(table, mode, self.trial), tuple(values), texts)
                self._open_trackers(table).add_row(event)
            case _:
                self.forward(event)

    def open_table(self, table: int) -> None:
        self._open_trackers(table)

    def save(self, table: int, which: CheckpointKind, bundle: dict[str, Any]) -> None:
        """Save a bundle as a checkpoint. A replaced "last" checkpoint is kept as "previous" for the command `verify`, see
        `_keep_previous`."""
        with _convert_write_errors(self.paths.checkpoint(table, which, self.trial)) as path:
            if which == "last" and isinstance(path, Path):
                _keep_previous(path, self.paths.checkpoint(table, "previous", self.trial), bundle)
            state.save(path, bundle)

    def save_shared(self, bundle: dict[str, Any]) -> None:
        with _convert_write_errors(self.paths.trial_checkpoint(self.trial)) as path:
            state.save(path, bundle)

    def sync_and_get_positions(self, session: int) -> Position:
        for table in self.tables.values():
            table.sync()
        return {path.name: self._size_and_crc(path) for path in self._paths(session)}

    def _size_and_crc(self, path: Path) -> tuple[int, int]:
        """Return the size of a table in bytes, and the CRC-32 of its content."""
        if (table := self.tables.get(path)) is not None:
            return table.size, table.crc
        if not path.exists():
            return 0, 0
        with path.open("rb") as file:
            content = file.read(path.stat().st_size)  # not read(), which may block if the file is not regular; its size is 0
        return len(content), zlib.crc32(content)

    def truncate_tables(self, session: int, position: Position | None = None, frame: int = 0) -> None:
        for path in self._paths(session):
            cut_table(path, frame if position is None else None, 0 if position is None else position[path.name][0])

    def _paths(self, session: int) -> list[Path]:
        """Return the paths of all tables of a Session.

        The tables are those of training rows and of evaluation rows for each policy, of population-based training, and of self-play
        snapshots.
        """
        paths, policies = self.paths, self.paths.policies
        indices = range(session * policies, (session + 1) * policies)
        modes: tuple[Mode, ...] = ("train", "eval")
        others = (paths.pbt(session, self.trial), paths.elo(session, self.trial))
        return [*(paths.session_df(index, mode, self.trial) for index in indices for mode in modes), *others]

    def read_rows(self, table: int, mode: Mode) -> list[dict[str, str]]:
        return complete_rows(self.paths.session_df(table, mode, self.trial))

    def append_extra_row(self, session: int, name: Literal["pbt", "elo"], columns: tuple[str, ...], row: Mapping[str, Any]) -> None:
        path = self.paths.pbt(session, self.trial) if name == "pbt" else self.paths.elo(session, self.trial)
        self._append(path, columns, {column: _cell_text(column, row[column]) for column in columns})

    def save_timeline(self, session: int, spans: Spans) -> None:
        with self.paths.timeline(session, self.trial).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("process", "kind", "begin", "end"))
            writer.writerows((process, kind, f"{begin:.6f}", f"{end:.6f}") for process, kind, begin, end in spans)

    def close(self, status: Status = "done") -> None:
        for table in self.tables.values():
            with suppress(OSError):  # close() tries again to write a row; the first error has already ended the Session
                table.file.close()
        self.tables.clear()
        for trackers in self.trackers.values():
            trackers.end(status)
        self.trackers.clear()

    def _append(self, path: Path, columns: tuple[str, ...], row: Mapping[str, str]) -> None:
        if (table := self.tables.get(path)) is None:
            with _convert_write_errors(path):
                self.tables[path] = table = CsvTable(path, columns)
        table.append([row.get(column, "") for column in table.columns])

    def _open_trackers(self, table: int) -> Trackers:
        if table not in self.trackers:
            self.trackers[table] = Trackers(self.track, self.paths, table, self.trial)
        return self.trackers[table]


class CsvTable:
    """A CSV file to which rows are appended.

    Attributes:
        columns: names of the columns, which are read from the file if the file exists already.
        size, crc: size of the file in bytes, and CRC-32 of its content.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.file: IO[bytes] = path.open("ab+")
        size = self.file.seek(0, os.SEEK_END)  # 0 if the file is not a regular file, for which read() may block
        self.file.seek(0)
        content = self.file.read(size)
        self.size, self.crc = len(content), zlib.crc32(content)
        self.columns = next(csv.reader([content.partition(b"\n")[0].decode()])) if content else columns
        if not content:
            self.append(columns)

    def append(self, cells: Sequence[str]) -> None:
        """Append a row to the file. Raises OSError if writing fails."""
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        line = text.getvalue().encode()
        self.file.write(line)
        self.file.flush()
        self.size, self.crc = self.size + len(line), zlib.crc32(line, self.crc)

    def sync(self) -> None:
        """Wait until all appended rows are on disk. Raises OSError if writing fails."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # the path is not a regular file
                raise


def _keep_previous(last: Path, previous: Location, bundle: Mapping[str, Any]) -> None:
    """Keep the checkpoint `last`, which `bundle` will replace, as `previous`.

    The command `verify` uses the checkpoint `previous` to train the end of a run again. The old checkpoint is kept as a hard link, without
    copying. A checkpoint is not kept if training cannot continue exactly from the checkpoint, or if the checkpoint is larger than 256 MiB.
    """
    temporary = last.with_name(f".{last.name}.previous.tmp")
    with suppress(OSError, state.BundleError):  # there is no such file yet, or the file system has no hard links
        header = state.read_header(last)
        if header.get("lost") != [] or header["frames"] == bundle.get("frames") or last.stat().st_size > _KEPT_BYTES:
            return
        temporary.unlink(missing_ok=True)
        os.link(last, temporary)
        os.replace(temporary, str(previous))


_L = TypeVar("_L", bound=Location)


@contextmanager
def _convert_write_errors(path: _L) -> Iterator[_L]:
    """Yield `path`. While the with-block runs, convert an OSError that is caused by missing write permission to NotWritable."""
    try:
        yield path
    except OSError as error:
        if error.errno in _READ_ONLY:
            raise NotWritable(f"cannot write {path}: {error.strerror}") from error
        raise


def complete_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV table as dicts, or [] if the file is missing. Raises OSError if the file cannot be read.

    If a killed process has left an incomplete last line, this line is removed from the file.
    """
    if not path.exists():
        return []
    with path.open("rb+") as file:
        text = file.read()
        end = text.rfind(b"\n") + 1
        if end < len(text):
            file.truncate(end)
            os.fsync(file.fileno())
    return list(csv.DictReader(text[:end].decode().splitlines()))


def is_damaged(path: Path, size: int, crc: int) -> bool:
    """Return whether the first `size` bytes of a table do not match the checksum `crc`. Raises OSError if the table cannot be read.

    If the table is missing or shorter than `size`, False is returned.
    """
    if not path.exists():
        return False
    with path.open("rb") as file:
        content = file.read(size)
    return len(content) == size and zlib.crc32(content) != crc


def cut_table(path: Path, frame: int | None, size: int = 0) -> None:
    """Truncate a table to its rows up to `frame` or, if `frame` is None, to `size` bytes. Raises OSError if the table cannot be changed.

    If no rows remain, the table is deleted. If `frame` is None and the table is shorter than `size`, a notice about the lost rows is
    printed, and the complete rows are kept.
    """
    if not path.exists():
        if size:
            notice(f"{path.name} is missing: its rows up to here are lost")
        return
    if frame is None and path.stat().st_size < size:
        rows = complete_rows(path)
        last = f"after frame {rows[-1]['frame']}" if rows else "up to here"
        notice(f"{path.name} is shorter than it was when the checkpoint was saved: its rows {last} are lost")
        size = path.stat().st_size
    if frame is not None:
        with path.open("rb") as file:
            lines = file.read().splitlines(keepends=True)
        kept = [line for line in lines[1:] if line.endswith(b"\n") and int(line.split(b",", 1)[0]) <= frame]
        size = len(lines[0]) + sum(map(len, kept)) if kept else 0
    if size == 0:
        path.unlink()
    elif path.stat().st_size > size:
        os.truncate(path, size)


def _cell_text(name: str, value: Any) -> str:
    match value:
        case None:
            return ""
        case int() | str():
            return str(value)
    return format(value, _FORMATS.get(name, ".8g"))
