"""Descriptions of figures, which render_html.py and render_png.py draw identically.

A Figure has one or more Panels below each other, with one legend. A Panel has lines with bands and marks, or rows of bars, or both.
A search has two more kinds of figures: ScatterGrid and ParallelCoordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slm_lab.experiment.report.metrics import Curve, evenly

MEAN_COLOUR = "#0072B2"
SESSION_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette, also distinguishable with colour blindness."""
POLICY_COLOURS = (MEAN_COLOUR, *SESSION_COLOURS, "#882255", "#7F7F7F")
EVALUATION_COLOUR = "#882255"
INK, GRID, GREY = "#333333", "#E3E3E3", "#777777"
BAND_OPACITY, FAINT_OPACITY = 0.18, 0.5
"""Opacity of bands and of the faint lines of a group."""
_MAX_POINTS = 2000
"""Longer lines are thinned evenly, since a screen cannot show more points."""
MAX_MARKERS = 25
"""Lines with up to this many points have a marker at each point: a single point would be invisible without one."""
_MAX_TITLE = 90
"""Characters."""
BAND = "±1 standard deviation"
MARK = "copied another policy's weights"
EMPTY = "nothing to show: no episode has ended"


@dataclass(frozen=True)
class Mark:
    """A highlighted point of a line."""

    frame: float
    value: float
    text: str
    """Description of the event at this point."""


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    name: str
    curve: Curve
    colour: str = MEAN_COLOUR
    band: tuple[np.ndarray, np.ndarray] | None = None
    """Lower and upper edge of the band around the line, [points] each; None: no band."""
    faint: bool = False
    """Drawn thinner than a mean; in a group with a common legend entry also pale."""
    steps: bool = False
    """Drawn as steps: the value is constant until the next point."""
    dashed: bool = False
    """Drawn thin and without markers, as a reference level."""
    marks: tuple[Mark, ...] = ()
    group: str = ""
    """Lines of the same group have one common legend entry with this name."""

    @property
    def opacity(self) -> float:
        return 1.0 if not self.faint else FAINT_OPACITY if self.group else 0.9

    @property
    def width(self) -> float:
        """Width in pixels on a page."""
        return 1.0 if self.dashed or (self.faint and self.group) else 1.6 if self.faint else 3.0

    @property
    def banded(self) -> bool:
        return len(self.curve.frame) > 0 and self.band is not None


@dataclass(frozen=True)
class Bar:
    """A horizontal bar."""

    begin: float
    end: float
    middle: float
    """Vertical position."""
    thickness: float
    text: str = ""
    """Shown under the mouse pointer; "": nothing is shown."""


@dataclass(frozen=True)
class Bars:
    """Bars of one kind: one colour, one name in the legend."""

    name: str
    colour: str
    bars: Sequence[Bar]
    edge: float = 0.0
    """Width of the white edge that separates neighbours."""


@dataclass(frozen=True)
class Panel:
    """Lines over frames or `x_label`, and bars; later ones are drawn on top."""

    y_label: str
    lines: list[Line] = field(default_factory=list)
    x_label: str = "frames"
    y_limits: tuple[float, float] | None = None
    """Limits of the vertical axis; None: determined by the lines."""
    band: str = BAND
    """Description of the band."""
    each: str = "sessions"
    """Description of the faint lines, if the PNG's legend counts them instead of naming each."""
    bars: tuple[Bars, ...] = ()
    rows: Mapping[str, float] = field(default_factory=dict)
    """Name of a row of bars → its vertical position, instead of a numeric axis."""
    x_max: float | None = None
    """Right end of the horizontal axis; None: determined by the lines."""
    nothing: str = EMPTY
    """Text shown if there are neither points nor bars."""
    best_last: bool = False
    """Whether lines are ordered from worst to best; the legend then lists the best first."""
    height: int | None = None
    """Height of the axes in the PNG in pixels; None: fill a picture of standard size, or 150 if there are several panels."""

    @property
    def empty(self) -> bool:
        return not self.bars and not any(len(line.curve.frame) for line in self.lines)

    @property
    def one_band(self) -> bool:
        """Whether the legend names the band; with several bands the title explains them."""
        return sum(line.banded for line in self.lines) == 1


@dataclass(frozen=True)
class Figure:
    """A title above one or more panels; panels below each other share the horizontal axis and the names of lines."""

    title: str
    panels: tuple[Panel, ...]
    subtitle: str = ""
    left: float = 0.115
    """Left end of the axes in the PNG, in widths of the picture."""

    @property
    def panel(self) -> Panel:
        """The first panel, for most figures the only one."""
        return self.panels[0]


