"""Render scatter grids and parallel coordinates: as plotly's JSON, and with matplotlib's canvas."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from slm_lab.experiment.report import figure as figures
from slm_lab.experiment.report.figure import (
    BEST,
    COLOURS,
    HIGHLIGHT,
    MARKERS,
    NOTHING,
    STATUS_TEXTS,
    UNUSED,
    ParallelCoordinates,
    Scale,
    ScatterGrid,
    Shade,
    Trials,
)
from slm_lab.experiment.report.page import page_layout

_CELL, _ROW, _LEFT, _RIGHT, _TOP, _BELOW = 190, 130, 95, 130, 95, 85
"""Pixels: a cell of a grid, its height, and what is around all cells."""
_PNG_SYMBOLS = {"circle": "o", "triangle": "v", "square": "s"}
_PLOTLY_SYMBOLS = {"circle": "circle", "triangle": "triangle-down", "square": "square"}
_MARGIN = 0.07
"""Around the positions 0 to 1."""


def scatter_json(figure: ScatterGrid | ParallelCoordinates) -> dict[str, Any]:
    """Return a figure as plotly's JSON: data and layout."""
    rows = len(figure.rows) if isinstance(figure, ScatterGrid) else 0
    layout = page_layout(figure.title, figure.subtitle, 180 * rows or 420)
    if figure.empty:
        layout["annotations"] = [{"text": NOTHING, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}]
        return {"data": [], "layout": layout | {"xaxis": {"visible": False}, "yaxis": {"visible": False}}}
    if isinstance(figure, ParallelCoordinates):
        layout["width"] = max(700, 180 * len(figure.axes))  # below that the labels of the axes overlap
        layout["margin"]["t"] += 40  # for these labels
        return {"data": [_parallel_trace(figure)], "layout": layout}
    data = [trace for row in range(len(figure.rows)) for column in range(len(figure.columns)) for trace in _cell(figure, row, column)]
    named: set[str] = set()
    for trace in data:  # each name is in the legend once
        trace["showlegend"] = trace["name"] not in named
        named.add(trace["name"])
    return {"data": data, "layout": layout | _grid_axes(figure)}


def _colour_scale() -> list[list[Any]]:
    return [[index / (len(COLOURS) - 1), colour] for index, colour in enumerate(COLOURS)]


def _parallel_trace(figure: ParallelCoordinates) -> dict[str, Any]:
    shade = figure.trials.shade
    order = np.arange(figure.position_AT.shape[1])[::-1]  # the best is drawn last
    dimensions = [
        {
            "label": html.escape(_wrapped(scale.label)).replace("\n", "<br>"),
            "range": [UNUSED - 0.05 if scale.unused else 0.0, 1.0],
            "tickvals": [position for position, _ in _ticks(scale)],
            "ticktext": [html.escape(text) for _, text in _ticks(scale)],
            "values": _numbers(position_T[order]),
        }
        for scale, position_T in zip(figure.axes, figure.position_AT, strict=True)
    ]
    line = {
        "color": _numbers(np.nan_to_num(shade.value_T[order], nan=shade.low)),
        "colorscale": _colour_scale(),
        "cmin": shade.low,
        "cmax": shade.high,
        "showscale": True,
        "colorbar": {"title": {"text": html.escape(shade.label)}},
    }
    return {"type": "parcoords", "dimensions": dimensions, "line": line}


