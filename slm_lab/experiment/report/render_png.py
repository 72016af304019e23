"""Render a figure as PNG with matplotlib.

Only the necessary classes of matplotlib are imported, since importing all of matplotlib takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from slm_lab.experiment.report import figure as figures
from slm_lab.experiment.report.figure import AnyFigure, Figure, Line, Panel, ParallelCoordinates, Scale, ScatterGrid, Trials, format_tick

_WIDTH, _HEIGHT = 800, 450
"""Standard width and height of an image in pixels. The image is higher if a figure has several panels or a panel with its own height."""
_RIGHT = 0.96
"""Right end of the axes, as a fraction of the image's width. The left end of the axes is Figure.left."""
_ABOVE, _SUBTITLE, _BELOW = 45, 25, 56
"""Height in pixels of the space above the legend, of a subtitle, and of the space below all panels."""
_PANEL, _BETWEEN = 150, 24
"""Height in pixels of each panel of a figure with several panels, and of the space between two panels."""
_LEGEND_ROW = 20.25
"""Height of a row of the legend, in pixels."""
_LEGEND_LETTERS = 100
"""Maximum number of characters in a row of the legend. The sample of the line beside a name is as wide as _HANDLE characters."""
_HANDLE = 6
_MAX_NAMES = 3
"""Maximum number of faint lines of a panel that have names in the legend. If there are more, the legend has only the number of faint
lines."""
_TITLE_LETTERS = 76
"""Maximum number of characters of a title at full font size. A longer title is drawn with a smaller font."""
_LEGEND: dict[str, Any] = {"fontsize": 9, "labelcolor": figures.INK, "frameon": False, "loc": "lower left"}
_CELL_WIDTH, _CELL_HEIGHT, _PARALLEL_HEIGHT = 190, 130, 340
"""Width and height in pixels of one scatter plot of a ScatterGrid, and height in pixels of ParallelCoordinates."""
_GRID_LEFT, _GRID_RIGHT, _GRID_TOP, _GRID_BELOW = 95, 130, 95, 85
"""Margins in pixels around a ScatterGrid or ParallelCoordinates."""
_SYMBOLS = {"finished": "o", "stopped": "v", "running": "s"}
_STROKES = {"finished": "-", "stopped": "--", "running": ":"}
"""Status of a trial → marker of the trial (_SYMBOLS), and line style of the trial (_STROKES)."""

_INTEGER_TICKS_FROM = 3
"""If the horizontal axis ends below this number, its ticks need not be integers."""


class PNGRenderer:
    """Renders figures as PNG. All figures of standard size use the same canvas, since creating a canvas takes longer than drawing."""

    def __init__(self) -> None:
        self._standard = _Canvas(_HEIGHT, 1)

    def render(self, figure: AnyFigure) -> bytes:
        if not isinstance(figure, Figure):
            return _draw_trials(figure)
        panels, legend = figure.panels, _legend_handles(figure.panels)
        columns, rows = _legend_shape(list(legend))
        around = _ABOVE + (_SUBTITLE if figure.subtitle else 0) + _LEGEND_ROW * max(rows, 1) + _BELOW
        if len(panels) == 1 and panels[0].height is None:
            return self._standard.draw(figure, [max(_HEIGHT - around, 0.3 * _HEIGHT)], legend, columns)
        heights = [panel.height or _PANEL for panel in panels]
        canvas = _Canvas(round(around + sum(heights) + _BETWEEN * (len(panels) - 1)), len(panels))
        return canvas.draw(figure, heights, legend, columns)


