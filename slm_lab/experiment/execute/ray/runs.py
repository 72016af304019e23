"""The runs of a study, each in a process on some node of a Ray cluster: what process.supervisor does for those of one machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.execute.local.child import Target, print_to_fd
from slm_lab.experiment.execute.local.heartbeat import Heartbeat
from slm_lab.experiment.execute.ray.remote import LOST_NODE, died
from slm_lab.experiment.plan import Stop


class RunContext:
    """What the target of a run works with, as process.child.ChildContext on one machine."""

    def __init__(self, name: str) -> None:
        self.name, self.restart, self.stop, self.heartbeat = name, 0, Stop(), Heartbeat()
        self.beat = self.heartbeat.beat
        self.sent: list[tuple[str, tuple[Any, ...]]] = []

    def send(self, kind: str, *content: Any) -> None:
        """Keep a message until the run has ended."""
        self.sent.append((kind, content))

    def print_to(self, path: Path) -> None:
        """Append the output of this process to `path` from now on."""
        print_to_fd(os.open(path.absolute(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))


class RunWorker:
    """Runs one target. `stop` is called from another thread meanwhile. This class does not import ray."""

    def __init__(self, name: str, folder: Path) -> None:
        self.context = RunContext(name)
        with suppress(OSError):  # this node has no such folder
            os.chdir(folder)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))

    def run(self, target: Target, job: Any) -> list[tuple[str, tuple[Any, ...]]]:
        """Run the target to its end; return its messages."""
        target(self.context, job)
        return self.context.sent

    def stop(self) -> None:
        """Let the run save itself and end."""
        self.context.stop.requested = True


class ClusterRun:
    """A run in a process on some node."""

    def __init__(self, name: str, actor: Any, future: Any) -> None:
        self.name, self.actor, self.future = name, actor, future


class Sent(NamedTuple):
    """A message of a run, when it has ended."""

    child: ClusterRun
    kind: str
    content: tuple[Any, ...]


class Ended(NamedTuple):
    """The process of a run has ended. With a lost node the run itself has not failed."""

    child: ClusterRun
    reason: str
    lost: bool


class ClusterRuns:
    """Starts runs on the nodes of the cluster that this process is connected to.

    Args: cores, gpus: of each run.
    """

    def __init__(self, cores: float, gpus: float) -> None:
        import ray

        self._ray: Any = ray
        remote = self._ray.remote(
            num_cpus=cores, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD", concurrency_groups={"control": 1}
        )
        self._worker: Any = remote(RunWorker)
        self._runs: list[ClusterRun] = []
        self._deadline: float | None = None

    def start(self, name: str, target: Target, job: Any) -> ClusterRun:
        """Start a run as soon as a node has the cores."""
        actor = self._worker.remote(name, Path(os.getcwd()))
        self._runs.append(ClusterRun(name, actor, actor.run.remote(target, job)))
        return self._runs[-1]

    def events(self, seconds: float) -> Iterator[Sent | Ended]:
        """Yield what has happened, after waiting for at most `seconds`."""
        if not self._runs:
            return
        pending = {run.future: run for run in self._runs}
        done, _ = self._ray.wait(list(pending), num_returns=1, timeout=seconds)
        for future in done:
            run = pending[future]
            try:
                messages = self._ray.get(future)
            except self._ray.exceptions.RayTaskError as error:
                yield from self._end(run, str(error.cause), lost=False)
            except self._ray.exceptions.RayError as error:
                reason = died(error)
                yield from self._end(run, reason, lost=reason == LOST_NODE)
            else:
                yield from (Sent(run, kind, content) for kind, content in messages)
                yield from self._end(run, "ended", lost=False)
        if self._deadline is not None and time.monotonic() > self._deadline:
            for run in list(self._runs):
                yield from self._end(run, "did not end in time", lost=False)

    def _end(self, run: ClusterRun, reason: str, *, lost: bool) -> Iterator[Ended]:
        self._ray.kill(run.actor)
        self._runs.remove(run)
        yield Ended(run, reason, lost)

    def stop(self, seconds: float) -> None:
        """Let all runs save themselves; those that have not ended after `seconds` are killed."""
        self._deadline = time.monotonic() + seconds
        for run in self._runs:
            run.actor.stop.options(concurrency_group="control").remote()

    def close(self) -> None:
        """Kill the runs that have not ended."""
        for run in self._runs:
            self._ray.kill(run.actor)
        self._runs.clear()
