"""What a run with rollout workers and a learner has to show beside its returns: waits, policy lag, policies and their history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.album import Album
from slm_lab.experiment.analysis.figures import Axis, Labels
from slm_lab.experiment.analysis.graph import POLICY_COLOURS, Graph, Line, Mark
from slm_lab.experiment.analysis.metrics import final_return_ma
from slm_lab.experiment.analysis.panels import Panels
from slm_lab.experiment.analysis.table import Curve, Table, curve, number, read_records
from slm_lab.experiment.analysis.timeline import KIND_COLOURS, Timeline, read_spans
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
"""Column of the history → along the axis."""
_LAG_BAND = "minimum to maximum"


def bottleneck(tables: Sequence[Table]) -> tuple[str, dict[str, float]] | None:
    """The role ("rollout", "inference" or "learner") that was busy for the largest share of the time, and the shares of all, 0..1.

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
    """What the tables, by index, say of the trial: bottleneck and busy; of several policies each one's final return and the best.

    `busy` is role → share. `policies` holds means over Sessions of the last total_reward_ma, None where no episode ended.
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


def table_graphs(table: Table, title: str, axis: Axis) -> dict[str, Graph]:
    """Policy lag and how busy each role was, each where the table has it; `title` says whose the table is."""
    graphs = {"policy_lag": _lag(table, title, axis), "busy": _busy(table, title, axis), "lag_masked": _masked(table, title, axis)}
    return {name: graph for name, graph in graphs.items() if graph.lines}


def _lag(table: Table, title: str, axis: Axis) -> Graph:
    """The mean between minimum and maximum."""
    mean, low, high = (curve(table, f"lag_{what}") for what in ("mean", "min", "max"))
    edges = (low.value, high.value) if len(mean.frame) == len(low.frame) == len(high.frame) else None
    lines = [Line("mean", mean, edges=edges)] if len(mean.frame) else []
    most = max((float(one.value.max()) for one in (mean, high) if len(one.value)), default=0.0) or 1.0
    label = "policy lag (gradient steps)"
    return Graph(f"{title}: policy lag", label, lines, x_label=axis.label, y_limits=_from_zero(most), band=_LAG_BAND)


def _busy(table: Table, title: str, axis: Axis) -> Graph:
    lines = [Line(_ROLE_LINES[role][0], _percent(curve(table, column)), _ROLE_LINES[role][1]) for role, column in ROLES.items()]
    lines = [line for line in lines if len(line.curve.frame)]
    return Graph(f"{title}: who is busy", "busy share of wall-clock time (%)", lines, x_label=axis.label, y_limits=_from_zero(100.0))


def _masked(table: Table, title: str, axis: Axis) -> Graph:
    """Without lines where nothing was left out."""
    masked = _percent(curve(table, "lag_masked"))
    lines = [Line("not trained on", masked)] if masked.value.any() else []
    limits = _from_zero(float(masked.value.max(initial=1.0)))
    label = "transitions above max_policy_lag (%)"
    return Graph(f"{title}: transitions too old to train on", label, lines, x_label=axis.label, y_limits=limits)


def _from_zero(most: float) -> tuple[float, float]:
    """So that lines at the edges are seen."""
    return -0.02 * most, 1.05 * most


def _percent(share: Curve) -> Curve:
    return Curve(share.frame, 100 * share.value)


def timeline(path: Path, title: str, sampler: SamplerSpec) -> Timeline | None:
    """The timeline in a file; None where there is none."""
    spans = read_spans(path)
    turns = "asynchronous" if sampler.async_rl else "synchronous"
    return Timeline(f"{title}: {turns}{', serial' if sampler.serial_mode else ''} timeline", spans) if spans else None


def pbt_panels(path: Path, title: str, axis: Axis) -> Panels | None:
    """The history of population-based training in a file: what mutates, and who took over whose weights; None where there is none."""
    rows = read_records(path)
    policies = sorted({int(policy) for row in rows if np.isfinite(policy := number(row.get("policy", "")))})
    graphs = []
    for column, label in _TUNED.items():
        lines = [_history(rows, policy, column) for policy in policies]
        lines = [line for line in lines if len(line.curve.frame)]
        if len(np.unique([value for line in lines for value in line.curve.value])) > (column == "gamma"):
            graphs.append(Graph(label, label, lines, x_label=axis.label))
    return Panels(f"{title}: population-based training", graphs) if graphs else None


def _history(rows: Sequence[Mapping[str, str]], policy: int, column: str) -> Line:
    """A hyperparameter of a policy, marked where the policy was replaced."""
    points = [
        (number(row.get("frame", "")), number(row.get(column, "")), number(row.get("source", "")))
        for row in rows
        if number(row.get("policy", "")) == policy
    ]
    points = sorted(point for point in points if np.isfinite(point[:2]).all())
    frame, value, _ = np.array(points).reshape(-1, 3).T
    marks = [
        Mark(at, of, f"policy {policy} took over the weights of policy {source:.0f}") for at, of, source in points if np.isfinite(source)
    ]
    colour = POLICY_COLOURS[policy % len(POLICY_COLOURS)]
    return Line(f"policy {policy}", Curve(frame, value), colour, steps=True, marks=tuple(marks))


def _timeline_path(paths: RunPaths, s: int, t: int, name: str, ext: str) -> Path:
    """Of the graph."""
    return paths.timeline_graph(s, ext, t)


def draw_sampler(album: Album, paths: RunPaths, t: int, tables: Mapping[int, Table], labels: Labels, sampler: SamplerSpec | None) -> None:
    """Draw what there is of the Sessions of these tables; a file that cannot be read is a notice."""
    for index, table in tables.items():
        graphs = table_graphs(table, f"{labels.title}, {labels.of(index)}", labels.frames)
        album.draw(graphs, partial(paths.session_graph, index, t=t))
    if sampler is None:
        return
    for s in sorted({index // sampler.num_policies for index in tables}):
        title = f"{labels.title}, session {s}"
        try:
            if (spans := timeline(paths.timeline(s, t), title, sampler)) is not None:
                album.draw({"timeline": spans}, partial(_timeline_path, paths, s, t))
        except Exception as error:
            notice(f"{paths.timeline(s, t).name} cannot be drawn: {error}")
        try:
            if (history := pbt_panels(paths.pbt(s, t), title, labels.frames)) is not None:
                album.draw({"pbt": history}, partial(paths.session_graph, s, t=t))
        except Exception as error:
            notice(f"{paths.pbt(s, t).name} cannot be drawn: {error}")