class _Canvas:
    """A matplotlib image with a title, a legend and one or more axes, one below the other."""

    def __init__(self, height: int, panels: int) -> None:
        self.height = height
        self.picture, self.canvas = _new_matplotlib_figure(_WIDTH, height)
        self.title, self.subtitle = self._new_text(22.5, weight="bold"), self._new_text(46, size=10)
        self.axes = [self._new_axes() for _ in range(panels)]
        for axes in self.axes[:-1]:
            axes.tick_params(labelbottom=False)

    def draw(self, figure: Figure, heights: Sequence[float], legend: Mapping[str, Any], columns: int) -> bytes:
        """Draw a figure in place of the previous figure of this canvas, and return the image as PNG.

        Args:
            heights: height of each panel in pixels.
            legend: name → matplotlib handle of each legend entry.
            columns: number of columns of the legend.
        """
        title = figures.shorten_title(figure.title)
        self.title.set_text(title)
        self.title.set_size(12 * min(1.0, _TITLE_LETTERS / max(len(title), 1)))
        self.subtitle.set_text(figure.subtitle)
        bottom = _BELOW + sum(heights) + _BETWEEN * len(heights)
        for axes, panel, height in zip(self.axes, figure.panels, heights, strict=True):
            bottom -= height + _BETWEEN
            axes.set_position((figure.left, bottom / self.height, _RIGHT - figure.left, height / self.height))
            _draw_panel(axes, panel, labelled=axes is self.axes[-1])
            # a fixed position of the label saves time; the position is set here, since set_xlabel resets it
            axes.xaxis.set_label_coords((figure.left + _RIGHT) / 2, 23.4 / self.height, transform=self.picture.transFigure)
        for old in self.picture.legends[:]:
            old.remove()
        if legend:
            place = (figure.left - 0.0085, self.axes[0].get_position().y1)
            handles, names = list(legend.values()), list(legend)
            spaces = {"borderaxespad": 0.2, "handlelength": 1.2, "columnspacing": 1}
            self.picture.legend(handles, names, bbox_to_anchor=place, ncols=columns, **spaces, **_LEGEND)
        return _canvas_png(self.canvas)

    def _new_text(self, below: float, **style: Any) -> Any:
        """Create an empty matplotlib text. The vertical centre of the text is `below` pixels below the top of the image."""
        return self.picture.text(0.02, 1 - below / self.height, "", color=figures.INK, va="center", parse_math=False, **style)

    def _new_axes(self) -> Any:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = self.picture.add_axes((0.115, 0.1, 0.845, 0.8))
        _style_axes(axes, 0.8)
        axes.tick_params(labelcolor=figures.INK, labelsize=9, bottom=False, left=False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(format_tick))
        axes.yaxis.set_major_formatter(FuncFormatter(format_tick))
        axes.yaxis.set_label_coords(-0.104, 0.5)
        return axes


def _new_matplotlib_figure(width: int, height: int) -> tuple[Any, Any]:
    """Return an empty matplotlib Figure and its canvas. The annotated type is Any, since matplotlib's type annotations are incomplete."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    picture = MatplotlibFigure(figsize=(width / 100, height / 100), dpi=100, facecolor="white")
    return picture, FigureCanvasAgg(picture)


def _canvas_png(canvas: Any) -> bytes:
    """Draw the content of a canvas, and return the image as PNG."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about glyphs that the font does not have
        canvas.draw()
    content = BytesIO()
    # PIL is 20 % faster than savefig, which writes an alpha channel
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(content, format="PNG", compress_level=1)
    return content.getvalue()


def _style_axes(axes: Any, grid_width: float) -> None:
    axes.grid(color=figures.GRID, linewidth=grid_width)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(figures.GREY)


