"""Describe in sentences how the returns of the seeds of a trial differ, at the end and over the run.

The sentences also name the diagnostics, such as the entropy, that differ when the returns differ most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from slm_lab.experiment.report.metrics import Curve, Table, current_return, curve, interpolate
from slm_lab.experiment.report.progress import format_number, format_with_error

_SHARE = 0.9
"""A seed counts as having learned if its return has covered this fraction of the range from the random baseline (or the lowest return) to
the best return."""
_WINDOW = 0.2
"""Length of the interval of frames in which the returns of two seeds differ most, as a fraction of the points of the return curves."""
_SMALL = 0.05
"""Differences between two return curves that are smaller than this fraction of the range of all returns are not explained."""
_FALL = 0.3
"""A fall of a seed's return from its previous best value is reported if the fall is at least this fraction of the range of all returns."""
_EFFECT, _RELATIVE, _SHOWN = 1.0, 0.1, 3
"""Smallest difference of a diagnostic that is reported, in standard deviations and relative to the larger mean, and maximum number of
reported diagnostics."""
_MAX_SEEDS = 6
"""Maximum number of seeds that are compared with the best seed."""
_MEANINGS = {
    "entropy": ("entropy", "it explored less", "it explored more"),
    "explore_var": ("exploration", "it explored less", "it explored more"),
    "alpha": ("temperature alpha", "entropy counted less", "entropy counted more"),
    "approx_kl": ("KL divergence per update", "its updates moved the policy less", "its updates moved the policy more"),
    "clip_fraction": ("clipped share", "fewer ratios were clipped", "more ratios were clipped"),
    "explained_variance": (
        "explained variance",
        "less accurate value estimates",
        "more accurate value estimates",
    ),
    "td_error": ("TD error", "its values were closer to their targets", "its values were further from their targets"),
    "grad_norm": ("gradient norm", "smaller gradients", "larger gradients"),
    "lr": ("learning rate", "smaller steps", "larger steps"),
    "lag_mean": ("policy lag", "its data were newer", "its data were older"),
    "staleness": ("staleness", "its gradients were newer", "its gradients were older"),
}
"""Table column of a diagnostic → (name, meaning of a lower value, meaning of a higher value). The dict has no losses and value estimates,
since these diagnostics follow the returns."""


class _Pair(NamedTuple):
    """A seed and the best seed, with their tables and the difference of their returns at common frames."""

    name: str
    best_name: str
    own: Table
    best: Table
    own_returns: Table
    best_returns: Table
    """`own_returns` and `best_returns` are the tables whose last rows have the current returns of the two seeds."""
    frame: np.ndarray
    gap: np.ndarray
    """current_return of the seed minus current_return of the best seed at each common frame, float64 [frames]."""
    scale: float
    """Range of all returns of all seeds."""


def seed_difference_sentences(
    tables: Mapping[int, Table],
    returns: Mapping[int, Table],
    names: Mapping[int, str],
    baseline: float | None = None,
    latest: Mapping[int, Table] | None = None,
) -> list[str]:
    """Return, for each seed except the best seed, a paragraph of sentences that compares this seed with the best seed.

    At most six seeds are compared. Returns [] if fewer than two seeds have returns.

    Args:
        tables: index of each seed → training table of the seed.
        returns: index of each seed → training table or evaluation table from which the returns of the seed are taken.
        names: index of each seed → name of the seed.
        baseline: random baseline of the env, or None if the baseline is unknown.
        latest: index of each seed → table whose last row has the current return of the seed, by default `returns`.
    """
    latest = returns if latest is None else latest
    curves = {index: one for index, table in returns.items() if len((one := curve(table, "current_return")).frame)}
    if len(curves) < 2:
        return []
    ranked = sorted(curves, key=lambda index: _sort_key(latest[index], curves[index]), reverse=True)
    level, scale = learned_return(curves.values(), baseline), _return_range(curves.values())
    best, sentences = ranked[0], list[str]()
    for index in ranked[1 : 1 + _MAX_SEEDS]:
        together = interpolate([curves[index], curves[best]])
        gap = together.value_SF[0] - together.value_SF[1] if len(together.frame) else np.empty(0)
        of_tables = tables[index], tables[best], latest[index], latest[best]
        pair = _Pair(names[index], names[best], *of_tables, together.frame, gap, scale)
        over_the_run = _mean_gap_sentence(pair, curves[index], curves[best], level)
        parts = [_end_sentence(pair), over_the_run, _fall_sentence(pair, curves[index]), *_cause_sentences(pair)]
        text = " ".join(filter(None, parts))
        sentences.append(text[0].upper() + text[1:])
    return sentences


def learned_return(curves: Iterable[Curve], baseline: float | None) -> float | None:
    """Return the level of the return at which a seed counts as having learned, or None if the curves have no returns.

    A seed counts as having learned at 90 % of the range from the random baseline to the best return of all seeds. If `baseline` is None,
    the range begins at the lowest return of all seeds.
    """
    values = np.concatenate([np.empty(0), *(one.value for one in curves)])
    if not len(values):
        return None
    low = float(values.min()) if baseline is None else baseline
    return low + _SHARE * (float(values.max()) - low)


def first_frame_at_level(returns: Curve, level: float | None) -> float | None:
    """Return the first frame at which a curve is at or above `level`, or None if the curve stays below `level` or `level` is None."""
    above = np.flatnonzero(returns.value >= (math.inf if level is None else level))
    return float(returns.frame[above[0]]) if len(above) else None


