"""Render a figure as HTML with plotly.

Only `plotly.io.to_html` is imported, since importing the whole plotly package takes seconds. All HTML pages of a run share one file
plotly.min.js and need no network connection.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from slm_lab.experiment.report import figure as figures
from slm_lab.experiment.report.figure import AnyFigure, Bars, Figure, Line, Panel, ParallelCoordinates, Scale, ScatterGrid, Trials

PLOTLY_JS = "plotly.min.js"
_SINGLE_PANEL, _PANEL = 420, 190
"""Height in pixels of the panel of a figure with a single panel, and of each panel of a figure with several panels."""
_GAP = 0.15
"""Distance between two panels of a figure, as a fraction of the height of a panel."""
_TITLE_LETTERS, _SUBTITLE_LETTERS = 44, 56
"""Maximum number of characters in a line of the title and in a line of the subtitle. Lines of this length fit on the screen of a phone."""
_TITLE_LINE, _SUBTITLE_LINE, _AROUND = 21, 17, 24
"""Height in pixels of a line of the title, of a line of the subtitle, and of the space above and below the title and subtitle."""
_X_LABEL = 62
"""Height in pixels of the ticks and the label of the x axis, which are above the legend."""
_SYMBOLS = {"finished": "circle", "stopped": "triangle-down", "running": "square"}
"""Status of a trial → shape of its marker."""


def plotly_js() -> bytes:
    """Return the content of plotly.min.js (4.5 MB), which the HTML pages need."""
    return plotly_file().read_bytes()


def script_size() -> int:
    """Return the size of plotly.min.js in bytes."""
    return plotly_file().stat().st_size


@cache
def plotly_file() -> Path:
    """Return the path of plotly.min.js in the plotly package, without importing the package."""
    plotly = find_spec("plotly")
    assert plotly is not None
    assert plotly.origin is not None
    return Path(plotly.origin).parent / "package_data" / "plotly.min.js"


def render_html(figure: AnyFigure, script: str) -> bytes:
    """Return a figure as an HTML page.

    Args: script: path of plotly.min.js relative to the page.
    """
    from plotly.io import to_html

    settings = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["sendChartToCloud"]}
    return str(to_html(plotly_json(figure), config=settings, include_plotlyjs=script, validate=False)).encode()


def plotly_json(figure: AnyFigure) -> dict[str, Any]:
    """Convert a figure to a dict in plotly's JSON format, with the keys "data" and "layout"."""
    if isinstance(figure, Figure):
        return _panels(figure)
    layout = _layout(figure, 180 * len(figure.rows) or 420 if isinstance(figure, ScatterGrid) else 420)
    if figure.is_empty:
        return {"data": [], "layout": layout | _empty_layout(figures.NOTHING)}
    return {"data": _grid(figure, layout) if isinstance(figure, ScatterGrid) else _parallel_traces(figure, layout), "layout": layout}


