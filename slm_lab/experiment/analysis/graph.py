"""A graph: lines and what to show of them. page.py makes of it a page to look into, picture.py a picture to pass on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slm_lab.experiment.analysis.table import Curve

MEAN_COLOUR = "#0072B2"
SESSION_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette: told apart also by the colour-blind."""
POLICY_COLOURS = (MEAN_COLOUR, *SESSION_COLOURS, "#882255", "#7F7F7F")
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
MARK = "took over another policy's weights"
NOTHING = "nothing to show: no episode has ended"


@dataclass(frozen=True)
class Mark:
    """A point of a line that is to be seen."""

    frame: float
    value: float
    text: str
    """What happened there."""


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
    edges: tuple[np.ndarray, np.ndarray] | None = None
    """The lower and the upper edge of a band that is no standard deviation, [points] each."""
    steps: bool = False
    """The value stays until the next point."""
    marks: tuple[Mark, ...] = ()

    @property
    def banded(self) -> bool:
        return len(self.curve.frame) > 0 and (self.std is not None or self.edges is not None)


@dataclass(frozen=True)
class Graph:
    """Lines over frames or `x_label`; those drawn later lie above."""

    title: str
    y_label: str
    lines: list[Line]
    core_range: bool = False
    """Show where most values lie: those at the start may be of another magnitude (quotients of small sums)."""
    x_label: str = "frames"
    y_limits: tuple[float, float] | None = None
    """The values to show; None: as the lines need."""
    band: str = BAND
    """What the band is."""
    each: str = "sessions"
    """What the faint lines are, where there are too many for a name of each."""

    @property
    def one_band(self) -> bool:
        """Whether the legend names the band; what several are, the title has to say."""
        return sum(line.banded for line in self.lines) == 1


def y_range(graph: Graph) -> tuple[float, float]:
    """The values to show, with a margin; (0, 1) for a graph without points."""
    if graph.y_limits:
        return graph.y_limits
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
    lower, upper = band_edges(line)
    outside = np.flatnonzero((lower < low) | (upper > high))
    early = outside[outside < len(lower) // 2]
    return _kept(line, np.arange(early[-1] + 1 if len(early) else 0, len(lower)))


def _core(graph: Graph) -> tuple[float, float]:
    """Where most values lie, of all lines together, and as much again to both sides."""
    low, high = np.percentile(_values(graph.lines), (15, 85))
    return float(2 * low - high), float(2 * high - low)


def _values(lines: list[Line]) -> np.ndarray:
    return np.concatenate([np.empty(0), *(edge for line in lines for edge in band_edges(line))])


def band_edges(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper edge of the band; without one both are the line."""
    if line.edges is not None:
        return line.edges
    std = 0.0 if line.std is None else line.std
    return line.curve.value - std, line.curve.value + std


def _kept(line: Line, kept: np.ndarray) -> Line:
    """The line at those points, by index."""
    std = None if line.std is None else line.std[kept]
    edges = None if line.edges is None else (line.edges[0][kept], line.edges[1][kept])
    return replace(line, curve=Curve(line.curve.frame[kept], line.curve.value[kept]), std=std, edges=edges)


def short(title: str) -> str:
    """A title that fits: what is drawn stands at its end, the spec's name at its begin."""
    return title if len(title) <= _LONGEST else f"{title[: _LONGEST - 61]}…{title[-60:]}"


def thinned(line: Line) -> Line:
    count = len(line.curve.frame)
    if count <= _MOST_POINTS:
        return line
    return _kept(line, np.linspace(0, count - 1, _MOST_POINTS).round().astype(int))
