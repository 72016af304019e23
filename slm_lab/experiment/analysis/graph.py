"""A graph, and its two forms: HTML by plotly, to look into, and PNG by matplotlib, to pass on. Both draw the same numbers.

Of plotly only the writer is loaded, and of matplotlib only the canvas: the whole of either takes seconds to import. HTML files share
one plotly.min.js per run and need no network.
"""

from __future__ import annotations

import html
import warnings
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.table import Curve

PLOTLY_JS = "plotly.min.js"
MEAN_COLOUR = "#0072B2"
SESSION_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette: told apart also by the colour-blind."""
_INK, _GRID, _GREY = "#333333", "#E3E3E3", "#777777"
_BAND, _FAINT = 0.18, 0.5
"""Opacity of the band and of the lines behind a mean."""
_MOST_POINTS = 2000
"""More than a screen can show: longer curves are thinned evenly."""
_FEW_POINTS = 25
"""Up to so many, each point is marked; a single one would not be seen otherwise."""
_LONGEST = 90
"""Letters of a title."""
_MOST_NAMES = 3
"""With more lines behind the mean, the legend of the PNG names them together: it has one row."""


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
    """Lines over frames; those drawn later lie above."""

    title: str
    y_label: str
    lines: list[Line]
    core_range: bool = False
    """Show where most values lie: those at the start may be of another magnitude (quotients of small sums)."""


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


def _short(title: str) -> str:
    """A title that fits: what is drawn stands at its end, the spec's name at its begin."""
    return title if len(title) <= _LONGEST else f"{title[: _LONGEST - 61]}…{title[-60:]}"


def _thinned(line: Line) -> Line:
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
    traces = [trace for line in map(_thinned, shown(graph)) for trace in (_band_trace(line), _line_trace(line)) if trace]
    grid = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GREY, "ticks": "outside", "tickcolor": _GREY}
    layout = {
        "title": {"text": html.escape(_short(graph.title)), "x": 0.01, "xanchor": "left"},
        "font": {"family": "Inter, Helvetica, Arial, sans-serif", "size": 13, "color": _INK},
        "xaxis": {"title": {"text": "frames"}, "tickformat": ",d", "rangemode": "tozero", "showline": True, **grid},
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
        "x": line.curve.frame.astype(int).tolist(),
        "y": _numbers(line.curve.value),
        "mode": "lines+markers" if len(line.curve.frame) <= _FEW_POINTS else "lines",
        "marker": {"size": 4 if line.faint else 6},
        "line": {"color": line.colour, "width": 1 if line.faint else 2.5},
        "opacity": _FAINT if line.faint else 1.0,
    }


def _band_trace(line: Line) -> dict[str, Any] | None:
    if line.std is None or not len(line.curve.frame):
        return None
    frame, low, high = line.curve.frame.astype(int), line.curve.value - line.std, line.curve.value + line.std
    red, green, blue = bytes.fromhex(line.colour[1:])
    return {
        "type": "scatter",
        "name": BAND,
        "x": [*frame.tolist(), *frame[::-1].tolist()],
        "y": [*_numbers(high), *_numbers(low[::-1])],
        "mode": "lines",
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{_BAND})",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _numbers(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _tick(value: float, position: int | None) -> str:
    """1,500 0.25 2e-5: matplotlib's own form may move a power of ten out of the axis."""
    if 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        text = f"{float(digits):g}e{int(power)}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


class Painter:
    """Draws PNGs, all on one canvas: making a new one takes longer than drawing."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

        figure = Figure(figsize=(8, 4.5), dpi=100, facecolor="white")
        self.canvas: Any = FigureCanvasAgg(figure)  # its methods have no types
        self.title = figure.text(0.02, 0.95, "", size=12, weight="bold", color=_INK, va="center", parse_math=False)
        self.axes = axes = figure.add_axes((0.115, 0.125, 0.845, 0.73))
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(labelcolor=_INK, labelsize=9, bottom=False, left=False)
        axes.set_xlabel("frames", color=_INK, size=10)
        axes.xaxis.set_label_coords(0.5, -0.1)  # a fixed place saves the search for one
        axes.yaxis.set_label_coords(-0.104, 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    def picture(self, graph: Graph) -> bytes:
        """The graph as a PNG of 800 × 450 points."""
        from PIL import Image

        axes = self.axes
        for artist in (*axes.lines, *axes.collections, *axes.texts):
            artist.remove()
        self.title.set_text(_short(graph.title))
        axes.set_ylabel(graph.y_label, color=_INK, size=10)
        self._draw(graph)
        last = max((float(line.curve.frame[-1]) for line in graph.lines if len(line.curve.frame)), default=1.0)
        axes.set_xlim(0, last * 1.02)
        axes.set_ylim(*y_range(graph))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a glyph that the font lacks
            self.canvas.draw()
        content = BytesIO()
        # without savefig and the alpha channel: a fifth faster
        Image.fromarray(np.asarray(self.canvas.buffer_rgba())).convert("RGB").save(content, format="PNG", compress_level=1)
        return content.getvalue()

    def _draw(self, graph: Graph) -> None:
        behind = [line for line in graph.lines if line.faint]
        together = len(behind) > _MOST_NAMES
        for line in map(_thinned, shown(graph)):
            (frame, value), colour, name = line.curve, line.colour, line.name
            if line.faint and together:
                colour, name = _GREY, f"{len(behind)} sessions" if line.name == behind[0].name else "_"  # "_": not in the legend
            if line.std is not None and len(frame):
                band = (value - line.std, value + line.std)
                self.axes.fill_between(frame, *band, color=colour, alpha=_BAND, linewidth=0, label=BAND)
            self.axes.plot(
                frame,
                value,
                color=colour,
                alpha=_FAINT if line.faint else 1.0,
                linewidth=1.0 if line.faint else 2.0,
                marker="o" if len(frame) <= _FEW_POINTS else "",
                markersize=2.5 if line.faint else 4,
                label=name,
            )
        if any(len(line.curve.frame) for line in graph.lines):
            place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
            self.axes.legend(**place, ncols=8, fontsize=9, labelcolor=_INK, frameon=False, handlelength=1.2, columnspacing=1)
        else:
            if legend := self.axes.get_legend():
                legend.remove()
            self.axes.text(0.5, 0.5, NOTHING, transform=self.axes.transAxes, ha="center", color=_GREY)
