"""Experiment trackers (meta.track): send the rows of a Session's tables to tracker processes (see slm_lab.experiment.track).

Each tracker has a separate process for each table. The library of a tracker does not affect the random number generators, threads and
signal handlers of a Session, and a tracker that fails or blocks cannot stop the Session. Rows that a tracker process has not read yet are
kept in the Session's process. A tracker is switched off with a notice if the tracker fails, or if it does not accept a row within
_HANG_SECONDS. After the last row, a tracker process may continue to run for at most END_SECONDS. `wait_for_trackers` waits until all
tracker processes have ended.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import slm_lab
from slm_lab.experiment.events import Row, Status
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.lib.log import notice
from slm_lab.lib.system import has_feature
from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.report import Problem, SpecError

with suppress(ImportError):  # on Windows, where check_trackers_installed refuses trackers
    import fcntl

MODULE = "slm_lab.experiment.track.tracker_process"
"""Name of the module that each tracker process runs."""
_HANG_SECONDS = 120.0
"""Maximum time in seconds in which a tracker must accept a row. A slower tracker is switched off."""
END_SECONDS = 120.0
"""Maximum time in seconds that a tracker process may run after the last row, for example to finish an upload."""
_WRITE_SECONDS = 5.0
"""Maximum time in seconds that a Session waits at its end for a tracker process that is still starting and has not read the last rows."""
_SHOW_SECONDS = 2.0
"""Time in seconds after which `wait_for_trackers` prints the name of the tracker that is still running."""
_KINDS = {
    "return": ("total_reward", "total_reward_ma", "return_new", "current_return", "current_return_se", "worker_reward"),
    "episode": ("epi", "epi_new", "current_epi"),
    "time": ("wall_t", "fps", "t", "opt_step", "global_frame"),
    "schedule": ("lr", "explore_var", "entropy_coef"),
}
_KIND = {column: kind for kind, columns in _KINDS.items() for column in columns}
"""Column of a table → kind of the column. Columns that are not in _KIND, such as loss and entropy, have the kind "loss"."""
_OF_EVALUATION = ("return", "episode")
"""Kinds of the columns of evaluation rows that are sent to trackers. The other columns of evaluation rows repeat values of training
rows."""


def check_trackers_installed(spec_name: str, meta: MetaSpec) -> None:
    """Raise SpecError if the library of a tracker in meta.track is not installed, or if trackers are used on a system without file locks.

    The SpecError contains a problem for each tracker whose library is not installed.
    """
    if meta.track and not has_feature("fcntl"):
        raise SpecError(spec_name, [Problem("meta.track", "requires Linux or macOS; use []")])
    missing = [(index, name) for index, name in enumerate(meta.track) if find_spec(name) is None]
    if missing:
        needs = "needs the package {0}: pip install 'slm-lab[{0}]'"
        raise SpecError(spec_name, [Problem(f"meta.track[{index}]", needs.format(name)) for index, name in missing])


def tracker_values(row: Row) -> dict[str, float]:
    """Return the finite values of a row as a dict: tag → value. Tags are for example "return/total_reward", "loss/entropy" or
    "eval/total_reward"."""
    tags = {}
    for column, value in {**row.values, **row.scalars}.items():
        kind = "info" if column.startswith("info_") else _KIND.get(column, "loss")
        if column == "frame" or value is None or not math.isfinite(value):
            continue
        if row.mode == "train":
            tags[f"{kind}/{column}"] = value
        elif kind in _OF_EVALUATION:
            tags[f"eval/{column}"] = value
    return tags


def tracker_step(row: Row) -> int:
    """Return the step under which trackers record a row: the frame of the row or, with meta.distributed, the total frame of all
    Sessions."""
    return int(row.values.get("global_frame") or row.values["frame"] or 0)


class Trackers:
    """The experiment trackers of one table. The constructor starts a process for each tracker in `names`."""

    def __init__(self, names: Iterable[str], paths: RunPaths, table: int, trial: int = 0) -> None:
        self.links = [TrackerLink(name, paths, table, trial) for name in dict.fromkeys(names)]

    def add_row(self, row: Row) -> None:
        """Send a row to each tracker without waiting."""
        if self.links:
            message = {"step": tracker_step(row), "mode": row.mode, "values": tracker_values(row)}
            for link in self.links:
                link.send(message)

    def end(self, status: Status) -> None:
        """Send the status with which the Session ended to each tracker, and close the connection to the tracker."""
        for link in self.links:
            link.end(status)


class TrackerLink:
    """The connection of a Session to the process of one tracker for one table."""

    def __init__(self, name: str, paths: RunPaths, table: int, trial: int) -> None:
        self.name, self.log = name, paths.tracker(table, name, "log", trial)
        self._rows, self._read = bytearray(), bytearray()
        self._waiting: deque[float] = deque()
        """Send times (time.monotonic) of the rows that the tracker has not accepted yet."""
        self._process: subprocess.Popen[bytes] | None = None
        description = {"tracker": name, "root": str(paths.root.absolute()), "spec": paths.spec_name, "table": table, "trial": trial}
        try:
            self._start({**description, "policies": paths.policies})
        except OSError as error:
            self._switch_off(f"its process cannot be started: {error.strerror or error}")

    def _start(self, description: Mapping[str, Any]) -> None:
        """Start the tracker process, and send the description of the table to the process. Raises OSError if the process cannot be
        started."""
        package = str(Path(slm_lab.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with self.log.open("ab") as log, self.log.open("ab") as lock:
            locked = lock.fileno()
            fcntl.flock(locked, fcntl.LOCK_SH)  # locked before the process runs, so that `wait_for_trackers` finds it
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=(locked,),
                start_new_session=True,  # so that a signal to this process or its group does not reach the tracker
            )
        for fd in self._fds:
            os.set_blocking(fd, False)
        self._write({**description, "lock": locked, "file": str(self.log.absolute().with_suffix(".json")), "limit": END_SECONDS})

    @property
    def _fds(self) -> tuple[int, int]:
        """The file descriptors of the pipes to and from the running tracker process."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a row to the tracker. If the tracker has failed, or has not accepted an earlier row for too long, the tracker is switched
        off instead."""
        self._receive()
        if self._waiting and time.monotonic() - self._waiting[0] > _HANG_SECONDS:
            self._switch_off(f"it has not taken a row for {_HANG_SECONDS:g} s")
        if self._process is not None:
            self._waiting.append(time.monotonic())
            self._write(message)

    def end(self, status: Status) -> None:
        """Send the status with which the Session ended, and close the connection. After `end`, the tracker process continues to run without
        the Session."""
        self._receive()
        if self._process is not None:
            self._write({"end": status})
            deadline = time.monotonic() + _WRITE_SECONDS
            while self._rows and time.monotonic() < deadline:
                select.select([], [self._fds[0]], [], 0.1)
                self._write()
        self._close()

    def _write(self, message: Mapping[str, Any] | None = None) -> None:
        """Write to the pipe as many bytes of the unsent rows and of `message` as the pipe accepts without waiting."""
        if message is not None:
            self._rows += json.dumps(message).encode() + b"\n"
        try:
            while self._rows:
                del self._rows[: os.write(self._fds[0], self._rows)]
        except BlockingIOError:
            pass
        except OSError:  # the process has died, which _receive reports
            self._rows.clear()

    def _receive(self) -> None:
        """Read the output of the tracker process: an empty line for each accepted row, and a line with the reason if the tracker has
        failed."""
        ended = False
        with suppress(BlockingIOError):
            while self._process is not None and not ended:
                data = os.read(self._fds[1], 2**16)
                self._read += data
                ended = not data
        *lines, rest = self._read.split(b"\n")
        self._read = bytearray(rest)
        for line in lines:
            if line:
                self._switch_off(line.decode(errors="replace"))
                return
            self._waiting.popleft()
        if ended:
            self._switch_off("its process has died")

    def _switch_off(self, reason: str) -> None:
        self._waiting.clear()
        self._close()
        notice(switched_off_message(self.name, reason, self.log))

    def _close(self) -> None:
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                with suppress(OSError):
                    stream.close()
            self._process.wait()  # takes little time: `_process` only forks the process that runs the tracker, and exits
            self._process = None


def switched_off_message(name: str, reason: str, log: Path) -> str:
    """Return the text of the notice that a tracker was switched off because of a failure."""
    return f"{name} (meta.track) is switched off: {reason}; the run continues; see {log.parent.name}/{log.name}"


def wait_for_trackers(paths: RunPaths, trial: int, names: Sequence[str], tables: Iterable[int]) -> None:
    """Wait until all tracker processes of a trial have ended, at most about END_SECONDS.

    A notice is printed for each tracker that failed after its last row.
    """
    begin, said = time.monotonic(), False
    for name, table in product(dict.fromkeys(names), tables):
        log = paths.tracker(table, name, "log", trial)
        while is_running(log) and time.monotonic() < begin + END_SECONDS + _SHOW_SECONDS:
            if not said and time.monotonic() > begin + _SHOW_SECONDS:
                notice(f"waiting for {name} (meta.track) to finish, at most {END_SECONDS:.0f} s")
                said = True
            time.sleep(0.05)
        if (reason := read_state(log.with_suffix(".json")).get("failed")) is not None:
            notice(switched_off_message(name, reason, log))


def read_state(file: Path) -> dict[str, Any]:
    """Return the saved state of a tracker: the id of the tracker's run, the last step of each mode, and the reason if the tracker failed.

    Returns {} if the file does not exist or cannot be read.
    """
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def is_running(log: Path) -> bool:
    """Return whether the tracker process with the log file `log` is running.

    A tracker process holds a shared lock (flock) on its log file while the process runs.
    """
    try:
        with log.open("rb") as opened:
            fcntl.flock(opened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def acquire_tracker_lock(fd: int | None) -> None:
    """Wait for an exclusive lock, and hold the lock until this process ends. The function uses lockf, which is independent of flock.

    While the process of an earlier start of the run is still uploading, that process holds the lock. This function returns after
    END_SECONDS at the latest, even if the lock was not acquired, and returns immediately on a file system without locks.

    Args: fd: file descriptor of the lock file. If `fd` is None, this function does not wait.
    """
    deadline = time.monotonic() + END_SECONDS
    while fd is not None and time.monotonic() < deadline:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # another process holds the lock; POSIX allows both EAGAIN and EACCES
            time.sleep(0.1)
        except OSError:  # such as ENOLCK
            return
        else:
            return
