"""Where the time goes: who was busy when."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

from slm_lab.experiment.sampler.worker import Collected

Kind = Literal["rollout", "inference", "train"]
_TRAININGS = 6
"""Shown in the timeline."""
_SPANS = 2048
_WINDOW = 5.0
"""Seconds that shares are of."""


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
        self.spans: deque[Span] = deque(maxlen=_SPANS * (8 if central else 1))
        self.busy: dict[Kind, float] = {"rollout": 0.0, "inference": 0.0, "train": 0.0}
        """Seconds so far, of all processes of a kind together."""
        self.marks: deque[tuple[float, dict[Kind, float]]] = deque()
        """When shares were asked for, and what `busy` was then."""
        self.begin()

    def begin(self) -> None:
        """The run begins now."""
        self.marks.clear()
        self.marks.append((perf_counter(), dict(self.busy)))

    def collected(self, worker: int, report: Collected) -> None:
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
        """Shares of the last seconds in which each role was busy, 0 to 1: over less, one rollout more or less would make them jump."""
        now, marks = perf_counter(), self.marks
        while len(marks) > 1 and marks[1][0] <= now - _WINDOW:
            marks.popleft()
        then, before = marks[0]
        marks.append((now, dict(self.busy)))
        many = {"rollout": self.workers, "inference": 1 if self.central else self.workers, "train": 1}
        share = {kind: min(1.0, (self.busy[kind] - before[kind]) / (max(now - then, 1e-9) * many[kind])) for kind in self.busy}
        return {"rollout_busy": share["rollout"], "inference_busy": share["inference"], "learner_busy": share["train"]}

    def write(self, path: Path) -> None:
        """The spans of the last few trainings as a table: process, kind, begin, end. Raises OSError."""
        trainings = [span for span in self.spans if span.kind == "train"]
        # not the very last: what workers did then has not been told
        window = trainings[-2 * _TRAININGS : -_TRAININGS] or trainings
        begin, end = (window[0].begin, window[-1].end) if window else (0.0, 0.0)
        shown = sorted((span for span in self.spans if span.end > begin and span.begin < end), key=lambda span: span.begin)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Span._fields)
            writer.writerows((span.process, span.kind, f"{span.begin:.6f}", f"{span.end:.6f}") for span in shown)
