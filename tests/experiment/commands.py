"""Start commands and scripts in separate processes, and inspect their processes and files while they run."""

from __future__ import annotations

import atexit
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import slm_lab
from slm_lab.experiment.files.paths import RunPaths, runs_of_spec
from slm_lab.experiment.run.trial import Trial, TrialResult

Deed = Callable[[Trial], None]
ROOT = Path(slm_lab.__file__).parent.parent
PATIENCE = 150.0
"""Time limit in seconds for Sessions to begin, even on a busy machine."""


class Command:
    """Start run_lab.py or a script in a separate process group; all its processes are found by a mark in their environment."""

    def __init__(self, folder: Path, body: dict[str, Any], **environ: str) -> None:
        self.folder = folder
        self.spec_file = folder / "spec.json"
        self.spec_file.write_text(json.dumps({"small": body}))
        self.temp = Path(tempfile.mkdtemp(prefix="slm_"))  # short, for the fork server's socket
        atexit.register(shutil.rmtree, self.temp, ignore_errors=True)
        self.mark = f"SLM_LAB_TEST={folder}"
        self.environment = {
            **os.environ,
            "SLM_LAB_TEST": str(folder),
            "PYTHONPATH": f"{folder}:{ROOT}",
            "TMPDIR": str(self.temp),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **environ,
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Train the spec with blank pictures."""
        return self._start(
            [
                str(ROOT / "tests" / "experiment" / "blank_run.py"),
                str(self.spec_file),
                "small",
                "train",
                "--data-dir",
                str(self.folder / "data"),
                *words,
            ]
        )

    def script(self, code: str) -> subprocess.Popen[str]:
        (self.folder / "script.py").write_text(code)
        return self._start(["script.py"])

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def paths(self) -> RunPaths:
        """Return the paths of the latest run."""
        return RunPaths(runs_of_spec(self.data, "small")[-1], "small")

    def has_rows(self, sessions: int) -> Callable[[], bool]:
        """Return a function that tells whether each of the first `sessions` Sessions has written a row."""
        return lambda: bool(runs_of_spec(self.data, "small")) and all(frame_of(self.paths, index) > 0 for index in range(sessions))

    def processes(self) -> list[int]:
        """Return the processes of this command that are running."""
        return processes_with(self.mark)

    def leaves_nothing(self, seconds: float = 10.0) -> None:
        """Check that no process and no temporary file is left."""
        until(lambda: self.processes() == [] and list(self.temp.iterdir()) == [], seconds=seconds)


def processes_with(variable: str) -> list[int]:
    """Return the processes (without zombies) that have NAME=value in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            marked = variable.encode() in (entry / "environ").read_bytes().split(b"\0")
            if marked and "State:\tZ" not in (entry / "status").read_text():
                found.append(int(entry.name))
    return found


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = PATIENCE) -> None:
    """Wait until `condition` holds; fail if `process` ends before that."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether a process is running."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def gone(*pids: int, seconds: float = 10.0) -> bool:
    """Return whether the processes have ended, after waiting up to `seconds` for them."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


def number_in(path: Path) -> int:
    """Wait until another process has written a number to the file, and return the number."""
    until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table without its time columns."""
    with path.open() as file:
        return [{key: value for key, value in row.items() if key not in ("wall_t", "fps")} for row in csv.DictReader(file)]


def frame_of(paths: RunPaths | None, index: int) -> int:
    """Return the frame of the last row of a table that is being written, or 0 if there is no row."""
    if paths is None or not paths.session_df(index).exists():
        return 0
    lines = paths.session_df(index).read_bytes().split(b"\n")[1:-1]
    return int(lines[-1].split(b",")[0]) if lines else 0


def session_processes(paths: RunPaths | None) -> dict[int, int]:
    """Return a dict from the index of each running Session to its process, found by the log file that it prints to."""
    found: dict[int, int] = {}
    if paths is None:
        return found
    logs = {str(paths.session_log(index).absolute()): index for index in range(16)}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (index := logs.get(os.readlink(entry / "fd" / "1"))) is not None:
                pid = int(entry.name)
                if alive(pid) and os.getpgid(pid) == pid:
                    found[index] = pid
    return found


def run_while(trial: Trial, *deeds: Deed) -> TrialResult:
    """Run the trial in this process while each of `deeds` runs in a thread."""
    with ThreadPoolExecutor(max(1, len(deeds))) as pool:
        done = [pool.submit(deed, trial) for deed in deeds]
        try:
            return trial.run()
        finally:
            for one in done:
                one.result()
