"""A finding of the doctor, and functions that several of its rules use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slm_lab.experiment.report.doctor_case import Session, Window

Severity = Literal["problem", "warning", "remark"]
"""problem: training cannot work well; warning: the performance is probably lower; remark: nothing is wrong with the training."""


@dataclass(frozen=True)
class Finding:
    """A fault that a rule has found."""

    rule: str = field(default="", kw_only=True)
    """Name of the rule, which `doctor.examine` adds."""
    title: str
    severity: Severity
    evidence: str
    """The measured values and their usual range."""
    advice: str
    """The recommended change, in a sentence."""
    key: str | None = None
    """Path of the key to change; None if no key helps."""
    value: Any = None
    """A value to try for the key."""
    sessions: tuple[int, ...] = ()
    """Sessions with the fault; empty if the fault concerns the whole trial."""
    frames: tuple[int, int] | None = None
    """First and last frame of the rows that are the evidence."""


def number_text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def rounded(value: float) -> float:
    """Return a value rounded to one significant digit, as a user would write it."""
    return float(f"{value:.1g}")


def range_text(window: Window) -> str:
    first, last = window.frames
    return f"(median of frames {first:,} to {last:,})"


def largest_half(session: Session, column: str) -> Window:
    """Return the half of the run in which the median of a column is larger, since a fault may disappear when the learning rate decays."""
    return max(session.column(column, 0.0, 0.5), session.second_half(column), key=lambda half: half.median)


def learning_rate_of(session: Session) -> tuple[str, float]:
    """Return the path and the value of the learning rate. If the spec has no value, it is taken from the first row."""
    path = f"{session.case.optim_path}.lr"
    rate = session.case.number(path)
    if math.isnan(rate):
        rows = session.table.get("lr", np.empty(0))
        rate = float(rows[np.isfinite(rows)][:1].sum()) or 1e-3
    return path, rate


def is_at_baseline(session: Session) -> bool:
    """Return whether the final return is at most the return of a random agent, with a margin of two standard errors or 5 %.

    In self-play: whether the final Elo rating is at most the rating of random actions, which is 0, with a margin of two standard errors.
    """
    session.require_progress()
    if "elo" in session.table:
        return float(session.column("elo").curve.value[-1]) <= 2.0 * session.rating_error
    session.require_own_return()
    margin = max(2.0 * session.return_error, 0.05 * abs(session.case.baseline))
    return max(session.returns.median, float(session.returns.curve.value[-1])) <= session.case.baseline + margin


def is_poor(session: Session) -> bool:
    """Return whether the final return is in the lower half of the range from the return of a random agent to the best return.

    In self-play, the same applies to the Elo rating.
    """
    if "elo" in session.table:
        ratings = session.column("elo").curve.value
        return is_at_baseline(session) or float(ratings[-1]) < 0.5 * float(ratings.max())
    rows = session.column("current_return").curve.value
    base = session.case.baseline
    return is_at_baseline(session) or session.returns.median < base + 0.5 * (float(rows.max()) - base)
