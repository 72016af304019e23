"""Descriptions of two figures of a search: a grid of scatter plots, and parallel coordinates. render_scatter.py draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slm_lab.experiment.report.figure import Figure

COLOURS = ("#BDDF26", "#5EC962", "#21918C", "#3B528B", "#440154")
"""Low to high: viridis the other way round, so that the best is dark on white."""
HIGHLIGHT = "#D55E00"
"""Edge of the best trials."""
BEST = 10
"""Number of highlighted trials."""
UNUSED = -0.12
"""Position of trials in which a key is not active, below its axis."""
NOTHING = "nothing to show: no trial has a result yet"
MARKERS = {"finished": "circle", "stopped": "triangle", "running": "square"}
"""Status → shape."""
STATUS_TEXTS = {"finished": "finished", "stopped": "stopped early", "running": "running"}


@dataclass(frozen=True)
class Scale:
    """An axis: its label, and numbers beside positions from 0 to 1."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Position and text of each."""
    unused: bool = False
    """Some trials lie at UNUSED."""


@dataclass(frozen=True)
class Shade:
    """Colours by a value of each trial, T trials."""

    label: str
    value_T: np.ndarray
    """NaN: not known, drawn grey."""
    low: float
    high: float
    """Values of the first and the last colour; others have the nearest."""


@dataclass(frozen=True)
class Trials:
    """What is drawn of each trial, best first: T trials."""

    text: Sequence[str]
    """Shown under the mouse pointer."""
    status: Sequence[str]
    """Key of MARKERS."""
    shade: Shade


@dataclass(frozen=True)
class ScatterGrid:
    """Metrics over keys: R rows of metrics, K columns of keys. The first BEST trials have an edge."""

    title: str
    subtitle: str
    columns: Sequence[Scale]
    rows: Sequence[Scale]
    x_KT: np.ndarray
    """Positions; NaN: not drawn."""
    y_RT: np.ndarray
    trials: Trials

    @property
    def empty(self) -> bool:
        return not bool(np.isfinite(self.y_RT).any())


@dataclass(frozen=True)
class ParallelCoordinates:
    """A line for each trial through its value on each of A axes; the first BEST trials are drawn thicker."""

    title: str
    subtitle: str
    axes: Sequence[Scale]
    position_AT: np.ndarray
    trials: Trials

    @property
    def empty(self) -> bool:
        return bool(self.position_AT.shape[1] == 0)


AnyFigure = Figure | ScatterGrid | ParallelCoordinates
"""What can be drawn."""
