"""The timeline of a run with rollout workers: what each process did when, as bars over seconds that show the waits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slm_lab.experiment.report.figure import Bar, Bars, Figure, Panel
from slm_lab.experiment.report.run import numbers

KIND_COLOURS = {"rollout": "#56B4E9", "inference": "#E69F00", "train": "#009E73"}
_NAMES = {"rollout": "collecting a rollout", "inference": "computing actions", "train": "training"}
_OTHER_COLOUR = "#CC79A7"
_IDLE, _WAITING, _WAITING_COLOUR = "idle", "waiting", "#E0E0E0"
_THICKNESS = 0.8
"""Of a bar; two rows are 1 apart."""
_GAP = 0.7
"""Additional distance between learner, inference and workers."""
_ROW_HEIGHT, _MIN_HEIGHT, _MAX_HEIGHT = 30, 150, 1500
"""Pixels."""
_NARROW = 0.01
"""Part of the window; narrower bars have no edge, which would hide them."""
_TOLERANCE = 0.02
"""Part of a bar's length; smaller overlaps come from the resolution of the clocks."""


class Span(NamedTuple):
    """What a process did for some time, in seconds since the start of the window."""

    process: str
    kind: str
    begin: float
    end: float


def spans_of(columns: Mapping[str, Sequence[str]]) -> list[Span]:
    """Return the spans of a timeline file, shifted so that the window begins at 0, without idle ones and rows that are not spans."""
    if not {"process", "kind", "begin", "end"} <= columns.keys():
        return []
    times = numbers(columns["begin"]), numbers(columns["end"])
    spans = [Span(*row) for row in zip(columns["process"], columns["kind"], *map(np.ndarray.tolist, times), strict=True)]
    spans = [span for span in spans if np.isfinite([span.begin, span.end]).all() and span.begin <= span.end]
    start = min((span.begin for span in spans), default=0.0)
    return [span._replace(begin=span.begin - start, end=span.end - start) for span in spans if span.kind != _IDLE]


def overlap(spans: Sequence[Span]) -> float | None:
    """Return the share of the training time in which a worker collects a rollout, 0 when they take turns; None without training."""
    training, collecting = (_union(span for span in spans if span.kind == kind) for kind in ("train", "rollout"))
    whole = sum(end - begin for begin, end in training)
    both = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in training for since, until in collecting)
    return both / whole if whole and collecting else None


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the intervals that the spans cover, without overlaps."""
    union: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if union and span.begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], span.end))
        else:
            union.append((span.begin, span.end))
    return union


def timeline_figure(title: str, spans: Sequence[Span]) -> Figure:
    """Draw a row of bars for each process: the learner on top and apart, then inference, then the workers; grey where it waits."""
    share = overlap(spans)
    lead = "" if share is None else f"Rollouts are collected during {100 * share:.0f} % of the training time. "
    rows = row_positions({span.process for span in spans})
    low, high = min(rows.values(), default=0.0) - 0.7, 0.7
    window = max((span.end for span in spans), default=0.0) or 1.0
    kinds = sorted({span.kind for span in spans}, key=lambda kind: (*KIND_COLOURS, kind).index(kind))
    panel = Panel(
        "",
        x_label="seconds since the start of the window",
        y_limits=(low, high),
        x_max=window,
        bars=(Bars(_WAITING, _WAITING_COLOUR, _tracks(spans, rows)), *(_bars(kind, spans, rows, window) for kind in kinds)),
        rows=rows,
        height=round(min(max(_ROW_HEIGHT * (high - low), _MIN_HEIGHT), _MAX_HEIGHT)),
    )
    return Figure(title, (panel,), f"{lead}Grey: waiting.")


def row_positions(processes: Iterable[str]) -> dict[str, float]:
    """Return the process → the middle of its row, from 0 downwards."""
    positions: dict[str, float] = {}
    position, above = 0.0, ""
    for process in sorted(processes, key=_order):
        if above:
            position -= 1 if _order(above)[0] == _order(process)[0] else 1 + _GAP
        positions[process], above = position, process
    return positions


def _tracks(spans: Sequence[Span], rows: Mapping[str, float]) -> list[Bar]:
    """Return a bar for each process from its first to its last span: outside it is unknown what the process did."""
    own = {process: [span for span in spans if span.process == process] for process in rows}
    return [Bar(min(s.begin for s in of), max(s.end for s in of), rows[process], _THICKNESS) for process, of in own.items()]


def _bars(kind: str, spans: Sequence[Span], rows: Mapping[str, float], window: float) -> Bars:
    """Return the bars of a kind; simultaneous ones of a process, such as of two groups of envs, share its row."""
    spans = [span for span in spans if span.kind == kind]
    name = _NAMES.get(kind, kind)
    bars = []
    for process, middle in rows.items():
        own = sorted((span for span in spans if span.process == process), key=lambda span: span.begin)
        lanes = _lanes(own)
        thickness = _THICKNESS / (max(lanes, default=0) + 1)
        for span, lane in zip(own, lanes, strict=True):
            length = 1000 * (span.end - span.begin)
            text = f"{process}: {name}, {span.begin:.4g} to {span.end:.4g} s ({length:.3g} ms)"
            bars.append(Bar(span.begin, span.end, middle + _THICKNESS / 2 - (lane + 0.5) * thickness, thickness, text))
    wide = float(np.median([span.end - span.begin for span in spans])) > _NARROW * window
    return Bars(name, KIND_COLOURS.get(kind, _OTHER_COLOUR), bars, edge=0.5 if wide else 0.0)


def _order(process: str) -> tuple[int, int, str]:
    """Sort learners, inference, workers and others in this order; those of one kind by their number."""
    found = re.search(r"\d+", process)
    kinds = ("learner", "inference", "worker")
    kind = next((place for place, name in enumerate(kinds) if process.startswith(name)), len(kinds))
    return kind, int(found[0]) if found else 0, process


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Return for each span the first lane that is free; spans are sorted by their begin."""
    ends: list[float] = []
    lanes = []
    for span in spans:
        since = span.begin + _TOLERANCE * (span.end - span.begin)
        lane = next((index for index, end in enumerate(ends) if end <= since), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes
