"""A graph as PNG, drawn by matplotlib, of which only the canvas is loaded: the whole takes seconds to import."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

import numpy as np

from slm_lab.experiment.analysis.graph import (
    BAND,
    BAND_OPACITY,
    FAINT_OPACITY,
    FEW_POINTS,
    GREY,
    GRID,
    INK,
    NOTHING,
    Graph,
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
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        figure = Figure(figsize=(8, 4.5), dpi=100, facecolor="white")
        self.canvas: Any = FigureCanvasAgg(figure)  # its methods have no types
        self.title = figure.text(0.02, 0.95, "", size=12, weight="bold", color=INK, va="center", parse_math=False)
        self.axes = axes = figure.add_axes((_LEFT, _BOTTOM, _WIDTH, _HEIGHT))
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(labelcolor=INK, labelsize=9, bottom=False, left=False)
        # a fixed place saves the search for one
        axes.xaxis.set_label_coords(_LEFT + _WIDTH / 2, 0.052, transform=figure.transFigure)
        axes.yaxis.set_label_coords(-0.104, 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))

    def picture(self, graph: Graph) -> bytes:
        """The graph as a PNG of 800 × 450 points."""
        from PIL import Image

        axes = self.axes
        for artist in (*axes.lines, *axes.collections, *axes.texts):
            artist.remove()
        axes.set_position((_LEFT, _BOTTOM, _WIDTH, _HEIGHT))
        self.title.set_text(short(graph.title))
        axes.set_xlabel(graph.x_label, color=INK, size=10)
        axes.set_ylabel(graph.y_label, color=INK, size=10)
        self._draw(graph)
        last = max((float(line.curve.frame[-1]) for line in graph.lines if len(line.curve.frame)), default=0.0)
        axes.set_xlim(0, last * 1.02 or 1.0)
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
        for line in map(thinned, shown(graph)):
            (frame, value), colour, name = line.curve, line.colour, line.name
            if line.faint and together:
                colour, name = GREY, f"{len(behind)} sessions" if line.name == behind[0].name else "_"  # "_": not in the legend
            if line.std is not None and len(frame):
                band = (value - line.std, value + line.std)
                self.axes.fill_between(frame, *band, color=colour, alpha=BAND_OPACITY, linewidth=0, label=BAND if graph.one_band else "_")
            self.axes.plot(
                frame,
                value,
                color=colour,
                alpha=FAINT_OPACITY if line.faint else 1.0,
                linewidth=1.0 if line.faint else 2.0,
                marker="o" if len(frame) <= FEW_POINTS else "",
                markersize=2.5 if line.faint else 4,
                label=name,
            )
        if any(len(line.curve.frame) for line in graph.lines):
            self._legend()
        else:
            if legend := self.axes.get_legend():
                legend.remove()
            self.axes.text(0.5, 0.5, NOTHING, transform=self.axes.transAxes, ha="center", color=GREY)

    def _legend(self) -> None:
        """The names above the axes, in as many rows as they need; the axes give way."""
        names = self.axes.get_legend_handles_labels()[1]
        columns = next((n for n in range(8, 1, -1) if _fits(names, n)), 1)
        rows = -(-len(names) // columns)
        self.axes.set_position((_LEFT, _BOTTOM, _WIDTH, max(_HEIGHT - _ROW * (rows - 1), 0.3)))
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
        self.axes.legend(**place, ncols=columns, fontsize=9, labelcolor=INK, frameon=False, handlelength=1.2, columnspacing=1)


def _fits(names: list[str], columns: int) -> bool:
    """Whether so many columns, which matplotlib fills one after another, as evenly as it can, fit beside each other."""
    widths = [len(name) + _HANDLE for name in names]
    return sum(max(column.tolist(), default=0) for column in np.array_split(widths, columns)) <= _LETTERS
