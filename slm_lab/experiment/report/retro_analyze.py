"""The command retro_analyze: metrics, graphs and results of a run, rebuilt from its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from slm_lab.experiment.files.lock import unfinished
from slm_lab.experiment.files.paths import RunPaths, not_a_run, run_paths_in
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.analyze import EPISODES, analyze_trial
from slm_lab.experiment.report.progress import number
from slm_lab.experiment.report.run import Run, last_frame, read_json
from slm_lab.experiment.report.slm_lab_run import LAST_EPISODES, import_run, is_slm_lab_run
from slm_lab.lib.files import not_writable
from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.models.sampler import SamplerSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import show_path

_META = ("max_session", "distributed", "rigorous_eval", "max_seconds", "sampler")
"""Keys of meta on which the analysis depends."""


def retro_analyze(folder: Path) -> str:
    """Rebuild the metrics and graphs of the run in `folder`; return its results and files as text, a part for each trial.

    The tables are read only, and each output is replaced atomically, so that the run may still be training. A run of SLM Lab is imported
    into a run folder inside its own first.

    A Session failed if its metrics file says so and its table has not grown since; else it is done if its last row is at the frames that
    the spec asks for, and stopped otherwise. The random baseline is the shipped or cached one, that of the existing metrics, or is
    measured, as at the end of training.

    Raises UserError, which names the run.
    """
    try:
        if is_slm_lab_run(folder):
            paths, remarks = import_run(folder)
            return "\n".join([_analyze(paths, episodes=LAST_EPISODES), *(f"note: {remark}" for remark in remarks)])
        paths_or_none = run_paths_in(folder)
        if paths_or_none is None:
            raise UserError(not_a_run(folder))
        return _analyze(paths_or_none)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be analyzed: {error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        ) from None


def _analyze(paths: RunPaths, episodes: str = EPISODES) -> str:
    trials = paths.trials()
    runs = [Run(paths, t) for t in trials or [0]]
    spec = _analysis_spec(runs[0])
    _check_writable(paths)
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
    graphs = [paths.trial_graph(what, ext, t) for what in ("mean_returns", "mean_returns_ma") for ext in ("html", "png")]
    files = [str(file) for file in (*graphs, paths.trial_metrics(t)) if file.is_file()]
    left = unfinished(paths.root, paths.lock)
    notes = [] if left is None else [f"note: {left}"]
    return "\n".join([_headline(run, spec, metrics, several), *filter(None, [_summary(metrics)]), *files, *notes])


def _failures(run: Run, spec: Spec) -> dict[int, str]:
    """Return the Sessions that failed, by their metrics files: index → cause. One that was resumed since has another last row."""
    causes: dict[int, str] = {}
    tables = run.tables("train")
    sessions = {index // spec.policies for index in tables} | set(range(spec.meta.max_session))
    for s in sorted(sessions):
        metrics = read_json(run.paths.session_metrics(s * spec.policies, run.trial)) or {}
        table = tables.get(s * spec.policies)
        if "failed" in metrics and metrics.get("frame") == (None if table is None else last_frame(table)):
            causes[s] = str(metrics["failed"])
    return causes


def _analysis_spec(run: Run) -> Spec:
    """Return a Spec with the env of a saved spec, and the keys of meta on which the analysis depends.

    The agent is a stand-in, since the analysis does not depend on it: the saved spec may be of another version, or name classes that
    cannot be imported here. Raises UserError.
    """
    meta = {key: value for key, value in _known(run.spec.get("meta"), MetaSpec).items() if key in _META}
    if "sampler" in meta:
        meta["sampler"] = _known(meta["sampler"], SamplerSpec)
    body = {"name": run.name, "agent": {"algorithm": {"name": "Random"}}, "env": run.spec.get("env"), "meta": meta}
    try:
        return Spec.model_validate(body)
    except ValidationError as error:
        problems = "; ".join(f"{show_path(item['loc'])}: {item['msg'].lower()}" for item in error.errors())
        raise UserError(f"{run.paths.spec} cannot be analyzed: {problems}") from None


def _known(section: Any, model: type[BaseModel]) -> dict[str, Any]:
    """Return the keys of a section that are in its model and not null."""
    items = section.items() if isinstance(section, Mapping) else ()
    return {key: value for key, value in items if key in model.model_fields and value is not None}


def _check_writable(paths: RunPaths) -> None:
    folders = (paths.root, paths.info_dir, paths.graph_dir)
    for folder in folders:
        if folder.exists() and (reason := not_writable(folder)) is not None:
            raise UserError(f"cannot write to {folder}: {reason}")


def _headline(run: Run, spec: Spec, metrics: Mapping[str, Any], several: bool) -> str:
    """Return the final return, and how the Sessions ended."""
    sessions, final = metrics["sessions"], metrics["final_return"]
    mean = f" (mean of {sessions} sessions)" if sessions > 1 and not run.distributed else ""
    result = "no episode ended" if final is None else f"final return {number(final)}{mean}"
    result = (
        f"{result} after {metrics['frame'] or 0:,} of {spec.trial_frames if run.distributed else spec.session_frames:,} frames; "
        if sessions
        else ""
    )
    statuses = Counter(Run(run.paths, run.trial).sessions.values())
    missing = spec.meta.max_session - sum(statuses.values())
    parts = [f"{count} {status}" for status, count in statuses.items()] + ([f"{missing} without rows"] if missing > 0 else [])
    ended = metrics["status"] if len(parts) == 1 and missing <= 0 else ", ".join(parts)
    trial = f", trial {run.trial}" if several else ""
    return f"{run.paths.root}{trial}: {result}{spec.meta.max_session} session{'s' * (spec.meta.max_session > 1)}: {ended}"


def _summary(metrics: Mapping[str, Any]) -> str:
    """Return the other metrics in one line; those that are not defined are left out."""
    aside = ("final_return", "frame", "sessions", "failed")
    shown = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name not in aside}
    return "  ".join(f"{name} {number(value)}" for name, value in shown.items())
