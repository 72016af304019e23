"""Write the HTML report of a run folder, a search folder or a study folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.find import TrainingChoice, find_run, find_training, newest_folder
from slm_lab.experiment.files.lock import in_use
from slm_lab.experiment.files.paths import RunPaths, StudyPaths, StudyRunFolder, study_in, study_start_info
from slm_lab.experiment.files.search_state import SearchState
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.decision import decisions
from slm_lab.experiment.report.figure import AnyFigure
from slm_lab.experiment.report.metrics import aggregate_known
from slm_lab.experiment.report.progress import format_duration, format_number
from slm_lab.experiment.report.render_html import plotly_json
from slm_lab.experiment.report.report_data import VERSION
from slm_lab.experiment.report.report_origin import origin
from slm_lab.experiment.report.report_page import REFRESH, write_report, write_trial_report
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.search_report import (
    SearchSummary,
    return_figures,
    search_figures,
    search_records,
    short_names,
    summarize_search,
)
from slm_lab.experiment.report.seed_result import seed_results
from slm_lab.experiment.report.setting import Setting
from slm_lab.experiment.report.study_report import (
    EntryResult,
    decision_lines,
    definitions,
    explanations,
    origins,
    result_sentences,
    study_commands,
    study_figures,
    study_rows,
    study_settings,
    study_table,
    with_usable_metric,
)
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.lib.files import display_path
from slm_lab.lib.text import error_line, last_line
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.models.study import PlannedRun, StudyPlan, StudySpec

_MAX_TRIALS = 300
"""Maximum number of trials in the ranking of a search. If a search has more trials, the ranking shows only the best trials."""


def write_folder_report(where: str, data_dir: Path, choice: TrainingChoice) -> Path:
    """Write the HTML report of a run, search or study, and return the path of the report.

    Args:
        where: the folder of the run, search or study, with or without `data_dir`, or "latest" for the newest of them.
        choice: a trial of the search, or a run of the study. If `choice` names a trial or a run, the report of this trial or run is written
            instead of the report of the search or study.

    Raises UserError if the folder does not exist or the report cannot be written, and SpecError if the spec in the folder cannot be read.
    """
    where = str(newest_folder(data_dir)) if where == "latest" else where
    for folder in (Path(where), data_dir / where):
        if (study := study_in(folder)) is not None:
            return _write_study_or_run(study, data_dir, choice)
    paths = find_run(where, None, data_dir)
    if choice._replace(trial=None) != TrainingChoice():
        return write_trial_report(find_training(where, None, data_dir, choice).paths)  # find_training checks `choice`
    if paths.search_state.is_file() and choice.trial is None:
        state = SearchState.load(paths.search_state)
        return write_search_report(paths, load_spec(paths.spec, paths.spec_name, builds_env=False), state)
    return _write_trial(paths, choice.trial)


def _write_trial(paths: RunPaths, trial: int | None) -> Path:
    known = paths.trials() or [0]
    if trial is not None and trial not in known:
        raise UserError(f"trial {trial}: {paths.root} has rows of trial {', '.join(map(str, known))}")
    chosen = known[0] if trial is None else trial
    ended = paths.has_several_trials and paths.trial_metrics(chosen).is_file()
    return write_trial_report(paths, chosen, ended=ended)


def _write_study_or_run(paths: StudyPaths, data_dir: Path, choice: TrainingChoice) -> Path:
    if choice != TrainingChoice():
        return write_trial_report(find_training(paths.root, None, data_dir, choice).paths)
    about = study_start_info(paths)
    study = _saved_study(paths, about)
    results = [ResultRun(file) for file in sorted(paths.results.glob("*.json"))]
    decide = about.get("max_seeds") is not None
    return write_study_report(_with_added_seeds(study, results) if decide else study, paths, results, decide=decide)


def _saved_study(paths: StudyPaths, about: Mapping[str, Any]) -> StudyPlan:
    """Return the study as it was saved in the study folder, since the original spec file may have changed.

    Raises UserError if the saved study cannot be read.
    """
    try:
        body = json.loads(paths.study.read_text(encoding="utf-8"))[paths.name]
        scores = {(entry, env): score for entry, env, score in about["scores"]}
        runs, spec = tuple(PlannedRun(*run) for run in about["runs"]), StudySpec.model_validate(body["study"])
        return StudyPlan(paths.name, about["source"], spec, body, runs, scores, tuple(about["set"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error_line(error)
        again = f"slm-lab {about.get('source', 'FILE')} {paths.name} study@{paths.root} writes it again"
        raise UserError(f"{paths.study} cannot be read as a study: {why}; {again}") from None


def _with_added_seeds(study: StudyPlan, results: Sequence[ResultRun]) -> StudyPlan:
    """Return the study plan with the additional runs that the option --until-decided has started."""
    planned = {(run.entry, run.env) for run in study.runs}
    ended = sorted(PlannedRun(one.name, one.env, one.random_seed) for one in results if (one.name, one.env) in planned)
    return replace(study, runs=tuple(dict.fromkeys([*study.runs, *ended])))


def _common_data(kind: str, title: str, subtitle: str, root: Path, *, running: bool, complete: bool) -> dict[str, Any]:
    """Return the entries that the data of a search report and of a study report have in common (see report_data.py)."""
    return {
        "version": VERSION,
        "kind": kind,
        "title": title,
        "subtitle": subtitle,
        "folder": root.name,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "status": "running" if running else "done" if complete else "stopped",
        **({"refresh": REFRESH} if running else {}),
    }


def _figure(figure: AnyFigure, href: str | None = None) -> dict[str, Any]:
    title = figure.title.partition(": ")[2] or figure.title
    return {"title": title[0].upper() + title[1:], "note": figure.subtitle, "plot": plotly_json(figure), "href": href}


def _command_entries(commands: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"label": label, "command": command} for label, command in commands.items()]


# ---- search


def write_search_report(paths: RunPaths, spec: Spec, state: SearchState, *, ended: bool = False) -> Path:
    """Write the HTML report of a search, which may still be running, and return the path of the report.

    Raises UserError if the report cannot be written.

    Args: ended: whether the search has ended, although a process still locks its folder.
    """
    summary = summarize_search(spec, search_records(state, paths, spec.meta.random_seed), state.metric)
    complete = state.exhausted or sum(trial.has_ended for trial in state.trials) >= max(spec.meta.max_trial, len(state.trials))
    data = search_data(summary, paths, spec, running=not ended and in_use(paths.lock), complete=complete)
    return write_report(paths.root, paths.report, data)


def search_data(summary: SearchSummary, paths: RunPaths, spec: Spec, *, running: bool, complete: bool = True) -> dict[str, Any]:
    """Return the data of the HTML report of a search (see report_data.py)."""
    figures = [*return_figures(summary, paths, "eval" if spec.meta.rigorous_eval else "train").items()]
    over_keys = search_figures(summary)
    ordered: dict[str, AnyFigure] = dict(figures[:1]) | {name: over_keys[name] for name in ("parallel_coordinates", "importance", "")}
    ordered |= dict(figures[1:])
    run = Run(paths, paths.trials()[0] if paths.trials() else 0)
    return {
        **_common_data(
            "search",
            f"{summary.space.spec.name}, search",
            f"{spec.agent.algorithm.name} in {run.env}",
            paths.root,
            running=running,
            complete=complete,
        ),
        "facts": _search_facts(summary),
        "tables_of": [_ranking(summary, paths)],
        "figures": [_figure(figure) for figure in ordered.values() if not figure_is_empty(figure)],
        "settings": {"spec": json.dumps(run.spec | {"meta": {**run.spec.get("meta", {}), "run": None}}, indent=2, default=str)},
        "origin": origin(run),
        "commands": _command_entries(_search_commands(summary, paths)),
        "files": [
            {"label": path.name, "href": path.name}
            for path in (paths.best_spec, paths.experiment_df, paths.importance, paths.search_state)
            if path.is_file()
        ],
    }


def figure_is_empty(figure: AnyFigure) -> bool:
    """Return whether a figure has neither points nor bars."""
    panels = getattr(figure, "panels", None)
    return all(panel.is_empty for panel in panels) if panels is not None else bool(getattr(figure, "is_empty", False))


def _search_facts(summary: SearchSummary) -> list[dict[str, Any]]:
    best, records = summary.best, summary.ranked
    facts = [{"label": "trials", "value": str(len(records)), "note": summary.status_counts_text(for_figure=False).partition(": ")[2]}]
    if best is not None:
        value = best.confirmed if best.confirmed is not None else best.metric
        interval = best.confirmed_interval
        with_seeds = (
            f"with new seeds{'' if interval is None else f', {format_number(interval[0])} to {format_number(interval[1])}'}; in the search"
        )
        note = f"trial {best.trial}" + (f", {with_seeds} {format_number(best.metric)}" if best.confirmed is not None else "")
        facts.append({"label": f"best {summary.metric}", "value": format_number(value), "note": note})
    frames, seconds = sum(one.frame for one in records), sum(one.seconds for one in records)
    return [*facts, {"label": "frames", "value": f"{frames:,}", "note": f"{format_duration(seconds)} of training, all trials together"}]


def _ranking(summary: SearchSummary, paths: RunPaths) -> dict[str, Any]:
    names = short_names(summary.space.keys)
    confirmed = any(one.confirmed is not None for one in summary.ranked)
    failed = any(one.cause for one in summary.ranked)
    columns = ["", "trial", "status", summary.metric, *(["with new seeds"] if confirmed else []), *names.values(), "frames", "time"]
    rows = []
    for rank, one in enumerate(summary.ranked[:_MAX_TRIALS], 1):
        page = f"{paths.stem}_t{one.trial}_report.html"
        trial = {"text": f"trial {one.trial}", "href": page if (paths.root / page).is_file() else None}
        again = [] if not confirmed else ["" if one.confirmed is None else format_number(one.confirmed)]
        values = [_value_text(one.values[key]) if key in one.values else "" for key in names]
        cause = [last_line(one.cause)] if failed else []
        rows.append(
            [
                str(rank),
                trial,
                one.status,
                format_number(one.metric),
                *again,
                *values,
                f"{one.frame:,}",
                format_duration(one.seconds),
                *cause,
            ]
        )
    left = len(summary.ranked) - len(rows)
    note = "Best first: by the result with new seeds where there is one, else by the metric."
    return {
        "title": "Ranking",
        "columns": [*columns, *(["cause"] if failed else [])],
        "rows": rows,
        "note": note + (f" {left} more trials are in the table {paths.experiment_df.name}." if left else ""),
    }


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _search_commands(summary: SearchSummary, paths: RunPaths) -> dict[str, str]:
    folder = shlex.quote(str(display_path(paths.root.absolute())))
    found = {"continue": f"slm-lab search@{folder}"}
    if summary.best is not None:
        spec = shlex.quote(str(display_path(paths.best_spec.absolute())))
        found |= {"play the best": f"slm-lab enjoy@{folder}", "confirm the best": f"slm-lab search@{folder} --confirm 3"}
        found |= {"train the best": f"slm-lab {spec} {shlex.quote(summary.space.spec.name)}", "export": f"slm-lab export {folder}"}
    return found | {"this page": f"slm-lab report {folder}"}


# ---- study


def write_study_report(
    study: StudyPlan,
    paths: StudyPaths,
    results: Sequence[ResultRun],
    failed: Sequence[tuple[str, str]] = (),
    *,
    ended: bool = False,
    decide: bool = False,
) -> Path:
    """Write the HTML report of a study, which may still be running, and return the path of the report.

    Raises UserError if the report cannot be written.

    Args:
        failed: (study entry, env) of each run that failed.
        ended: whether the study has ended, although a process still locks its folder.
        decide: whether to report for which entries the difference from the reference entry is decided (see report/decision.py).
    """
    data = study_data(study, paths, results, failed, running=not ended and in_use(paths.lock), decide=decide)
    return write_report(paths.root, paths.report, data)


def study_data(
    study: StudyPlan,
    paths: StudyPaths,
    results: Sequence[ResultRun],
    failed: Sequence[tuple[str, str]],
    *,
    running: bool,
    decide: bool = False,
) -> dict[str, Any]:
    """Return the data of the HTML report of a study (see report_data.py)."""
    settings = study_settings(study, results)
    study, reason = with_usable_metric(study, settings)
    rows = study_rows(study, settings, failed)
    decided = decisions(study, settings) if decide else []
    sentences = result_sentences(study, [row._replace(difference=None) for row in rows] if decided else rows)
    folder = shlex.quote(str(display_path(paths.root)))
    commands = study_commands(study, paths)
    complete = len(results) + len(failed) >= len(study.runs)
    return {
        **_common_data(
            "study",
            study.name,
            f"study of {len(study.entries)} entries in {', '.join(study.envs)}",
            paths.root,
            running=running,
            complete=complete,
        ),
        "facts": _study_facts(study, results, failed),
        "paragraphs": [*([reason] if reason else []), *decision_lines(study, decided), *sentences]
        if settings
        else ["No run has ended yet."],
        "tables_of": [_comparison(study, rows), _runs(study, paths, results), _definitions(study), _origins(results)],
        "figures": _study_figures(study, paths, settings),
        "settings": {"spec": json.dumps({study.name: study.raw}, indent=2, ensure_ascii=False, default=str)},
        "commands": _command_entries(commands | {"export": f"slm-lab export {folder}", "this page": f"slm-lab report {folder}"}),
        "files": [{"label": path.name, "href": path.name} for path in map(paths.table, _TABLES) if path.is_file()],
    }


_TABLES = ("md", "csv", "json")


def _study_facts(study: StudyPlan, results: Sequence[ResultRun], failed: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    known = sum(one.content.get("seconds") or 0.0 for one in results)
    left = len(study.runs) - len(results) - len(failed)
    parts = [f"{len(failed)} failed" if failed else "", f"{left} not run yet" if left > 0 else ""]
    facts = [{"label": "runs", "value": f"{len(results)} of {len(study.runs)}", "note": ", ".join(filter(None, parts))}]
    seeds = sorted({run.random_seed for run in study.runs})
    facts.append({"label": "seeds", "value": str(len(seeds)), "note": f"random_seed {', '.join(map(str, seeds[:8]))}"})
    return [*facts, {"label": "time", "value": format_duration(known), "note": "all runs together"}]


def _comparison(study: StudyPlan, rows: Sequence[EntryResult]) -> dict[str, Any]:
    head, *lines = study_table(study, rows)
    return {"title": "Comparison", "columns": head, "rows": lines, "note": " ".join(explanations(study, head))}


def _definitions(study: StudyPlan) -> dict[str, Any]:
    return {
        "title": "Definitions",
        "columns": ["term", "meaning"],
        "texts": True,
        "rows": [list(one) for one in definitions(study).items()],
    }


def _origins(results: Sequence[ResultRun]) -> dict[str, Any]:
    return {"title": "Hardware and versions", "columns": ["trained on"], "texts": True, "rows": [[one] for one in origins(results)]}


def _runs(study: StudyPlan, paths: StudyPaths, results: Sequence[ResultRun]) -> dict[str, Any]:
    """Return the table of those runs of a study that have ended, with a link to the report of each run."""
    rows = []
    for one in sorted(results, key=lambda one: (one.env, one.content["entry"], one.random_seed)):
        value = aggregate_known(seed.final_return(study.metric) for seed in seed_results(one))
        page = _run_report_path(paths, one)
        seconds = one.content.get("seconds")
        name = {"text": str(one.content["entry"]), "href": page}
        rows.append(
            [name, one.env, str(one.random_seed), one.status, format_number(value), "-" if seconds is None else format_duration(seconds)]
        )
    return {"title": "Runs", "columns": ["entry", "env", "random_seed", "status", "score", "time"], "rows": rows}


def _run_report_path(paths: StudyPaths, result: ResultRun) -> str | None:
    folder = StudyRunFolder(paths.runs / result.paths.root.stem)
    starts = folder.run_folders() if folder.root.is_dir() else []
    page = starts[-1].report if starts else None
    return page.relative_to(paths.root).as_posix() if page is not None and page.is_file() else None


def _study_figures(study: StudyPlan, paths: StudyPaths, settings: Mapping[tuple[str, str], Setting]) -> list[dict[str, Any]]:
    figures = study_figures(study, settings)
    with_file = {name: paths.graph(name, "html") for name in figures}
    hrefs = {name: file.relative_to(paths.root).as_posix() if file.is_file() else None for name, file in with_file.items()}
    return [{**_figure(figure, hrefs[name]), "title": figure.title} for name, figure in figures.items()]
