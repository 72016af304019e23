"""Data classes that describe figures. From the same description, render_html.py draws an HTML page and render_png.py draws a PNG image.

A Figure has one or more Panels, one below the other, and one legend. A Panel contains lines with bands and marks, rows of bars, or both.
Searches have two more kinds of figures: ScatterGrid and ParallelCoordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slm_lab.experiment.report.metrics import Curve, evenly_spaced_indices

MEAN_COLOUR = "#0072B2"
SESSION_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Palette of Okabe and Ito. People with colour blindness can distinguish these colours too."""
POLICY_COLOURS = (MEAN_COLOUR, *SESSION_COLOURS, "#882255", "#7F7F7F")
EVALUATION_COLOUR = "#882255"
INK, GRID, GREY = "#333333", "#E3E3E3", "#777777"
BAND_OPACITY, FAINT_OPACITY = 0.18, 0.5
"""Opacity of the bands around lines, and opacity of faint lines that belong to a group (see Line.group)."""
_MAX_POINTS = 2000
"""Maximum number of points of a drawn line. Lines with more points are thinned evenly, since a screen cannot show more points."""
MAX_MARKERS = 25
"""Lines with up to this many points have a marker at each point, since a line with a single point would be invisible without a marker."""
_MAX_TITLE = 90
"""Maximum length of a title, in characters."""
BAND = "±1 standard deviation"
MARK = "copied another policy's weights"
EMPTY = "nothing to show: no episode has ended"


@dataclass(frozen=True)
class Mark:
    """A highlighted point of a line, which shows an event."""

    frame: float
    value: float
    text: str
    """Description of the event at this point."""


@dataclass(frozen=True)
class Line:
    """One line (curve) of a panel, with its style."""

    name: str
    curve: Curve
    colour: str = MEAN_COLOUR
    band: tuple[np.ndarray, np.ndarray] | None = None
    """Lower and upper edge of the band around the line, each of shape [points], or None if the line has no band."""
    faint: bool = False
    """Whether the line is drawn thinner than the line of a mean. A faint line that belongs to a group (see `group`) has the opacity
    FAINT_OPACITY."""
    steps: bool = False
    """Whether the line is drawn as steps: the value is constant from each point to the next point."""
    dashed: bool = False
    """Whether the line is drawn dashed, thin and without markers, as a reference level."""
    marks: tuple[Mark, ...] = ()
    group: str = ""
    """Name of the legend entry that several lines of a panel share, or "" if the line has its own legend entry."""

    @property
    def opacity(self) -> float:
        return 1.0 if not self.faint else FAINT_OPACITY if self.group else 0.9

    @property
    def width(self) -> float:
        """Width of the line in pixels in the HTML page."""
        return 1.0 if self.dashed or (self.faint and self.group) else 1.6 if self.faint else 3.0

    @property
    def has_band(self) -> bool:
        return len(self.curve.frame) > 0 and self.band is not None


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of a panel, from `begin` to `end` on the horizontal axis."""

    begin: float
    end: float
    middle: float
    """Vertical position of the bar's centre."""
    thickness: float
    text: str = ""
    """Text that is shown under the mouse pointer, or "" for no text."""


@dataclass(frozen=True)
class Bars:
    """A group of bars that have the same colour and one common legend entry."""

    name: str
    colour: str
    bars: Sequence[Bar]
    edge: float = 0.0
    """Width of the white edge around each bar, which separates neighbouring bars."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines and bars. Later lines are drawn on top of earlier lines."""

    y_label: str
    lines: list[Line] = field(default_factory=list)
    x_label: str = "frames"
    y_limits: tuple[float, float] | None = None
    """Limits of the vertical axis, or None if the values of the lines determine the limits."""
    band: str = BAND
    """Description of the bands of the lines, for the legend."""
    faint_name: str = "sessions"
    """Plural name of what each faint line shows, such as "sessions". If the panel has many faint lines, the legend of the PNG shows only
    their number and this name."""
    bars: tuple[Bars, ...] = ()
    rows: Mapping[str, float] = field(default_factory=dict)
    """Name of each row of bars → vertical position of the row. If the panel has rows, the vertical axis shows their names."""
    x_max: float | None = None
    """Right end of the horizontal axis, or None if the points of the lines determine the end."""
    nothing: str = EMPTY
    """Text that is shown if the panel has neither points nor bars."""
    best_last: bool = False
    """Whether `lines` are ordered from the worst to the best line, so that the legend must list the lines in reverse order."""
    height: int | None = None
    """Height of the axes in the PNG, in pixels. With the default None, a single panel fills an image of standard size, and each of several
    panels has a height of 150 pixels."""

    @property
    def is_empty(self) -> bool:
        return not self.bars and not any(len(line.curve.frame) for line in self.lines)

    @property
    def one_band(self) -> bool:
        """Whether exactly one line has a band.

        A single band has an entry in the legend. If several lines have bands, the title explains the bands.
        """
        return sum(line.has_band for line in self.lines) == 1


@dataclass(frozen=True)
class Figure:
    """A figure: a title above one or more panels.

    The panels are one below the other, and share the horizontal axis and the names of the lines.
    """

    title: str
    panels: tuple[Panel, ...]
    subtitle: str = ""
    left: float = 0.115
    """Left end of the axes in the PNG, as a fraction of the image's width."""

    @property
    def first_panel(self) -> Panel:
        """The first panel of the figure, which is the only panel of most figures."""
        return self.panels[0]


