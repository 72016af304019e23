"""The process that runs one tracker for one table of metrics. See files/trackers.py for the session's side of the communication.

The process reads from stdin one line that describes the table, one line for each row, and one line with the final status of the session.
The process writes to stdout an empty line for each row that the tracker has accepted, or a line with the reason of a failure. Output of the
tracker's library is appended to a log file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from slm_lab.lib.system import has_feature
from slm_lab.lib.text import first_line


def main() -> None:
    """Continue as a background process that is detached from its parent, and send rows to the tracker until the session ends."""
    if has_feature("fork") and os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    tracking = _TrackerLoop(replies)
    threading.Thread(target=tracking.read, args=(sys.stdin.buffer,), daemon=True).start()
    code = tracking.run()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk is full
            stream.flush()
    os._exit(code)  # without waiting for threads of the library


class _TrackerLoop:
    """Object that passes the messages of a session to the adapter of a tracker.

    Args: replies: file descriptor of the pipe to the session.
    """

    def __init__(self, replies: int) -> None:
        self.replies = replies
        self.messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.file = Path()
        self.state: dict[str, Any] = {}
        """State of the tracked run that is saved in `file` (see `files.trackers.read_state`)."""

    def read(self, lines: Iterable[bytes]) -> None:
        """Read the messages of the session and queue them until the session has ended. If the tracker's library blocks after the end of the
        session, end this process after a time limit."""
        limit, message = 0.0, dict[str, Any]()
        for line in lines:
            with suppress(ValueError):  # an incomplete line of a killed process
                message = json.loads(line)
                if "file" in message:
                    self.file, limit = Path(message.pop("file")), message.pop("limit")
                self.messages.put(message)
        if "end" not in message:  # the process of the Session was killed, or the Session has switched off the tracker
            self.messages.put({"end": "failed"})
        time.sleep(limit)
        self._report_failure(f"it did not finish within {limit:g} s")
        os._exit(1)

    def run(self) -> int:
        """Send the queued messages to the tracker until the session ends. Return the exit code of this process."""
        try:
            self._track(**self.messages.get())
        except BaseException as error:  # also a SystemExit of the library
            traceback.print_exc()
            self._report_failure(_one_line_error(error))
            return 1
        return 0

    def _track(self, tracker: str, root: str, spec: str, table: int, trial: int, policies: int, lock: int | None) -> None:
        from slm_lab.experiment.files.paths import RunPaths
        from slm_lab.experiment.files.trackers import acquire_tracker_lock, read_state
        from slm_lab.experiment.track.adapters import ADAPTERS, TrackedRun
        from slm_lab.experiment.track.summary import summary

        paths = RunPaths(Path(root), spec)
        paths.__dict__["policies"] = policies
        acquire_tracker_lock(lock)
        self.state = {key: value for key, value in read_state(self.file).items() if key != "failed"}
        adapter = ADAPTERS[tracker]()
        self.state["id"] = adapter.start(TrackedRun(paths, trial, table), self.state.get("id"))
        self._save()
        while "end" not in (message := self.messages.get()):
            step, mode, values = message["step"], message["mode"], message["values"]
            if step > self._steps.get(mode, -1):
                adapter.log(step, values)
                self._steps[mode] = step
                self._save()
            self._reply("")
        adapter.end(message["end"], summary(paths, trial, table))

    @property
    def _steps(self) -> dict[str, int]:
        """Last tracked step of each mode ("train" and "eval"). Rows that a continued run repeats, because they follow its checkpoint, are
        not tracked again."""
        steps: dict[str, int] = self.state.setdefault("steps", {})
        return steps

    def _report_failure(self, reason: str) -> None:
        self.state["failed"] = reason
        with suppress(OSError):
            self._save()
        self._reply(reason)

    def _save(self) -> None:
        from slm_lab.lib.files import replace_file

        replace_file(self.file, json.dumps(self.state).encode())

    def _reply(self, text: str) -> None:
        with suppress(OSError):  # the Session has ended
            os.write(self.replies, f"{text}\n".encode())


def _one_line_error(error: BaseException) -> str:
    """Return one line of text with the type of an error and the first line of its message."""
    first = first_line(str(error))
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


if __name__ == "__main__":
    main()