def _cell(figure: ScatterGrid, row: int, column: int) -> list[dict[str, Any]]:
    """Return the traces of one cell, one for each status and the best trials last."""
    x_T, y_T, suffix = figure.x_KT[column], figure.y_RT[row], str(row * len(figure.columns) + column + 1).removeprefix("0")
    suffix = "" if suffix == "1" else suffix
    shade, traces = figure.trials.shade, []
    for name, picked in _groups(figure.trials).items():
        chosen = picked[np.isfinite(x_T[picked]) & np.isfinite(y_T[picked])]
        is_best = name.startswith("best")
        marker: dict[str, Any] = {
            "symbol": [_PLOTLY_SYMBOLS[MARKERS[figure.trials.status[t]]] for t in chosen],
            "size": 13 if is_best else 7,
            "line": {"color": HIGHLIGHT if is_best else figures.INK, "width": 2 if is_best else 0.5},
        }
        if is_best:
            marker["symbol"] = "circle-open"
            marker["color"] = HIGHLIGHT
        else:
            marker |= {"color": _numbers(shade.value_T[chosen]), "colorscale": _colour_scale(), "cmin": shade.low, "cmax": shade.high}
            marker |= {"showscale": not row and not column and name == next(iter(_groups(figure.trials)))}
            marker |= {"colorbar": {"title": {"text": html.escape(shade.label)}, "lenmode": "pixels", "len": 400, "y": 1, "yanchor": "top"}}
        traces.append({
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "legendgroup": name,
            "x": _numbers(x_T[chosen]),
            "y": _numbers(y_T[chosen]),
            "xaxis": f"x{suffix}",
            "yaxis": f"y{suffix}",
            "text": [html.escape(figure.trials.text[t]).replace("\n", "<br>") for t in chosen],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": marker,
        })  # fmt: skip
    return traces


def _grid_axes(figure: ScatterGrid) -> dict[str, Any]:
    count, rows = len(figure.columns), len(figure.rows)
    style = {"gridcolor": figures.GRID, "zeroline": False, "showline": True, "linecolor": figures.GREY, "range": [-_MARGIN, 1 + _MARGIN]}
    width, height = 1 / (count + 0.18 * (count - 1)), 1 / (rows + 0.22 * (rows - 1))
    axes: dict[str, Any] = {"width": max(700, 190 + 190 * count)}
    for row in range(rows):
        for column in range(count):
            number = row * count + column + 1
            suffix = "" if number == 1 else str(number)
            left, top = column * 1.18 * width, 1 - row * 1.22 * height
            bottom_row, first = row == rows - 1, column == 0
            axes[f"xaxis{suffix}"] = {
                **style, **_plotly_ticks(figure.columns[column]), "domain": [left, min(left + width, 1.0)], "anchor": f"y{suffix}",
                "title": {"text": html.escape(figure.columns[column].label) if bottom_row else ""},
            }  # fmt: skip
            axes[f"yaxis{suffix}"] = {
                **style, **_plotly_ticks(figure.rows[row]), "domain": [max(top - height, 0.0), top], "anchor": f"x{suffix}",
                "showticklabels": first, "title": {"text": html.escape(figure.rows[row].label) if first else ""},
            }  # fmt: skip
    return axes


def _plotly_ticks(scale: Scale) -> dict[str, Any]:
    return {"tickvals": [position for position, _ in scale.ticks], "ticktext": [html.escape(text) for _, text in scale.ticks]}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _ticks(scale: Scale) -> list[tuple[float, str]]:
    return [*([(UNUSED, "not used")] if scale.unused else []), *scale.ticks]


def _groups(trials: Trials) -> dict[str, np.ndarray]:
    """Return the names in the legend, each with the indices of its trials."""
    status = np.array(trials.status)
    groups = {
        f"{STATUS_TEXTS[kind]} ({(status == kind).sum()})": np.flatnonzero(status == kind) for kind in MARKERS if kind in trials.status
    }
    best = min(BEST, len(status))
    return {**groups, f"best {best}" if best > 1 else "best": np.arange(best)}


