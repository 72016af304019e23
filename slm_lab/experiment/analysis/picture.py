"""A graph as PNG, drawn by matplotlib, of which only the canvas is loaded: the whole takes seconds to import."""

from __future__ import annotations

import warnings
from io import BytesIO
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
    band_edges,
    short,
    shown,
    thinned,
    y_range,
)

_MOST_NAMES = 3
"""With more lines behind the mean, the legend names them together."""
_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 0.115, 0.125, 0.845, 0.73
"""The axes, as parts of the picture."""
_ROW = 0.045
"""Height of a row of the legend, of the picture."""
_LETTERS = 100
"""Of a row of the legend; a name's line is as wide as _HANDLE letters."""
_HANDLE = 6
_TITLE_LETTERS = 76
"""Of a title; a longer one is smaller."""


def tick(value: float, position: int | None) -> str:
    """1,500 0.25 2e-5: matplotlib's own form may move a power of ten out of the axis."""
    if 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        text = f"{float(digits):g}e{int(power)}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


class Canvas:
    """An empty picture with a title, `height` points high and 800 wide."""

    def __init__(self, title: str, height: int = 450) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.height = height
        self.figure: Any = Figure(figsize=(8, height / 100), dpi=100, facecolor="white")  # matplotlib's methods have hardly any types
        self.canvas: Any = FigureCanvasAgg(self.figure)
        self.title = self.text(22.5, "", weight="bold")
        self.entitle(title)

    def entitle(self, title: str) -> None:
        title = short(title)
        self.title.set_text(title)
        self.title.set_size(12 * min(1.0, _TITLE_LETTERS / max(len(title), 1)))

    def text(self, below: float, words: str, **style: Any) -> Any:
        """Write words so many points below the top."""
        return self.figure.text(0.02, 1 - below / self.height, words, color=INK, va="center", parse_math=False, **style)

    def axes(self, left: float, bottom: float, width: float, height: float) -> Any:
        """New axes; all parts of the picture."""
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = self.figure.add_axes((left, bottom, width, height))
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(labelcolor=INK, labelsize=9, bottom=False, left=False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        return axes

    def png(self) -> bytes:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a glyph that the font lacks
            self.canvas.draw()
        content = BytesIO()
        # without savefig and the alpha channel: a fifth faster
        Image.fromarray(np.asarray(self.canvas.buffer_rgba())).convert("RGB").save(content, format="PNG", compress_level=1)
        return content.getvalue()


class Painter:
    """Draws graphs as PNGs, all on one canvas: making a new one takes longer than drawing."""

    def __init__(self) -> None:
        self.canvas = Canvas("")
        self.axes = axes = self.canvas.axes(_LEFT, _BOTTOM, _WIDTH, _HEIGHT)
        # a fixed place saves the search for one
        axes.xaxis.set_label_coords(_LEFT + _WIDTH / 2, 0.052, transform=self.canvas.figure.transFigure)
        axes.yaxis.set_label_coords(-0.104, 0.5)

    def picture(self, graph: Graph) -> bytes:
        """The graph as a PNG of 800 × 450 points."""
        axes = self.axes
        for artist in (*axes.lines, *axes.collections, *axes.texts):
            artist.remove()
        axes.set_position((_LEFT, _BOTTOM, _WIDTH, _HEIGHT))
        self.canvas.entitle(graph.title)
        axes.set_xlabel(graph.x_label, color=INK, size=10)
        axes.set_ylabel(graph.y_label, color=INK, size=10)
        draw_lines(axes, graph)
        if any(len(line.curve.frame) for line in graph.lines):
            self._legend()
        else:
            if legend := axes.get_legend():
                legend.remove()
            axes.text(0.5, 0.5, NOTHING, transform=axes.transAxes, ha="center", color=GREY)
        return self.canvas.png()

    def _legend(self) -> None:
        """The names above the axes, in as many rows as they need; the axes give way."""
        columns, rows = legend_form(self.axes.get_legend_handles_labels()[1])
        self.axes.set_position((_LEFT, _BOTTOM, _WIDTH, max(_HEIGHT - _ROW * (rows - 1), 0.3)))
        self.axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.2, ncols=columns, **LEGEND)


def draw_lines(axes: Any, graph: Graph) -> None:
    """Draw a graph's lines into axes, and set what the axes show."""
    behind = [line for line in graph.lines if line.faint]
    together = len(behind) > _MOST_NAMES
    for line in map(thinned, shown(graph)):
        (frame, value), colour, name = line.curve, line.colour, line.name
        if line.faint and together:
            colour, name = GREY, f"{len(behind)} {graph.each}" if line.name == behind[0].name else "_"  # "_": not in the legend
        if line.banded:
            band = graph.band if graph.one_band else "_"
            axes.fill_between(frame, *band_edges(line), color=colour, alpha=BAND_OPACITY, linewidth=0, label=band)
        axes.plot(
            frame,
            value,
            color=colour,
            alpha=FAINT_OPACITY if line.faint else 1.0,
            linewidth=1.0 if line.faint else 2.0,
            marker="o" if len(frame) <= FEW_POINTS else "",
            markersize=2.5 if line.faint else 4,
            drawstyle="steps-post" if line.steps else "default",
            label=name,
        )
    marks = {"marker": "X", "s": 70, "edgecolor": INK, "linewidth": 0.8, "zorder": 3}
    marked = [line for line in graph.lines if line.marks]
    for line in marked:
        axes.scatter([mark.frame for mark in line.marks], [mark.value for mark in line.marks], color=line.colour, **marks)
    if marked:
        axes.scatter([], [], color="white", label=MARK, **marks)
    last = max((float(line.curve.frame[-1]) for line in graph.lines if len(line.curve.frame)), default=0.0)
    axes.set_xlim(0, last * 1.02 or 1.0)
    axes.set_ylim(*y_range(graph))


LEGEND: dict[str, Any] = {"fontsize": 9, "labelcolor": INK, "frameon": False, "handlelength": 1.2, "columnspacing": 1}
"""What all legends look like."""


def legend_form(names: list[str]) -> tuple[int, int]:
    """Columns and rows of a legend of these names."""
    columns = next((n for n in range(8, 1, -1) if _fits(names, n)), 1)
    return columns, -(-len(names) // columns)


def _fits(names: list[str], columns: int) -> bool:
    """Whether so many columns, which matplotlib fills one after another, as evenly as it can, fit beside each other."""
    widths = [len(name) + _HANDLE for name in names]
    return sum(max(column.tolist(), default=0) for column in np.array_split(widths, columns)) <= _LETTERS
