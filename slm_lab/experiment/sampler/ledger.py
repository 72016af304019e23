"""Where the time goes: who was busy when."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

from slm_lab.experiment.sampler.worker import Report

Kind = Literal["rollout", "inference", "train"]
_TRAININGS = 6
"""Shown in the timeline."""
_SPANS = 8192


class Span(NamedTuple):
    """Someone was busy from `begin` to `end` (perf_counter's seconds)."""

    process: str
    kind: Kind
    begin: float
    end: float


class Ledger:
    """Takes note of everyone's work; tells shares of time, and the last spans of it.

    Args: workers: rollout workers. central: actions are computed elsewhere, so that a worker that waits for them is not busy.
    """

    def __init__(self, workers: int, central: bool) -> None:
        self.workers, self.central = workers, central
        self.spans: deque[Span] = deque(maxlen=_SPANS)
        self.busy: dict[Kind, float] = {"rollout": 0.0, "inference": 0.0, "train": 0.0}
        self.since = perf_counter()

    def collected(self, worker: int, report: Report) -> None:
        """A rollout was gathered."""
        self.spans.append(Span(f"worker {worker}", "rollout", report.begin, report.end))
        self.busy["rollout"] += report.env_seconds
        if not self.central:
            self.busy["inference"] += report.act_seconds

    def inferred(self, spans: Iterable[tuple[float, float]]) -> None:
        """Actions were computed for workers, each time from begin to end."""
        for begin, end in spans:
            self.spans.append(Span("inference", "inference", begin, end))
            self.busy["inference"] += end - begin

    def trained(self, begin: float, end: float) -> None:
        """The learner has trained on a dataset."""
        self.spans.append(Span("learner", "train", begin, end))
        self.busy["train"] += end - begin

    def shares(self) -> dict[str, float]:
        """Shares of the time since the last call that each role was busy, 0 to 1."""
        now = perf_counter()
        passed = max(now - self.since, 1e-9)
        shares = {
            "rollout_busy": self.busy["rollout"] / (passed * self.workers),
            "inference_busy": self.busy["inference"] / (passed * (1 if self.central else self.workers)),
            "learner_busy": self.busy["train"] / passed,
        }
        self.busy = dict.fromkeys(self.busy, 0.0)
        self.since = now
        return shares

    def write(self, path: Path) -> None:
        """The spans of the last few trainings as a table: process, kind, begin, end. Raises OSError."""
        trainings = [span.begin for span in self.spans if span.kind == "train"]
        begin = trainings[-_TRAININGS] if len(trainings) >= _TRAININGS else 0.0
        shown = sorted((span for span in self.spans if span.end > begin), key=lambda span: span.begin)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Span._fields)
            writer.writerows((span.process, span.kind, f"{span.begin:.6f}", f"{span.end:.6f}") for span in shown)
