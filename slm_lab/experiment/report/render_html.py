"""Render a figure as HTML by plotly.

Only plotly's writer is loaded: the whole package takes seconds to import. The pages of a run share one plotly.min.js and need no network.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from slm_lab.experiment.report import figure as figures
from slm_lab.experiment.report.figure import AnyFigure, Bars, Figure, Line, Panel
from slm_lab.experiment.report.page import page_layout
from slm_lab.experiment.report.render_scatter import scatter_json

PLOTLY_JS = "plotly.min.js"
_SINGLE_PANEL, _PANEL = 420, 190
"""Pixels of a panel alone, and of one of several."""
_GAP = 0.15
"""Between two panels, in heights of a panel."""


def plotly_js() -> bytes:
    """Return the script that the pages need, 4.5 MB."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def render_html(figure: AnyFigure, script: str) -> bytes:
    """Return a figure as a page; `script` is the path of plotly.min.js relative to the page."""
    from plotly.io import to_html

    content = plotly_json(figure) if isinstance(figure, Figure) else scatter_json(figure)
    settings = {"displaylogo": False, "responsive": True}
    return str(to_html(content, config=settings, include_plotlyjs=script, validate=False)).encode()


def plotly_json(figure: Figure) -> dict[str, Any]:
    """Return a figure as plotly's JSON: data and layout."""
    data: list[dict[str, Any]] = []
    layout = _layout(figure)
    several = len(figure.panels) > 1
    height = 1 / (len(figure.panels) * (1 + _GAP) - _GAP)
    named: set[str] = set()
    for order, panel in enumerate(figure.panels):
        x_axis, y_axis, suffix = _x_axis(panel), _y_axis(panel), str(order + 1) if order else ""
        traces = _traces(panel)
        if several:
            top = 1 - (1 + _GAP) * height * order
            last = order == len(figure.panels) - 1
            x_axis |= {"anchor": f"y{suffix}"} | ({"matches": "x"} if order else {})
            x_axis |= {} if last else {"title": {"text": ""}, "showticklabels": False}
            y_axis |= {"anchor": f"x{suffix}", "domain": [max(top - height, 0.0), top]}
            for trace in traces:  # each name is in the legend once
                shown = trace["name"] not in named and trace.get("showlegend", True)
                trace |= {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": shown, "legendgroup": trace["name"]}
                named |= {trace["name"]} if shown else set()
        elif not traces:
            x_axis, y_axis = {"visible": False}, {"visible": False}
            layout["annotations"] = [
                {"text": html.escape(panel.nothing), "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
            ]
        layout |= {f"xaxis{suffix}": x_axis, f"yaxis{suffix}": y_axis}
        data += traces
    return {"data": data, "layout": layout}


def _layout(figure: Figure) -> dict[str, Any]:
    bars = any(panel.bars for panel in figure.panels)
    grouped = any(line.group not in ("", line.name) for panel in figure.panels for line in panel.lines)
    heights = [panel.height or (_PANEL if len(figure.panels) > 1 else _SINGLE_PANEL) for panel in figure.panels]
    layout = page_layout(figure.title, figure.subtitle, max(sum(heights) * (1 + _GAP), 300))
    if any(panel.best_last for panel in figure.panels):
        layout["legend"]["traceorder"] = "reversed"
    return {
        **layout,
        "showlegend": True,
        "hovermode": "closest" if bars or grouped else "x unified",
        **({"barmode": "overlay"} if bars else {}),
    }


def _x_axis(panel: Panel) -> dict[str, Any]:
    return {
        "title": {"text": html.escape(panel.x_label)},
        "separatethousands": True,
        "exponentformat": "none",
        "rangemode": "tozero",
        "showline": True,
        **({} if panel.x_max is None else {"range": [0.0, panel.x_max]}),
        **_GRID_STYLE,
    }


def _y_axis(panel: Panel) -> dict[str, Any]:
    limits = _digits(figures.y_range(panel))
    if panel.rows:
        names = [html.escape(name) for name in panel.rows]
        return {
            "tickvals": list(panel.rows.values()),
            "ticktext": names,
            "range": limits,
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        }
    return {"title": {"text": html.escape(panel.y_label)}, "range": limits, "exponentformat": "power", **_GRID_STYLE}


_GRID_STYLE: dict[str, Any] = {
    "gridcolor": figures.GRID,
    "zeroline": False,
    "linecolor": figures.GREY,
    "ticks": "outside",
    "tickcolor": figures.GREY,
}


def _traces(panel: Panel) -> list[dict[str, Any]]:
    """Return what is drawn, from back to front."""
    lines = [line for line in map(figures.thin, figures.visible_lines(panel)) if len(line.curve.frame)]
    traces = [trace for line in lines for trace in (*([_band_trace(line, panel)] if line.banded else []), _line_trace(line))]
    grouped: set[str] = set()
    for line, trace in ((line, trace) for line in lines for trace in traces if line.group and trace["name"] == line.name):
        hover = {"hovertemplate": f"%{{x}}, %{{y}}<extra>{html.escape(line.name)}</extra>"} if line.name != line.group else {}
        trace |= {"name": line.group, "legendgroup": line.group, "showlegend": line.group not in grouped, **hover}
        grouped.add(line.group)
    marked = [line for line in lines if line.marks]
    legend = [_mark_trace(Line(figures.MARK, marked[0].curve, "#FFFFFF"), legend=True)] if marked else []
    return [*map(_bars_trace, panel.bars), *traces, *map(_mark_trace, marked), *legend]


def _line_trace(line: Line) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": line.name,
        "x": _positions(line.curve.frame),
        "legendgroup": line.name,
        "y": _digits(line.curve.value),
        "mode": "lines+markers" if len(line.curve.frame) <= figures.MAX_MARKERS and not line.dashed else "lines",
        "marker": {"size": 12 if len(line.curve.frame) == 1 else 4 if line.faint else 6},
        "line": {"color": line.colour, "width": 1 if line.faint or line.dashed else 2.5}
        | ({"shape": "hv"} if line.steps else {})
        | ({"dash": "dash"} if line.dashed else {}),
        "opacity": figures.FAINT_OPACITY if line.faint else 1.0,
    }


def _band_trace(line: Line, panel: Panel) -> dict[str, Any]:
    low, high = figures.band_edges(line)
    frame = _positions(line.curve.frame)
    red, green, blue = bytes.fromhex(line.colour[1:])
    return {
        "type": "scatter",
        "name": panel.band,
        **({} if panel.one_band else {"showlegend": False, "legendgroup": line.name}),  # shown and hidden with its line
        "x": [*frame, *frame[::-1]],
        "y": [*_digits(high), *_digits(low[::-1])],
        "mode": "lines",
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{figures.BAND_OPACITY})",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _mark_trace(line: Line, *, legend: bool = False) -> dict[str, Any]:
    """Return the marks of a line, or the entry of the legend for those of all."""
    return {
        "type": "scatter",
        "name": figures.MARK,
        "legendgroup": figures.MARK,
        "showlegend": legend,
        "x": [mark.frame for mark in line.marks] or [None],
        "y": _digits([mark.value for mark in line.marks]) or [None],
        "text": [html.escape(mark.text) for mark in line.marks],
        "hovertemplate": "%{text}<extra></extra>",
        "mode": "markers",
        "marker": {"symbol": "x", "size": 10, "color": line.colour, "line": {"color": figures.INK, "width": 1}},
    }


def _bars_trace(kind: Bars) -> dict[str, Any]:
    texts = [html.escape(bar.text) for bar in kind.bars]
    hover = {"text": texts, "textposition": "none", "hovertemplate": "%{text}<extra></extra>"} if any(texts) else {"hoverinfo": "skip"}
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind.name,
        "marker": {"color": kind.colour, "line": {"color": "white", "width": kind.edge}},
        "y": [bar.middle for bar in kind.bars],
        "x": _digits([bar.end - bar.begin for bar in kind.bars]),
        "base": _digits([bar.begin for bar in kind.bars]),
        "width": [bar.thickness for bar in kind.bars],
        **hover,
    }


def _digits(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return values with six significant digits, which is more than a screen shows."""
    return [float(f"{value:.6g}") for value in values]


def _positions(frame: np.ndarray) -> list[float]:
    """Return counts in full, seconds rounded to the millisecond."""
    positions: list[float] = (frame.astype(int) if (frame == frame.astype(int)).all() else frame.round(3)).tolist()
    return positions
