"""Compute metrics and draw figures of runs with rollout workers or several policies.

The module computes metrics of the utilization of the processes, a figure of population-based training, and a timeline figure, which shows
the activities of each process as bars over time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.report.figure import Bar, Bars, Figure, Line, Mark, Panel, policy_colour
from slm_lab.experiment.report.metrics import Curve, Table, aggregate_known, last_value
from slm_lab.experiment.report.run import Run, parse_numbers, read_columns
from slm_lab.experiment.report.trial_figures import Axis, Labels
from slm_lab.experiment.report.writer import Writer
from slm_lab.spec.models.meta import SamplerSpec

KIND_COLOURS = {"rollout": "#56B4E9", "inference": "#E69F00", "train": "#009E73"}
_NAMES = {"rollout": "collecting a rollout", "inference": "computing actions", "train": "training"}
_OTHER_COLOUR = "#CC79A7"
_IDLE, _WAITING, _WAITING_COLOUR = "idle", "waiting", "#E0E0E0"
_THICKNESS = 0.8
"""Thickness of a bar of the timeline, where the distance between two rows of bars is 1."""
_GAP = 0.7
"""Additional distance in the timeline between the rows of the learner, of inference and of the workers."""
_ROW_HEIGHT, _MIN_HEIGHT, _MAX_HEIGHT = 30, 150, 1500
"""Height of a row of bars, and minimum and maximum height of the timeline, in pixels."""
_NARROW = 0.01
"""If the median bar is narrower than this fraction of the recorded time, the bars have no edges, since an edge would hide a narrow bar."""
_TOLERANCE = 0.02
"""An overlap of two bars that is shorter than this fraction of a bar is ignored, since the clocks have limited resolution."""
_ROLES = ("rollout", "inference", "learner")
"""Roles of the processes of a run. The table column {role}_busy has the fraction of the time in which the processes of a role were busy."""
_TUNED = {"lr": "learning rate", "entropy_coef": "entropy coefficient", "gamma": "gamma"}
"""Hyperparameter that population-based training changes → label of the vertical axis."""


def bottleneck(tables: Sequence[Table]) -> tuple[str, dict[str, float]] | None:
    """Return the role of processes that was busy for the largest share of the time, and a dict: role → share of the time (0 to 1).

    The roles are "rollout", "inference" and "learner". A share is the mean over the second half of the rows of each table, averaged over
    the tables. Returns None if the tables lack the busy times of a role.
    """
    busy = {role: _second_half_mean(tables, f"{role}_busy") for role in _ROLES}
    known = {role: share for role, share in busy.items() if share is not None}
    return (max(known, key=lambda role: known[role]), known) if len(known) == len(_ROLES) else None


def _second_half_mean(tables: Sequence[Table], column: str) -> float | None:
    halves = [table[column][len(table["frame"]) // 2 :] for table in tables if column in table]
    return aggregate_known(float(np.nanmean(half)) for half in halves if np.isfinite(half).any())


def sampler_metrics(train: Mapping[int, Table], metric_tables: Mapping[int, Table], policies: int) -> dict[str, Any]:
    """Return the metrics that only runs with rollout workers or several policies have.

    If the utilization of the processes was measured, the metrics are `bottleneck` (the role of processes that limits the speed) and `busy`
    (role → share of the time in which the role is busy). If there are several policies, the metrics are `policies` (the last current_return
    of each policy, averaged over the Sessions, or None if no episode ended) and `best_policy` (the index of the best policy).

    Args:
        train: index of each training table → table.
        metric_tables: index of each table from which the metrics of the trial are computed → table.
        policies: number of policies of each Session.
    """
    metrics: dict[str, Any] = {}
    if (found := bottleneck(list(train.values()))) is not None:
        metrics |= {"bottleneck": found[0], "busy": found[1]}
    if policies > 1:
        finals = {index: last_value(table, "current_return") for index, table in metric_tables.items()}
        means = [aggregate_known(final for index, final in finals.items() if index % policies == policy) for policy in range(policies)]
        known = [policy for policy, mean in enumerate(means) if mean is not None]
        metrics |= {"policies": means, "best_policy": max(known, key=lambda policy: means[policy] or 0.0, default=None)}
    return metrics


def pbt_figure(columns: Mapping[str, Sequence[str]], title: str, axis: Axis) -> Figure | None:
    """Return a figure of population-based training, which shows the mutated hyperparameters and the replaced policies.

    Returns None if the history has no hyperparameter to draw.

    Args: columns: column → cells of the history of population-based training.
    """
    history = {name: parse_numbers(cells) for name, cells in columns.items()}
    policies = sorted({int(policy) for policy in history.get("policy", ()) if np.isfinite(policy)})
    panels = []
    for column, label in _TUNED.items():
        lines = (
            [_hyperparameter_line(history, policy, column) for policy in policies] if {"frame", "source", column} <= history.keys() else []
        )
        lines = [line for line in lines if len(line.curve.frame)]
        if len(np.unique([value for line in lines for value in line.curve.value])) > (column == "gamma"):
            panels.append(Panel(label, lines, x_label=axis.label, height=150))
    return Figure(f"{title}: population-based training", tuple(panels)) if panels else None


def _hyperparameter_line(history: Mapping[str, np.ndarray], policy: int, column: str) -> Line:
    """Return the line of one hyperparameter of a policy, with a mark at each frame at which the policy copied another policy's weights."""
    points = np.stack([history["frame"], history[column], history["source"]], axis=1)
    points = points[(history["policy"] == policy) & np.isfinite(points[:, :2]).all(axis=1)]
    points = points[np.lexsort((points[:, 1], points[:, 0]))]
    frame, value, _ = points.T
    copied = points[np.isfinite(points[:, 2])].tolist()
    marks = [Mark(at, of, f"policy {policy} copied the weights of policy {source:.0f}") for at, of, source in copied]
    return Line(f"policy {policy}", Curve(frame, value), policy_colour(policy), steps=True, marks=tuple(marks))


