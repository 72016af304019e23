"""TEMPORARY, until the records are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slm_lab.experiment.search.space import Values


@dataclass(frozen=True)
class TrialRecord:
    trial: int
    values: Values
    metrics: dict[str, float | None]
    metric: float | None
    frame: int
    seconds: float
    status: Literal["finished", "stopped", "failed", "running"]
    random_seed: int | None
    confirmed: float | None = None
    confirmed_interval: tuple[float, float] | None = None
    cause: str = ""
