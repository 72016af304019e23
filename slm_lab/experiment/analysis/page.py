"""A graph's form to look into: HTML by plotly.

Of plotly only the writer is loaded: the whole takes seconds to import. HTML files share one plotly.min.js per run and need no network.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.graph import (
    BAND_OPACITY,
    FAINT_OPACITY,
    FEW_POINTS,
    GREY,
    GRID,
    INK,
    MARK,
    NOTHING,
    Graph,
    Line,
    band_edges,
    short,
    shown,
    thinned,
    y_range,
)

PLOTLY_JS = "plotly.min.js"


def plotly_js() -> bytes:
    """The script that the pages need, 4.5 MB."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def page(figure: dict[str, Any], script: str) -> bytes:
    """A figure (plotly's JSON) as a page; `script` is where it finds plotly_js(), as seen from the page."""
    from plotly.io import to_html

    settings = {"displaylogo": False, "responsive": True}
    return str(to_html(figure, config=settings, include_plotlyjs=script, validate=False)).encode()


def figure(graph: Graph) -> dict[str, Any]:
    """The graph as plotly's JSON."""
    drawn = traces(graph)
    layout = base_layout(graph.title) | {"xaxis": x_axis(graph.x_label), "yaxis": y_axis(graph)}
    if not drawn:
        layout |= {"xaxis": {"visible": False}, "yaxis": {"visible": False}}
        layout["annotations"] = [{"text": NOTHING, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}]
    return {"data": drawn, "layout": layout}


def traces(graph: Graph) -> list[dict[str, Any]]:
    """What is drawn of a graph, from the back to the front."""
    lines = [line for line in map(thinned, shown(graph)) if len(line.curve.frame)]
    drawn = [trace for line in lines for trace in (*([_band_trace(line, graph)] if line.banded else []), _line_trace(line))]
    marked = [line for line in lines if line.marks]
    return [*drawn, *map(_mark_trace, marked), *([_mark_trace(Line(MARK, marked[0].curve, "#FFFFFF"), named=True)] if marked else [])]


def base_layout(title: str) -> dict[str, Any]:
    """What all pages look like."""
    return {
        "title": {"text": html.escape(short(title)), "x": 0.01, "xanchor": "left"},
        "font": {"family": "Inter, Helvetica, Arial, sans-serif", "size": 13, "color": INK},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
        "hovermode": "x unified",
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 80, "r": 30, "t": 100, "b": 60},
    }


def x_axis(label: str) -> dict[str, Any]:
    return {
        "title": {"text": html.escape(label)},
        "separatethousands": True,
        "exponentformat": "none",
        "rangemode": "tozero",
        "showline": True,
        **_grid(),
    }


def y_axis(graph: Graph) -> dict[str, Any]:
    return {
        "title": {"text": html.escape(graph.y_label)},
        "range": numbers(y_range(graph)),
        "exponentformat": "power",
        **_grid(),
    }


def numbers(values: Sequence[float] | np.ndarray) -> list[float]:
    """With as many digits as anybody can see."""
    return [float(f"{value:.6g}") for value in values]


def _grid() -> dict[str, Any]:
    return {"gridcolor": GRID, "zeroline": False, "linecolor": GREY, "ticks": "outside", "tickcolor": GREY}


def _line_trace(line: Line) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": line.name,
        "x": _places(line.curve.frame),
        "legendgroup": line.name,
        "y": numbers(line.curve.value),
        "mode": "lines+markers" if len(line.curve.frame) <= FEW_POINTS else "lines",
        "marker": {"size": 4 if line.faint else 6},
        "line": {"color": line.colour, "width": 1 if line.faint else 2.5} | ({"shape": "hv"} if line.steps else {}),
        "opacity": FAINT_OPACITY if line.faint else 1.0,
    }


def _band_trace(line: Line, graph: Graph) -> dict[str, Any]:
    low, high = band_edges(line)
    frame = _places(line.curve.frame)
    red, green, blue = bytes.fromhex(line.colour[1:])
    return {
        "type": "scatter",
        "name": graph.band,
        **({} if graph.one_band else {"showlegend": False, "legendgroup": line.name}),  # goes with its line
        "x": [*frame, *frame[::-1]],
        "y": [*numbers(high), *numbers(low[::-1])],
        "mode": "lines",
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{BAND_OPACITY})",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _mark_trace(line: Line, *, named: bool = False) -> dict[str, Any]:
    """The marks of a line; without any it stands in the legend for those of all."""
    return {
        "type": "scatter",
        "name": MARK,
        "legendgroup": MARK,
        "showlegend": named,
        "x": [mark.frame for mark in line.marks] or [None],
        "y": numbers([mark.value for mark in line.marks]) or [None],
        "text": [html.escape(mark.text) for mark in line.marks],
        "hovertemplate": "%{text}<extra></extra>",
        "mode": "markers",
        "marker": {"symbol": "x", "size": 10, "color": line.colour, "line": {"color": INK, "width": 1}},
    }


def _places(frame: np.ndarray) -> list[float]:
    """Counts in full, seconds to the millisecond."""
    places: list[float] = (frame.astype(int) if (frame == frame.astype(int)).all() else frame.round(3)).tolist()
    return places
