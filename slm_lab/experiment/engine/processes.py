"""Sessions as spawned processes: the parent's side.

The children build their env and agent at once, each on its own; the first that is ready lets the run's folder be made,
and each begins when told to. So torch is loaded in the children alone, while the parent has time for other things.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from slm_lab.experiment.engine import OpenRun, Outcome, child
from slm_lab.experiment.engine.spawned import CommonFile, Spawned
from slm_lab.experiment.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.progress import Progress
from slm_lab.lib.heap import common_file
from slm_lab.lib.machine import memory_bytes
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import Spec

_STOP_SECONDS = 60.0
"""So long may a Session take to save itself after Ctrl-C."""
_WORKER_BYTES = 160 * 2**20
"""What a Session's process takes of its own, not shared with the others: measured with A3C of CartPole, so hardly any takes less."""
_TAIL = 20
"""Lines shown of what a killed process printed."""
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
"""Begin of a line that slm_lab logged, whether it died or not."""


class _Child(Spawned):
    """A running Session."""

    def __init__(self, task: child.Task, scratch_dir: Path) -> None:
        self.task, self.index = task, task.index
        self.backend: str | None = None
        """Once it is ready."""
        self.begun = False
        self.outcome: Outcome | None = None
        self.printed = scratch_dir / f"{task.index}_{task.restart}.log"
        super().__init__(f"session {task.index}", child.main, (task,), (self.printed,))

    def death(self) -> str:
        """Why a process ended that has not said so itself, and the last that it printed."""
        with suppress(OSError):
            lines = self.printed.read_text(errors="replace").splitlines()
            return "\n".join([self.how_it_ended(), *[line for line in lines if line and not _LOGGED.match(line)][-_TAIL:]])
        return self.how_it_ended()


class _Crew:
    """The Sessions of a trial: those that wait, those that run, and how the others ended."""

    def __init__(self, spec: Spec, plan: Plan, trial: int, open_run: OpenRun, progress: Progress, stop: Stop, scratch_dir: Path) -> None:
        self.spec, self.plan, self.trial = spec, plan, trial
        self.open_run, self.progress, self.stop, self.scratch_dir = open_run, progress, stop, scratch_dir
        self.waiting = deque(range(spec.meta.max_session))
        self.running: list[_Child] = []
        self.outcomes: list[Outcome] = []
        self.paths: RunPaths | None = None
        self.deadline: float | None = None
        self.common = CommonFile(common_file()) if spec.meta.distributed else None

    def run(self) -> list[Outcome]:
        at_once = self.plan.at_once(self.spec.meta)
        try:
            while self.waiting or self.running:
                if self.stop.requested:
                    self._stop()
                while self.waiting and len(self.running) < at_once:
                    self._start(child.Task(self.spec, self.waiting.popleft(), self.trial, self.plan, self.common))
                wait([item for one in self.running for item in one.waitable], timeout=0.2)
                for one in list(self.running):
                    self._attend(one)
                self._begin()
        finally:
            for one in self.running:
                one.kill()
            if self.common is not None:
                os.close(self.common.fd)
        return self.outcomes

    def _start(self, task: child.Task) -> None:
        self.running.append(_Child(task, self.scratch_dir))

    def _attend(self, one: _Child) -> None:
        ended = not one.process.is_alive()  # asked first: whatever it sent before it ended is then in the pipe
        for message in one.messages():
            self._take(one, *message)
        if ended and one.outcome is None and self._may_restart(one):
            self._restart(one)
        elif ended:
            self._end(one, one.outcome or Outcome(one.index, "failed", one.death()))

    def _may_restart(self, one: _Child) -> bool:
        """The others train one net with it, or wait for it to begin, so a Session that was killed is worth a new process."""
        return self.common is not None and one.task.restart < self.spec.meta.max_restart and not self.stop.requested

    def _restart(self, one: _Child) -> None:
        self.running.remove(one)
        one.kill()
        task = replace(one.task, fresh=self.paths is None, restart=one.task.restart + 1)
        how = one.death().splitlines()[0]
        self.progress.notice(f"Session {one.index} {how}; a new process takes its place ({task.restart} of {self.spec.meta.max_restart})")
        try:
            self._start(task)
        except OSError as error:  # no memory, no process: the others go on all the same
            self.outcomes.append(Outcome(one.index, "failed", f"{one.death()}\nno new process could be started: {error.strerror}"))
            self.progress.ended(one.index, "failed", self.outcomes[-1].detail)

    def _take(self, one: _Child, kind: str, *content: Any) -> None:
        match kind:
            case "ready":
                one.backend = content[0]
            case "progress":
                self.progress.update(*content)
            case "notice":
                self.progress.notice(content[0])
            case "done":
                one.outcome = Outcome(one.index, "stopped" if content[0] else "done")
            case "user_error" if self.paths is None:
                raise content[0]
            case "user_error" | "failed":
                one.outcome = Outcome(one.index, "failed", str(content[0]))

    def _begin(self) -> None:
        """Let those begin that are ready; those that train one net, together."""
        ready = [one for one in self.running if one.backend is not None and not one.begun]
        if self.common is not None and self.paths is None and len(ready) < len(self.running):
            return
        for one in ready:
            self.paths = self.paths or self.open_run(str(one.backend))
            one.begun, one.printed = True, self.paths.session_log(one.index, self.trial)
            one.send(self.paths)

    def _end(self, one: _Child, outcome: Outcome) -> None:
        self.running.remove(one)
        one.kill()
        self.outcomes.append(outcome)
        self.progress.ended(outcome.index, outcome.status, outcome.detail)

    def _stop(self) -> None:
        """Let those that have begun save themselves; the others have nothing to save."""
        self.waiting.clear()
        if self.deadline is None:
            self.deadline = time.monotonic() + _STOP_SECONDS
            if any(one.begun for one in self.running):
                self.progress.notice("stopping: every Session saves itself (Ctrl-C again: at once, without)")
            for one in list(self.running):
                if one.begun:
                    one.send("stop")
                else:
                    self._end(one, Outcome(one.index, "stopped"))
        elif time.monotonic() > self.deadline:
            for one in list(self.running):
                self._end(one, Outcome(one.index, "failed", f"did not end within {_STOP_SECONDS:.0f} seconds"))


def run_processes(spec: Spec, plan: Plan, trial: int, open_run: OpenRun, progress: Progress, stop: Stop) -> list[Outcome]:
    """Run the Sessions of a trial, so many at a time as the plan says, and return how each ended.

    Raises SpecError or UserError where the spec cannot be built or the run not be opened. No process outlives the call.
    """
    if spec.meta.distributed:
        _check_memory(spec)
    with tempfile.TemporaryDirectory(prefix="slm_lab_") as scratch_dir:
        return _Crew(spec, plan, trial, open_run, progress, stop, Path(scratch_dir)).run()


def _check_memory(spec: Spec) -> None:
    """Raise SpecError where the processes of Sessions that train one net, which all run at once, do not fit this machine."""
    sessions, there = spec.meta.max_session, memory_bytes()
    if sessions * _WORKER_BYTES > there:
        each, has, fit = _WORKER_BYTES / 2**20, there / 2**30, there // _WORKER_BYTES
        message = (
            f"{sessions} Sessions at once, for meta.distributed, take at least {each:.0f} MiB each; {fit} fit this machine's {has:,.1f} GiB"
        )
        raise SpecError(spec.name, [Problem("meta.max_session", message)])
