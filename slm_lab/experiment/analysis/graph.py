"""A graph, and its form to look into: HTML by plotly. picture.py makes of the same numbers a PNG to pass on.

Of plotly only the writer is loaded: the whole takes seconds to import. HTML files share one plotly.min.js per run and need no network.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.table import Curve

PLOTLY_JS = "plotly.min.js"
MEAN_COLOUR = "#0072B2"
SESSION_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette: told apart also by the colour-blind."""
INK, GRID, GREY = "#333333", "#E3E3E3", "#777777"
BAND_OPACITY, FAINT_OPACITY = 0.18, 0.5
"""Opacity of the band and of the lines behind a mean."""
_MOST_POINTS = 2000
"""More than a screen can show: longer curves are thinned evenly."""
FEW_POINTS = 25
"""Up to so many, each point is marked; a single one would not be seen otherwise."""
_LONGEST = 90
"""Letters of a title."""
BAND = "±1 standard deviation"
NOTHING = "nothing to show: no episode has ended"


@dataclass(frozen=True)
class Line:
    """One line of a graph."""

    name: str
    curve: Curve
    colour: str = MEAN_COLOUR
    std: np.ndarray | None = None
    """Half the height of the band around the line, [points]; None: no band."""
    faint: bool = False
    """Stands behind the others."""


@dataclass(frozen=True)
class Graph:
    """Lines over frames or `x_label`; those drawn later lie above."""

    title: str
    y_label: str
    lines: list[Line]
    core_range: bool = False
    """Show where most values lie: those at the start may be of another magnitude (quotients of small sums)."""
    x_label: str = "frames"

    @property
    def one_band(self) -> bool:
        """Whether the legend names the band; what several are, the title has to say."""
        return sum(line.std is not None and len(line.curve.frame) > 0 for line in self.lines) == 1


def y_range(graph: Graph) -> tuple[float, float]:
    """The values to show, with a margin; (0, 1) for a graph without points."""
    values = _values(shown(graph))
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if graph.core_range:
        core_low, core_high = _core(graph)
        low, high = max(low, core_low), min(high, core_high)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def shown(graph: Graph) -> list[Line]:
    """The lines; with core_range from where on they stay where most values lie.

    Only the first half of a line may be left out: what strays later is to be seen.
    """
    if not graph.core_range or not len(_values(graph.lines)):
        return graph.lines
    low, high = _core(graph)
    return [_begun(line, low, high) for line in graph.lines]


def _begun(line: Line, low: float, high: float) -> Line:
    lower, upper = _edges(line)
    outside = np.flatnonzero((lower < low) | (upper > high))
    early = outside[outside < len(lower) // 2]
    return _kept(line, np.arange(early[-1] + 1 if len(early) else 0, len(lower)))


def _core(graph: Graph) -> tuple[float, float]:
    """Where most values lie, of all lines together, and as much again to both sides."""
    low, high = np.percentile(_values(graph.lines), (15, 85))
    return float(2 * low - high), float(2 * high - low)


def _values(lines: list[Line]) -> np.ndarray:
    return np.concatenate([np.empty(0), *(edge for line in lines for edge in _edges(line))])


def _edges(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper edge of the band; without one both are the line."""
    std = 0.0 if line.std is None else line.std
    return line.curve.value - std, line.curve.value + std


def _kept(line: Line, kept: np.ndarray) -> Line:
    """The line at those points, by index."""
    std = None if line.std is None else line.std[kept]
    return replace(line, curve=Curve(line.curve.frame[kept], line.curve.value[kept]), std=std)


def short(title: str) -> str:
    """A title that fits: what is drawn stands at its end, the spec's name at its begin."""
    return title if len(title) <= _LONGEST else f"{title[: _LONGEST - 61]}…{title[-60:]}"


def thinned(line: Line) -> Line:
    count = len(line.curve.frame)
    if count <= _MOST_POINTS:
        return line
    return _kept(line, np.linspace(0, count - 1, _MOST_POINTS).round().astype(int))


def plotly_js() -> bytes:
    """The script that the pages need, 4.5 MB."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def page(graph: Graph, script: str) -> bytes:
    """The graph as a page; `script` is where it finds plotly_js(), as seen from the page."""
    from plotly.io import to_html

    settings = {"displaylogo": False, "responsive": True}
    return str(to_html(figure(graph), config=settings, include_plotlyjs=script, validate=False)).encode()


def figure(graph: Graph) -> dict[str, Any]:
    """The graph as plotly's JSON."""
    traces = [trace for line in map(thinned, shown(graph)) for trace in (_band_trace(line, graph.one_band), _line_trace(line)) if trace]
    grid = {"gridcolor": GRID, "zeroline": False, "linecolor": GREY, "ticks": "outside", "tickcolor": GREY}
    layout = {
        "title": {"text": html.escape(short(graph.title)), "x": 0.01, "xanchor": "left"},
        "font": {"family": "Inter, Helvetica, Arial, sans-serif", "size": 13, "color": INK},
        "xaxis": {
            "title": {"text": html.escape(graph.x_label)},
            "separatethousands": True,
            "exponentformat": "none",
            "rangemode": "tozero",
            "showline": True,
            **grid,
        },
        "yaxis": {
            "title": {"text": html.escape(graph.y_label)},
            "range": _numbers(np.array(y_range(graph))),
            "exponentformat": "power",
            **grid,
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
        "hovermode": "x unified",
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 80, "r": 30, "t": 100, "b": 60},
    }
    if not traces:
        layout |= {"xaxis": {"visible": False}, "yaxis": {"visible": False}}
        layout["annotations"] = [{"text": NOTHING, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}]
    return {"data": traces, "layout": layout}


def _line_trace(line: Line) -> dict[str, Any] | None:
    if not len(line.curve.frame):
        return None
    return {
        "type": "scatter",
        "name": line.name,
        "x": _places(line.curve.frame),
        "legendgroup": line.name,
        "y": _numbers(line.curve.value),
        "mode": "lines+markers" if len(line.curve.frame) <= FEW_POINTS else "lines",
        "marker": {"size": 4 if line.faint else 6},
        "line": {"color": line.colour, "width": 1 if line.faint else 2.5},
        "opacity": FAINT_OPACITY if line.faint else 1.0,
    }


def _band_trace(line: Line, named: bool) -> dict[str, Any] | None:
    if line.std is None or not len(line.curve.frame):
        return None
    low, high = _edges(line)
    frame = _places(line.curve.frame)
    red, green, blue = bytes.fromhex(line.colour[1:])
    return {
        "type": "scatter",
        "name": BAND,
        **({} if named else {"showlegend": False, "legendgroup": line.name}),  # goes with its line
        "x": [*frame, *frame[::-1]],
        "y": [*_numbers(high), *_numbers(low[::-1])],
        "mode": "lines",
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{BAND_OPACITY})",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _places(frame: np.ndarray) -> list[float]:
    """Counts in full, seconds to the millisecond."""
    places: list[float] = (frame.astype(int) if (frame == frame.astype(int)).all() else frame.round(3)).tolist()
    return places


def _numbers(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