def policy_colour(policy: int) -> str:
    return POLICY_COLOURS[policy % len(POLICY_COLOURS)]


def y_range(panel: Panel) -> tuple[float, float]:
    """Return the limits of the vertical axis, with a margin; (0, 1) for a panel without points."""
    if panel.y_limits:
        return panel.y_limits
    values = _values(panel.lines)
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _values(lines: list[Line]) -> np.ndarray:
    return np.concatenate([np.empty(0), *(edge for line in lines for edge in band_edges(line))])


def band_edges(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper edge of the band; without a band, both are the line itself."""
    return line.band or (line.curve.value, line.curve.value)


def _select(line: Line, indices: np.ndarray) -> Line:
    """Return the line with only the points at `indices`."""
    band = line.band and (line.band[0][indices], line.band[1][indices])
    return replace(line, curve=Curve(line.curve.frame[indices], line.curve.value[indices]), band=band)


def shorten(title: str) -> str:
    """Shorten a title in the middle: its beginning names the spec, its end the content."""
    return title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE - 61]}…{title[-60:]}"


def thin(line: Line) -> Line:
    return _select(line, evenly(len(line.curve.frame), _MAX_POINTS))


def format_tick(value: float, position: int | None) -> str:
    """Format a tick as 1,500, 0.25 or 2e-5: matplotlib's own format may factor out a power of ten."""
    if 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        text = f"{float(digits):g}e{int(power)}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


COLOURS = ("#BDDF26", "#5EC962", "#21918C", "#3B528B", "#440154")
"""From low to high: reversed viridis, so that the best is dark on white."""
HIGHLIGHT = "#D55E00"
"""Edge colour of the best trials."""
BEST = 10
"""Number of highlighted trials."""
UNUSED = -0.12
"""Position of trials in which a key is not active, below its axis."""
SCATTER_RANGE = (-0.07, 1.07)
"""Axis range: the positions 0 to 1 with a margin."""
NOTHING = "nothing to show: no trial has a result yet"
STATUS_TEXTS = {"finished": "finished", "stopped": "stopped early", "running": "running"}
"""Status of a trial that is drawn → its text."""


@dataclass(frozen=True)
class Scale:
    """An axis: its label, and ticks at positions from 0 to 1."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Position and text of each tick."""
    unused: bool = False
    """Whether some trials are at UNUSED."""

    @property
    def all_ticks(self) -> list[tuple[float, str]]:
        """The ticks, including the tick of UNUSED if needed."""
        return [*([(UNUSED, "not used")] if self.unused else []), *self.ticks]

    @property
    def wrapped_label(self) -> str:
        return self.label if len(self.label) <= 22 else self.label.replace(".", ".\n", 1)


@dataclass(frozen=True)
class Trials:
    """The trials of a figure, best first: T trials, coloured by a value."""

    text: Sequence[str]
    """Shown under the mouse pointer."""
    status: Sequence[str]
    """Keys of STATUS_TEXTS."""
    label: str
    """Name of the value."""
    value_T: np.ndarray
    """Value of each trial; NaN: unknown, drawn grey."""
    low: float
    high: float
    """Values of the first and the last colour; values outside are clipped to this range."""

    def groups(self) -> dict[str, np.ndarray]:
        """Return the names in the legend, each with the indices of its trials; the best trials are the last entry."""
        status = np.array(self.status)
        found = {text: np.flatnonzero(status == kind) for kind, text in STATUS_TEXTS.items()}
        best = min(BEST, len(status))
        counted = {f"{text} ({len(own)})": own for text, own in found.items() if len(own)}
        return {**counted, f"best {best}" if best > 1 else "best": np.arange(best)}


@dataclass(frozen=True)
class TrialsFigure:
    """Base class of the figures of trials over the keys of a search."""

    title: str
    subtitle: str
    trials: Trials

    @property
    def empty(self) -> bool:
        return not self.trials.status


@dataclass(frozen=True)
class ScatterGrid(TrialsFigure):
    """Metrics over keys: R rows of metrics, K columns of keys. The first BEST trials have an edge."""

    columns: Sequence[Scale]
    rows: Sequence[Scale]
    x_KT: np.ndarray
    """Positions; NaN: not drawn."""
    y_RT: np.ndarray


@dataclass(frozen=True)
class ParallelCoordinates(TrialsFigure):
    """One line per trial through its values on A axes; the first BEST trials are drawn thicker."""

    axes: Sequence[Scale]
    position_AT: np.ndarray


AnyFigure = Figure | ScatterGrid | ParallelCoordinates
"""Any figure that can be drawn."""
