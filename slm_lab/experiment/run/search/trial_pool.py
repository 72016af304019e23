"""Ray actors that run trials.

Ray starts and watches the processes and gives each its share of the GPUs. The search itself decides about trials, with Tune's schedulers
(schedule.py), instead of Tune's `Tuner`, for three reasons. At its end the Tuner kills an actor after 15 s, while Sessions may need 60 s to
save themselves and then have to be analysed. A restored Tuner continues the trials that were running from Tune's own checkpoints, not by
Trial.resume, and asks the searcher again for trials that began after its last save. And it accepts no search algorithm together with
population-based training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slm_lab.experiment.execute.ray.remote import LOST_NODE, died
from slm_lab.experiment.run.search.trial_worker import Outcome, TrialJob, TrialWorker, Update

_CLOSE_SECONDS = 10.0


class TrialPool:
    """Runs up to `size` trials at a time, each in an actor that runs one after another.

    Args:
        cores, gpus: of each actor.
        server: fork server from which the Sessions' processes come, see process.server.shared_server; {}: each actor has its own.
    """

    def __init__(self, size: int, cores: float, gpus: float, server: Mapping[str, Any]) -> None:
        import ray

        self._ray: Any = ray
        # an actor that dies is replaced here; its trial is retried
        self._remote: Any = self._ray.remote(num_cpus=cores, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(TrialWorker)
        self._arguments = (server, Path(os.getcwd()))
        self._idle: list[Any] = [self._remote.remote(*self._arguments) for _ in range(size)]
        self._running: dict[int, tuple[Any, Any, TrialJob]] = {}
        """Trial → actor, what it will return, job."""
        self._to_stop: set[int] = set()

    @property
    def idle(self) -> int:
        """Number of trials that can be started."""
        return len(self._idle)

    @property
    def running(self) -> list[int]:
        return list(self._running)

    def start(self, job: TrialJob) -> None:
        """Start a trial in an idle actor."""
        actor = self._idle.pop(0)
        actor.begin.remote(job)
        self._running[job.trial] = (actor, actor.update.remote(), job)

    def stop(self, trial: int) -> None:
        """Request that a running trial ends early, saved and analysed."""
        self._to_stop.add(trial)

    def events(self, seconds: float) -> Iterator[tuple[TrialJob, Update]]:
        """Yield what has happened, after waiting for at most `seconds`. The death of an actor is a failure of its trial."""
        pending = {future: trial for trial, (_, future, _) in self._running.items()}
        if not pending:
            return
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=seconds)
        for future in ready:
            trial = pending[future]
            actor, _, job = self._running[trial]
            update, replace = self._result(future)
            if update.outcome is None:
                self._running[trial] = (actor, actor.update.remote(trial in self._to_stop), job)
            else:
                del self._running[trial]
                self._to_stop.discard(trial)
                self._idle.append(self._remote.remote(*self._arguments) if replace else actor)
            yield job, update

    def _result(self, future: Any) -> tuple[Update, bool]:
        """Return an update, and whether the actor died instead of sending one."""
        try:
            update: Update = self._ray.get(future)
        except self._ray.exceptions.RayActorError as error:
            reason = died(error)
            lost = reason == LOST_NODE
            cause = reason if lost else "the process that ran the trial died"
            return Update(0, outcome=Outcome("failed", cause=cause, lost=lost)), True
        return update, False

    def close(self) -> None:
        """End all actors; running trials are interrupted, and their Sessions save themselves."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.wait([actor.close.remote() for actor in self._idle], num_returns=len(self._idle), timeout=_CLOSE_SECONDS)
        for actor in [*self._idle, *(actor for actor, _, _ in self._running.values())]:
            self._ray.kill(actor)
