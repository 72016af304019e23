"""Figures and metrics of runs with rollout workers: utilization, policy lag, several policies and population-based training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from slm_lab.experiment.report.curves import Curve, Table, curve
from slm_lab.experiment.report.figure import POLICY_COLOURS, Figure, Line, Mark, Panel
from slm_lab.experiment.report.metrics import average, last_value
from slm_lab.experiment.report.run import Run, numbers, read_columns
from slm_lab.experiment.report.timeline import KIND_COLOURS, spans_of, timeline_figure
from slm_lab.experiment.report.trial_figures import Axis, Labels
from slm_lab.experiment.report.writer import Writer
from slm_lab.spec.models.meta import SamplerSpec

_ROLES = {
    "rollout": ("rollout: stepping envs", KIND_COLOURS["rollout"]),
    "inference": ("inference: computing actions", KIND_COLOURS["inference"]),
    "learner": ("learner: training", KIND_COLOURS["train"]),
}
"""Role, whose busy share is in column {role}_busy → name and colour of its line."""
_TUNED = {"lr": "learning rate", "entropy_coef": "entropy coefficient", "gamma": "gamma"}
"""Column of the history → vertical axis."""


def bottleneck(tables: Sequence[Table]) -> tuple[str, dict[str, float]] | None:
    """Return the role ("rollout", "inference" or "learner") that was busy for the largest share of the time, and the shares of all, 0..1.

    Means over the second half of each table's rows, then over the tables. None if a role has no values.
    """
    busy = {role: _settled_mean(tables, f"{role}_busy") for role in _ROLES}
    known = {role: share for role, share in busy.items() if share is not None}
    return (max(known, key=lambda role: known[role]), known) if len(known) == len(_ROLES) else None


def _settled_mean(tables: Sequence[Table], column: str) -> float | None:
    halves = [table[column][len(table["frame"]) // 2 :] for table in tables if column in table]
    return average(float(np.nanmean(half)) for half in halves if np.isfinite(half).any())


def sampler_metrics(train: Mapping[int, Table], metric_tables: Mapping[int, Table], policies: int) -> dict[str, Any]:
    """Return the metrics of a trial from its tables by index: bottleneck and busy (role → share), if these were measured.

    With several policies also `policies`, the means over Sessions of the last total_reward_ma (None if no episode ended), and
    `best_policy`.
    """
    metrics: dict[str, Any] = {}
    if (found := bottleneck(list(train.values()))) is not None:
        metrics |= {"bottleneck": found[0], "busy": found[1]}
    if policies > 1:
        finals = {index: last_value(table, "total_reward_ma") for index, table in metric_tables.items()}
        means = [average(final for index, final in finals.items() if index % policies == policy) for policy in range(policies)]
        known = [policy for policy, mean in enumerate(means) if mean is not None]
        metrics |= {"policies": means, "best_policy": max(known, key=lambda policy: means[policy] or 0.0, default=None)}
    return metrics


def table_figures(table: Table, title: str, axis: Axis) -> dict[str, Figure]:
    """Return policy lag, utilization and masked transitions, each where the table has it; `title` says whose the table is."""
    lag, low, high = (curve(table, f"lag_{what}") for what in ("mean", "min", "max"))
    band = (low.value, high.value) if len(lag.frame) == len(low.frame) == len(high.frame) else None
    top = max((float(one.value.max()) for one in (lag, high) if len(one.value)), default=0.0) or 1.0
    busy = [Line(name, _percent(table, f"{role}_busy"), colour) for role, (name, colour) in _ROLES.items()]
    masked = _percent(table, "lag_masked")
    texts: dict[str, tuple[str, str, list[Line], float]] = {
        "policy_lag": ("policy lag", "policy lag (gradient steps)", [Line("mean", lag, band=band)], top),
        "busy": ("utilization", "busy share of wall-clock time (%)", busy, 100.0),
        "lag_masked": (
            "transitions masked for their policy lag",
            "transitions above max_policy_lag (%)",
            [Line("masked", masked)] if masked.value.any() else [],
            float(masked.value.max(initial=1.0)),
        ),
    }
    figures = {}
    for name, (what, y_label, lines, upper) in texts.items():
        if lines := [line for line in lines if len(line.curve.frame)]:
            limits = -0.02 * upper, 1.05 * upper  # lines at the edges are visible
            panel = Panel(y_label, lines, x_label=axis.label, y_limits=limits, band="minimum to maximum")
            figures[name] = Figure(f"{title}: {what}", (panel,))
    return figures


def _percent(table: Table, column: str) -> Curve:
    share = curve(table, column)
    return Curve(share.frame, 100 * share.value)


def pbt_figure(columns: Mapping[str, Sequence[str]], title: str, axis: Axis) -> Figure | None:
    """Return the history of population-based training: the values that mutate, and the replaced policies; None without rows."""
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
    """Return a hyperparameter of a policy, marked if the policy was replaced."""
    points = np.stack([history["frame"], history[column], history["source"]], axis=1)
    points = points[(history["policy"] == policy) & np.isfinite(points[:, :2]).all(axis=1)]
    points = points[np.lexsort((points[:, 1], points[:, 0]))]
    frame, value, _ = points.T
    marks = [
        Mark(at, of, f"policy {policy} copied the weights of policy {source:.0f}")
        for at, of, source in points.tolist()
        if np.isfinite(source)
    ]
    colour = POLICY_COLOURS[policy % len(POLICY_COLOURS)]
    return Line(f"policy {policy}", Curve(frame, value), colour, steps=True, marks=tuple(marks))


def draw_sampler(writer: Writer, run: Run, labels: Labels, sampler: SamplerSpec | None) -> None:
    """Write the figures of all Sessions; a file that cannot be read is a notice."""
    tables = run.tables("train")
    for index, table in tables.items():
        figures = table_figures(table, f"{labels.title}, {labels.describe(index)}", labels.frames)
        writer.draw(figures, partial(run.paths.session_graph, index, t=run.trial))
    if sampler is not None:
        turns = f"{'asynchronous' if sampler.async_rl else 'synchronous'}{', serial' if sampler.serial_mode else ''}"
        for s in sorted({index // sampler.num_policies for index in tables}):
            _draw_session(writer, run, s, labels, turns)


def _draw_session(writer: Writer, run: Run, s: int, labels: Labels, turns: str) -> None:
    paths, t, title = run.paths, run.trial, f"{labels.title}, session {s}"
    with writer.drawing(paths.timeline(s, t).name):
        if spans := spans_of(read_columns(paths.timeline(s, t))):
            figure = timeline_figure(f"{title}: {turns} timeline", spans)
            writer.draw({"timeline": figure}, lambda _, ext: paths.timeline_graph(s, ext, t))
    with writer.drawing(paths.pbt(s, t).name):
        if (history := pbt_figure(read_columns(paths.pbt(s, t)), title, labels.frames)) is not None:
            writer.draw({"pbt": history}, partial(paths.session_graph, s, t=t))
