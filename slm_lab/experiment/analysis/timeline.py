"""What each process of a sampler did when: bars over seconds, in which the waits show."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.experiment.analysis.graph import INK
from slm_lab.experiment.analysis.page import base_layout, numbers, x_axis
from slm_lab.experiment.analysis.picture import LEGEND, Canvas
from slm_lab.experiment.analysis.table import number, read_records

KIND_COLOURS = {"rollout": "#56B4E9", "inference": "#E69F00", "train": "#009E73"}
_NAMES = {"rollout": "gathering a rollout", "inference": "computing actions", "train": "training"}
_OTHER_COLOUR = "#CC79A7"
_IDLE, _WAITING, _WAITING_COLOUR = "idle", "waiting", "#E0E0E0"
_X_LABEL = "seconds since the begin of the window"
_THICKNESS = 0.8
"""Of a bar; two rows are 1 apart."""
_APART = 0.7
"""Further between learner, inference and workers."""
_NARROW = 0.01
"""Of the window."""
_OVERLAP = 0.02
"""Of a bar's length: less is the grain of the clocks, not two things at once."""


class Span(NamedTuple):
    """One thing that a process did; seconds since the window's begin."""

    process: str
    kind: str
    begin: float
    end: float


def read_spans(path: Path) -> list[Span]:
    """The spans of a timeline file, shifted so that the window begins at 0; a line that is no span, and what is idle, is left out.

    Raises OSError where a file that is there cannot be read.
    """
    spans = [
        Span(row.get("process", ""), row.get("kind", ""), number(row.get("begin", "")), number(row.get("end", "")))
        for row in read_records(path)
    ]
    spans = [span for span in spans if np.isfinite([span.begin, span.end]).all() and span.begin <= span.end]
    start = min((span.begin for span in spans), default=0.0)
    return [span._replace(begin=span.begin - start, end=span.end - start) for span in spans if span.kind != _IDLE]


