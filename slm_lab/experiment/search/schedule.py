"""Early stopping of trials: Tune's schedulers, asked directly."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Protocol

from slm_lab.lib.log import notice
from slm_lab.spec.spec import Spec


class Scheduler(Protocol):
    """Decides from intermediate metrics which trials go on."""

    def report(self, trial: int, frame: int, metric: float) -> bool:
        """Take the metric of a running trial at a frame; return whether to stop the trial."""

    def complete(self, trial: int, frame: int, metric: float) -> None:
        """Take the metric of a trial that has finished."""


class Asha:
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934): ray.tune.schedulers.ASHAScheduler.

    At grace_period · reduction_factor^k frames, k = 0, 1, …, a trial continues if its metric is among the best 1 / reduction_factor of
    those that other trials had there before it.

    Args: reports: (trial, frame, metric) of an earlier start of the search, in order.
    """

    def __init__(self, grace_period: int, reduction_factor: float, max_frame: int, reports: Iterable[tuple[int, int, float]] = ()) -> None:
        from ray.tune.schedulers import ASHAScheduler

        self._asha: Any = ASHAScheduler(
            time_attr="frame", metric="metric", mode="max", max_t=max_frame, grace_period=grace_period, reduction_factor=reduction_factor
        )
        self._trials: dict[int, Any] = {}
        for trial, frame, metric in reports:
            self.report(trial, frame, metric)

    def report(self, trial: int, frame: int, metric: float) -> bool:
        known = self._trials.get(trial)
        if known is None:
            known = self._trials[trial] = SimpleNamespace(trial_id=str(trial))
            self._asha.on_trial_add(None, known)
        decision = self._asha.on_trial_result(None, known, {"frame": frame, "metric": metric})
        return bool(decision == self._asha.STOP)

    def complete(self, trial: int, frame: int, metric: float) -> None:
        self.report(trial, frame, metric)


def make_scheduler(spec: Spec, reports: Iterable[tuple[int, int, float]]) -> Scheduler | None:
    """Return the scheduler of meta.search_scheduler, with the reports of an earlier start; None if there is none."""
    wanted = spec.meta.search_scheduler
    if wanted is None:
        return None
    frames = spec.session_frames
    if wanted.grace_period >= frames:
        grace = f"meta.search_scheduler.grace_period {wanted.grace_period:,}"
        notice(f"{grace} is not below the {frames:,} frames of a trial: no trial is stopped early")
        return None
    return Asha(wanted.grace_period, wanted.reduction_factor, frames, reports)
