"""Figures and metrics of runs with rollout workers: utilization, policy lag, several policies and population-based training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.figure import POLICY_COLOURS, Figure, Line, Mark, Panel
from slm_lab.experiment.analysis.metrics import final_return_ma
from slm_lab.experiment.analysis.run import Run
from slm_lab.experiment.analysis.table import Curve, Table, curve, numbers, read_columns
from slm_lab.experiment.analysis.timeline import KIND_COLOURS, spans_of, timeline_figure
from slm_lab.experiment.analysis.trial_figures import Axis, Labels
from slm_lab.experiment.analysis.writer import Writer
from slm_lab.experiment.paths import RunPaths
from slm_lab.lib.log import notice
from slm_lab.spec.sampler import SamplerSpec

ROLES = {"rollout": "rollout_busy", "inference": "inference_busy", "learner": "learner_busy"}
"""Role → column."""
_ROLE_LINES = {
    "rollout": ("rollout: stepping envs", KIND_COLOURS["rollout"]),
    "inference": ("inference: computing actions", KIND_COLOURS["inference"]),
    "learner": ("learner: training", KIND_COLOURS["train"]),
}
_TUNED = {"lr": "learning rate", "entropy_coef": "entropy coefficient", "gamma": "gamma"}
"""Column of the history → vertical axis."""


def bottleneck(tables: Sequence[Table]) -> tuple[str, dict[str, float]] | None:
    """Return the role ("rollout", "inference" or "learner") that was busy for the largest share of the time, and the shares of all, 0..1.

    Means over the second half of each table's rows, then over the tables. None where a role has no values.
    """
    busy = {role: _settled_mean(tables, column) for role, column in ROLES.items()}
    known = {role: share for role, share in busy.items() if share is not None}
    return (max(known, key=lambda role: known[role]), known) if len(known) == len(ROLES) else None


def _settled_mean(tables: Sequence[Table], column: str) -> float | None:
    halves = [table[column][len(table["frame"]) // 2 :] for table in tables if column in table]
    means = [float(np.nanmean(half)) for half in halves if np.isfinite(half).any()]
    return float(np.mean(means)) if means else None


def sampler_metrics(train: Mapping[int, Table], judged: Mapping[int, Table], policies: int) -> dict[str, Any]:
    """Return the metrics of a trial from its tables by index: bottleneck and busy (role → share), where these were measured.

    With several policies also `policies`, the means over Sessions of the last total_reward_ma (None where no episode ended), and
    `best_policy`.
    """
    metrics: dict[str, Any] = {}
    if (found := bottleneck(list(train.values()))) is not None:
        metrics |= {"bottleneck": found[0], "busy": found[1]}
    if policies > 1:
        finals = [[final_return_ma(table) for index, table in judged.items() if index % policies == policy] for policy in range(policies)]
        known = [[value for value in final if value is not None] for final in finals]
        means = [float(np.mean(values)) if values else None for values in known]
        best = max((value, -policy) for policy, value in enumerate(means) if value is not None) if any(known) else None
        metrics |= {"policies": means, "best_policy": None if best is None else -best[1]}
    return metrics


def table_figures(table: Table, title: str, axis: Axis) -> dict[str, Figure]:
    """Return policy lag, utilization and masked transitions, each where the table has it; `title` says whose the table is."""
    figures = {"policy_lag": _lag(table, title, axis), "busy": _busy(table, title, axis), "lag_masked": _masked(table, title, axis)}
    return {name: figure for name, figure in figures.items() if figure.panel.lines}


def _lag(table: Table, title: str, axis: Axis) -> Figure:
    """Return the mean between minimum and maximum."""
    mean, low, high = (curve(table, f"lag_{what}") for what in ("mean", "min", "max"))
    edges = (low.value, high.value) if len(mean.frame) == len(low.frame) == len(high.frame) else None
    lines = [Line("mean", mean, edges=edges)] if len(mean.frame) else []
    top = max((float(one.value.max()) for one in (mean, high) if len(one.value)), default=0.0) or 1.0
    panel = Panel("policy lag (gradient steps)", lines, x_label=axis.label, y_limits=_from_zero(top), band="minimum to maximum")
    return Figure(f"{title}: policy lag", (panel,))


def _busy(table: Table, title: str, axis: Axis) -> Figure:
    lines = [Line(_ROLE_LINES[role][0], _percent(curve(table, column)), _ROLE_LINES[role][1]) for role, column in ROLES.items()]
    lines = [line for line in lines if len(line.curve.frame)]
    panel = Panel("busy share of wall-clock time (%)", lines, x_label=axis.label, y_limits=_from_zero(100.0))
    return Figure(f"{title}: utilization", (panel,))


def _masked(table: Table, title: str, axis: Axis) -> Figure:
    """Return the share of transitions that were masked; without lines where none was."""
    masked = _percent(curve(table, "lag_masked"))
    lines = [Line("masked", masked)] if masked.value.any() else []
    limits = _from_zero(float(masked.value.max(initial=1.0)))
    panel = Panel("transitions above max_policy_lag (%)", lines, x_label=axis.label, y_limits=limits)
    return Figure(f"{title}: transitions masked for their policy lag", (panel,))


def _from_zero(top: float) -> tuple[float, float]:
    """Return limits with a margin, so that lines at the edges are visible."""
    return -0.02 * top, 1.05 * top


def _percent(share: Curve) -> Curve:
    return Curve(share.frame, 100 * share.value)


def pbt_figure(columns: Mapping[str, Sequence[str]], title: str, axis: Axis) -> Figure | None:
    """Return the history of population-based training: what mutates, and who took over whose weights; None without rows."""
    history = {name: numbers(cells) for name, cells in columns.items()}
    policies = sorted({int(policy) for policy in history.get("policy", ()) if np.isfinite(policy)})
    panels = []
    for column, label in _TUNED.items():
        lines = [_history(history, policy, column) for policy in policies] if {"frame", "source", column} <= history.keys() else []
        lines = [line for line in lines if len(line.curve.frame)]
        if len(np.unique([value for line in lines for value in line.curve.value])) > (column == "gamma"):
            panels.append(Panel(label, lines, x_label=axis.label, height=150))
    return Figure(f"{title}: population-based training", tuple(panels)) if panels else None


def _history(history: Mapping[str, np.ndarray], policy: int, column: str) -> Line:
    """Return a hyperparameter of a policy, marked where the policy was replaced."""
    points = np.stack([history["frame"], history[column], history["source"]], axis=1)
    points = points[(history["policy"] == policy) & np.isfinite(points[:, :2]).all(axis=1)]
    points = points[np.lexsort((points[:, 1], points[:, 0]))]
    frame, value, _ = points.T
    marks = [
        Mark(at, of, f"policy {policy} took over the weights of policy {source:.0f}")
        for at, of, source in points.tolist()
        if np.isfinite(source)
    ]
    colour = POLICY_COLOURS[policy % len(POLICY_COLOURS)]
    return Line(f"policy {policy}", Curve(frame, value), colour, steps=True, marks=tuple(marks))


def _timeline_path(paths: RunPaths, s: int, t: int, name: str, ext: str) -> Path:
    return paths.timeline_graph(s, ext, t)


def draw_sampler(writer: Writer, run: Run, tables: Mapping[int, Table], labels: Labels, sampler: SamplerSpec | None) -> None:
    """Write the figures of the Sessions of these tables; a file that cannot be read is a notice."""
    paths, t = run.paths, run.trial
    for index, table in tables.items():
        figures = table_figures(table, f"{labels.title}, {labels.of(index)}", labels.frames)
        writer.draw(figures, partial(paths.session_graph, index, t=t))
    if sampler is None:
        return
    turns = f"{'asynchronous' if sampler.async_rl else 'synchronous'}{', serial' if sampler.serial_mode else ''}"
    for s in sorted({index // sampler.num_policies for index in tables}):
        title = f"{labels.title}, session {s}"
        try:
            if spans := spans_of(read_columns(paths.timeline(s, t))):
                figure = timeline_figure(f"{title}: {turns} timeline", spans)
                writer.draw({"timeline": figure}, partial(_timeline_path, paths, s, t))
        except Exception as error:
            notice(f"cannot draw {paths.timeline(s, t).name}: {error}")
        try:
            if (history := pbt_figure(read_columns(paths.pbt(s, t)), title, labels.frames)) is not None:
                writer.draw({"pbt": history}, partial(paths.session_graph, s, t=t))
        except Exception as error:
            notice(f"cannot draw {paths.pbt(s, t).name}: {error}")
