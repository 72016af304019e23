"""Commands of slm_lab that start in milliseconds: each is a fork of one server process that has imported everything.

`Launcher` starts the server process, which runs this module as a program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from tests.blank import BlankRenderer

MARK = "SLM_LAB_TEST"
"""Environment variable that identifies all processes of a command."""
_LOADED = (
    "gymnasium",
    "torch",
    "slm_lab.cli.run",
    "slm_lab.experiment.report.analyze",
    "slm_lab.experiment.run.trial",
)
_LIMIT = 240.0
"""Seconds after which a command that still runs is an error; long enough for a busy machine."""


class Running:
    """Command that was started.

    Attributes:
        pid: id of the process that reads the command line.
        output: file with its stdout and stderr.
    """

    def __init__(self, launcher: Launcher, number: int, pid: int, output: Path) -> None:
        self.launcher, self.number, self.pid, self.output = launcher, number, pid, output
        self.status: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.status is None:
            self.status = self.launcher.ask(poll=self.pid)
        return self.status

    def wait(self, seconds: float = _LIMIT) -> int:
        """Wait until the process has ended; return its exit code."""
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < end, f"still running:\n{self.text}"
            time.sleep(0.01)
        return status

    @property
    def text(self) -> str:
        """Output of the command so far."""
        return self.output.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Return the ids of the running processes that the command has started, directly or indirectly."""
        return _processes(f"{self.launcher.name}_{self.number}_")

    def kill(self, *, group: bool = False) -> None:
        """Kill the process (SIGKILL) and, with `group`, all processes that it has started."""
        for pid in [self.pid, *(self.processes() if group else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        while group and (left := self.processes()):  # processes that were being started
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Launcher:
    """Server process that forks itself for each command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.count = folder, f"{os.getpid()}_{time.monotonic_ns()}", 0
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )

    def ask(self, **request: Any) -> Any:
        """Send a request to the server process and return its answer."""
        to, answers = self.process.stdin, self.process.stdout
        to.write(json.dumps(request) + "\n")
        to.flush()
        return json.loads(answers.readline())

    def start(self, words: Sequence[object], cwd: Path) -> Running:
        """Start a command in a folder."""
        self.count += 1
        output = self.folder / f"output_{self.count}"
        environ = {MARK: f"{self.name}_{self.count}_", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        pid = self.ask(words=[str(word) for word in words], cwd=str(cwd), output=str(output), environ=environ)
        return Running(self, self.count, pid, output)

    def run(self, words: Sequence[object], cwd: Path) -> tuple[int, str]:
        """Run a command in a folder; return its exit code and its output."""
        running = self.start(words, cwd)
        return running.wait(), running.text

    def kill_commands(self) -> None:
        """Kill all running commands and the processes that they have started."""
        self.ask(kill=True)
        while left := _processes(f"{self.name}_"):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the server process and all running commands."""
        self.kill_commands()
        self.process.stdin.close()
        self.process.wait(30)


def _processes(mark: str) -> list[int]:
    """Return the ids of processes, except zombies, that were started by commands whose MARK begins with `mark`.

    A command itself is not included: /proc shows the environment with which a program began, and a command is a fork.
    """
    begin, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            marked = entry.name.isdecimal() and any(one.startswith(begin) for one in (entry / "environ").read_bytes().split(b"\0"))
            if marked and "State:\tZ" not in (entry / "status").read_text():
                found.append(int(entry.name))
    return found


def _serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until their end: fork a process for a command, poll one, or kill all."""
    for name in _LOADED:
        import_module(name)
    import_module("slm_lab.experiment.report.writer").PNGRenderer = BlankRenderer  # type: ignore[attr-defined]
    left: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if "kill" in request:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            left, answer = set(), None
        elif "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            left -= {pid}
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(_command(request))
            left.add(answer)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def _command(request: dict[str, Any]) -> int:
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["environ"])
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = ["slm-lab", *request["words"]]
    from slm_lab.cli import main

    code = 1
    try:
        code = main(request["words"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import atexit

        sys.stdout.flush()
        atexit._run_exitfuncs()
    return code


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.set_inheritable(answers.fileno(), False)
    _serve(sys.stdin, answers)
