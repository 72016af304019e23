"""The metric of a running trial at the frames that all of its Sessions have reached, from their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.report.curves import Table
from slm_lab.experiment.report.metrics import Strengths, consistency, last_value, session_metrics
from slm_lab.experiment.report.run import independent, read_table
from slm_lab.experiment.report.trial_figures import common_strengths
from slm_lab.spec.models.spec import Spec

COLUMNS = {"final_return": "total_reward", "total_reward_ma": "total_reward_ma"}
"""Metric → column whose last value it is."""


class ReportReader:
    """Computes the metric of a running trial from the tables that its Sessions write.

    Args:
        metric, baseline: see SearchState.
        after: frame of the last report that was read before.
    """

    def __init__(self, paths: RunPaths, trial: int, spec: Spec, metric: str, baseline: float | None, after: int = 0) -> None:
        mode: DataMode = "eval" if spec.meta.rigorous_eval else "train"
        self.files = [paths.session_df(index, mode, trial) for index in range(spec.meta.max_session * spec.policies)]
        self.metric, self.baseline, self.after = metric, baseline, after
        self.frame = 0
        """The last frame that all tables have."""
        self._sizes: list[int] = []

    def read(self) -> list[tuple[int, float]]:
        """Return (frame, metric) for each frame that is new in all tables and at which the metric is known, in order."""
        try:
            sizes = [file.stat().st_size for file in self.files]
        except OSError:  # some Session has no row yet
            return []
        if sizes == self._sizes:
            return []
        tables = [read_table(file) for file in self.files]
        self._sizes = sizes
        if not all(len(table["frame"]) for table in tables):
            return []
        common = min(float(table["frame"][-1]) for table in tables)
        self.frame = int(common)
        new = [int(frame) for frame in tables[0]["frame"] if self.after < frame <= common]
        found = [(frame, self._metric_at(frame, tables)) for frame in new]
        self.after = max([self.after, *new])
        return [(frame, value) for frame, value in found if value is not None]

    def _metric_at(self, frame: int, tables: list[Table]) -> float | None:
        cut = [{name: column[table["frame"] <= frame] for name, column in table.items()} for table in tables]
        return mean_metric(list(independent(dict(enumerate(cut))).values()), self.metric, self.baseline)


def mean_metric(tables: list[Table], metric: str, baseline: float | None) -> float | None:
    """Return a metric of a trial, as analyze_trial computes it: the mean over the tables in which it is defined."""
    if metric in COLUMNS:
        values = [last_value(table, COLUMNS[metric]) for table in tables]
    else:
        strengths = [Strengths.from_table(table, baseline) for table in tables]
        if metric == "consistency":
            return consistency(common_strengths(strengths))
        values = [session_metrics(one)[metric] for one in strengths]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def metric_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a trial that has ended; None if it is not defined."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else None