def _panels(figure: Figure) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    layout = _panels_layout(figure)
    several = len(figure.panels) > 1
    height = 1 / (len(figure.panels) * (1 + _GAP) - _GAP)
    named: set[str] = set()
    for order, panel in enumerate(figure.panels):
        traces, suffix = _traces(panel), str(order + 1) if order else ""
        if not several and not traces:
            return {"data": [], "layout": layout | _empty_layout(panel.nothing)}
        x_axis, y_axis = _x_axis(panel), _y_axis(panel)
        if several:
            top = 1 - (1 + _GAP) * height * order
            last = order == len(figure.panels) - 1
            x_axis |= {"anchor": f"y{suffix}"} | ({"matches": "x"} if order else {})
            x_axis |= {} if last else {"title": {"text": ""}, "showticklabels": False}
            y_axis |= {"anchor": f"x{suffix}", "domain": [max(top - height, 0.0), top]}
            for trace in traces:  # show each name in the legend only once
                shown = trace["name"] not in named and trace.get("showlegend", True)
                trace |= {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": shown, "legendgroup": trace["name"]}
                named |= {trace["name"]} if shown else set()
        layout |= {f"xaxis{suffix}": x_axis, f"yaxis{suffix}": y_axis}
        data += traces
    return {"data": data, "layout": layout}


def _panels_layout(figure: Figure) -> dict[str, Any]:
    bars = any(panel.bars for panel in figure.panels)
    grouped = any(line.group not in ("", line.name) for panel in figure.panels for line in panel.lines)
    heights = [panel.height or (_PANEL if len(figure.panels) > 1 else _SINGLE_PANEL) for panel in figure.panels]
    layout = _layout(figure, max(sum(heights) * (1 + _GAP), 300))
    if any(panel.best_last for panel in figure.panels):
        layout["legend"]["traceorder"] = "reversed"
    layout |= {"showlegend": True, "hovermode": "closest" if bars or grouped else "x unified"}
    return layout | ({"barmode": "overlay"} if bars else {})


def _layout(figure: AnyFigure, plot_height: float) -> dict[str, Any]:
    """Return the plotly layout of a figure: title, size, fonts, colours and legend.

    The legend is below the plot, where plotly adds as many rows of legend entries as the width of the browser window requires.

    Args: plot_height: height of the area between the title and the legend, in pixels.
    """
    large, small = wrap(figures.shorten_title(figure.title), _TITLE_LETTERS), wrap(figure.subtitle, _SUBTITLE_LETTERS)
    lines = [*map(html.escape, large), *([f"<span style='font-size:13px'>{'<br>'.join(map(html.escape, small))}</span>"] if small else [])]
    top = _TITLE_LINE * len(large) + _SUBTITLE_LINE * len(small) + 2 * _AROUND
    place = {"x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top", "yref": "container", "pad": {"t": _AROUND}}
    return {
        "title": {"text": "<br>".join(lines), "font": {"size": 16}, **place},
        "font": {"family": "Inter, Helvetica, Arial, sans-serif", "size": 13, "color": figures.INK},
        "legend": {"orientation": "h", "x": 0, "y": -_X_LABEL / plot_height, "yanchor": "top"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "height": round(top + plot_height + _X_LABEL + 40),
        "margin": {"l": 80, "r": 30, "t": top, "b": _X_LABEL + 40},
    }


def _empty_layout(text: str) -> dict[str, Any]:
    """Return the entries of a plotly layout that hide the axes and show a text instead."""
    note = {"text": html.escape(text), "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    return {"annotations": [note], "xaxis": {"visible": False}, "yaxis": {"visible": False}}


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
    limits = _round_to_six_digits(figures.y_range(panel))
    if panel.rows:
        ticks = _named_ticks([(position, name) for name, position in panel.rows.items()])
        return {**ticks, "range": limits, "showgrid": False, "zeroline": False, "automargin": True}
    return {"title": {"text": html.escape(panel.y_label)}, "range": limits, "exponentformat": "power", **_GRID_STYLE}


_GRID_STYLE: dict[str, Any] = {
    "gridcolor": figures.GRID,
    "zeroline": False,
    "linecolor": figures.GREY,
    "ticks": "outside",
    "tickcolor": figures.GREY,
}


def _traces(panel: Panel) -> list[dict[str, Any]]:
    """Return the plotly traces of a panel in the order in which plotly draws them: bars, lines with their bands, and marks."""
    lines = [line for line in map(figures.thinned_line, panel.lines) if len(line.curve.frame)]
    traces = [trace for line in lines for trace in (*([_band_trace(line, panel)] if line.has_band else []), _line_trace(line))]
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
        "y": _round_to_six_digits(line.curve.value),
        "mode": "lines+markers" if len(line.curve.frame) <= figures.MAX_MARKERS and not line.dashed else "lines",
        "marker": {"size": 12 if len(line.curve.frame) == 1 else 4 if line.faint else 6},
        "line": {"color": line.colour, "width": line.width}
        | ({"shape": "hv"} if line.steps else {})
        | ({"dash": "dash"} if line.dashed else {}),
        "opacity": line.opacity,
    }


def _band_trace(line: Line, panel: Panel) -> dict[str, Any]:
    low, high = figures.band_edges(line)
    frame = _positions(line.curve.frame)
    red, green, blue = bytes.fromhex(line.colour[1:])
    return {
        "type": "scatter",
        "name": panel.band,
        **({} if panel.one_band else {"showlegend": False, "legendgroup": line.name}),  # the band is shown and hidden with the line
        "x": [*frame, *frame[::-1]],
        "y": [*_round_to_six_digits(high), *_round_to_six_digits(low[::-1])],
        "mode": "lines",
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{figures.BAND_OPACITY})",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _mark_trace(line: Line, *, legend: bool = False) -> dict[str, Any]:
    """Return the plotly trace of the marks of a line. If `legend` is True, return the trace of the legend entry that all marks share."""
    return {
        "type": "scatter",
        "name": figures.MARK,
        "legendgroup": figures.MARK,
        "showlegend": legend,
        "x": [mark.frame for mark in line.marks] or [None],
        "y": _round_to_six_digits([mark.value for mark in line.marks]) or [None],
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
        "x": _round_to_six_digits([bar.end - bar.begin for bar in kind.bars]),
        "base": _round_to_six_digits([bar.begin for bar in kind.bars]),
        "width": [bar.thickness for bar in kind.bars],
        **hover,
    }


def _round_to_six_digits(values: Sequence[float] | np.ndarray) -> list[float]:
    """Round the values to six significant digits, since a screen cannot show more digits."""
    return [float(f"{value:.6g}") for value in values]


def _positions(frame: np.ndarray) -> list[float]:
    """Return x positions for plotly: integers if all positions are integers, such as frames, else numbers with three decimals."""
    positions: list[float] = (frame.astype(int) if (frame == frame.astype(int)).all() else frame.round(3)).tolist()
    return positions


# ---- figures of a search


def _grid(figure: ScatterGrid, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plotly traces of a grid of scatter plots, and add the axes and the width to `layout`."""
    count, rows = len(figure.columns), len(figure.rows)
    width, height = 1 / (count + 0.18 * (count - 1)), 1 / (rows + 0.22 * (rows - 1))
    layout["width"] = max(700, 190 + 190 * count)
    data: list[dict[str, Any]] = []
    for row, column in np.ndindex(rows, count):
        number = row * count + column + 1
        suffix = "" if number == 1 else str(number)
        left, top = column * 1.18 * width, 1 - row * 1.22 * height
        x_domain, y_domain = [left, min(left + width, 1.0)], [max(top - height, 0.0), top]
        layout[f"xaxis{suffix}"] = _cell_axis(figure.columns[column], x_domain, f"y{suffix}", labelled=row == rows - 1)
        y_axis = _cell_axis(figure.rows[row], y_domain, f"x{suffix}", labelled=column == 0)
        layout[f"yaxis{suffix}"] = {**y_axis, "showticklabels": column == 0}
        data += _cell_traces(figure, row, column, suffix)
    return data


def _cell_axis(scale: Scale, domain: list[float], anchor: str, *, labelled: bool) -> dict[str, Any]:
    return {
        "gridcolor": figures.GRID,
        "zeroline": False,
        "showline": True,
        "linecolor": figures.GREY,
        "range": figures.SCATTER_RANGE,
        **_named_ticks(scale.ticks),
        "domain": domain,
        "anchor": anchor,
        "title": {"text": html.escape(scale.label if labelled else "")},
    }


def _cell_traces(figure: ScatterGrid, row: int, column: int, suffix: str) -> list[dict[str, Any]]:
    """Return the plotly traces of one scatter plot of the grid: a trace for each status of trials, and a last trace for the best trials."""
    x_T, y_T = figure.x_KT[column], figure.y_RT[row]
    trials, first, traces = figure.trials, row == column == 0, list[dict[str, Any]]()
    for name, picked in trials.legend_groups().items():
        chosen = picked[np.isfinite(x_T[picked]) & np.isfinite(y_T[picked])]
        if name.startswith("best"):
            edge = {"color": figures.HIGHLIGHT, "width": 2}
            marker: dict[str, Any] = {"symbol": "circle-open", "size": 13, "line": edge, "color": figures.HIGHLIGHT}
        else:
            marker = {"symbol": [_SYMBOLS[trials.status[t]] for t in chosen], "size": 7, "line": {"color": figures.INK, "width": 0.5}}
            marker |= {"color": _rounded_or_none(trials.value_T[chosen]), **_colours(trials), "showscale": first and not traces}
            marker["colorbar"] |= {"lenmode": "pixels", "len": 400, "y": 1, "yanchor": "top"}
        traces.append({
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "legendgroup": name,
            "x": _rounded_or_none(x_T[chosen]),
            "y": _rounded_or_none(y_T[chosen]),
            "xaxis": f"x{suffix}",
            "yaxis": f"y{suffix}",
            "text": [html.escape(trials.text[t]).replace("\n", "<br>") for t in chosen],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": marker,
            "showlegend": first,  # show each name in the legend only once
        })  # fmt: skip
    return traces


def _parallel_traces(figure: ParallelCoordinates, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plotly traces of parallel coordinates, and set the width and the top margin in `layout`."""
    layout["width"] = max(700, 180 * len(figure.axes))  # in a narrower figure, the labels of the axes would overlap
    layout["margin"]["t"] += 40  # space for the labels of the axes
    trials = figure.trials
    dimensions = [
        {
            "label": html.escape(scale.wrapped_label).replace("\n", "<br>"),
            "range": [figures.UNUSED - 0.05 if scale.unused else 0.0, 1.0],
            **_named_ticks(scale.all_ticks),
            "values": _rounded_or_none(position_T[::-1]),  # the best trial is drawn last
        }
        for scale, position_T in zip(figure.axes, figure.position_AT, strict=True)
    ]
    line = {"color": _rounded_or_none(np.nan_to_num(trials.value_T[::-1], nan=trials.low)), **_colours(trials), "showscale": True}
    return [{"type": "parcoords", "dimensions": dimensions, "line": line}]


def _named_ticks(ticks: Sequence[tuple[float, str]]) -> dict[str, Any]:
    return {"tickvals": [position for position, _ in ticks], "ticktext": [html.escape(text) for _, text in ticks]}


def _colours(trials: Trials) -> dict[str, Any]:
    scale = [[index / (len(figures.COLOURS) - 1), colour] for index, colour in enumerate(figures.COLOURS)]
    return {"colorscale": scale, "cmin": trials.low, "cmax": trials.high, "colorbar": {"title": {"text": html.escape(trials.label)}}}


def _rounded_or_none(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