def policy_colour(policy: int) -> str:
    return POLICY_COLOURS[policy % len(POLICY_COLOURS)]


def y_range(panel: Panel) -> tuple[float, float]:
    """Return the limits of the vertical axis of a panel: panel.y_limits or else the range of the values with a margin.

    If the panel has no points, the limits are (0, 1).
    """
    if panel.y_limits:
        return panel.y_limits
    values = _all_band_edges(panel.lines)
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _all_band_edges(lines: list[Line]) -> np.ndarray:
    return np.concatenate([np.empty(0), *(edge for line in lines for edge in band_edges(line))])


def band_edges(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper edge of the band of a line. If the line has no band, both edges are the values of the line."""
    return line.band or (line.curve.value, line.curve.value)


def _select_points(line: Line, indices: np.ndarray) -> Line:
    """Return a copy of the line that has only the points at `indices`."""
    band = line.band and (line.band[0][indices], line.band[1][indices])
    return replace(line, curve=Curve(line.curve.frame[indices], line.curve.value[indices]), band=band)


def shorten_title(title: str) -> str:
    """Shorten a long title in the middle, since its beginning names the spec and its end names the content of the figure."""
    return title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE - 61]}…{title[-60:]}"


def thinned_line(line: Line) -> Line:
    return _select_points(line, evenly_spaced_indices(len(line.curve.frame), _MAX_POINTS))


def format_tick(value: float, position: int | None) -> str:
    """Format the value of a tick, such as 1,500, 0.25 or 2e-5.

    The default format of matplotlib is not used, since it may factor out a power of ten.
    """
    if 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        text = f"{float(digits):g}e{int(power)}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


COLOURS = ("#BDDF26", "#5EC962", "#21918C", "#3B528B", "#440154")
"""Colours of trials from the lowest to the highest value: reversed viridis, so that the best trials are dark on a white background."""
HIGHLIGHT = "#D55E00"
"""Colour of the marker edges of the best trials."""
BEST = 10
"""Number of best trials that are highlighted in figures of a search."""
UNUSED = -0.12
"""Position, on the axis of a searched key, of the trials in which the key is not active. The position is below the values of the key."""
SCATTER_RANGE = (-0.07, 1.07)
"""Range of an axis of a scatter plot: the positions 0 to 1 with a margin."""
NOTHING = "nothing to show: no trial has a result yet"
STATUS_TEXTS = {"finished": "finished", "stopped": "stopped early", "running": "running"}
"""Status of a trial → text in the legend. Trials whose status is not in this dict, such as failed trials, are not drawn."""


@dataclass(frozen=True)
class Scale:
    """An axis of a figure of trials: a label, and ticks at positions from 0 to 1."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Position and text of each tick."""
    unused: bool = False
    """Whether some trials are drawn at the position UNUSED, since the key of the axis is not active in these trials."""

    @property
    def all_ticks(self) -> list[tuple[float, str]]:
        """Position and text of each tick. If some trials are drawn at the position UNUSED, the first tick is at this position."""
        return [*([(UNUSED, "not used")] if self.unused else []), *self.ticks]

    @property
    def wrapped_label(self) -> str:
        return self.label if len(self.label) <= 22 else self.label.replace(".", ".\n", 1)


@dataclass(frozen=True)
class Trials:
    """The T trials of a figure, from the best to the worst trial, with the value by which each trial is coloured."""

    text: Sequence[str]
    """Text of each trial, which is shown under the mouse pointer."""
    status: Sequence[str]
    """Status of each trial, which is a key of STATUS_TEXTS."""
    label: str
    """Name of the value by which the trials are coloured."""
    value_T: np.ndarray
    """Value by which each trial is coloured, float [T]. A trial whose value is NaN (unknown) is drawn grey."""
    low: float
    high: float
    """`low` and `high` are the values of the first and the last colour of the colour scale. Values outside this range are clipped."""

    def legend_groups(self) -> dict[str, np.ndarray]:
        """Return a dict of the legend entries: name → indices of the trials.

        The dict has an entry for each status of trials, and a last entry for the best trials.
        """
        status = np.array(self.status)
        found = {text: np.flatnonzero(status == kind) for kind, text in STATUS_TEXTS.items()}
        best = min(BEST, len(status))
        counted = {f"{text} ({len(own)})": own for text, own in found.items() if len(own)}
        return {**counted, f"best {best}" if best > 1 else "best": np.arange(best)}


@dataclass(frozen=True)
class TrialsFigure:
    """Base class of the figures that show the trials of a search over the searched keys."""

    title: str
    subtitle: str
    trials: Trials

    @property
    def is_empty(self) -> bool:
        return not self.trials.status


@dataclass(frozen=True)
class ScatterGrid(TrialsFigure):
    """A grid of scatter plots with a row for each of R metrics and a column for each of K keys.

    The markers of the best trials, of which there are at most BEST, have coloured edges.
    """

    columns: Sequence[Scale]
    rows: Sequence[Scale]
    x_KT: np.ndarray
    """Horizontal position of each trial on the axis of each key, float [K, T]. A trial whose position is NaN is not drawn."""
    y_RT: np.ndarray


@dataclass(frozen=True)
class ParallelCoordinates(TrialsFigure):
    """A line for each trial through the values of the trial on A parallel axes.

    The lines of the best trials, of which there are at most BEST, are thicker.
    """

    axes: Sequence[Scale]
    position_AT: np.ndarray


AnyFigure = Figure | ScatterGrid | ParallelCoordinates
"""Union of the classes of figures that render_html.py and render_png.py can draw."""
