"""The files of a search: the table of its trials, figures, importance of its keys, and the best trial's spec."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report.importance import Importance, key_importance
from slm_lab.experiment.report.progress import number
from slm_lab.experiment.report.search_figures import SearchView, return_figures, search_figures
from slm_lab.experiment.report.trial_record import TrialRecord, ranked
from slm_lab.experiment.report.writer import Writer
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.load.search_space import SearchSpace
from slm_lab.spec.models.search import SearchKey
from slm_lab.spec.models.spec import Spec


@dataclass(frozen=True)
class SearchSummary:
    """What a search found."""

    best: TrialRecord | None
    """The best trial, by --confirm if there are confirmed ones; None if no trial has a result."""
    ranked: tuple[TrialRecord, ...]
    """All trials, best first."""
    metric: str
    """Name of the metric by which they are ranked."""
    importance: Importance | None
    """None for too few trials, see key_importance."""
    files: tuple[Path, ...]
    """The files that were written, without the pages' script."""


def write_search(paths: RunPaths, spec: Spec, records: Sequence[TrialRecord], metric: str) -> SearchSummary:
    """Write the files of a search, finished or not, from its trials and their tables, and return what it found.

    Trials that run, failed or were stopped, or none at all, are accepted. A file or figure that fails is a notice.

    Args: metric: name of TrialRecord.metric.
    """
    space, writer = SearchSpace(spec), Writer(paths.root)
    order = tuple(ranked(records))
    best = next((one for one in order if one.status != "failed" and one.known_metric is not None), None)
    importance: Importance | None = None
    with writer.drawing("the importance of the searched keys"):
        importance = key_importance(space, order)
    view = SearchView(f"{spec.name} ({spec.env.name.rpartition(':')[2]})", space, order, metric, importance)
    writer.write("table not written", (paths.experiment_df, partial(_csv, space, order)))
    writer.write("file not written", (paths.importance, partial(_importance_json, importance, metric)))
    if best is not None:
        writer.write("file not written", (paths.best_spec, partial(_best_spec, view, best, paths.root.name)))
    with writer.drawing("the graphs of the search"):
        writer.draw(search_figures(view), paths.experiment_graph)
    with writer.drawing("the returns of the trials"):
        writer.draw(return_figures(view, paths, "eval" if spec.meta.rigorous_eval else "train"), paths.multi_trial_graph)
    writer.close()
    return SearchSummary(best, order, metric, importance, tuple(file for file in _files(paths) if file.is_file()))


def describe_search(space: SearchSpace) -> str:
    """Return the searched keys with their distributions: "agent.algorithm.gamma uniform [0.9, 0.999]"."""
    return ", ".join(f"{key.text} {key.distribution} {_short(key)}" for key in space.named.values())


def _short(key: SearchKey) -> str:
    return json.dumps(list(key.args), ensure_ascii=False, default=str)


def _best_spec(view: SearchView, best: TrialRecord, folder: str) -> bytes:
    """Return the spec of the best trial, with a comment that says what was searched; `train` runs it as it is."""
    space = view.space
    body = dump_spec(space.apply(best.values))[space.spec.name]
    body.get("meta", {}).pop("run", None)
    confirmed = ""
    if best.confirmed is not None:
        interval = best.confirmed_interval
        between = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
        confirmed = f", with new seeds {number(best.confirmed)}{between}"
    comment = [
        f"Trial {best.trial}, the best by {view.metric} ({number(best.metric)}{confirmed}) of a search in {folder}.",
        f"The search had {view.count(shown=False)}.",
        f"Searched: {describe_search(space)}.",
        "Used: " + ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in best.values.items()) + ".",
    ]
    return (json.dumps({"_comment": comment, space.spec.name: body}, indent=2, ensure_ascii=False) + "\n").encode()


def _importance_json(importance: Importance | None, metric: str) -> bytes:
    content = {"metric": metric, **(asdict(importance) if importance else {"shares": None})}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _csv(space: SearchSpace, records: Sequence[TrialRecord]) -> bytes:
    """Return the table: one row per trial, best first; a key that is not active in a trial is empty."""
    keys = dict.fromkeys([*space.keys, *(key for one in records for key in one.values)])
    after = ("frame", "seconds", "random_seed", "confirmed", "confirmed_low", "confirmed_high", "cause")
    metrics = dict.fromkeys(name for one in records for name in one.metrics if name not in after)
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["trial", "status", "metric", *keys, *metrics, *after])
    for one in records:
        low, high = one.confirmed_interval or (None, None)
        cause = one.cause.strip().rpartition("\n")[2]
        last = (one.frame, round(one.seconds, 3), one.random_seed, one.confirmed, low, high, cause)
        values = [_cell(one.values[key]) if key in one.values else None for key in keys]
        table.writerow([one.trial, one.status, one.metric, *values, *(one.metrics.get(name) for name in metrics), *last])
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return a number or text as it is, other values as JSON."""
    return value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _files(paths: RunPaths) -> list[Path]:
    graphs = [paths.experiment_graph(what, ext) for what in ("", "parallel_coordinates", "importance") for ext in ("html", "png")]
    returns = [paths.multi_trial_graph(what, ext) for what in ("mean_returns", "mean_returns_ma") for ext in ("html", "png")]
    return [paths.experiment_df, paths.best_spec, paths.importance, *graphs, *returns]
