"""Rows to files, TensorBoard and the user's screen."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from slm_lab.experiment.observers.base import COLUMNS, Mean, Observer, Row
from slm_lab.experiment.paths import DataMode
from slm_lab.lib.clock import Clock
from slm_lab.lib.log import notice
from slm_lab.lib.records import Metrics, VecStep

_FORMATS = {"wall_t": ".3f", "fps": ".1f"}
_REPORT_EVERY = 0.25
"""Seconds between two reports of progress."""


class CSVWriter(Observer):
    """Appends each row to the table's file at once, in a fixed format: equal numbers give equal bytes."""

    def __init__(self, paths: dict[DataMode, Path], columns: Sequence[str] = COLUMNS) -> None:
        self.paths, self.columns = paths, columns
        self.files: dict[DataMode, Any] = {}

    def on_row(self, mode: DataMode, row: Row) -> None:
        if mode not in self.files:
            self.files[mode] = file = self.paths[mode].open("a", newline="", encoding="utf-8")
            if file.tell() == 0:
                csv.writer(file, lineterminator="\n").writerow(self.columns)
        csv.writer(self.files[mode], lineterminator="\n").writerow([_text(name, row[name]) for name in self.columns])
        self.files[mode].flush()

    def close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):  # a row that could not be written, which has ended the Session already
                file.close()


def complete_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table, [] where there is none; a last line that a killed process left half-written is cut off. Raises OSError."""
    if not path.exists():
        return []
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
    return list(csv.DictReader(text[: text.rfind(b"\n") + 1].decode().splitlines()))


class TensorBoard(Observer):
    """Scalars for TensorBoard: the rows, and what else updates report. A failure is a notice, never the end of the run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = _excepthook
        self.extra: dict[str, Mean] = {}
        self.writer: Any = None
        try:
            self.writer = SummaryWriter(str(folder))
        except Exception as error:
            self._stop(error)

    @staticmethod
    def installed() -> bool:
        return find_spec("tensorboard") is not None

    def on_update(self, metrics: Metrics) -> None:
        for name, value in metrics.extra.items():
            self.extra.setdefault(name, Mean()).add(value)

    def on_row(self, mode: DataMode, row: Row) -> None:
        frame = row["frame"]
        scalars = {name: value for name, value in row.items() if name != "frame"}
        if mode == "train":
            scalars |= {name: mean.drain() for name, mean in self.extra.items()}
        self._try(lambda: [self.writer.add_scalar(f"{mode}/{name}", value, frame) for name, value in scalars.items() if value is not None])

    def on_checkpoint(self) -> None:
        self._try(lambda: self.writer.flush())

    def close(self) -> None:
        self._try(lambda: self.writer.close())

    def _try(self, write: Callable[[], object]) -> None:
        if self.writer is None:
            return
        try:
            write()
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.writer = None
        notice(f"TensorBoard stopped: {error}")


def _excepthook(args: threading.ExceptHookArgs) -> None:
    """A thread of TensorBoard's that fails is told of by the next call of its writer."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)


class Reporter(Observer):
    """Reports progress a few times a second and at each row: report(frame, fps, last row or None)."""

    def __init__(self, clock: Clock, report: Callable[[int, float, Row | None], None]) -> None:
        self.clock, self.report = clock, report
        self.due = perf_counter() + _REPORT_EVERY
        self.frame, self.time = clock.frame, clock.moment

    def on_step(self, step: VecStep) -> None:
        if perf_counter() >= self.due:
            self._report(None)

    def on_row(self, mode: DataMode, row: Row) -> None:
        if mode == "train":
            self._report(row)

    def _report(self, row: Row | None) -> None:
        now = self.clock.moment
        fps = (self.clock.frame - self.frame) / max(now - self.time, 1e-9)
        if now - self.time >= _REPORT_EVERY:
            self.frame, self.time = self.clock.frame, now
        self.due = perf_counter() + _REPORT_EVERY
        self.report(self.clock.frame, fps, row)


def _text(name: str, value: float | int | None) -> str:
    match value:
        case None:
            return ""
        case int():
            return str(value)
    return format(value, _FORMATS.get(name, ".8g"))
