"""What an engine is given: the Sessions of a trial, and where their events go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slm_lab.experiment.events import Emit, End
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.spec.models.spec import Spec

OpenRun = Callable[[Mapping[str, str | int]], RunPaths]
"""open_run(Session.choices): make the run's folder, once the first Session has shown that the spec can be built."""
STOP_SECONDS = 60.0
"""Time that a Session has to save itself after Ctrl-C."""
SAVING = "saving checkpoints (Ctrl-C again quits without saving)"


@dataclass(frozen=True)
class Job:
    """The Sessions of a trial and what they need to run."""

    spec: Spec
    plan: Plan
    trial: int
    open_run: OpenRun
    emit: Emit
    """Takes the events of all Sessions but rows."""
    stop: Stop
    sessions: tuple[int, ...] = ()
    """Those to run; () stands for all."""
    resumed: RunPaths | None = None
    """The run that the Sessions continue; None for a new one."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The Sessions to run."""
        return self.sessions or tuple(range(self.spec.meta.max_session))


Engine = Callable[[Job], list[End]]
"""Runs every Session of a job and returns how each ended. Raises SpecError or UserError if the spec cannot be built or the run's
folder cannot be made. No process outlives the call."""
