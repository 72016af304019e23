"""Compute the content of the comparison page: curves and statistics of each setting, and a table with the specs of all runs.

A setting is a group of runs of one spec with different seeds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from slm_lab.experiment.files.search_state import SearchState, best_first
from slm_lab.experiment.report.compare import group_runs
from slm_lab.experiment.report.compare_report import AXES
from slm_lab.experiment.report.metrics import INTERVAL, Curve, evenly_spaced_indices
from slm_lab.experiment.report.pairwise import compare_pairs
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.seed_result import seed_results
from slm_lab.experiment.report.setting import Setting, comparable_metric, summarize
from slm_lab.experiment.view.details import Content, files_version, relative_path
from slm_lab.experiment.view.entries import run_paths
from slm_lab.experiment.view.folders import DataFolder, FoundFolder, NotServed, begun_study_runs

BOOTSTRAP = (
    "The interquartile mean is the mean of the middle half of the seeds, with the 95 % percentile interval of the bootstrap, which draws "
    "the seeds of each env separately."
)
_POINTS = 400
"""Maximum number of points of a curve."""
_SEEDS = ("random_seed", "max_session")


def comparison_content(words: Sequence[str], by: str, data: DataFolder) -> Content:
    """Return the version of the comparison page, and a function that computes its content (see `details.Content`).

    Args:
        words: texts that name the compared runs. "TRIAL:PATH" names a trial, and ":PATH" names a run, the best trial of a search, or all
            runs of a study.
        by: table column on the horizontal axis of the curves.
    """
    if by not in AXES:
        raise NotServed(f"invalid column '{by}'; expected one of {', '.join(AXES)}", 400)
    chosen = [one for word in dict.fromkeys(words) for one in _resolve_runs(word, data)]
    version = f"{zlib.crc32(repr([files_version(found) for found, _ in chosen]).encode()):08x}"
    return version, lambda: _comparison(chosen, by, data)


def _resolve_runs(word: str, data: DataFolder) -> list[tuple[FoundFolder, int]]:
    """Return (folder of the run, number of the trial) for each run that `word` names (see `comparison_content`).

    Raises NotServed if `word` is invalid or its folder does not exist.
    """
    trial, _, path = word.partition(":")
    if trial and not (trial.isascii() and trial.isdecimal() and len(trial) < 9):
        raise NotServed(f"invalid run '{word}'; expected TRIAL:PATH or :PATH", 400)
    found = data.find(path)
    if found.kind == "study":
        return [(data.find(relative_path(paths.root, data)), 0) for _, paths in begun_study_runs(found.study)]
    if trial or found.kind == "run":
        return [(found, int(trial or 0))]
    state = SearchState.load(found.paths.search_state)
    best = best_first(state.confirmations)
    if best:
        return [(data.find(relative_path(found.paths.confirmation, data)), best[0].trial)]
    return [(found, one.trial) for one in best_first(state.trials)[:1]]


def _comparison(chosen: Sequence[tuple[FoundFolder, int]], by: str, data: DataFolder) -> dict[str, Any]:
    runs, labels, notes = list[Run](), list[dict[str, Any]](), list[str]()
    for found, trial in chosen:
        run = Run(run_paths(found), trial)
        if not seed_results(run):
            notes.append(f"{relative_path(found.folder, data)} has no rows yet.")
            continue
        runs.append(run)
        of_search = found.kind == "search" or run.paths.has_several_trials
        of_trial = f", trial {trial}" if of_search else ""
        labels.append({"path": relative_path(found.folder, data), "trial": trial if of_search else None})
        labels[-1]["label"] = found.folder.name + of_trial
    settings = group_runs(runs)
    metric, reason = comparable_metric("current_return", settings)
    notes += [f"{reason}."] if reason else []
    pairs = compare_pairs(settings, metric) if len(settings) > 1 else None
    return {
        "settings": [_setting(one, metric, by) for one in settings],
        "pairs": [_fields(one) for one in pairs.pairs] if pairs else [],
        "overall": [_fields(one) for one in pairs.overall] if pairs else [],
        "explained": f"The table shows {metric} at the end of training. Brackets contain the {INTERVAL} of the mean. {BOOTSTRAP}",
        "notes": notes,
        "runs": labels,
        "spec": _spec_rows(runs),
    }


def _fields(row: Any) -> dict[str, Any]:
    return dict(row._asdict())


def _setting(setting: Setting, metric: str, by: str) -> dict[str, Any]:
    """Return the entry of the comparison page about one setting: the curves and the statistics of its seeds."""
    summary, seeds = summarize(setting, None, metric), setting.seeds
    aligned = setting.aligned_curves(metric, by)
    chosen = evenly_spaced_indices(len(aligned.frame), _POINTS)
    mean, band = aligned.mean().value[chosen], [edge[chosen] for edge in aligned.band()] if len(seeds) > 1 else None
    return {
        "name": setting.name,
        "env": setting.env,
        "count": setting.count_text(),
        "seeds_count": summary.seeds,
        "status": summary.status,
        "final_return": summary.final_return,
        "median": summary.final_return_median,
        "interquartile_mean": summary.interquartile_mean,
        "x": _round_values(aligned.frame[chosen]),
        "mean": _round_values(mean),
        "low": None if band is None else _round_values(band[0]),
        "high": None if band is None else _round_values(band[1]),
        "seeds": [_curve(seed.curve(metric, by)) for seed in setting.all_seeds if seed.status != "failed"],
    }


def _curve(curve: Curve) -> dict[str, list[float]]:
    chosen = evenly_spaced_indices(len(curve.frame), _POINTS)
    return {"x": _round_values(curve.frame[chosen]), "y": _round_values(curve.value[chosen])}


def _round_values(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _spec_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each spec key except keys about provenance.

    A row has the value of the key in each run, and says whether the values differ.
    """
    bodies = [run.settings() | {f"meta.{key}": run.spec.get("meta", {}).get(key) for key in _SEEDS} for run in runs]
    keys = sorted({key for body in bodies for key in body})
    rows = []
    for key in keys:
        values = [None if body.get(key) is None else _text(body[key]) for body in bodies]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
