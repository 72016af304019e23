"""The figures of a search: metrics over keys, parallel coordinates, importance, and the returns of all trials."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.report.curves import Curve, align_or_interpolate
from slm_lab.experiment.report.figure import GREY, MEAN_COLOUR, Bar, Bars, Figure, Line, Panel
from slm_lab.experiment.report.importance import METHOD, MIN_TRIALS, Importance, frozen
from slm_lab.experiment.report.progress import number
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.scatter import BEST, MARKERS, UNUSED, ParallelCoordinates, Scale, ScatterGrid, Shade, Trials
from slm_lab.experiment.report.trial_figures import return_curves
from slm_lab.experiment.report.trial_record import TrialRecord
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.meta import SearchMetric
from slm_lab.spec.models.search import SearchKey

_MAX_COLUMNS = 12
"""Keys in the grid of scatter plots: the most important ones."""
_MAX_OPTIONS = 12
"""Values of a choice that have a number or text at the axis."""
_LETTERS = 14
"""Of a value at an axis."""
_POINTS = 300
"""Of a line in the figure of all trials."""
_OUTLIERS = 10
"""Percentile below which trials have the colour of the worst."""
_BEST_COLOURS = ("#440154", "#3B528B", "#0072B2", "#21918C", "#009E73", "#5EC962", "#E69F00", "#D55E00", "#CC79A7", "#882255")
_RETURN_LABELS = {"mean_returns": "mean return (last 100 episodes)", "mean_returns_ma": "mean return, moving average (last 100 rows)"}


@dataclass(frozen=True)
class SearchView:
    """What the figures show."""

    title: str
    """Spec and env."""
    space: SearchSpace
    records: Sequence[TrialRecord]
    """Best first."""
    metric: str
    """Name of the metric of the search."""
    importance: Importance | None

    @property
    def known(self) -> list[TrialRecord]:
        """Return the trials with a metric that did not fail."""
        return [one for one in self.records if one.status in MARKERS and one.known_metric is not None]

    def count(self, *, shown: bool = True) -> str:
        """Return "24 trials: 20 finished, 3 stopped early, 1 failed (not shown)"; without `shown`, not what a figure leaves out."""
        words = {"finished": "finished", "stopped": "stopped early", "running": "running", "failed": "failed" + " (not shown)" * shown}
        counts = {text: sum(one.status == status for one in self.records) for status, text in words.items()}
        trials = len(self.records)
        if not trials:
            return "no trials yet"
        return f"{trials} trial{'s' * (trials != 1)}: " + ", ".join(f"{n} {text}" for text, n in counts.items() if n)

    def trials(self) -> Trials:
        known = self.known
        strength_T = np.array(
            [one.metrics.get("strength") if one.metrics.get("strength") is not None else np.nan for one in known], dtype=float
        )
        label, value_T = "strength", strength_T
        if not np.isfinite(strength_T).any():
            label, value_T = self.metric, np.array([one.known_metric for one in known], dtype=float)
        finite = value_T[np.isfinite(value_T)]
        low, high = (float(np.percentile(finite, _OUTLIERS)), float(finite.max())) if len(finite) else (0.0, 1.0)
        shade = Shade(label, value_T, low, high if high > low else low + (abs(low) or 1.0))
        return Trials([self._describe(one) for one in known], [one.status for one in known], shade)

    def _describe(self, record: TrialRecord) -> str:
        return f"trial {record.trial}: {self.metric} {number(record.metric)}\n{record.frame:,} frames, {record.status}"


def search_figures(view: SearchView) -> dict[str, Any]:
    """Return the figures by the name that follows _experiment_graph: "", parallel_coordinates and importance."""
    return {"": grid_figure(view), "parallel_coordinates": parallel_figure(view), "importance": importance_figure(view)}


def grid_figure(view: SearchView) -> ScatterGrid:
    """Return every metric that is known of a trial over every key; of many keys the most important."""
    known = view.known
    names = dict.fromkeys((view.metric, *get_args(SearchMetric)))
    values = {name: np.array([_metric(one, name, view.metric) for one in known], dtype=float) for name in names}
    drawn = {name: value_T for name, value_T in values.items() if np.isfinite(value_T).any()}
    keys = view.space.keys
    if len(keys) > _MAX_COLUMNS:
        ordered = [*view.importance.shares] if view.importance else [*keys]
        keys = tuple(key for key in keys if key in ordered[:_MAX_COLUMNS])
    columns = [_axis(view, key, known, jitter=True) for key in keys]
    rows = [_linear(name, value_T) for name, value_T in drawn.items()]
    left_out = len(view.space.keys) - len(keys)
    subtitle = view.count() + (f"; the {len(keys)} most important of {len(view.space.keys)} keys" if left_out else "")
    return ScatterGrid(
        f"{view.title}, search: metrics over the searched keys",
        subtitle,
        [scale for scale, _ in columns],
        [scale for scale, _ in rows],
        np.array([position_T for _, position_T in columns]).reshape(len(columns), len(known)),
        np.array([position_T for _, position_T in rows]).reshape(len(rows), len(known)),
        view.trials(),
    )


def parallel_figure(view: SearchView) -> ParallelCoordinates:
    """Return a line for each trial over all keys, and the metric as the last axis."""
    known = view.known
    axes = [_axis(view, key, known) for key in view.space.keys]
    axes.append(_linear(view.metric, np.array([one.known_metric for one in known], dtype=float)))
    scales = []
    for scale, position_T in axes:
        unused = bool(np.isnan(position_T).any())
        scales.append(Scale(scale.label, scale.ticks, unused))
        position_T[np.isnan(position_T)] = UNUSED
    positions = np.array([position_T for _, position_T in axes]).reshape(len(axes), len(known))
    return ParallelCoordinates(f"{view.title}, search: trials across the searched keys", view.count(), scales, positions, view.trials())


def importance_figure(view: SearchView) -> Figure:
    """Return a bar for each key."""
    names, found = short_names(view.space.keys), view.importance
    title = f"{view.title}, search: importance of the searched keys for {view.metric}"
    if found is None:
        why = f"{view.count()}; importance needs {MIN_TRIALS} trials that ended with different results"
        nothing = "nothing to show: too few trials, or all with the same result"
        return Figure(title, (Panel("", x_label=METHOD, nothing=nothing),), why)
    ordered = [*reversed(found.shares.items())]
    bars = [Bar(0.0, max(share, 0.0), row, 0.6, f"{key}: {share:.0%}") for row, (key, share) in enumerate(ordered)]
    rows = {names[key]: float(row) for row, (key, _) in enumerate(ordered)}
    panel = Panel(
        "",
        x_label="share of the variance of the forest's predictions (total-effect Sobol index)",
        bars=(Bars("share of the variance that is due to the key, interactions with other keys included", MEAN_COLOUR, bars),),
        rows=rows,
        y_limits=(-0.7, len(rows) - 0.3),
        x_max=max(1.0, *(bar.end for bar in bars)),
        height=max(60, 30 * len(rows)),
    )
    subtitle = f"random forest of {found.trials} trials; {found.quality}"
    return Figure(title, (panel,), subtitle, left=min(0.05 + 0.0085 * max(map(len, rows)), 0.4))


def return_figures(
    view: SearchView, paths: RunPaths, mode: DataMode, curves_of: Callable[[int], Mapping[str, Curve]] | None = None
) -> dict[str, Figure]:
    """Return the mean returns of every trial over frames, the best ten highlighted."""
    read = curves_of or (lambda trial: trial_curves(paths, trial, mode))
    curves = {one.trial: read(one.trial) for one in view.records if one.status != "failed"}
    best = {one.trial: rank for rank, one in enumerate(view.known[:BEST])}
    known = {one.trial: one for one in view.known}
    figures = {}
    for name, label in _RETURN_LABELS.items():
        drawn = {trial: _thinned(of[name]) for trial, of in curves.items() if name in of and len(of[name].frame)}
        others = [trial for trial in drawn if trial not in best]
        group = f"{len(others)} other trial{'s' * (len(others) != 1)}"
        lines = [Line(f"trial {trial}", drawn[trial], GREY, faint=True, group=group) for trial in others]
        for trial, rank in sorted(best.items(), key=lambda item: -item[1]):
            if trial in drawn:
                text = f"{rank + 1}. trial {trial}: {number(known[trial].metric)}"
                lines.append(Line(text, drawn[trial], _BEST_COLOURS[rank]))
        what = "moving average of the mean return" if name.endswith("_ma") else "mean return"
        shown = min(BEST, len(known))
        highlighted = f"; the best {shown} by {view.metric} in colour" if known else ""
        panel = Panel(label, lines, best_last=True, each="other trials")
        figures[name] = Figure(f"{view.title}, search: {what} of each trial", (panel,), view.count() + highlighted)
    return figures


def trial_curves(paths: RunPaths, trial: int, mode: DataMode) -> dict[str, Curve]:
    """Return the mean returns of a trial over its Sessions, from its tables; {} if it has none."""
    tables = [return_curves(table) for table in Run(paths, trial).independent(mode).values()]
    result = {}
    for name in _RETURN_LABELS:
        curves = [one[name] for one in tables if len(one[name].frame)]
        if curves:
            result[name] = align_or_interpolate(curves, min(len(curves), 2)).mean()
    return result


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each path, with those before it that are needed to tell it apart or to say what it belongs to."""
    parts = {key: key.split(".") for key in keys}

    def name(key: str) -> str:
        words = parts[key]
        least = 2 if len(words) > 1 and (words[-2].endswith("_spec") or words[-1] in ("name", "type")) else 1
        for count in range(least, len(words) + 1):
            if sum(other[-count:] == words[-count:] for other in parts.values()) == 1:
                return ".".join(words[-count:])
        return key

    return {key: name(key) for key in keys}


