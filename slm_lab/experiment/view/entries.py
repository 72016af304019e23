"""Create the entries of the list of runs. An entry summarises a run, search or study, and is computed from only a few files.

An entry is a dict that can be written as JSON, with these keys:

- path, kind, name, env, algorithm, mode, status, text (a problem, or the number of trials or runs), frame and max_frame
- progress (0 to 1), eta (remaining time, s) and seconds (training time so far, s)
- value and error: for a run, the current return and its standard error, or the Elo rating if the key measure is "Elo". For a search, value
  is the metric of the best trial. For a study, value is the score of the best study entry.
- best: number of the best trial of a search, or label of the best study entry of a study
- began: time of the first start, in seconds since 1970, and, for a search or study, ended: time of the end, in seconds since 1970
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from slm_lab.experiment.files.lock import in_use
from slm_lab.experiment.files.paths import RunPaths, StudyPaths, parse_folder_time
from slm_lab.experiment.files.search_state import SearchState, best_first
from slm_lab.experiment.report.metrics import mean_current_return, mean_rating
from slm_lab.experiment.report.run import Run, last_row, parse_numbers, read_json
from slm_lab.experiment.view.folders import FoundFolder, begun_study_runs
from slm_lab.lib.episodes import MAX_AGE

Entry = dict[str, Any]
_WHOLE = 65_536
"""Maximum size in bytes of a table file that is read completely for a sparkline."""
_POINTS = 40
"""Number of points of a sparkline."""
_ACTIVE_SECONDS = 120.0
"""Time in seconds. A table that has not grown for this time is ignored in the estimate of the remaining training time."""


def make_entry(found: FoundFolder, trial: int = 0) -> Entry:
    """Return the entry of a run, a search, a study, or a trial of a search for the list of runs.

    If the folder cannot be read, entry["status"] is "unreadable" and entry["text"] is the reason.
    """
    entry: Entry = {"kind": found.kind, "name": found.stem, "env": "", "algorithm": "", "mode": "", "text": "", "value": None}
    try:
        if found.kind == "run":
            return entry | _run_entry(Run(found.paths, trial) if trial else _ListedRun(found.paths))
        return entry | (_search_entry if found.kind == "search" else _study_entry)(found)
    except Exception as error:  # a damaged folder may cause any error; the list must show the other folders
        return entry | {"status": "unreadable", "text": str(error) or type(error).__name__}


# ---- runs


class _ListedRun(Run):
    """A Run that reads its spec without searching its folder for trials.

    The search for trials would take too long for a list that may have a thousand runs.
    """

    @cached_property
    def _named_spec(self) -> tuple[str, dict[str, Any]]:
        try:
            ((name, body),) = from_json(_read_file(f"{self.paths.root}/{self.paths.stem}_spec.json")).items()
            return str(name), dict(body)
        except (OSError, ValueError, TypeError, AttributeError):
            return Run(self.paths)._named_spec  # raises an error that says what is wrong


def _read_file(path: str) -> bytes:
    """Return the content of a file, in half the time that Path.read_bytes takes. Raises OSError if the file cannot be read."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _run_entry(run: Run) -> Entry:
    entry = basic_entry(run)
    return entry | _progress_entry(run, entry) | _rating_entry(run)


def _rating_entry(run: Run) -> Entry:
    """Return the keys of a run's entry that show the Elo rating of self-play, or {} if the run has no self-play.

    The Elo rating replaces the return, since returns in self-play depend on the opponents.
    """
    if run.spec.get("meta", {}).get("self_play") is None:
        return {}
    rows = [_last_row(path) for path in table_paths(run)]
    found = mean_rating([(row["elo"], row.get("elo_se")) for row in rows if "elo" in row])
    return {} if found is None else {"value": found[0], "error": found[1], "measure": "Elo"}


def _progress_entry(run: Run, entry: Entry) -> Entry:
    """Return the keys of a run's entry that show the frame, the progress, the times and the return of the run."""
    if run.status == "running" or not run.metrics:
        return _state_from_tables(run, entry["sessions"], entry["max_frame"])
    metrics = run.metrics
    frame = metrics.get("frame") or 0
    return {
        "frame": frame,
        "progress": _share(frame, entry["max_frame"]),
        "value": metrics.get("current_return"),
        "error": metrics.get("current_return_se"),
        "seconds": _last_row(_first_table(run)).get("wall_t"),
    }


