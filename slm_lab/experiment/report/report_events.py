"""Read the notices, restarts and failures of a run from its log files, and compute the frame and the training time of each event.

A training process writes its notices, with date and time, to the log file of its Session. In a log file, the line "begins: …, frame F"
marks the start of a process. The training time at a later line is computed from the time that has passed since the line "begins: …".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.report.metrics import Table, curve, last_value
from slm_lab.experiment.report.run import Run, last_frame

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)")
_BEGINS = re.compile(r"begins: index \d+, .*frame (\d+)")
_TIME = re.compile(r"time: ([\d.]+) s collecting, ([\d.]+) s learning")
_EXPECTED = re.compile(r"ends at frame \d+|time: |process \d+ on node |open episodes |close\(\) failed")
"""Pattern of the lines of a log file that are not warnings, and that are therefore not events."""
_MAX_BYTES = 1_000_000
"""Maximum number of bytes that are read from the end of a log file, since an env may print without limit."""
_MAX_EVENTS, _MAX_LETTERS = 100, 400


class _ProcessStart(NamedTuple):
    """The start of a process that trains a Session: the time of day, and the training time so far."""

    time: datetime
    seconds: float
    """Training time of the Session at the start of the process, s."""


def trial_events(run: Run, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the events of all Sessions of a trial in order of time, as dicts with the keys frame, seconds, line, name, kind and text.

    The kind of an event is start, notice or failed. If several notices of a Session have the same text, they are merged into one event,
    whose text says how often the notice occurred.

    Args: names: index of each table → name of the line that is drawn from this table.
    """
    tables, found = run.tables("train"), list[dict[str, Any]]()
    sessions = {index // run.policies for index in tables} | {int(s) for s in run.metrics.get("failures", {})}
    for session in sorted(sessions):
        index = session * run.policies
        table = tables.get(index, {"frame": np.empty(0)})
        name = names.get(index, f"session {session}") if run.policies == 1 else f"session {session}"
        for one in _merge_repeated_events(_log_events(run.paths.session_log(session, run.trial), table)):
            found.append({**one, "line": index, "name": name})
        if (cause := run.metrics.get("failures", {}).get(str(session))) is not None:
            end = {"frame": last_frame(table), "seconds": last_value(table, "wall_t") if "wall_t" in table else None}
            found.append({**end, "line": index, "name": name, "kind": "failed", "text": str(cause)[:_MAX_LETTERS]})
    return sorted(found, key=lambda one: one["seconds"] or 0.0)[:_MAX_EVENTS]


def collecting_and_learning_time(run: Run) -> tuple[float, float] | None:
    """Return the time that all Sessions together have spent collecting experience, and the time that they have spent learning, in seconds.

    Returns None if no Session has ended normally.
    """
    sessions = {index // run.policies for index in run.tables("train")}
    texts = [text for session in sessions for _, text in _timed_log_lines(run.paths.session_log(session, run.trial))]
    found = [(float(match[1]), float(match[2])) for text in texts if (match := _TIME.fullmatch(text))]
    return (sum(one for one, _ in found), sum(other for _, other in found)) if found else None


def _log_events(log: Path, table: Table) -> list[dict[str, Any]]:
    """Return the events in the log file of a Session, or [] if the log file cannot be read."""
    start: _ProcessStart | None = None
    found: list[dict[str, Any]] = []
    for time, text in _timed_log_lines(log):
        if begins := _BEGINS.match(text):
            restart, frame = start is not None or int(begins[1]) > 0, int(begins[1])
            start = _ProcessStart(time, _interpolate_column(table, "frame", "wall_t", frame))
            found += (
                [{"frame": frame, "seconds": start.seconds, "kind": "start", "text": f"continued at frame {frame:,}"}] if restart else []
            )
        elif not _EXPECTED.match(text):
            seconds = 0.0 if start is None else start.seconds + (time - start.time).total_seconds()
            frame = round(_interpolate_column(table, "wall_t", "frame", seconds))
            found.append({"frame": frame, "seconds": round(seconds, 3), "kind": "notice", "text": text[:_MAX_LETTERS]})
    return found


def _timed_log_lines(log: Path) -> list[tuple[datetime, str]]:
    """Return (time, text) of each line of a log file that begins with a date and time."""
    with suppress(OSError, ValueError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_BYTES))
        matches = (_LINE.match(line) for line in file.read().decode(errors="replace").splitlines())
        return [(datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f"), match[2]) for match in matches if match]
    return []


def _interpolate_column(table: Table, x: str, y: str, at: float) -> float:
    """Return the value of column `y` where column `x` has the value `at`, by linear interpolation between the rows of a table.

    Before the first row, the interpolation begins at the point x = 0, y = 0. Returns 0 if the table has no rows, or lacks the column `x` or
    `y`.
    """
    if x not in table or y not in table:
        return 0.0
    found = curve(table, y, x)
    return float(np.interp(at, [0.0, *found.frame], [0.0, *found.value])) if len(found.frame) else 0.0


def _merge_repeated_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a Session.

    Events with the same text are merged into one event, which has the time of the first of these events.
    """
    first: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    for one in events:
        counts[one["text"]] = counts.get(one["text"], 0) + 1
        first.setdefault(one["text"], one)
    return [{**one, "text": one["text"] + (f" (× {counts[one['text']]})" if counts[one["text"]] > 1 else "")} for one in first.values()]
