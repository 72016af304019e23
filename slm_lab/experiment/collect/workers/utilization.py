"""How busy rollout workers, inference and learner are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import Literal, NamedTuple

from slm_lab.experiment.collect.workers.worker import Collected
from slm_lab.experiment.files.sink import Spans

Kind = Literal["rollout", "inference", "train"]
_TRAININGS = 6
"""Number of updates that the timeline shows."""
_SPANS = 2048
_WINDOW = 5.0
"""Seconds over which shares are measured."""


class BusySpan(NamedTuple):
    """A process was busy from `begin` to `end` (seconds of perf_counter)."""

    process: str
    kind: Kind
    begin: float
    end: float


class UtilizationTracker:
    """Records who is busy when; reports shares of time, and the last spans.

    Args:
        workers: number of rollout workers.
        central: an inference server computes the actions, so a worker that waits for them is idle.
    """

    def __init__(self, workers: int, central: bool) -> None:
        self.workers, self.central = workers, central
        self.spans: deque[BusySpan] = deque(maxlen=_SPANS * (8 if central else 1))
        self.busy: dict[Kind, float] = {"rollout": 0.0, "inference": 0.0, "train": 0.0}
        """Seconds so far, of all processes of a kind together."""
        self.marks: deque[tuple[float, dict[Kind, float]]] = deque()
        """When shares were asked for, and what `busy` was then."""
        self.begin()

    def begin(self) -> None:
        """Start measuring now."""
        self.marks.clear()
        self.marks.append((perf_counter(), dict(self.busy)))

    def record_rollout(self, worker: int, report: Collected) -> None:
        """Record a rollout."""
        self.spans.append(BusySpan(f"worker {worker}", "rollout", report.begin, report.end))
        self.busy["rollout"] += report.env_seconds
        if not self.central:
            self.busy["inference"] += report.act_seconds

    def record_inference(self, spans: Iterable[tuple[float, float]]) -> None:
        """Record answers of the inference server, (begin, end) each."""
        for begin, end in spans:
            self.spans.append(BusySpan("inference", "inference", begin, end))
            self.busy["inference"] += end - begin

    def record_update(self, begin: float, end: float) -> None:
        """Record an update."""
        self.spans.append(BusySpan("learner", "train", begin, end))
        self.busy["train"] += end - begin

    def shares(self) -> dict[str, float]:
        """Shares of the last seconds in which each role was busy, 0 to 1. Over a shorter time a single rollout would make them jump."""
        now, marks = perf_counter(), self.marks
        while len(marks) > 1 and marks[1][0] <= now - _WINDOW:
            marks.popleft()
        then, before = marks[0]
        marks.append((now, dict(self.busy)))
        many = {"rollout": self.workers, "inference": 1 if self.central else self.workers, "train": 1}
        share = {kind: min(1.0, (self.busy[kind] - before[kind]) / (max(now - then, 1e-9) * many[kind])) for kind in self.busy}
        return {"rollout_busy": share["rollout"], "inference_busy": share["inference"], "learner_busy": share["train"]}

    def window(self) -> Spans:
        """The spans of a few of the last updates."""
        trainings = [span for span in self.spans if span.kind == "train"]
        # not the very last ones: what the workers did meanwhile is not reported yet
        window = trainings[-2 * _TRAININGS : -_TRAININGS] or trainings
        begin, end = (window[0].begin, window[-1].end) if window else (0.0, 0.0)
        shown = [(span.process, str(span.kind), span.begin, span.end) for span in self.spans if span.end > begin and span.begin < end]
        return sorted(shown, key=lambda span: span[2])
