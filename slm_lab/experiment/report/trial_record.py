"""What is known of a trial of a search."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slm_lab.spec.load.search_space import Values

TrialStatus = Literal["finished", "stopped", "failed", "running"]
"""stopped: by the scheduler (ASHA)."""


@dataclass(frozen=True)
class TrialRecord:
    """Values and results of a trial."""

    trial: int
    values: Values
    metrics: dict[str, float | None]
    """Metrics of the trial, None where one is not defined."""
    metric: float | None
    """meta.search_metric, of which more is better; None if it is not known."""
    frame: int
    """Number of frames that every Session has reached."""
    seconds: float
    """Wall-clock time of the trial so far."""
    status: TrialStatus
    random_seed: int | None
    confirmed: float | None = None
    """The metric when the values are trained again with new seeds (--confirm); None if they are not."""
    confirmed_interval: tuple[float, float] | None = None
    """95 % interval of `confirmed` over its Sessions."""
    cause: str = ""
    """Why the trial failed."""

    @property
    def known_metric(self) -> float | None:
        """Return the metric if it is a finite number."""
        return self.metric if self.metric is not None and math.isfinite(self.metric) else None


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials, best first: confirmed ones by that result, then finished ones, then others by what they reached.

    Trials that failed or have no metric are last, in order of their index.
    """
    return sorted(records, key=_rank)


def _rank(record: TrialRecord) -> tuple[float, ...]:
    metric = record.known_metric
    if record.status == "failed" or metric is None:
        return (3, record.trial)
    if record.confirmed is not None and math.isfinite(record.confirmed):
        return (0, -record.confirmed, -metric, record.trial)
    return (1 if record.status == "finished" else 2, -metric, record.trial)