def round_text(value: float, digits: int = 4) -> str:
    """Return a number as text, with `digits` significant digits."""
    return format_number(float(f"{value:.{digits}g}"))


def _sort_key(table: Table, returns: Curve) -> tuple[float, float]:
    """Return (current return in the last row of `table`, mean of `returns`) of a seed."""
    value = current_return(table)["current_return"]
    return -math.inf if value is None else value, float(returns.value.mean())


def _return_range(curves: Iterable[Curve]) -> float:
    values = np.concatenate([one.value for one in curves])
    return float(np.ptp(values)) or 1.0


def _end_sentence(pair: _Pair) -> str:
    (own, own_error), (best, best_error) = (tuple(current_return(table).values()) for table in (pair.own_returns, pair.best_returns))
    if own is None or best is None:
        return f"{pair.name}: no episode ended recently."
    error = math.hypot(own_error or 0.0, best_error or 0.0)
    figures = f"{format_with_error(own, own_error)} against {format_with_error(best, best_error)}"
    if best - own > 2 * error:
        return f"{pair.name} ended worse than {pair.best_name}: {figures}, more than two standard errors apart."
    return f"{pair.name} did not end worse than {pair.best_name}: {figures}, within two standard errors."


def _mean_gap_sentence(pair: _Pair, own: Curve, best: Curve, level: float | None) -> str:
    if not len(pair.gap):
        return ""
    mean = float(pair.gap.mean())
    if abs(mean) < _SMALL * pair.scale:
        text = "Over the whole run the two differ little on average"
    else:
        way = "worse" if mean < 0 else "better"
        text = f"Over the whole run it was {way}, by {round_text(abs(mean), 3)} on average"
    times = [first_frame_at_level(one, level) for one in (own, best)]
    if level is None or times == [None, None]:
        return f"{text}."
    own_frame, best_frame = (None if frame is None else f"at frame {frame:,.0f}" for frame in times)
    if own_frame is None:
        return f"{text}; it never reached {round_text(level)}, but {pair.best_name} did {best_frame}."
    return f"{text}; it reached {round_text(level)} {own_frame}, and {pair.best_name} {best_frame or 'never did'}."


def _fall_sentence(pair: _Pair, returns: Curve) -> str:
    """Return a sentence about the largest fall of a seed's return from its previous best value, or "" if this fall is small."""
    falls = np.maximum.accumulate(returns.value) - returns.value
    low = int(falls.argmax())
    if falls[low] < _FALL * pair.scale:
        return ""
    high = int(returns.value[: low + 1].argmax())
    best = f"{round_text(returns.value[high])} at frame {returns.frame[high]:,.0f}"
    return f"It fell from {best} to {round_text(returns.value[low])} at frame {returns.frame[low]:,.0f}."


def _cause_sentences(pair: _Pair) -> list[str]:
    """Return sentences about the frames at which the returns of two seeds differ most, and about the diagnostics near these frames."""
    largest = _largest_gap(pair)
    if largest is None:
        return []
    begin, end, gap = largest
    gap_text = f"The gap was largest at frames {begin:,.0f} to {end:,.0f} (on average {'+' if gap > 0 else '−'}{round_text(abs(gap), 3)})."
    differing = sorted(_differing_diagnostics(pair, max(0.0, 2 * begin - end), end), reverse=True)[:_SHOWN]
    if not differing:
        return [gap_text, "No diagnostic differed much before or during it."]
    return [gap_text, f"Before and during it: {'; '.join(text for _, text in differing)}."]


def _largest_gap(pair: _Pair) -> tuple[float, float, float] | None:
    """Return (first frame, last frame, mean gap) of the interval of frames with the largest mean gap between the returns of two seeds.

    An interval in which the seed is worse than the best seed is preferred, since the sentences explain why the seed is worse. Returns None
    if the largest gap is less than 5 % of the range of all returns.
    """
    if len(pair.frame) < 5:
        return None
    rows = max(2, round(_WINDOW * len(pair.frame)))
    means = np.convolve(pair.gap, np.ones(rows) / rows, "valid")
    at = int(means.argmin())
    if -means[at] < _SMALL * pair.scale:
        at = int(means.argmax())
    if abs(means[at]) < _SMALL * pair.scale:
        return None
    return float(pair.frame[at]), float(pair.frame[at + rows - 1]), float(means[at])


def _differing_diagnostics(pair: _Pair, begin: float, end: float) -> Iterable[tuple[float, str]]:
    """Yield (difference in standard deviations, text) for each diagnostic that differs between two seeds in the frames `begin` to `end`."""
    for column, (name, lower, higher) in _MEANINGS.items():
        if column not in pair.own or column not in pair.best:
            continue
        together = interpolate([curve(table, column) for table in (pair.own, pair.best)])
        inside = (together.frame >= begin) & (together.frame <= end)
        if inside.sum() < 3 or len(together.value_SF) < 2:
            continue
        (one, other), change_F = together.value_SF[:, inside].mean(axis=1), (together.value_SF[0] - together.value_SF[1])[inside]
        change, spread = float(change_F.mean()), float(change_F.std())
        if abs(change) <= _RELATIVE * max(abs(one), abs(other)) or abs(change) < _EFFECT * spread:
            continue
        size = abs(change) / spread if spread else math.inf
        yield size, f"{name} {_short_number(one)} against {_short_number(other)} ({lower if change < 0 else higher})"


def _short_number(value: float) -> str:
    return f"{value:.3g}"