def overlap(spans: Sequence[Span]) -> float | None:
    """The share of the time in which something trains that a worker gathers a rollout as well: 0 in turns; None where nothing trains."""
    training, gathering = (_union(span for span in spans if span.kind == kind) for kind in ("train", "rollout"))
    whole = sum(end - begin for begin, end in training)
    both = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in training for since, until in gathering)
    return both / whole if whole and gathering else None


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Without overlaps."""
    union: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if union and span.begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], span.end))
        else:
            union.append((span.begin, span.end))
    return union


class Bar(NamedTuple):
    """A span and where it is drawn."""

    span: Span
    middle: float
    thickness: float


@dataclass(frozen=True)
class Timeline:
    """A row of bars for each process: the learner on top and apart, then inference, then the workers."""

    title: str
    spans: list[Span]

    @property
    def subtitle(self) -> str:
        share = overlap(self.spans)
        told = "" if share is None else f"While the learner trains, rollouts are gathered {100 * share:.0f} % of the time. "
        return f"{told}Grey: waiting."

    @cached_property
    def places(self) -> dict[str, float]:
        """Process → middle of its row, from 0 downwards."""
        places: dict[str, float] = {}
        below = 0.0
        processes = sorted({span.process for span in self.spans}, key=_order)
        for above, process in zip(["", *processes], processes, strict=False):
            if above:
                below -= 1 if _order(above)[0] == _order(process)[0] else 1 + _APART
            places[process] = below
        return places

    @property
    def tracks(self) -> dict[str, tuple[float, float]]:
        """Process → from its first to its last span: what it did before and after is not known, and what has no bar within is waiting."""
        of = {process: [span for span in self.spans if span.process == process] for process in self.places}
        return {process: (min(span.begin for span in spans), max(span.end for span in spans)) for process, spans in of.items()}

    @property
    def window(self) -> float:
        """Seconds."""
        return max((span.end for span in self.spans), default=0.0) or 1.0

    @property
    def kinds(self) -> list[str]:
        """Those there are, in the order in which they are drawn."""
        return sorted({span.kind for span in self.spans}, key=lambda kind: (*KIND_COLOURS, kind).index(kind))

    def bars(self, kind: str) -> list[Bar]:
        """The bars of a kind; those that a process has at one time, as of two groups of envs, share its row."""
        bars = []
        for process, middle in self.places.items():
            spans = sorted((span for span in self.spans if span.process == process and span.kind == kind), key=lambda span: span.begin)
            lanes = _lanes(spans)
            thickness = _THICKNESS / (max(lanes, default=0) + 1)
            top = middle + _THICKNESS / 2
            bars += [Bar(span, top - (lane + 0.5) * thickness, thickness) for span, lane in zip(spans, lanes, strict=True)]
        return bars

    def figure(self) -> dict[str, Any]:
        """As plotly's JSON."""
        middles, tracks = list(self.places.values()), list(self.tracks.values())
        waiting = {
            **_trace(_WAITING, _WAITING_COLOUR),
            "y": middles,
            "x": numbers([end - begin for begin, end in tracks]),
            "base": numbers([begin for begin, _ in tracks]),
            "width": [_THICKNESS] * len(middles),
            "hoverinfo": "skip",
        }
        title = base_layout(self.title)["title"]
        title["text"] += f"<br><span style='font-size:13px'>{html.escape(self.subtitle)}</span>"
        y_axis = {"tickvals": middles, "ticktext": [html.escape(name) for name in self.places], "range": self._y_range(), "showgrid": False}
        layout = base_layout(self.title) | {
            "title": title,
            "xaxis": x_axis(_X_LABEL) | {"range": [0.0, self.window]},
            "yaxis": y_axis | {"zeroline": False},
            "barmode": "overlay",
            "hovermode": "closest",
        }
        return {"data": [waiting, *(self._bar_trace(kind) for kind in self.kinds)], "layout": layout}

    def _bar_trace(self, kind: str) -> dict[str, Any]:
        bars = self.bars(kind)
        return {
            **_trace(_NAMES.get(kind, kind), _colour(kind), self._edge(kind)),
            "y": [bar.middle for bar in bars],
            "x": numbers([bar.span.end - bar.span.begin for bar in bars]),
            "base": numbers([bar.span.begin for bar in bars]),
            "width": [bar.thickness for bar in bars],
            "text": [_told(bar.span) for bar in bars],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }

    def picture(self) -> bytes:
        """As a PNG, the higher the more processes there are."""
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        low, high = self._y_range()
        rows = min(max(30 * (high - low), 150), 1500)
        canvas = Canvas(self.title, round(rows) + 150)
        canvas.text(46, self.subtitle, size=10)
        axes = canvas.axes(0.115, 55 / canvas.height, 0.845, rows / canvas.height)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(8))
        tracks = list(self.tracks.values())
        waits, since = [end - begin for begin, end in tracks], [begin for begin, _ in tracks]
        axes.barh(list(self.places.values()), waits, _THICKNESS, since, color=_WAITING_COLOUR)
        for kind in self.kinds:
            bars = self.bars(kind)
            lengths, begins = [bar.span.end - bar.span.begin for bar in bars], [bar.span.begin for bar in bars]
            thickness, middles = [bar.thickness for bar in bars], [bar.middle for bar in bars]
            axes.barh(middles, lengths, thickness, begins, color=_colour(kind), edgecolor="white", linewidth=self._edge(kind))
        axes.set_yticks(list(self.places.values()), labels=list(self.places))
        axes.set_xlabel(_X_LABEL, color=INK, size=10)
        axes.set_xlim(0, self.window)
        axes.set_ylim(low, high)
        named = [*((_NAMES.get(kind, kind), _colour(kind)) for kind in self.kinds), (_WAITING, _WAITING_COLOUR)]
        handles = [Patch(color=colour, label=name) for name, colour in named]
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.2, ncols=len(handles), **LEGEND)
        return canvas.png()

    def _edge(self, kind: str) -> float:
        """Width of the white edge that tells bars apart; narrow ones have none, of which nothing would be left."""
        lengths = [span.end - span.begin for span in self.spans if span.kind == kind]
        return 0.5 if float(np.median(lengths)) > _NARROW * self.window else 0.0

    def _y_range(self) -> list[float]:
        return [min(self.places.values(), default=0.0) - 0.7, 0.7]


def _order(process: str) -> tuple[int, int, str]:
    """Learners, inference, workers and others; those of one kind by their number."""
    found = re.search(r"\d+", process)
    kinds = ("learner", "inference", "worker")
    kind = next((place for place, name in enumerate(kinds) if process.startswith(name)), len(kinds))
    return kind, int(found[0]) if found else 0, process


def _lanes(spans: Sequence[Span]) -> list[int]:
    """For each span, in their order, the first lane that is free."""
    ends: list[float] = []
    lanes = []
    for span in spans:
        since = span.begin + _OVERLAP * (span.end - span.begin)
        lane = next((index for index, end in enumerate(ends) if end <= since), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes


def _colour(kind: str) -> str:
    return KIND_COLOURS.get(kind, _OTHER_COLOUR)


def _told(span: Span) -> str:
    what = _NAMES.get(span.kind, span.kind)
    return html.escape(f"{span.process}: {what}, {span.begin:.4g} to {span.end:.4g} s ({1000 * (span.end - span.begin):.3g} ms)")


def _trace(name: str, colour: str, edge: float = 0.0) -> dict[str, Any]:
    return {"type": "bar", "orientation": "h", "name": name, "marker": {"color": colour, "line": {"color": "white", "width": edge}}}
