"""Define the findings of the command `doctor`, and functions that several diagnostic rules use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slm_lab.experiment.report.doctor_case import ColumnInterval, Session

Severity = Literal["problem", "warning", "remark"]
"""Severity of a finding. "problem" means that the fault prevents good training, "warning" means that the fault probably lowers the
performance, and "remark" means that the training itself has no fault."""


@dataclass(frozen=True)
class Finding:
    """A fault of a run that a diagnostic rule has detected, with the evidence and the recommended change."""

    rule: str = field(default="", kw_only=True)
    """Name of the rule that detected the fault, which `doctor.diagnose_run` sets."""
    title: str
    severity: Severity
    evidence: str
    """The measured values and the usual range of these values."""
    advice: str
    """Description of the recommended change."""
    key: str | None = None
    """Path of the spec key to change, or None if no change of a spec key corrects the fault."""
    value: Any = None
    """Recommended value of the spec key `key`."""
    sessions: tuple[int, ...] = ()
    """Numbers of the sessions that have the fault. The tuple is empty if the fault concerns the whole trial."""
    frames: tuple[int, int] | None = None
    """First and last frame of the table rows that are the evidence."""


def number_text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def round_to_one_digit(value: float) -> float:
    """Return the value rounded to one significant digit, as a user would write it in a spec."""
    return float(f"{value:.1g}")


def range_text(window: ColumnInterval) -> str:
    first, last = window.frames
    return f"(median of frames {first:,} to {last:,})"


def half_with_larger_median(session: Session, column: str) -> ColumnInterval:
    """Return the values of a table column in that half of the run in which the median of the column is larger.

    Both halves of the run are compared, since a fault may disappear when the learning rate decays.
    """
    return max(session.column(column, 0.0, 0.5), session.second_half(column), key=lambda half: half.median)


def learning_rate_setting(session: Session) -> tuple[str, float]:
    """Return the path of the spec key of the learning rate, and the learning rate.

    If the spec does not have the key, the learning rate is the first finite value in the column `lr` of the training table or, without such
    a value, 1e-3.
    """
    path = f"{session.case.optim_path}.lr"
    rate = session.case.spec_number(path)
    if math.isnan(rate):
        rows = session.table.get("lr", np.empty(0))
        rate = float(rows[np.isfinite(rows)][:1].sum()) or 1e-3
    return path, rate


def is_at_baseline(session: Session) -> bool:
    """Return whether the final return is at most the return of a random agent plus a margin.

    The margin is two standard errors of the final return or 5 % of the magnitude of the random agent's return, whichever is larger.

    In self-play, return whether the final Elo rating is at most two standard errors above 0, which is the rating of random actions.
    """
    session.require_progress()
    if "elo" in session.table:
        return float(session.column("elo").curve.value[-1]) <= 2.0 * session.rating_error
    session.require_fixed_opponents()
    margin = max(2.0 * session.return_error, 0.05 * abs(session.case.baseline))
    return max(session.final_returns.median, float(session.final_returns.curve.value[-1])) <= session.case.baseline + margin


def has_poor_return(session: Session) -> bool:
    """Return whether the final return is in the lower half of the range from the return of a random agent to the best return of the run.

    In self-play, return whether the final Elo rating is less than half of the best Elo rating of the run.
    """
    if "elo" in session.table:
        ratings = session.column("elo").curve.value
        return is_at_baseline(session) or float(ratings[-1]) < 0.5 * float(ratings.max())
    rows = session.column("current_return").curve.value
    base = session.case.baseline
    return is_at_baseline(session) or session.final_returns.median < base + 0.5 * (float(rows.max()) - base)