def draw_sampler(writer: Writer, run: Run, labels: Labels, sampler: SamplerSpec | None) -> None:
    """Write the timeline figure and the figure of population-based training of each Session.

    If a file cannot be read, a notice is printed.
    """
    if sampler is not None:
        turns = f"{'asynchronous' if sampler.async_rl else 'synchronous'}{', serial' if sampler.serial_mode else ''}"
        for s in sorted({index // sampler.num_policies for index in run.tables("train")}):
            _draw_session(writer, run, s, labels, turns)


def _draw_session(writer: Writer, run: Run, s: int, labels: Labels, turns: str) -> None:
    paths, t, title = run.paths, run.trial, f"{labels.title}, session {s}"
    with writer.suppress_drawing_errors(paths.timeline(s, t).name):
        if spans := read_spans(read_columns(paths.timeline(s, t))):
            figure = timeline_figure(f"{title}: {turns} timeline", spans)
            writer.draw({"timeline": figure}, lambda _, ext: paths.timeline_graph(s, ext, t))
    with writer.suppress_drawing_errors(paths.pbt(s, t).name):
        if (history := pbt_figure(read_columns(paths.pbt(s, t)), title, labels.frames)) is not None:
            writer.draw({"pbt": history}, partial(paths.session_graph, s, t=t))


# ---- timeline


class Span(NamedTuple):
    """An activity of a process in a timeline, from `begin` to `end`, in seconds since the start of the recorded time."""

    process: str
    kind: str
    begin: float
    end: float


def read_spans(columns: Mapping[str, Sequence[str]]) -> list[Span]:
    """Return the activities in a timeline file, without idle times and invalid rows.

    The times of the activities are shifted so that the recorded time begins at 0.

    Args: columns: column → cells of the timeline file.
    """
    if not {"process", "kind", "begin", "end"} <= columns.keys():
        return []
    times = parse_numbers(columns["begin"]), parse_numbers(columns["end"])
    spans = [Span(*row) for row in zip(columns["process"], columns["kind"], *map(np.ndarray.tolist, times), strict=True)]
    spans = [span for span in spans if np.isfinite([span.begin, span.end]).all() and span.begin <= span.end]
    start = min((span.begin for span in spans), default=0.0)
    return [span._replace(begin=span.begin - start, end=span.end - start) for span in spans if span.kind != _IDLE]


def training_overlap(spans: Sequence[Span]) -> float | None:
    """Return the share of the training time in which a worker is collecting a rollout.

    The share is 0 if training and collection alternate. Returns None if the spans contain no training or no collection.
    """
    training, collecting = (_union(span for span in spans if span.kind == kind) for kind in ("train", "rollout"))
    whole = sum(end - begin for begin, end in training)
    both = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in training for since, until in collecting)
    return both / whole if whole and collecting else None


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the union of the times of the spans as (begin, end) intervals that do not overlap."""
    union: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if union and span.begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], span.end))
        else:
            union.append((span.begin, span.end))
    return union


def timeline_figure(title: str, spans: Sequence[Span]) -> Figure:
    """Return the timeline figure, with a row of bars for each process. Grey bars show waiting times.

    From top to bottom, the rows show the processes of the learner, of inference and of the workers.
    """
    share = training_overlap(spans)
    lead = "" if share is None else f"Rollouts are collected during {100 * share:.0f} % of the training time. "
    rows = row_positions({span.process for span in spans})
    spans_by = {process: [span for span in spans if span.process == process] for process in rows}
    low, high = min(rows.values(), default=0.0) - 0.7, 0.7
    window = max((span.end for span in spans), default=0.0) or 1.0
    # the activity of a process is unknown before its first span and after its last span
    tracks = [Bar(min(s.begin for s in own), max(s.end for s in own), rows[process], _THICKNESS) for process, own in spans_by.items()]
    kinds = sorted({span.kind for span in spans}, key=lambda kind: (*KIND_COLOURS, kind).index(kind))
    panel = Panel(
        "",
        x_label="seconds since the start of the window",
        y_limits=(low, high),
        x_max=window,
        bars=(Bars(_WAITING, _WAITING_COLOUR, tracks), *(_bars(kind, spans, rows, window) for kind in kinds)),
        rows=rows,
        height=round(min(max(_ROW_HEIGHT * (high - low), _MIN_HEIGHT), _MAX_HEIGHT)),
    )
    return Figure(title, (panel,), f"{lead}Grey: waiting.")


def row_positions(processes: Iterable[str]) -> dict[str, float]:
    """Return a dict: process → vertical position of the centre of its row in the timeline.

    The first row of the timeline is at position 0, and the rows below have negative positions.
    """
    positions: dict[str, float] = {}
    position, above = 0.0, ""
    for process in sorted(processes, key=_process_sort_key):
        if above:
            position -= 1 if _process_sort_key(above)[0] == _process_sort_key(process)[0] else 1 + _GAP
        positions[process], above = position, process
    return positions


def _bars(kind: str, spans: Sequence[Span], rows: Mapping[str, float], window: float) -> Bars:
    """Return the bars that show one kind of activity in a timeline.

    Simultaneous bars of a process, for example of two groups of envs, share the height of the row of the process.
    """
    spans = [span for span in spans if span.kind == kind]
    name = _NAMES.get(kind, kind)
    bars = []
    for process, middle in rows.items():
        own = sorted((span for span in spans if span.process == process), key=lambda span: span.begin)
        lanes = _assign_lanes(own)
        thickness = _THICKNESS / (max(lanes, default=0) + 1)
        for span, lane in zip(own, lanes, strict=True):
            length = 1000 * (span.end - span.begin)
            text = f"{process}: {name}, {span.begin:.4g} to {span.end:.4g} s ({length:.3g} ms)"
            bars.append(Bar(span.begin, span.end, middle + _THICKNESS / 2 - (lane + 0.5) * thickness, thickness, text))
    wide = float(np.median([span.end - span.begin for span in spans])) > _NARROW * window
    return Bars(name, KIND_COLOURS.get(kind, _OTHER_COLOUR), bars, edge=0.5 if wide else 0.0)


def _process_sort_key(process: str) -> tuple[int, int, str]:
    """Return the sort key of a process name. Processes are sorted by kind (learner, inference, worker, other) and then by number."""
    found = re.search(r"\d+", process)
    kinds = ("learner", "inference", "worker")
    kind = next((place for place, name in enumerate(kinds) if process.startswith(name)), len(kinds))
    return kind, int(found[0]) if found else 0, process


def _assign_lanes(spans: Sequence[Span]) -> list[int]:
    """Assign each span to a lane, and return the number of the lane of each span.

    A lane is a strip of a row of the timeline. The spans in a lane do not overlap: a span gets the lane with the lowest number that is free
    when the span begins. The spans must be sorted by `begin`.
    """
    ends: list[float] = []
    lanes = []
    for span in spans:
        since = span.begin + _TOLERANCE * (span.end - span.begin)
        lane = next((index for index, end in enumerate(ends) if end <= since), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes
