"""Implementation of the command `retro_analyze`: rebuild the metrics, graphs and report of a run from its files.

A run folder of SLM Lab v4 or v5 is first imported into a run folder in the format of this program. The metrics file
{name}_t0_trial_metrics_scalar.json and the graphs have the same names in SLM Lab and in this program. A run folder of SLM Lab has these
other files:

    {name}_spec.json (of a search), {name}_t0_spec.json, {name}_t0_s0_spec.json: one flat object {name, agent, env, meta}
    info/{name}_t0_s0_session_df_train.csv and …_eval.csv, written by pandas (in v5 with frames as floats)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from slm_lab.experiment.files.lock import unfinished_notice
from slm_lab.experiment.files.paths import DataMode, RunPaths, not_a_run_message, retro_analyze_paths, run_paths_in
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.analyze import EPISODES, analyze_trial, return_text
from slm_lab.experiment.report.progress import format_number, is_number
from slm_lab.experiment.report.report_page import try_write_report, write_trial_report
from slm_lab.experiment.report.run import Run, last_frame, parse_numbers, read_columns, read_json
from slm_lab.experiment.report.writer import csv_bytes, json_bytes
from slm_lab.experiment.training.observers.base import COLUMNS
from slm_lab.lib.files import replace_file, unwritable_reason
from slm_lab.spec.compat.migrate import migrate_spec
from slm_lab.spec.load.build import drop_nulls
from slm_lab.spec.models.meta import MetaSpec, SamplerSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report, show_path, value_at

_META = ("max_session", "distributed", "rigorous_eval", "eval_episodes", "max_seconds", "sampler", "self_play")
"""Keys of the spec section meta on which the analysis of a run depends."""


LAST_EPISODES = "last episode of each env"
"""Description of the episodes whose mean return SLM Lab writes as total_reward."""
_REQUIRED = ("frame", "total_reward")
_MISSING = {
    "opt_step": "training_efficiency",
    "loss": "the graph of the loss",
    "entropy": "the graph of the entropy",
    "explore_var": "the graph of explore_var",
    "wall_t": "wall-clock time",
}
"""Column that a table of SLM Lab may lack → result that cannot be computed without this column."""
_COUNTS = ("frame", "epi", "t", "opt_step")
_ROWS = 100
"""Number of table rows over which total_reward_ma is averaged."""
_OTHER_SIMULATORS = re.compile(r"Roboschool|.*BulletEnv")
"""Names of old envs that have been replaced by envs with another simulator and other rewards."""


def retro_analyze(folder: Path) -> str:
    """Rebuild the metrics and graphs of the run in `folder`, and return a text with the results and files of each trial.

    The run may still be training: retro_analyze only reads the tables, and replaces each output file atomically. A run of SLM Lab is first
    imported into a run folder inside the folder of the SLM Lab run.

    A Session has the status "failed" if its metrics file has this status and its table has not grown since the failure. Any other Session
    has the status "done" if its last row has reached the number of frames in the spec or meta.max_seconds, else "stopped". The random
    baseline is the shipped or cached baseline or, if the env has no such baseline, the baseline in the existing metrics file. The random
    baseline is measured if there is no shipped, cached or existing baseline.

    Raises UserError if the run cannot be analyzed. The message of the UserError names the run folder.
    """
    try:
        if (raw := _slm_lab_spec(folder)) is not None:
            paths, remarks = _import_run(folder, raw)
            return "\n".join([_analyze(paths, LAST_EPISODES), *(f"note: {remark}" for remark in remarks)])
        if (found := run_paths_in(folder)) is None:
            raise UserError(not_a_run_message(folder))
        return _analyze(found)
    except OSError as error:
        file = f": {error.filename}" if error.filename else ""
        raise UserError(f"{folder}: cannot be analyzed: {error.strerror or error}{file}") from None


def _analyze(paths: RunPaths, episodes: str = EPISODES) -> str:
    runs = [Run(paths, t) for t in paths.trials() or [0]]
    spec = _analysis_spec(runs[0])
    for folder in (paths.root, paths.info_dir, paths.graph_dir):
        if folder.exists() and (reason := unwritable_reason(folder)) is not None:
            raise UserError(f"cannot write to {folder}: {reason}")
    paths.make_dirs()
    return "\n\n".join(_analyze_trial(run, spec, len(runs) > 1, episodes) for run in runs)


def _analyze_trial(run: Run, spec: Spec, several: bool, episodes: str) -> str:
    paths, t = run.paths, run.trial
    failed = _failures(run, spec)
    if not failed and not any(len(table["frame"]) for table in run.tables("train").values()):
        raise UserError(f"'{paths.root}' has no rows yet: no session table in {paths.info_dir} has a complete row")
    before = run.metrics.get("random_baseline")
    recorded = before if isinstance(before, int | float) else None
    metrics = analyze_trial(spec, paths, t, failed=failed, recorded_baseline=recorded, episodes=episodes, complete=True)
    if read_json(paths.trial_metrics(t)) != metrics:
        raise UserError(f"cannot write the metrics of {paths.root}: {paths.trial_metrics(t).name} was not replaced")
    page = try_write_report(partial(write_trial_report, paths, t))
    graphs = [paths.trial_graph(what, ext, t) for what in ("mean_returns", "mean_returns_ma") for ext in ("html", "png")]
    files = [str(file) for file in (page, *graphs, paths.trial_metrics(t)) if file is not None and file.is_file()]
    left = unfinished_notice(paths.root, paths.lock)
    aside = ("current_return", "current_return_se", "frame", "sessions", "failed")
    others = {name: value for name, value in metrics.items() if is_number(value) and name not in aside}
    summary = "  ".join(f"{name} {format_number(value)}" for name, value in others.items())
    return "\n".join(filter(None, [_result_line(run, spec, metrics, several, episodes), summary, *files, f"note: {left}" if left else ""]))


def _failures(run: Run, spec: Spec) -> dict[int, str]:
    """Return a dict: index of each failed Session → cause of the failure in the metrics file of the Session.

    A Session that was resumed after the failure is omitted. A Session was resumed if the last frame in its table is not the frame in its
    metrics file.
    """
    causes, tables = dict[int, str](), run.tables("train")
    for s in sorted({index // spec.policies for index in tables} | set(range(spec.meta.max_session))):
        metrics, table = read_json(run.paths.session_metrics(s * spec.policies, run.trial)) or {}, tables.get(s * spec.policies)
        if "failed" in metrics and metrics.get("frame") == (table and last_frame(table)):
            causes[s] = str(metrics["failed"])
    return causes


def _analysis_spec(run: Run) -> Spec:
    """Return a Spec for the analysis of a run, with the env and the keys `_META` of the saved spec, and a placeholder as agent.

    The saved agent is not used, since the analysis does not depend on the agent, and since the saved agent may be invalid. For example, the
    agent may have been saved by another version of the program, or may name classes that cannot be imported. Raises UserError if the
    section env or meta of the saved spec is invalid.
    """
    meta = {key: value for key, value in _known_keys(run.spec.get("meta"), MetaSpec).items() if key in _META}
    if "sampler" in meta:
        meta["sampler"] = _known_keys(meta["sampler"], SamplerSpec)
    body = {"name": run.name, "agent": {"algorithm": {"name": "Random"}}, "env": run.spec.get("env"), "meta": meta}
    try:
        return Spec.model_validate(body)
    except ValidationError as error:
        problems = "; ".join(f"{show_path(item['loc'])}: {item['msg'].lower()}" for item in error.errors())
        raise UserError(f"{run.paths.spec} cannot be analyzed: {problems}") from None


def _known_keys(section: Any, model: type[BaseModel]) -> dict[str, Any]:
    """Return the entries of a spec section whose keys are fields of `model` and whose values are not null."""
    items = section.items() if isinstance(section, Mapping) else ()
    return {key: value for key, value in items if key in model.model_fields and value is not None}


def _result_line(run: Run, spec: Spec, metrics: Mapping[str, Any], several: bool, episodes: str) -> str:
    """Return a line for the terminal with the folder of the run, the current return, and the number of Sessions of each status."""
    frames = spec.trial_frames if run.shares_one_net else spec.session_frames
    result = f"{return_text(metrics, spec, episodes)} after {metrics['frame'] or 0:,} of {frames:,} frames; " if metrics["sessions"] else ""
    statuses = Counter(Run(run.paths, run.trial).sessions.values())
    missing = spec.meta.max_session - sum(statuses.values())
    parts = [f"{count} {status}" for status, count in statuses.items()] + ([f"{missing} without rows"] if missing > 0 else [])
    ended = metrics["status"] if len(parts) == 1 and missing <= 0 else ", ".join(parts)
    trial = f", trial {run.trial}" if several else ""
    return f"{run.paths.root}{trial}: {result}{spec.meta.max_session} session{'s' * (spec.meta.max_session > 1)}: {ended}"


# ---- runs of SLM Lab


def _import_run(folder: Path, raw: Mapping[str, Any]) -> tuple[RunPaths, list[str]]:
    """Import a run of SLM Lab: write its tables and its spec to a run folder inside `folder`.

    Returns the RunPaths of the new run folder, and remarks about differences between this run and a run of this program. Raises UserError
    if no table can be used, and OSError if a file cannot be read or written.

    Args:
        folder: folder of the SLM Lab run.
        raw: content of the spec file of the SLM Lab run.
    """
    name, old_env = str(raw["name"]), str(value_at(raw, ("env", 0, "name")) or value_at(raw, ("env", "name")))
    body = _converted_spec(raw, folder)
    if _OTHER_SIMULATORS.match(old_env):
        body["env"]["name"] = old_env
    tables = _read_tables(folder, name)
    if body["meta"].get("rigorous_eval"):
        tables |= {(t, s, "eval"): table for (t, s, mode), table in _read_tables(folder, name, "eval").items()}
    if not any(_row_count(table) for table in tables.values()):
        raise UserError(f"'{folder}' has no rows: no {name}_t*_s*_session_df_train.csv in {folder / 'info'} has a row")
    for (t, s, _), table in tables.items():
        if lacking := [column for column in _REQUIRED if column not in table]:
            raise UserError(f"'{folder}' cannot be analyzed: its table of trial {t}, session {s} has no column {' and '.join(lacking)}")
    paths = retro_analyze_paths(folder, name)
    paths.root.mkdir(exist_ok=True)
    paths.make_dirs()
    for path in {paths.spec, *(paths.trial_spec(t) for t, _, _ in tables)}:
        replace_file(path, json_bytes({name: body}))
    for (t, s, mode), table in tables.items():
        replace_file(paths.session_df(s, mode, t), _csv(table))
    return paths, _remarks(folder, body, tables, old_env)


def _slm_lab_spec(folder: Path) -> dict[str, Any] | None:
    """Return the content of the spec file of a run of SLM Lab, or None if `folder` has no spec file of SLM Lab.

    If `folder` has several spec files, the one with the shortest name is read: the spec file of a search is preferred to the spec files of
    its trials.
    """
    for path in sorted(folder.glob("*_spec.json"), key=lambda path: (len(path.name), path.name)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and isinstance(content.get("name"), str) and {"agent", "env", "meta"} <= content.keys():
            return content
    return None


def _converted_spec(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the spec of a run of SLM Lab in the format of this program, with the keys agent, env and meta.

    Keys that SLM Lab adds to the section meta at run time are omitted. Raises UserError if the spec cannot be converted.
    """
    body = {key: raw[key] for key in ("agent", "env", "meta")}
    report = Report()
    migrate_spec(body, report)
    if report.problems:
        raise UserError(f"'{folder}' cannot be analyzed: {'; '.join(map(str, report.problems))}")
    if not all(isinstance(section, dict) for section in body.values()):
        raise UserError(f"'{folder}' cannot be analyzed: agent, env and meta of its spec must be objects")
    body["meta"] = {key: value for key, value in body["meta"].items() if key in MetaSpec.model_fields}
    drop_nulls(body)
    return body


_Tables = dict[tuple[int, int, DataMode], dict[str, list[str]]]
"""(trial, session, mode) → table of SLM Lab with the cells as texts: column → cells of the column."""


def _read_tables(folder: Path, name: str, mode: DataMode = "train") -> _Tables:
    pattern = re.compile(re.escape(name) + rf"_t(\d+)_s(\d+)_session_df_{mode}\.csv")
    found = {path: match for path in sorted((folder / "info").glob("*.csv")) if (match := pattern.fullmatch(path.name))}
    return {(int(match[1]), int(match[2]), mode): read_columns(path) for path, match in found.items()}


def _row_count(table: Mapping[str, list[str]]) -> int:
    return len(next(iter(table.values()), []))


def _csv(table: Mapping[str, list[str]]) -> bytes:
    """Convert a table of SLM Lab to the content of a CSV file of this program.

    The columns that this program writes come first, in their usual order, followed by all other columns. If the column total_reward_ma is
    missing, the column is computed.
    """
    columns = dict(table)
    for name in _COUNTS:
        if name in columns:
            columns[name] = [f"{value:.0f}" if np.isfinite(value) else "" for value in parse_numbers(columns[name])]
    if "total_reward_ma" not in columns:
        columns["total_reward_ma"] = _moving_average(parse_numbers(columns["total_reward"]))
    names = [name for name in dict.fromkeys((*COLUMNS, *columns)) if name in columns]
    return csv_bytes(names, zip(*(columns[name] for name in names), strict=True))


def _moving_average(values: np.ndarray) -> list[str]:
    windows = (values[max(0, end - _ROWS) : end] for end in range(1, len(values) + 1))
    means = (float(np.nanmean(window)) if np.isfinite(window).any() else np.nan for window in windows)
    return [f"{mean:.8g}" if np.isfinite(mean) else "" for mean in means]


def _remarks(folder: Path, body: Mapping[str, Any], tables: _Tables, old_env: str) -> list[str]:
    env = body["env"]["name"]
    remarks = [f"{folder} is a run of SLM Lab; its total_reward is the mean return of the {LAST_EPISODES}"]
    if _OTHER_SIMULATORS.match(old_env):
        remarks.append(f"not computed: strength and the metrics computed from strength, which need the random baseline of {old_env}")
    elif env != old_env:
        remarks.append(f"{old_env} is now {env}, whose random baseline is used")
    found = {name for table in tables.values() for name, cells in table.items() if np.isfinite(parse_numbers(cells)).any()}
    missing = [column for column in _MISSING if column not in found]
    lacking = [f"{_MISSING[column]} (no {column} in its tables)" for column in missing]
    if body["meta"].get("distributed"):
        lacking.append("graphs over global frames (its tables have the frames of each session)")
    return remarks + ([f"not computed: {', '.join(lacking)}"] if lacking else [])
