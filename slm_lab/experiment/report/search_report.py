"""Write the output files of a search: the table of trials, the figures, the importance of the searched keys, and the best trial's spec."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from slm_lab.experiment.files.paths import DataMode, RunPaths
from slm_lab.experiment.files.search_state import SearchState
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report import figure as figures
from slm_lab.experiment.report.figure import Bar, Bars, Figure, Line, Panel, ParallelCoordinates, Scale, ScatterGrid, Trials
from slm_lab.experiment.report.metrics import Curve, align_or_interpolate, estimate_mean, evenly_spaced_indices
from slm_lab.experiment.report.progress import format_number, is_number
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.report.run import Run, read_json
from slm_lab.experiment.report.trial_figures import return_curves
from slm_lab.experiment.report.trial_record import METHOD, MIN_TRIALS, Importance, TrialRecord, key_importance, rank_trials
from slm_lab.experiment.report.writer import Writer, csv_bytes, json_bytes
from slm_lab.lib.log import notice
from slm_lab.lib.text import last_line
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.meta import SearchMetric
from slm_lab.spec.models.search import SearchKey
from slm_lab.spec.models.spec import Spec

_MAX_COLUMNS = 12
"""Maximum number of keys in the grid of scatter plots. If a search has more keys, the most important keys are shown."""
_MAX_OPTIONS = 12
"""Maximum number of values of a categorical key that have a label at the axis of the key."""
_LETTERS = 14
"""Maximum number of characters of the label of a value of a searched key."""
_POINTS = 300
"""Maximum number of points of the line of a trial in the figure of the returns of all trials."""
_OUTLIERS = 10
"""Percentile at which the colour scale of the trials begins. All trials below this percentile have the same colour, so that outliers do not
determine the colour scale."""
_BEST_COLOURS = ("#440154", "#3B528B", "#0072B2", "#21918C", "#009E73", "#5EC962", "#E69F00", "#D55E00", "#CC79A7", "#882255")
_RETURN_LABELS = {
    "mean_returns": "mean return (evaluation, or recent episodes)",
    "mean_returns_ma": "mean return, moving average (last 100 rows)",
}


@dataclass(frozen=True)
class SearchSummary:
    """The results of a search, and the data of its figures."""

    title: str
    """Beginning of the titles of all figures: the name of the spec, and the env."""
    space: SearchSpace
    ranked: Sequence[TrialRecord]
    """All trials of the search, from the best to the worst trial."""
    metric: str
    """Name of the metric by which the trials are ranked."""
    importance: Importance | None
    """Importance of the searched keys, or None if the importance cannot be computed (see key_importance)."""
    files: Sequence[Path] = ()
    """Paths of the files that have been written, except plotly.min.js, the script of the HTML pages."""

    @property
    def best(self) -> TrialRecord | None:
        """The best trial (the best confirmed trial if trials were confirmed), or None if no trial has a result."""
        return next((one for one in self.ranked if one.status != "failed" and one.known_metric is not None), None)

    @cached_property
    def trials_with_metric(self) -> list[TrialRecord]:
        """The trials that have a metric and did not fail."""
        return [one for one in self.ranked if one.status in figures.STATUS_TEXTS and one.known_metric is not None]

    @cached_property
    def known_metric_T(self) -> np.ndarray:
        """Metric of each trial in `trials_with_metric`, float64 [T]."""
        return np.array([one.known_metric for one in self.trials_with_metric], dtype=float)

    def status_counts_text(self, *, for_figure: bool = True) -> str:
        """Return a text with the number of trials of each status, such as "24 trials: 20 finished, 3 stopped early, 1 failed (not shown)".

        Args: for_figure: whether the text is for a figure. Figures do not show failed trials, so that their number is marked "(not shown)".
        """
        words = {**figures.STATUS_TEXTS, "failed": "failed" + " (not shown)" * for_figure}
        counts = {text: sum(one.status == status for one in self.ranked) for status, text in words.items()}
        trials = len(self.ranked)
        if not trials:
            return "no trials yet"
        return f"{trials} trial{'s' * (trials != 1)}: " + ", ".join(f"{n} {text}" for text, n in counts.items() if n)

    def trials(self) -> Trials:
        """Return `trials_with_metric` for a figure, coloured by strength or, if no trial has a strength, by the metric of the search."""
        label, value_T = "strength", np.array([one.metrics.get("strength") for one in self.trials_with_metric], dtype=float)
        if not np.isfinite(value_T).any():
            label, value_T = self.metric, self.known_metric_T
        finite = value_T[np.isfinite(value_T)]
        low, high = (float(np.percentile(finite, _OUTLIERS)), float(finite.max())) if len(finite) else (0.0, 1.0)
        high = high if high > low else low + (abs(low) or 1.0)
        texts = [
            f"trial {one.trial}: {self.metric} {format_number(one.metric)}\n{one.frame:,} frames, {one.status}"
            for one in self.trials_with_metric
        ]
        return Trials(texts, [one.status for one in self.trials_with_metric], label, value_T, low, high)


def write_search(paths: RunPaths, spec: Spec, records: Sequence[TrialRecord], metric: str) -> SearchSummary:
    """Write the files of a search from the records and tables of its trials, and return the results of the search.

    The search may still be running, and `records` may be empty. If a file or figure cannot be written, a notice is printed.

    Args: metric: name of the metric by which trials are ranked, whose value for each trial is TrialRecord.metric.
    """
    writer, summary = Writer(paths.root), summarize_search(spec, records, metric)
    space, order, importance = summary.space, summary.ranked, summary.importance
    writer.write("table not written", (paths.experiment_df, partial(_csv, space, order)))
    if summary.best is not None:
        writer.write("file not written", (paths.best_spec, partial(_best_spec, summary, summary.best, paths.root.name)))
    shares = asdict(importance) if importance else {"shares": None}
    writer.write("file not written", (paths.importance, partial(json_bytes, {"metric": metric, **shares})))
    with writer.suppress_drawing_errors("the graphs of the search"):
        writer.draw(search_figures(summary), paths.experiment_graph)
    with writer.suppress_drawing_errors("the returns of the trials"):
        writer.draw(return_figures(summary, paths, "eval" if spec.meta.rigorous_eval else "train"), paths.multi_trial_graph)
    writer.close()
    return replace(summary, files=tuple(writer.files))


def summarize_search(spec: Spec, records: Sequence[TrialRecord], metric: str) -> SearchSummary:
    """Return the results of a search, computed from the records of its trials.

    If an error prevents the computation of the importance of the searched keys, a notice is printed.
    """
    space, order, importance = SearchSpace(spec), tuple(rank_trials(records)), None
    try:
        importance = key_importance(space, order)
    except Exception as error:
        notice(f"cannot compute the importance of the searched keys: {type(error).__name__}: {error}")
    return SearchSummary(f"{spec.name} ({spec.env.name.rpartition(':')[2]})", space, order, metric, importance)


def search_records(state: SearchState, paths: RunPaths, random_seed: int | None) -> list[TrialRecord]:
    """Return a TrialRecord of each trial of a search, with the result of the confirmation of the trial (see TrialRecord.confirmed)."""
    confirmed = {one.trial: one for one in state.confirmations if one.status == "finished"}
    intervals = {t: confidence_interval(RunPaths(paths.confirmation, paths.spec_name), t, state.metric) for t in confirmed}
    return [
        TrialRecord(
            trial.trial,
            trial.values,
            {key: value for key, value in trial.metrics.items() if value is None or is_number(value)},
            trial.metric,
            trial.frame,
            trial.seconds,
            "running" if trial.status == "waiting" else trial.status,
            random_seed,
            confirmed[trial.trial].metric if trial.trial in confirmed else None,
            intervals.get(trial.trial),
            trial.cause,
        )
        for trial in state.trials
    ]


def confidence_interval(runs: RunPaths, trial: int, metric: str) -> tuple[float, float] | None:
    """Return the 95 % interval (Student's t) of a metric over the Sessions of a confirmed trial, or None if the trial has a single Session.

    If the metric is a return and the range of possible returns is known, the interval is clipped to this range.
    """
    files = (runs.session_metrics(session, trial) for session in runs.table_numbers("train", trial))
    bounds = None
    if metric in ("current_return", "final_return", "total_reward_ma"):
        with suppress(UserError):  # the saved spec cannot be read
            bounds = return_range(Run(runs, trial).settings())
    mean = estimate_mean([(read_json(file) or {}).get(metric) for file in files], bounds)
    return None if mean is None or mean.low is None or mean.high is None else (mean.low, mean.high)


def _best_spec(summary: SearchSummary, best: TrialRecord, folder: str) -> bytes:
    """Return the content of the spec file of the best trial, with a comment about the search.

    The command `train` accepts this spec file.
    """
    space = summary.space
    body = dump_spec(space.trial_spec(best.values))[space.spec.name]
    body.get("meta", {}).pop("run", None)
    confirmed = ""
    if best.confirmed is not None:
        interval = best.confirmed_interval
        between = f" [{format_number(interval[0])}, {format_number(interval[1])}]" if interval else ""
        confirmed = f", with new seeds {format_number(best.confirmed)}{between}"
    to_json = partial(json.dumps, ensure_ascii=False, default=str)
    keys = (f"{key.text} {key.distribution} {to_json(list(key.args))}" for key in space.named.values())
    used = (f"{key} = {to_json(value)}" for key, value in best.values.items())
    comment = [
        f"Trial {best.trial}, the best by {summary.metric} ({format_number(best.metric)}{confirmed}) of a search in {folder}.",
        f"The search had {summary.status_counts_text(for_figure=False)}.",
        f"Searched: {', '.join(keys)}.",
        f"Used: {', '.join(used)}.",
    ]
    return json_bytes({"_comment": comment, space.spec.name: body})


def _csv(space: SearchSpace, records: Sequence[TrialRecord]) -> bytes:
    """Return the content of the CSV file of a search, which has a row for each trial, from the best to the worst trial.

    If a searched key is not active in a trial, the cell of this key is empty.
    """
    keys = dict.fromkeys([*space.keys, *(key for one in records for key in one.values)])
    after = ("frame", "seconds", "random_seed", "confirmed", "confirmed_low", "confirmed_high", "cause")
    metrics = dict.fromkeys(name for one in records for name in one.metrics if name not in after)
    rows = []
    for one in records:
        low, high = one.confirmed_interval or (None, None)
        last = (one.frame, round(one.seconds, 3), one.random_seed, one.confirmed, low, high, last_line(one.cause))
        values = [_cell(one.values[key]) if key in one.values else None for key in keys]
        rows.append([one.trial, one.status, one.metric, *values, *(one.metrics.get(name) for name in metrics), *last])
    return csv_bytes(["trial", "status", "metric", *keys, *metrics, *after], rows)


def _cell(value: Any) -> Any:
    """Return the value of a searched key for a cell of a CSV file. Numbers and texts are returned unchanged, and other values as JSON."""
    return value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


# ---- figures


def search_figures(summary: SearchSummary) -> dict[str, figures.AnyFigure]:
    """Return a dict of the figures of a search, whose keys are "", "parallel_coordinates" and "importance".

    The key of a figure is the last part of its file name.
    """
    return {"": grid_figure(summary), "parallel_coordinates": parallel_figure(summary), "importance": importance_figure(summary)}


def grid_figure(summary: SearchSummary) -> ScatterGrid:
    """Return a grid of scatter plots of each metric over each searched key.

    If a search has more than 12 keys, only the 12 most important keys are shown or, if the importance is unknown, the first 12 keys. A
    metric that no trial has is omitted.
    """
    values = {summary.metric: summary.known_metric_T}
    for name in get_args(SearchMetric):
        values.setdefault(name, np.array([one.metrics.get(name) for one in summary.trials_with_metric], dtype=float))
    keys = summary.space.keys
    if len(keys) > _MAX_COLUMNS:
        ordered = [*summary.importance.shares] if summary.importance else [*keys]
        keys = tuple(key for key in keys if key in ordered[:_MAX_COLUMNS])
    columns, x_KT = _stack_axes([_axis(summary, key, jitter=True) for key in keys], summary)
    rows, y_RT = _stack_axes([_numeric_axis(name, value_T) for name, value_T in values.items() if np.isfinite(value_T).any()], summary)
    left_out = len(summary.space.keys) - len(keys)
    chosen = f"the {len(keys)} most important" if summary.importance else f"the first {len(keys)}"
    subtitle = summary.status_counts_text() + (f"; {chosen} of {len(summary.space.keys)} keys" if left_out else "")
    return ScatterGrid(f"{summary.title}, search: metrics over the searched keys", subtitle, summary.trials(), columns, rows, x_KT, y_RT)


def parallel_figure(summary: SearchSummary) -> ParallelCoordinates:
    """Return the parallel coordinates of a search: a line for each trial over the axes of all searched keys and the axis of the metric."""
    axes = [_axis(summary, key) for key in summary.space.keys]
    scales, position_AT = _stack_axes([*axes, _numeric_axis(summary.metric, summary.known_metric_T)], summary)
    unused_AT = np.isnan(position_AT)
    scales = [replace(scale, unused=bool(unused_T.any())) for scale, unused_T in zip(scales, unused_AT, strict=True)]
    position_AT[unused_AT] = figures.UNUSED
    return ParallelCoordinates(
        f"{summary.title}, search: trials across the searched keys", summary.status_counts_text(), summary.trials(), scales, position_AT
    )


def _stack_axes(axes: Sequence[tuple[Scale, np.ndarray]], summary: SearchSummary) -> tuple[list[Scale], np.ndarray]:
    """Return the axes as a list, and the positions of all T trials on these axes as an array, float [axes, T]."""
    positions = np.array([position_T for _, position_T in axes])
    return [scale for scale, _ in axes], positions.reshape(len(axes), len(summary.trials_with_metric))


def importance_figure(summary: SearchSummary) -> Figure:
    """Return a figure with a horizontal bar for each searched key, which shows the importance of the key."""
    names, importance = short_names(summary.space.keys), summary.importance
    title = f"{summary.title}, search: importance of the searched keys for {summary.metric}"
    if importance is None:
        needs = f"importance needs {MIN_TRIALS} trials that ended with different results, and the package optuna"
        why = f"{summary.status_counts_text()}; {needs}"
        nothing = "nothing to show: too few trials, or all with the same result"
        return Figure(title, (Panel("", x_label=METHOD, nothing=nothing),), why)
    ordered = [*reversed(importance.shares.items())]
    bars = [Bar(0.0, max(share, 0.0), row, 0.6, f"{key}: {share:.0%}") for row, (key, share) in enumerate(ordered)]
    rows = {names[key]: float(row) for row, (key, _) in enumerate(ordered)}
    panel = Panel(
        "",
        x_label="share of the importance of all keys (PED-ANOVA)",
        bars=(Bars("how far the key's values among the best trials differ from its values among all trials", figures.MEAN_COLOUR, bars),),
        rows=rows,
        y_limits=(-0.7, len(rows) - 0.3),
        x_max=max(1.0, *(bar.end for bar in bars)),
        height=max(60, 30 * len(rows)),
    )
    subtitle = f"PED-ANOVA: the best {importance.best} of {importance.trials} trials are compared with all of them"
    return Figure(title, (panel,), subtitle, left=min(0.05 + 0.0085 * max(map(len, rows)), 0.4))


def return_figures(summary: SearchSummary, paths: RunPaths, mode: DataMode) -> dict[str, Figure]:
    """Return a dict of the figures of the mean returns of all trials over frames: name → figure. The ten best trials are highlighted."""
    curves = {one.trial: _trial_curves(paths, one.trial, mode) for one in summary.ranked if one.status != "failed"}
    best = {one.trial: (rank, one) for rank, one in enumerate(summary.trials_with_metric[: figures.BEST])}
    drawn_figures = {}
    for name, label in _RETURN_LABELS.items():
        drawn = {trial: by_name[name] for trial, by_name in curves.items() if name in by_name and len(by_name[name].frame)}
        others = [trial for trial in drawn if trial not in best]
        group = f"{len(others)} other trial{'s' * (len(others) != 1)}"
        lines = [Line(f"trial {trial}", drawn[trial], figures.GREY, faint=True, group=group) for trial in others]
        for trial, (rank, one) in reversed(best.items()):
            if trial in drawn:
                lines.append(Line(f"{rank + 1}. trial {trial}: {format_number(one.metric)}", drawn[trial], _BEST_COLOURS[rank]))
        what = "moving average of the mean return" if name.endswith("_ma") else "mean return"
        highlighted = f"; the best {len(best)} by {summary.metric} in colour" if best else ""
        panel = Panel(label, lines, best_last=True, faint_name="other trials")
        drawn_figures[name] = Figure(f"{summary.title}, search: {what} of each trial", (panel,), summary.status_counts_text() + highlighted)
    return drawn_figures


def _trial_curves(paths: RunPaths, trial: int, mode: DataMode) -> dict[str, Curve]:
    """Return a dict: name of each figure of returns → curve of the trial, averaged over its Sessions.

    A figure is omitted if the tables of the trial have no values for its curve.
    """
    tables = [return_curves(table) for table in Run(paths, trial).tables_per_training(mode).values()]
    result = {}
    for name in _RETURN_LABELS:
        curves = [one[name] for one in tables if len(one[name].frame)]
        if curves:
            mean = align_or_interpolate(curves).mean()
            chosen = evenly_spaced_indices(len(mean.frame), _POINTS)
            result[name] = Curve(mean.frame[chosen], mean.value[chosen])
    return result


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a dict: path of each spec key → short name of the key.

    The short name is the last part of the path. If the last part is not unique or is general, such as "name", the short name has more parts
    of the path.
    """
    parts = {key: key.split(".") for key in keys}

    def name(key: str) -> str:
        words = parts[key]
        least = 2 if len(words) > 1 and (words[-2].endswith("_spec") or words[-1] in ("name", "type")) else 1
        for count in range(least, len(words) + 1):
            if sum(other[-count:] == words[-count:] for other in parts.values()) == 1:
                return ".".join(words[-count:])
        return key

    return {key: name(key) for key in keys}


def _value_text(value: Any) -> str:
    """Return the value of a searched key as a short text for a label."""
    if isinstance(value, float):
        return format_number(value) if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _axis(summary: SearchSummary, key: str, *, jitter: bool = False) -> tuple[Scale, np.ndarray]:
    """Return the axis of a searched key, and the position on this axis of each trial in `summary.trials_with_metric`, float64 [T].

    If the key is not active in a trial, the position of the trial is NaN.

    Args: jitter: see `_categorical_axis`.
    """
    label = short_names(summary.space.keys)[key]
    search_keys = [one for one in summary.space.named.values() if one.text == key]
    if any(one.has_options for one in search_keys) or any(not _is_number(one.values.get(key, 0)) for one in summary.trials_with_metric):
        return _categorical_axis(label, key, search_keys, summary.trials_with_metric, jitter=jitter)
    value_T = np.array([one.values.get(key, np.nan) for one in summary.trials_with_metric], dtype=float)
    ends = [] if any(one.is_normal for one in search_keys) else [end for one in search_keys for end in one.bounds]
    return _numeric_axis(label, value_T, log=all(one.is_log for one in search_keys), ends=ends)


def _categorical_axis(
    label: str, key: str, search_keys: Sequence[SearchKey], trials: Sequence[TrialRecord], *, jitter: bool
) -> tuple[Scale, np.ndarray]:
    """Return an axis with one place for each different value of a searched key, and the position of each trial on this axis, float64 [T].

    If the key is not active in a trial, the position of the trial is NaN.

    Args:
        key: path of the searched key.
        search_keys: the search keys with the path `key`. There are several if the key is nested in several options of another key.
        jitter: whether trials with the same value are spread around the place of the value, so that their markers do not overlap.
    """
    options = [_comparable_text(value) for one in search_keys if one.has_options for value in one.args]
    options += [_comparable_text(one.values[key]) for one in trials if key in one.values]
    texts = {value: json.loads(value) for value in dict.fromkeys(options)}
    step = 1 / max(len(texts) - 1, 1)
    edge = 0.15 if jitter else 0.0
    places = {value: edge + (1 - 2 * edge) * index * step if len(texts) > 1 else 0.5 for index, value in enumerate(texts)}
    spread = 0.25 * min(step, 0.5) * jitter
    position_T = np.array(
        [
            places[_comparable_text(one.values[key])] + spread * (2 * (one.trial * 0.618034 % 1) - 1) if key in one.values else np.nan
            for one in trials
        ]
    )
    every = -(-len(texts) // _MAX_OPTIONS)
    ticks = [(places[value], text) for value, text in zip(texts, _option_texts(list(texts.values())), strict=True)][::every]
    return Scale(label, ticks), position_T


def _comparable_text(value: object) -> str:
    """Return a value as JSON text. Equal values have equal texts, so that values that are not hashable can be compared by their texts."""
    return json.dumps(value, sort_keys=True, default=str)


def _option_texts(values: Sequence[Any]) -> list[str]:
    """Return the values of a categorical key as texts.

    A dict is represented by the value of its key `name` or, without this key, of its key `type`, unless two of the texts would be equal.
    """
    names = [str(value.get("name", value.get("type"))) if isinstance(value, dict) else _value_text(value) for value in values]
    return names if len(set(names)) == len(names) else [_value_text(value) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numeric_axis(label: str, value_T: np.ndarray, *, log: bool = False, ends: Sequence[float] = ()) -> tuple[Scale, np.ndarray]:
    """Return a linear or logarithmic axis, and the positions of the values of the T trials on this axis, float64 [T].

    The axis reaches from the smallest to the largest number in `value_T` and `ends`. If `ends` is not empty, both ends of the axis have a
    label.
    """
    finite = [*value_T[np.isfinite(value_T)].tolist(), *ends]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0))
    to = math.log if log else float
    begin, length = to(low), to(high) - to(low)
    inner = [((to(value) - begin) / length, _value_text(value)) for value in (_log_ticks(low, high) if log else _ticks(low, high))]
    outer = [(0.0, _value_text(float(low))), (1.0, _value_text(float(high)))] if ends else []
    ticks = [*outer, *(tick for tick in inner if not ends or 0.18 < tick[0] < 0.8)]
    position_T = (np.log(value_T) if log else value_T).astype(float)
    return Scale(label, sorted(ticks)), (position_T - begin) / length


def _ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers between `low` and `high`, for the ticks of an axis."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten between `low` and `high`. If there are fewer than two, return `low` and `high` too."""
    powers = [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]
    return powers if len(powers) > 1 else [low, *powers, high]
