"""Computation of the final metrics of one table, as in the metrics file of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.report.baseline import known_baseline
from slm_lab.experiment.report.metrics import Strengths, Table, current_return, is_recent, last_value, session_metrics
from slm_lab.experiment.report.run import last_frame, read_table
from slm_lab.spec.load.loader import load_spec

_MODES: tuple[DataMode, ...] = ("train", "eval")


def summary(paths: RunPaths, trial: int = 0, table: int = 0) -> dict[str, float]:
    """Return the defined metrics of a session's table, as a dict: name → value. If the table has no rows, {} is returned.

    With meta.rigorous_eval, all metrics are computed from evaluation rows. Without meta.rigorous_eval, the metrics are computed from
    training rows, except that the current return is the return of the last evaluation if this evaluation is recent. The strength metrics
    are omitted for a session of meta.distributed, and if the random baseline of the env has not been measured yet. Raises SpecError or
    UserError if the saved spec cannot be read.
    """
    spec = load_spec(paths.trial_spec(trial), paths.spec_name, for_search=False, builds_env=False)
    mode: DataMode = "eval" if spec.meta.rigorous_eval else "train"
    train, evaluation = (_rows(paths.session_df(table, table_mode, trial)) for table_mode in _MODES)
    rows = evaluation if mode == "eval" else train
    baseline = known_baseline(spec.env)
    strengths = Strengths.from_table(rows, baseline.mean_return if baseline is not None and not spec.meta.distributed else None)
    metrics = {
        **current_return(evaluation if spec.meta.may_evaluate and is_recent(evaluation, train) else rows),
        "final_return": last_value(rows, "total_reward"),
        "total_reward_ma": last_value(rows, "total_reward_ma"),
        **session_metrics(strengths),
        "frame": last_frame(train),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _rows(file: Path) -> Table:
    return read_table(file) if file.exists() else {"frame": np.empty(0)}