def value_text(value: Any, letters: int = _LETTERS) -> str:
    """Return a value as short text."""
    if isinstance(value, float):
        return number(value) if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _axis(view: SearchView, key: str, known: Sequence[TrialRecord], *, jitter: bool = False) -> tuple[Scale, np.ndarray]:
    """Return the axis of a key, and the position of each trial on it; NaN where the key is not active."""
    label = short_names(view.space.keys)[key]
    same = [one for one in view.space.named.values() if one.text == key]
    if any(one.has_options for one in same) or any(not _is_number(one.values.get(key, 0)) for one in known):
        return _choices(label, key, same, known, jitter=jitter)
    value_T = np.array([one.values.get(key, np.nan) for one in known], dtype=float)
    ends = [] if any(one.is_normal for one in same) else [end for one in same for end in one.bounds]
    return _linear(label, value_T, log=all(one.is_log for one in same), ends=ends)


def _choices(label: str, key: str, same: Sequence[SearchKey], known: Sequence[TrialRecord], *, jitter: bool) -> tuple[Scale, np.ndarray]:
    options = [frozen(value) for one in same if one.has_options for value in one.args]
    options += [frozen(one.values[key]) for one in known if key in one.values]
    texts = {value: json.loads(value) for value in dict.fromkeys(options)}
    step = 1 / max(len(texts) - 1, 1)
    edge = 0.15 if jitter else 0.0
    places = {value: edge + (1 - 2 * edge) * index * step if len(texts) > 1 else 0.5 for index, value in enumerate(texts)}
    spread = 0.25 * min(step, 0.5) * jitter
    position_T = np.array(
        [places[frozen(one.values[key])] + spread * (2 * (one.trial * 0.618034 % 1) - 1) if key in one.values else np.nan for one in known]
    )
    every = -(-len(texts) // _MAX_OPTIONS)
    ticks = [(places[value], text) for value, text in zip(texts, _option_texts(list(texts.values())), strict=True)][::every]
    return Scale(label, ticks), position_T


def _option_texts(values: Sequence[Any]) -> list[str]:
    """Return the values as text; objects by their names if these differ."""
    names = [str(value.get("name", value.get("type"))) if isinstance(value, dict) else value_text(value) for value in values]
    return names if len(set(names)) == len(names) else [value_text(value) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _linear(label: str, value_T: np.ndarray, *, log: bool = False, ends: Sequence[float] = ()) -> tuple[Scale, np.ndarray]:
    """Return an axis from the lowest to the highest of values and `ends`, which are labelled, and the positions of the values on it."""
    finite = [*value_T[np.isfinite(value_T)].tolist(), *ends]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0))
    to = math.log if log else float
    begin, length = to(low), to(high) - to(low)
    inner = [((to(value) - begin) / length, value_text(value)) for value in (_log_ticks(low, high) if log else _ticks(low, high))]
    outer = [(0.0, value_text(float(low))), (1.0, value_text(float(high)))] if ends else []
    ticks = [*outer, *(tick for tick in inner if not ends or 0.18 < tick[0] < 0.8)]
    position_T = (np.log(value_T) if log else value_T).astype(float)
    return Scale(label, sorted(ticks)), (position_T - begin) / length


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from low to high."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]
    return powers if len(powers) > 1 else [low, *powers, high]


def _metric(record: TrialRecord, name: str, searched: str) -> float:
    value = record.known_metric if name == searched else record.metrics.get(name)
    return math.nan if value is None else value


def _thinned(curve: Curve) -> Curve:
    count = len(curve.frame)
    chosen = np.linspace(0, count - 1, min(count, _POINTS)).round().astype(int)
    return Curve(curve.frame[chosen], curve.value[chosen])
