"""Choose the window of frames of a run that is trained again. The window begins at a saved state and ends at a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import checkpoint_names
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.metrics import Table
from slm_lab.experiment.report.nondeterminism import inexact_continuations
from slm_lab.experiment.report.progress import format_duration

LIMIT_SECONDS = 600.0
"""Maximum training time in seconds of a window that is chosen automatically."""


@dataclass(frozen=True)
class Checkpoint:
    """A readable checkpoint of a Session. `which` is "last", "previous", "best" or a frame number.

    `table` is the number of the table of the policy to which the checkpoint belongs.
    """

    which: str
    table: int
    path: Location
    frame: int
    header: dict[str, Any]


@dataclass(frozen=True)
class Window:
    """The frames of a Session with `begin` < frame ≤ `end`, which are trained again."""

    begin: int
    end: int
    start: Location | None
    """The checkpoint with the state at the frame `begin`, or None if `begin` is 0."""
    checkpoints: tuple[Checkpoint, ...]
    """The checkpoints of the run whose frames are in the window, in order of frames."""
    seconds: float | None
    """Time in seconds that the run needed to train the window, or None if the time is unknown."""

    @property
    def frames(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class SessionFiles:
    """The readable and the damaged checkpoints of a Session."""

    checkpoints: tuple[Checkpoint, ...]
    """The readable checkpoints, except the checkpoint "previous"."""
    damaged: tuple[str, ...]
    """The error message for each damaged checkpoint."""
    previous: Checkpoint | None
    """The checkpoint before the last checkpoint, or None if it was not kept. Training can be continued exactly from this checkpoint."""

    @property
    def last(self) -> Checkpoint | None:
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.which == "last"), None)


def session_files(paths: RunPaths, session: int, trial: int) -> SessionFiles:
    """Read the headers of the checkpoints of a Session, and verify every byte of the files.

    Raises UserError for a checkpoint that another version of slm_lab has written.
    """
    checkpoints, damaged = list[Checkpoint](), list[str]()
    for which, table in _checkpoint_names(paths, session, trial):
        path = paths.checkpoint(table, which, trial)
        try:
            header = state.read_header(path, check=True)
        except state.DamagedError as error:
            damaged.append(str(error))
            continue
        frame = header["frames"][0] if which in ("last", "previous") else header["frame"]
        checkpoints.append(Checkpoint(which, table, path, int(frame), header))
    checkpoints.sort(key=lambda checkpoint: (checkpoint.frame, checkpoint.which))
    last = max((checkpoint.frame for checkpoint in checkpoints if checkpoint.which == "last"), default=0)
    previous = next((checkpoint for checkpoint in checkpoints if checkpoint.which == "previous" and checkpoint.frame < last), None)
    return SessionFiles(tuple(checkpoint for checkpoint in checkpoints if checkpoint.which != "previous"), tuple(damaged), previous)


def _checkpoint_names(paths: RunPaths, session: int, trial: int) -> Iterable[tuple[str, int]]:
    """Yield (name of the checkpoint, number of the table) for each checkpoint file of a Session."""
    first = session * paths.policies
    for which in ("last", "previous"):
        if paths.checkpoint(first, which, trial).is_file():
            yield which, first
    for table in range(first, first + paths.policies):
        for which in checkpoint_names(paths, table, trial):
            if which != "last":
                yield which, table


def last_inexact_continuation(starts: Sequence[dict[str, Any]], session: int) -> tuple[int, str]:
    """Return the frame of a Session's last inexact continuation, and the reason why the continuation was inexact.

    If no continuation was inexact, (0, "") is returned. Training after the returned frame can be repeated exactly.

    Args: starts: the entries of meta.run in the saved spec, one for each start of the run.
    """
    found = inexact_continuations(starts, session)
    return found[-1] if found else (0, "")


def choose_window(
    files: SessionFiles, table: Table, starts: Sequence[dict[str, Any]], session: int, asked: tuple[int | None, int | None, int | None]
) -> Window:
    """Return the window of frames to train again. Raises UserError if no window is possible, or if the window exceeds the limit.

    By default, the window leads from the previous checkpoint to the last checkpoint, which verifies the final weights at low cost. If the
    previous checkpoint was not kept, the window leads from frame 0 to the first checkpoint after an update.

    Args:
        table: rows of the Session, from which the training time is estimated.
        starts: the entries of meta.run in the saved spec, one for each start of the run.
        asked: the values of --from, --to and --frames, or None for an option that is not given.
    """
    begin, end, frames = asked
    exact, why = last_inexact_continuation(starts, session)
    states: dict[int, Location | None] = {0: None} if exact == 0 else {}
    if files.previous is not None and files.previous.frame >= exact:
        states |= {files.previous.frame: files.previous.path}
    if not states:
        raise UserError(
            f"session {session} was continued at frame {exact:,}, but not exactly ({why}), and no state was saved after this frame"
        )
    if begin is not None and begin not in states:
        raise UserError(f"--from {begin}: training can be repeated from frame {' or '.join(f'{frame:,}' for frame in states)}")
    if end is not None and begin is None:
        begin = max((frame for frame in states if frame < end), default=None)
        if begin is None:
            raise UserError(f"--to {end}: expected a frame after {min(states):,}, from which training can be repeated")
    begin = max(states) if begin is None else begin
    end = _default_end(files, table, begin, session) if end is None else _checked_end(end, begin, files)
    inside = tuple(checkpoint for checkpoint in files.checkpoints if begin < checkpoint.frame <= end)
    window = Window(begin, end, states[begin], inside, _seconds(table, begin, end))
    if asked[1] is None:
        _check_limit(window, frames)
    return window


def _default_end(files: SessionFiles, table: Table, begin: int, session: int) -> int:
    """Return the frame at which a window that starts at the frame `begin` ends by default, which is the frame of a checkpoint."""
    if begin:
        assert files.last is not None
        return files.last.frame
    steps = table.get("opt_step", np.zeros(0))
    trained = table["frame"][steps > 0] if len(steps) == len(table["frame"]) else table["frame"]
    ends = [checkpoint.frame for checkpoint in files.checkpoints if checkpoint.frame > 0]
    useful = [frame for frame in ends if len(trained) and frame >= trained[0]] or ends
    if not useful:
        raise UserError(f"session {session} has no checkpoint to compare with")
    return min(useful)


def _checked_end(end: int, begin: int, files: SessionFiles) -> int:
    last: int = max((checkpoint.frame for checkpoint in files.checkpoints), default=0)
    if not begin < end <= last:
        raise UserError(f"--to {end}: expected a frame above {begin:,} and at most {last:,}, the last checkpoint")
    return end


def _seconds(table: Table, begin: int, end: int) -> float | None:
    """Return the training time between two frames in seconds, interpolated between rows, or None if no row contains a time."""
    frame, seconds = table["frame"], table.get("wall_t", np.zeros(0))
    has_time = np.isfinite(seconds) if len(seconds) == len(frame) else np.zeros(len(frame), bool)
    if not has_time.any():
        return None
    at_begin, at_end = np.interp([begin, end], [0.0, *frame[has_time]], [0.0, *seconds[has_time]])
    return float(at_end - at_begin)


def _check_limit(window: Window, frames: int | None) -> None:
    """Raise UserError if a window has more than `frames` frames or, if `frames` is None, took more than LIMIT_SECONDS to train."""
    what = f"frames {window.begin:,} to {window.end:,}"
    if frames is not None:
        if window.frames > frames:
            raise UserError(f"--frames {frames}: the shortest window, {what}, has {window.frames:,} frames; --to FRAME ends it earlier")
    elif window.seconds is not None and window.seconds > LIMIT_SECONDS:
        took = f"{what}, took {format_duration(window.seconds)} of training"
        raise UserError(f"the shortest window, {took}; to train it again, add --frames {window.frames}; for a part of it, --to FRAME")


def recorded_settings(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the machine-dependent settings (backend, matmul and threads) that the last start of the run has recorded."""
    last: dict[str, Any] = next((start for start in reversed(starts) if "threads" in start), {})
    return {key: last[key] for key in ("backend", "matmul", "threads") if key in last}


def is_numbered(which: str) -> bool:
    """Return whether the name of a checkpoint is a frame number."""
    return bool(re.fullmatch(r"\d+", which))


def table_paths(paths: RunPaths, session: int, trial: int) -> list[Path]:
    """Return the paths of the tables with the training rows and the evaluation rows of each policy of a Session."""
    tables = range(session * paths.policies, (session + 1) * paths.policies)
    return [paths.session_df(table, mode, trial) for table in tables for mode in ("train", "eval")]