def _draw_panel(axes: Any, panel: Panel, *, labelled: bool) -> None:
    """Clear the matplotlib axes and draw a panel.

    Args: labelled: whether to draw the label of the horizontal axis.
    """
    from matplotlib.ticker import MaxNLocator

    for artist in (*axes.lines, *axes.collections, *axes.texts, *axes.patches):
        artist.remove()
    if panel.rows:
        axes.grid(visible=False, axis="y")
        axes.set_yticks(list(panel.rows.values()), labels=list(panel.rows))
        axes.xaxis.set_major_locator(MaxNLocator(8))
    else:
        ends = [float(line.curve.frame[-1]) for line in panel.lines if len(line.curve.frame)]
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=not ends or max(ends) >= _INTEGER_TICKS_FROM))
    axes.set_xlabel(panel.x_label if labelled else "", color=figures.INK, size=10)
    axes.set_ylabel(panel.y_label, color=figures.INK, size=10)
    for kind in panel.bars:
        lengths, begins = [bar.end - bar.begin for bar in kind.bars], [bar.begin for bar in kind.bars]
        middles, thickness = [bar.middle for bar in kind.bars], [bar.thickness for bar in kind.bars]
        edge = {"edgecolor": "white"} if kind.edge else {}
        axes.barh(middles, lengths, thickness, begins, color=kind.colour, linewidth=kind.edge, **edge)
    names = _legend_names(panel)
    for line in map(figures.thinned_line, panel.lines):
        colour = figures.GREY if line.faint and names[line.name] != line.name else line.colour
        if line.has_band:
            axes.fill_between(line.curve.frame, *figures.band_edges(line), color=colour, alpha=figures.BAND_OPACITY, linewidth=0)
        axes.plot(*line.curve, drawstyle="steps-post" if line.steps else "default", **_line_style(line, colour))
    for line in panel.lines:
        if line.marks:
            axes.scatter([mark.frame for mark in line.marks], [mark.value for mark in line.marks], color=line.colour, **_MARK_STYLE)
    if panel.is_empty:
        axes.text(0.5, 0.5, panel.nothing, transform=axes.transAxes, ha="center", color=figures.GREY)
    last = max((float(line.curve.frame[-1]) for line in panel.lines if len(line.curve.frame)), default=0.0)
    axes.set_xlim(0, panel.x_max or last * 1.02 or 1.0)
    axes.set_ylim(*figures.y_range(panel))


_MARK_STYLE: dict[str, Any] = {"marker": "X", "s": 70, "edgecolor": figures.INK, "linewidth": 0.8, "zorder": 3}
_MARK_SAMPLE: dict[str, Any] = {
    "marker": "X",
    "markersize": 8,
    "color": "white",
    "markeredgecolor": figures.INK,
    "markeredgewidth": 0.8,
    "lw": 0,
}


def _line_style(line: Line, colour: str) -> dict[str, Any]:
    return {
        "color": colour,
        "alpha": line.opacity,
        "linestyle": "--" if line.dashed else "-",
        "linewidth": 0.8 * line.width,
        "marker": "o" if len(line.curve.frame) <= figures.MAX_MARKERS and not line.dashed else "",
        "markersize": 9 if len(line.curve.frame) == 1 else 2.5 if line.faint else 4,
    }


def _legend_names(panel: Panel) -> dict[str, str]:
    """Return a dict: name of each line of a panel → name in the legend.

    If the panel has many faint lines, all faint lines share one name.
    """
    faint = [line.name for line in panel.lines if line.faint and not line.group]
    together = f"{len(faint)} {panel.faint_name}" if len(faint) > _MAX_NAMES else ""
    return {line.name: line.group or (together if line.faint and together else line.name) for line in panel.lines}