def scatter_png(figure: ScatterGrid | ParallelCoordinates) -> bytes:
    """Return a figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure
    from PIL import Image

    is_grid = isinstance(figure, ScatterGrid)
    columns, rows = (len(figure.columns), len(figure.rows)) if isinstance(figure, ScatterGrid) else (max(len(figure.axes) - 1, 1), 1)
    if figure.empty:
        columns = rows = 1
    width = max(800, _LEFT + _RIGHT + columns * _CELL)
    height = _TOP + _BELOW + (max(rows * _ROW, 200) if is_grid else 340)
    picture: Any = MatplotlibFigure(figsize=(width / 100, height / 100), dpi=100, facecolor="white")
    canvas: Any = FigureCanvasAgg(picture)
    title = figures.shorten(figure.title)
    style = {"color": figures.INK, "va": "center", "parse_math": False}
    picture.text(16 / width, 1 - 22 / height, title, size=12, weight="bold", **style)
    picture.text(16 / width, 1 - 45 / height, figure.subtitle, size=10, **style)
    area = (_LEFT / width, _BELOW / height, (width - _LEFT - _RIGHT) / width, (height - _TOP - _BELOW) / height)
    if figure.empty:
        picture.text(0.5, 0.5, NOTHING, ha="center", size=11, color=figures.GREY)
    elif isinstance(figure, ScatterGrid):
        _draw_grid(picture, figure, area)
        _draw_legend(picture, _grid_legend(figure.trials), area)
    else:
        _draw_parallel(picture, figure, area)
        _draw_legend(picture, _line_legend(figure.trials), area)
    if not figure.empty:
        _draw_colour_bar(picture, figure.trials.shade, (1 - (_RIGHT - 30) / width, area[1], 14 / width, area[3]))
    canvas.draw()
    content = BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(content, format="PNG")
    return content.getvalue()


def _colour_map(shade: Shade) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("search", COLOURS).with_extremes(bad="#BBBBBB")
    return ScalarMappable(Normalize(shade.low, shade.high, clip=True), colours)


def _draw_grid(picture: Any, figure: ScatterGrid, area: tuple[float, float, float, float]) -> None:
    left, bottom, width, height = area
    count, rows = len(figure.columns), len(figure.rows)
    cell_w, cell_h = width / (count + 0.12 * (count - 1)), height / (rows + 0.14 * (rows - 1))
    colours = _colour_map(figure.trials.shade).to_rgba(np.ma.masked_invalid(figure.trials.shade.value_T))
    best = np.arange(len(figure.trials.status)) < BEST
    symbols = np.array([_PNG_SYMBOLS[MARKERS[status]] for status in figure.trials.status])
    for row in range(rows):
        for column in range(count):
            place = (left + column * 1.12 * cell_w, bottom + height - cell_h - row * 1.14 * cell_h, cell_w, cell_h)
            axes = picture.add_axes(place)
            x_T, y_T = figure.x_KT[column], figure.y_RT[row]
            for highlighted in (False, True):
                for symbol in dict.fromkeys(symbols):
                    chosen = (symbols == symbol) & (best == highlighted) & np.isfinite(x_T) & np.isfinite(y_T)
                    if not chosen.any():
                        continue
                    edge = (
                        {"edgecolor": HIGHLIGHT, "linewidth": 1.6, "s": 42}
                        if highlighted
                        else {"edgecolor": "white", "linewidth": 0.4, "s": 24}
                    )
                    axes.scatter(
                        x_T[chosen], y_T[chosen], color=colours[chosen], marker=symbol, **{"zorder": 3 if highlighted else 2, **edge}
                    )
            _style_axes(axes, figure.columns[column] if row == rows - 1 else None, figure.columns[column], vertical=False)
            _style_axes(axes, figure.rows[row] if column == 0 else None, figure.rows[row], vertical=True)


def _style_axes(axes: Any, labelled: Scale | None, scale: Scale, *, vertical: bool) -> None:
    axes.grid(color=figures.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(figures.GREY)
    axes.tick_params(labelcolor=figures.INK, labelsize=8, length=0)
    positions, texts = [position for position, _ in scale.ticks], [text for _, text in scale.ticks]
    set_ticks, set_label, set_limits = (
        (axes.set_yticks, axes.set_ylabel, axes.set_ylim) if vertical else (axes.set_xticks, axes.set_xlabel, axes.set_xlim)
    )
    size = 8 if vertical else max(5, min(8, 190 / max(sum(map(len, texts)) + len(texts), 1)))
    set_ticks(positions, labels=texts if labelled else [""] * len(texts), parse_math=False, size=size)
    set_label(
        _wrapped(labelled.label) if labelled and not vertical else labelled.label if labelled else "",
        size=9,
        color=figures.INK,
        parse_math=False,
    )
    set_limits(-_MARGIN, 1 + _MARGIN)


def _draw_parallel(picture: Any, figure: ParallelCoordinates, area: tuple[float, float, float, float]) -> None:
    axes = picture.add_axes(area)
    count = len(figure.axes)
    trials = figure.trials
    colours = _colour_map(trials.shade).to_rgba(np.ma.masked_invalid(trials.shade.value_T))
    for t in range(figure.position_AT.shape[1])[::-1]:
        best = t < BEST
        style = "--" if trials.status[t] == "stopped" else ":" if trials.status[t] == "running" else "-"
        axes.plot(
            range(count), figure.position_AT[:, t], style, color=colours[t], linewidth=2.4 if best else 0.9, alpha=1.0 if best else 0.5
        )
    for index, scale in enumerate(figure.axes):
        axes.axvline(index, color=figures.GREY, linewidth=1, zorder=3)
        for position, text in _ticks(scale):
            box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}
            axes.text(index + 0.02, position, text, size=8, color=figures.INK, va="center", zorder=4, bbox=box, parse_math=False)
    labels = [_wrapped(scale.label) for scale in figure.axes]
    axes.set_xticks(range(count), labels=labels, size=9, color=figures.INK, parse_math=False)
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.02, max(count - 1, 1) + 0.02)
    axes.set_ylim(UNUSED - 0.06 if any(scale.unused for scale in figure.axes) else -0.04, 1.04)


def _wrapped(label: str) -> str:
    return label if len(label) <= 22 else label.replace(".", ".\n", 1)


def _draw_colour_bar(picture: Any, shade: Shade, place: tuple[float, float, float, float]) -> None:
    from matplotlib.ticker import FuncFormatter

    axes = picture.add_axes(place)
    bar = picture.colorbar(_colour_map(shade), cax=axes, format=FuncFormatter(figures.format_tick))
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=figures.INK, color=figures.GREY)
    axes.set_title(shade.label, size=9, color=figures.INK, loc="center", pad=8)


def _grid_legend(trials: Trials) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for name, picked in _groups(trials).items():
        best = name.startswith("best")
        symbol = "o" if best else _PNG_SYMBOLS[MARKERS[trials.status[picked[0]]]]
        edge = {"markeredgecolor": HIGHLIGHT, "markeredgewidth": 1.6} if best else {"markeredgecolor": figures.GREY}
        entries[name] = Line2D([], [], lw=0, marker=symbol, markersize=7, markerfacecolor="white" if best else figures.GREY, **edge)
    return entries


def _line_legend(trials: Trials) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    styles: dict[str, Any] = {"finished": "-", "stopped": "--", "running": ":"}
    entries: dict[str, Any] = {}
    for name, picked in _groups(trials).items():
        best = name.startswith("best")
        style = styles["finished" if best else trials.status[picked[0]]]
        entries[name] = Line2D([], [], linestyle=style, color=figures.INK if best else figures.GREY, linewidth=2.4 if best else 0.9)
    return entries


def _draw_legend(picture: Any, entries: Mapping[str, Any], area: Sequence[float]) -> None:
    place = (area[0], area[1] + area[3])
    style = {"fontsize": 9, "labelcolor": figures.INK, "frameon": False, "handlelength": 1.8, "columnspacing": 1.2, "borderaxespad": 0.3}
    picture.legend(list(entries.values()), list(entries), loc="lower left", bbox_to_anchor=place, ncols=len(entries), **style)
