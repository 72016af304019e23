"""A spec with a search block, and an executor that replays scripted updates instead of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slm_lab.experiment.execute.executor import Event, Message, Resources, TaskDied
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import TrialState
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.search.stage import SearchTable, Stage
from slm_lab.experiment.run.search.trial_task import TrialJob, TrialOutcome, Update
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec

SEARCH = {"agent": {"algorithm": {"gamma__uniform": [0.9, 0.99]}}}


@pytest.fixture
def search_body(spec_body: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function such as search_body(meta={…}) that makes the body of a spec with 4 trials over gamma."""

    def make(search: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
        meta = {"max_trial": 4} | sections.pop("meta", {})
        return spec_body(meta=meta, **sections) | {"search": search or SEARCH}

    return make


@pytest.fixture
def search_spec(search_body: Callable[..., dict[str, Any]]) -> Callable[..., Spec]:
    return lambda search=None, **sections: load_spec({"small": search_body(search, **sections)}, "small")


@dataclass(eq=False)
class Played:
    """A task with scripted updates."""

    name: str
    job: TrialJob
    updates: deque[Update]
    executor: ScriptedExecutor
    restart: int = 0
    stopped: bool = False

    def send(self, order: Any) -> None: ...

    def stop(self, grace: float) -> None:
        self.stopped = True


@dataclass
class ScriptedExecutor:
    """An executor that yields the updates of `script(trial, start)`, one per call of `events`; stopped trials end at the next one."""

    script: Callable[[int, int], list[Update]]
    started: list[int] = field(default_factory=list)
    playing: list[Played] = field(default_factory=list)

    def start(self, name: str, target: Any, job: TrialJob, resources: Any = None) -> Played:
        self.started.append(job.trial)
        self.playing.append(Played(name, job, deque(self.script(job.trial, self.started.count(job.trial))), self))
        return self.playing[-1]

    def stop(self, grace: float) -> None:
        for task in self.playing:
            task.stop(grace)

    def events(self, seconds: float) -> Iterator[Event]:
        for task in list(self.playing):
            update = task.updates.popleft()
            if task.stopped:
                update = Update(update.frame, outcome=TrialOutcome("stopped"))
            yield Message(task, "update", (update,))
            if update.outcome is not None:
                self.playing.remove(task)
                yield TaskDied(task, "ended with exit code 0", "", 0)


def finishing(metric: float, frame: int = 100) -> list[Update]:
    """Return the updates of a trial with reports at half its frames and at its end."""
    outcome = TrialOutcome("finished", {"final_strength": metric})
    return [Update(frame // 2, ((frame // 2, metric),)), Update(frame, ((frame, metric),)), Update(frame, outcome=outcome)]


def failing(cause: str = "broken", *, retry: bool = True) -> list[Update]:
    return [Update(10, outcome=TrialOutcome("failed", cause=cause, retry=retry))]


@pytest.fixture
def make_stage(tmp_path: Path, search_spec: Callable[..., Spec]) -> Callable[..., tuple[Stage, ScriptedExecutor, StringIO]]:
    """Return a function that makes a stage whose executor replays the script, the executor, and the printed output."""

    def make(script: Callable[[int, int], list[Update]], target: int = 4, **options: Any) -> tuple[Stage, ScriptedExecutor, StringIO]:
        executor, printed = ScriptedExecutor(script), StringIO()
        paths, spec = RunPaths(tmp_path, "small"), search_spec()

        def job(trial: TrialState, slot: int) -> TrialJob:
            return TrialJob(spec, paths, trial.trial, Plan(), "final_strength", 0.0)

        table = SearchTable("final_strength", Console(file=printed, width=200))
        given: dict[str, Any] = {"propose": lambda trial: {"x": trial}, "trials": [], "save": lambda: None, "make_job": job} | options
        stage = Stage(
            target=target,
            executor=executor,
            resources=Resources(),
            table=table,
            concurrent=2,
            max_frame=100,
            **given,  # type: ignore[arg-type]
        )
        return stage, executor, printed

    return make