def _legend_handles(panels: tuple[Panel, ...]) -> dict[str, Any]:
    """Return the legend of a figure as a dict: name of each legend entry → matplotlib handle."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for panel in panels:
        for kind in panel.bars:
            entries.setdefault(kind.name, Patch(color=kind.colour))
        names = _legend_names(panel)
        lines = [line for line in panel.lines if len(line.curve.frame)]
        for line in lines:
            colour = line.colour if names[line.name] == line.name else figures.GREY
            entries.setdefault(names[line.name], Line2D([], [], **_line_style(line, colour)))
        for line in lines if panel.one_band else ():
            if line.has_band:
                entries.setdefault(panel.band, Patch(color=line.colour, alpha=figures.BAND_OPACITY, linewidth=0))
        if any(line.marks for line in lines):
            entries.setdefault(figures.MARK, Line2D([], [], **_MARK_SAMPLE))
    return dict(reversed(entries.items())) if any(panel.best_last for panel in panels) else entries


def _legend_shape(names: list[str]) -> tuple[int, int]:
    """Return the number of columns and the number of rows of a legend with the entries `names`."""
    columns = next((n for n in range(8, 1, -1) if _legend_fits(names, n)), 1)
    return columns, -(-len(names) // columns)


def _legend_fits(names: list[str], columns: int) -> bool:
    """Return whether a legend with `columns` columns fits the width of the image.

    As in matplotlib, the names fill the columns one after another, as evenly as possible.
    """
    widths = [len(name) + _HANDLE for name in names]
    return sum(max(column.tolist(), default=0) for column in np.array_split(widths, columns)) <= _LEGEND_LETTERS


# ---- figures of a search


def _draw_trials(figure: ScatterGrid | ParallelCoordinates) -> bytes:
    if isinstance(figure, ScatterGrid):
        columns, height = len(figure.columns), max(len(figure.rows) * _CELL_HEIGHT, 200)
    else:
        columns, height = len(figure.axes) - 1, _PARALLEL_HEIGHT
    width = _WIDTH if figure.is_empty else max(_WIDTH, _GRID_LEFT + _GRID_RIGHT + columns * _CELL_WIDTH)
    height += _GRID_TOP + _GRID_BELOW
    picture, canvas = _new_matplotlib_figure(width, height)
    style = {"color": figures.INK, "va": "center", "parse_math": False}
    picture.text(16 / width, 1 - 22 / height, figures.shorten_title(figure.title), size=12, weight="bold", **style)
    picture.text(16 / width, 1 - 45 / height, figure.subtitle, size=10, **style)
    if figure.is_empty:
        picture.text(0.5, 0.5, figures.NOTHING, ha="center", size=11, color=figures.GREY)
        return _canvas_png(canvas)
    left, bottom = _GRID_LEFT / width, _GRID_BELOW / height
    area = left, bottom, (width - _GRID_LEFT - _GRID_RIGHT) / width, (height - _GRID_TOP - _GRID_BELOW) / height
    if isinstance(figure, ScatterGrid):
        _draw_grid(picture, figure, area)
    else:
        _draw_parallel_coordinates(picture.add_axes(area), figure)
    entries, spaces = _trials_legend(figure), {"borderaxespad": 0.3, "handlelength": 1.8, "columnspacing": 1.2}
    place = left, bottom + area[3]
    picture.legend(list(entries.values()), list(entries), bbox_to_anchor=place, ncols=len(entries), **spaces, **_LEGEND)
    _draw_colour_bar(picture, figure.trials, (1 - (_GRID_RIGHT - 30) / width, bottom, 14 / width, area[3]))
    return _canvas_png(canvas)


def _draw_grid(picture: Any, figure: ScatterGrid, area: tuple[float, float, float, float]) -> None:
    left, bottom, width, height = area
    count, rows = len(figure.columns), len(figure.rows)
    cell_w, cell_h = width / (count + 0.12 * (count - 1)), height / (rows + 0.14 * (rows - 1))
    colours = _colours(figure.trials)
    best = np.arange(len(figure.trials.status)) < figures.BEST
    symbols = np.array([_SYMBOLS[status] for status in figure.trials.status])
    for row, column in np.ndindex(rows, count):
        axes = picture.add_axes((left + column * 1.12 * cell_w, bottom + height - cell_h - row * 1.14 * cell_h, cell_w, cell_h))
        x_T, y_T = figure.x_KT[column], figure.y_RT[row]
        for highlighted in (False, True):
            style = {"edgecolor": figures.HIGHLIGHT, "linewidth": 1.6, "s": 42} if highlighted else _PLAIN_POINT
            for symbol in dict.fromkeys(symbols):
                chosen = (symbols == symbol) & (best == highlighted) & np.isfinite(x_T) & np.isfinite(y_T)
                if chosen.any():
                    axes.scatter(x_T[chosen], y_T[chosen], color=colours[chosen], marker=symbol, zorder=2 + highlighted, **style)
        _style_axes(axes, 0.7)
        axes.tick_params(labelcolor=figures.INK, labelsize=8, length=0)
        _draw_scale(axes, figure.columns[column], vertical=False, labelled=row == rows - 1)
        _draw_scale(axes, figure.rows[row], vertical=True, labelled=column == 0)


_PLAIN_POINT: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4, "s": 24}


def _draw_scale(axes: Any, scale: Scale, *, vertical: bool, labelled: bool) -> None:
    label, set_ticks, set_label, set_limits = scale.wrapped_label, axes.set_xticks, axes.set_xlabel, axes.set_xlim
    if vertical:
        label, set_ticks, set_label, set_limits = scale.label, axes.set_yticks, axes.set_ylabel, axes.set_ylim
    texts = [text if labelled else "" for _, text in scale.ticks]
    set_ticks([position for position, _ in scale.ticks], labels=texts, parse_math=False, size=8)
    set_label(label if labelled else "", size=9, color=figures.INK, parse_math=False)
    set_limits(*figures.SCATTER_RANGE)


def _draw_parallel_coordinates(axes: Any, figure: ParallelCoordinates) -> None:
    count, status, colours = len(figure.axes), figure.trials.status, _colours(figure.trials)
    for t in range(len(status))[::-1]:
        style = {"linewidth": 2.4, "alpha": 1.0} if t < figures.BEST else {"linewidth": 0.9, "alpha": 0.5}
        axes.plot(range(count), figure.position_AT[:, t], _STROKES[status[t]], color=colours[t], **style)
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}
    for index, scale in enumerate(figure.axes):
        axes.axvline(index, color=figures.GREY, linewidth=1, zorder=3)
        for position, text in scale.all_ticks:
            axes.text(index + 0.02, position, text, size=8, color=figures.INK, va="center", zorder=4, bbox=box, parse_math=False)
    labels = [scale.wrapped_label for scale in figure.axes]
    axes.set_xticks(range(count), labels=labels, size=9, color=figures.INK, parse_math=False)
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.02, max(count - 1, 1) + 0.02)
    axes.set_ylim(figures.UNUSED - 0.06 if any(scale.unused for scale in figure.axes) else -0.04, 1.04)


def _trials_legend(figure: ScatterGrid | ParallelCoordinates) -> dict[str, Any]:
    """Return the legend of a figure of trials as a dict: name of each legend entry → matplotlib handle."""
    from matplotlib.lines import Line2D

    entries, style = dict[str, Any](), dict[str, Any]()
    for name, picked in figure.trials.legend_groups().items():
        best = name.startswith("best")
        status = "finished" if best else figure.trials.status[picked[0]]
        if isinstance(figure, ParallelCoordinates):
            style = {"linestyle": _STROKES[status], "color": figures.INK if best else figures.GREY, "linewidth": 2.4 if best else 0.9}
        else:
            edge = {"markeredgecolor": figures.HIGHLIGHT, "markeredgewidth": 1.6} if best else {"markeredgecolor": figures.GREY}
            style = {"lw": 0, "marker": _SYMBOLS[status], "markersize": 7, "markerfacecolor": "white" if best else figures.GREY, **edge}
        entries[name] = Line2D([], [], **style)
    return entries


def _draw_colour_bar(picture: Any, trials: Trials, place: tuple[float, float, float, float]) -> None:
    from matplotlib.ticker import FuncFormatter

    axes = picture.add_axes(place)
    bar = picture.colorbar(_colour_map(trials), cax=axes, format=FuncFormatter(format_tick))
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=figures.INK, color=figures.GREY)
    axes.set_title(trials.label, size=9, color=figures.INK, loc="center", pad=8)


def _colour_map(trials: Trials) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("search", figures.COLOURS).with_extremes(bad="#BBBBBB")
    return ScalarMappable(Normalize(trials.low, trials.high, clip=True), colours)


def _colours(trials: Trials) -> Any:
    """Return the RGBA colour of each trial, [T, 4]."""
    return _colour_map(trials).to_rgba(np.ma.masked_invalid(trials.value_T))
