"""A spec with a search block, and a pool that plays trials by a script instead of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.search.search_state import TrialState
from slm_lab.experiment.run.search.search_table import SearchTable
from slm_lab.experiment.run.search.stage import Stage
from slm_lab.experiment.run.search.trial_worker import Outcome, TrialJob, Update
from slm_lab.spec.loader import load_spec
from slm_lab.spec.spec import Spec

SEARCH = {"agent": {"algorithm": {"gamma__uniform": [0.9, 0.99]}}}


@pytest.fixture
def search_body(spec_body: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """search_body(meta={…}): the body of a spec whose gamma is searched in 4 trials."""

    def make(search: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
        meta = {"max_trial": 4} | sections.pop("meta", {})
        return spec_body(meta=meta, **sections) | {"search": search or SEARCH}

    return make


@pytest.fixture
def search_spec(search_body: Callable[..., dict[str, Any]]) -> Callable[..., Spec]:
    return lambda search=None, **sections: load_spec({"small": search_body(search, **sections)}, "small")


@dataclass
class FakePool:
    """Plays the updates that `script(trial, start)` returns, one each time it is asked; stopped trials end with their next update."""

    script: Callable[[int, int], list[Update]]
    size: int = 2
    started: list[int] = field(default_factory=list)
    playing: dict[int, tuple[TrialJob, deque[Update]]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)

    @property
    def idle(self) -> int:
        return self.size - len(self.playing)

    @property
    def running(self) -> list[int]:
        return list(self.playing)

    def start(self, job: TrialJob) -> None:
        assert self.idle
        self.started.append(job.trial)
        self.playing[job.trial] = (job, deque(self.script(job.trial, self.started.count(job.trial))))

    def stop(self, trial: int) -> None:
        self.stopped.add(trial)

    def events(self, seconds: float) -> Iterator[tuple[TrialJob, Update]]:
        for trial, (job, updates) in list(self.playing.items()):
            update = updates.popleft()
            if trial in self.stopped:
                self.stopped.discard(trial)
                update = Update(update.frame, outcome=Outcome("stopped"))
            if update.outcome is not None:
                del self.playing[trial]
            yield job, update


def finishing(metric: float, frame: int = 100) -> list[Update]:
    """A trial with reports at half its frames and at its end."""
    outcome = Outcome("finished", {"final_strength": metric})
    return [Update(frame // 2, ((frame // 2, metric),)), Update(frame, ((frame, metric),)), Update(frame, outcome=outcome)]


def failing(cause: str = "broken", *, retry: bool = True) -> list[Update]:
    return [Update(10, outcome=Outcome("failed", cause=cause, retry=retry))]


@pytest.fixture
def make_stage(tmp_path: Path, search_spec: Callable[..., Spec]) -> Callable[..., tuple[Stage, FakePool, StringIO]]:
    """make_stage(script, target, …): a stage whose pool plays the script, the pool, and what is printed."""

    def make(script: Callable[[int, int], list[Update]], target: int = 4, **options: Any) -> tuple[Stage, FakePool, StringIO]:
        pool, printed = FakePool(script), StringIO()
        paths, spec = RunPaths(tmp_path, "small"), search_spec()

        def job(trial: TrialState) -> TrialJob:
            return TrialJob(spec, paths, trial.trial, Plan(), "final_strength", 0.0)

        table = SearchTable("final_strength", Console(file=printed, width=200))
        given: dict[str, Any] = {"propose": lambda trial: {"x": trial}, "trials": [], "save": lambda: None, "make_job": job} | options
        return Stage(target=target, pool=pool, table=table, concurrent=2, max_frame=100, **given), pool, printed  # type: ignore[arg-type]

    return make
