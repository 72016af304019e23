"""The parts of plotly's layout that all pages share."""

from __future__ import annotations

import html
from textwrap import wrap
from typing import Any

from slm_lab.experiment.report import figure as figures

_TITLE_LETTERS, _SUBTITLE_LETTERS = 44, 56
"""Characters in a line of each: what fits a phone."""
_TITLE_LINE, _SUBTITLE_LINE, _AROUND = 21, 17, 24
"""Pixels of a line of each, and above and below both."""
_X_LABEL = 62
"""Pixels of the x axis's ticks and label, above the legend."""


def page_layout(title: str, subtitle: str, plot_height: float) -> dict[str, Any]:
    """Return title, size, fonts, colours and legend.

    The legend is below the plot, where plotly makes room for as many rows as the width of the window requires.

    Args:
        plot_height: pixels between title and legend.
    """
    large, small = wrap(figures.shorten(title), _TITLE_LETTERS), wrap(subtitle, _SUBTITLE_LETTERS)
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