def basic_entry(run: Run) -> Entry:
    """Return the part of a run's entry that is derived from its spec, its status and the time of its first start."""
    env, meta, agent = (run.spec.get(part, {}) for part in ("env", "meta", "agent"))
    return {
        "name": run.name,
        "env": run.env,
        "algorithm": str(agent.get("name") or agent.get("algorithm", {}).get("name", "")),  # a search saves the user's original spec
        "mode": run.mode,
        "status": run.status,
        "sessions": int(meta.get("max_session", 1)),
        "max_frame": int(env.get("max_frame") or 0),
        "began": start_time(run),
    }


def start_time(run: Run) -> float | None:
    """Return the time of the first start of a run, in seconds since 1970, or None if the time is unknown."""
    try:
        return datetime.fromisoformat(run.starts[0]["began"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return modification_time(run.paths.spec)


def _state_from_tables(run: Run, sessions: int, max_frame: int) -> Entry:
    """Return the keys of a run's entry that are computed from the last rows of its tables: frame, progress, times and return."""
    meta = run.spec.get("meta", {})
    shared = bool(meta.get("distributed"))
    target = max_frame / sessions if shared else max_frame
    indices = range(sessions * run.policies)
    rows = {index: _last_row(run.paths.session_df(index, "train", run.trial)) for index in indices}
    frames = [min(row.get("frame", 0.0), target) for row in rows.values()]
    done = sum(frames) / len(frames) if frames else 0.0
    entry: Entry = {"frame": round(sum(frames) if shared else done), "progress": _share(done, target)}
    evaluations = {index: _last_row(run.paths.session_df(index, "eval", run.trial)) for index in rows}
    recent = meta.get("rigorous_eval") or all(_is_recent(evaluations[index], row) for index, row in rows.items())
    returns = {index: _current_return(rows[index], evaluations[index] if recent else {}) for index in rows}
    current = mean_current_return(returns, run.policies)
    entry |= {"value": current["current_return"], "error": current["current_return_se"]}
    if run.status == "running":
        return entry | {"eta": _seconds_left(rows.values(), target, meta.get("max_seconds") or math.inf)}
    return entry | {"seconds": max((row["wall_t"] for row in rows.values() if "wall_t" in row), default=None)}


def _seconds_left(rows: Collection[Mapping[str, float]], target: float, limit: float) -> float | None:
    """Return the estimated time in seconds until the training ends, or None if the time is unknown.

    Training ends when every table has reached `target` frames or `limit` seconds of training. The estimate uses the current speed of
    those tables that still grow.
    """
    left = [max(target - row.get("frame", 0.0), 0.0) for row in rows]
    speed = sum(row.get("fps", 0.0) for row, rest in zip(rows, left, strict=True) if rest and row.get("active"))
    until_limit = [limit - row["wall_t"] for row in rows if "wall_t" in row]
    seconds = min(sum(left) / speed if speed > 0 else math.inf, *until_limit, math.inf)
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_recent(evaluation: Mapping[str, float], row: Mapping[str, float]) -> bool:
    """Return whether the last evaluation is recent enough to count as the current return (see `metrics.is_recent`).

    Args: evaluation: last row of the evaluation table. row: last row of the training table.
    """
    return evaluation.get("frame", -1.0) >= (1.0 - MAX_AGE) * row.get("frame", 0.0)


def _current_return(row: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
    """Return the current return and its standard error, from the evaluation row or, if this row has no return, from the training row."""
    if "total_reward" in evaluation:
        return {"current_return": evaluation["total_reward"], "current_return_se": evaluation.get("current_return_se")}
    value = row.get("current_return", None if "current_epi" in row else row.get("total_reward"))
    return {"current_return": value, "current_return_se": row.get("current_return_se")}


def _first_table(run: Run) -> str:
    """Return the path of the training table of session 0.

    The path is built without `RunPaths.session_df`, since this method would read the spec again.
    """
    policy = "_p0" if run.policies > 1 else ""
    return f"{run.paths.info_dir}/{run.paths.stem}_t{run.trial}_s0{policy}_session_df_train.csv"


def _last_row(path: Path | str) -> dict[str, float]:
    """Return the last row of a table as a dict: column → number. The dict is empty if the table has no row.

    The additional key "active" says whether the table has grown recently.
    """
    row = last_row(path)
    if row:
        row["active"] = float(time.time() - (modification_time(path) or 0.0) < _ACTIVE_SECONDS)
    return row


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole else 0.0


def modification_time(path: Path | str) -> float | None:
    """Return the time of the last change of a file or folder, in seconds since 1970, or None if it does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


# ---- searches and studies


def _search_entry(found: FoundFolder) -> Entry:
    run, paths = Run(found.paths), found.paths
    state = SearchState.load(paths.search_state)
    running = in_use(paths.lock)
    ended = sum(trial.has_ended for trial in state.trials)
    failed = sum(trial.status == "failed" for trial in state.trials)
    planned = max(int(run.spec.get("meta", {}).get("max_trial") or 0), len(state.trials))
    planned = len(state.trials) if state.exhausted else planned
    best = next(iter(best_first(state.confirmations) or best_first(state.trials)), None)
    return basic_entry(run) | {
        "status": "running" if running else "failed" if failed and failed == ended else "done" if ended >= planned else "stopped",
        "text": f"{ended} of {planned} trials" + (f", {failed} failed" if failed else ""),
        "trials": len(state.trials),
        "frame": sum(trial.frame for trial in state.trials),
        "progress": _share(ended, planned),
        "value": None if best is None else best.metric,
        "metric": state.metric,
        "best": None if best is None else best.trial,
        "ended": None if running else modification_time(paths.search_state),
    }


def _study_entry(found: FoundFolder) -> Entry:
    study = found.study
    name, spec = _study_spec(study)
    planned = sum(len(entry.get("random_seed") or spec["random_seed"]) for entry in spec["entries"]) * max(len(spec.get("envs") or []), 1)
    results, running = _names(study.results, ".json"), in_use(study.lock)
    begun = len(_names(study.runs))
    planned = max(planned, begun)  # including the seeds that --until-decided has added
    envs = [str(env.get("label") or env["name"]).rpartition(":")[2] for env in spec.get("envs") or []]
    return {
        "name": name,
        "env": ", ".join(envs),
        "algorithm": ", ".join(dict.fromkeys(str(entry.get("label") or entry["spec"].rpartition(":")[2]) for entry in spec["entries"])),
        "status": "running" if running else "done" if len(results) >= planned else "stopped",
        "text": f"{len(results)} of {planned} runs",
        "runs": begun,
        "progress": _share(len(results), planned),
        "began": None if (start := parse_folder_time(found.folder.name)) is None else start.timestamp(),
        "ended": None if running else max(filter(None, map(modification_time, (study.results, study.runs))), default=None),
        **_best_entry(study),
    }


def _best_entry(study: StudyPaths) -> Entry:
    """Return the keys "best" (label) and "value" (score) for the study entry with the highest score.

    Returns {} if the study has no table of scores yet, or if the study has several envs.
    """
    rows = (read_json(study.table("json")) or {}).get("rows") or []
    scored = [row for row in rows if row.get("score") is not None]
    if not scored or len({row.get("env") for row in rows}) > 1:
        return {}
    best = max(scored, key=lambda row: float(row["score"]))
    return {"value": best["score"], "best": best["entry"]}


def _study_spec(study: StudyPaths) -> tuple[str, dict[str, Any]]:
    """Return the name of a study, and the content of its section "study", read from the study file in the study folder."""
    content = json.loads(study.study.read_text(encoding="utf-8"))
    return next((name, body["study"]) for name, body in content.items() if isinstance(body, dict) and "study" in body)


def _names(folder: Path, suffix: str = "") -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(suffix) and not name.startswith(".")]
    except OSError:
        return []


# ---- sparklines


def sparkline(found: FoundFolder) -> list[list[float]]:
    """Return the points of the sparkline (a small curve in the list) of a run, search or study.

    The points of a run are [fraction of max_frame, current return or Elo rating] at a few frames, averaged over the tables of the run. The
    points of a search are [fraction of the trials, metric], one for each trial. A study has no points.
    """
    if found.kind == "study":
        return []
    if found.kind == "search":
        trials = SearchState.load(found.paths.search_state).trials
        return [[(index + 1) / len(trials), one.metric] for index, one in enumerate(trials) if one.metric is not None]
    return run_sparkline_points(_ListedRun(found.paths))


def run_sparkline_points(run: Run) -> list[list[float]]:
    """Return the points of the sparkline of a run or trial (see `sparkline`)."""
    target = int(run.spec.get("env", {}).get("max_frame") or 0)
    if run.spec.get("meta", {}).get("distributed"):
        target //= max(int(run.spec["meta"].get("max_session", 1)), 1)
    curves = [curve for path in table_paths(run) if len((curve := _read_thinned_curve(path))[0])]
    return _mean_points(curves, target)


def table_paths(run: Run) -> Iterable[Path]:
    """Return the paths of the training tables that a run has according to its spec."""
    indices = range(int(run.spec.get("meta", {}).get("max_session", 1)) * run.policies)
    return (run.paths.session_df(index, "train", run.trial) for index in indices)


def _mean_points(curves: Sequence[tuple[np.ndarray, np.ndarray]], target: float) -> list[list[float]]:
    """Return the points of the sparkline of a run: the mean of curves (frames, values) over the fraction of `target` frames."""
    if not curves:
        return []
    first, last = max(frame[0] for frame, _ in curves), max(frame[-1] for frame, _ in curves)
    frame_F = np.linspace(min(first, last), last, _POINTS) if last > first else np.array([last])
    value_F = np.mean([np.interp(frame_F, frame, value) for frame, value in curves], axis=0)
    whole = max(target, last) or 1.0
    return [[round(float(frame / whole), 4), float(f"{value:.5g}")] for frame, value in zip(frame_F, value_F, strict=True)]


def _read_thinned_curve(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames and the current returns (or Elo ratings) in some rows of a table. Only the rows that `_lines` selects are read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            names = file.readline(_WHOLE).decode(errors="replace").strip().split(",")
            lines = _lines(file, file.tell(), size)
    except OSError:
        return np.empty(0), np.empty(0)
    column = next((name for name in ("elo", "current_return") if name in names), "total_reward")
    if "frame" not in names or column not in names:
        return np.empty(0), np.empty(0)
    at = names.index("frame"), names.index(column)
    rows = [cells for line in lines if len(cells := line.split(b",")) == len(names)]
    frame, value = (parse_numbers([cells[index] for cells in rows]) for index in at)
    known = np.isfinite(frame) & np.isfinite(value)
    order = np.argsort(frame[known], kind="stable")
    return frame[known][order], value[known][order]


def _lines(file: BinaryIO, begin: int, size: int) -> list[bytes]:
    """Return complete lines of a file at evenly spaced positions. The last returned line is the last complete line of the file.

    A file of at most _WHOLE bytes gives at most 2 · _POINTS lines, and a larger file at most _POINTS lines.
    """
    if size <= _WHOLE:
        lines = _read(file, size, begin).split(b"\n")[:-1]
        return [lines[index] for index in sorted({*np.linspace(0, len(lines) - 1, 2 * _POINTS).round().astype(int)})] if lines else []
    places = np.linspace(begin, size - 1024, _POINTS).astype(int)
    found = (_read(file, 1024, int(place)).split(b"\n") for place in places[:-1])
    last = _read(file, 1024, int(places[-1])).split(b"\n")[:-1]
    return [*(part[1] for part in found if len(part) > 2), *last[-1:]]


def _read(file: BinaryIO, size: int, begin: int) -> bytes:
    file.seek(begin)
    return file.read(size)


def study_runs(found: FoundFolder, root: Path) -> list[Entry]:
    """Return the entries of all runs of a study that have begun. In each entry, the path is relative to `root`."""
    runs = []
    for name, paths in begun_study_runs(found.study):
        runs.append(
            make_entry(FoundFolder(paths.root, "run", paths.spec_name)) | {"path": paths.root.relative_to(root).as_posix(), "label": name}
        )
    return runs


def run_paths(found: FoundFolder) -> RunPaths:
    """Return the RunPaths of a run or search, with the name that its saved spec contains."""
    return RunPaths(found.folder, Run(found.paths).name)
