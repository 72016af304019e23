"""Compute the content of the web pages of a run, a search and a study.

Each of the functions `run_content`, `search_content` and `study_content` returns a version and a function. The returned version is
a text that changes when the files of the run, search or study change. The returned function computes the content of the page as a dict for
JSON.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.lock import in_use
from slm_lab.experiment.files.paths import RunPaths, StudyRunFolder
from slm_lab.experiment.files.search_state import SearchState
from slm_lab.experiment.report.report_data import report_data
from slm_lab.experiment.report.run import Run, read_json
from slm_lab.experiment.view.entries import make_entry, modification_time, run_paths, run_sparkline_points, study_runs
from slm_lab.experiment.view.folders import DataFolder, FoundFolder, NotServed, begun_study_runs
from slm_lab.lib.text import last_line

Content = tuple[str, Callable[[], dict[str, Any]]]
_LOG_BYTES = 65_536
"""Maximum number of bytes of a log file in one response."""
_CURVES = 300
"""Maximum number of trials whose curves are sent to the page of a search."""


def files_version(found: FoundFolder, folders: Iterable[str] = ("", "info", "video")) -> str:
    """Return a text that changes when files in the subfolders `folders` of a run change, or when the run starts or ends.

    A file counts as changed if its name, size or modification time has changed.
    """
    state: list[object] = [in_use(found.folder / ".lock")]
    for name in folders:
        try:
            with os.scandir(found.folder / name) as entries:
                files = ((entry.name, entry.stat()) for entry in entries if entry.is_file())
                state += sorted((file, status.st_size, status.st_mtime_ns) for file, status in files)
        except OSError:  # the folder does not exist
            state.append(False)
    return f"{zlib.crc32(repr(state).encode()):08x}"


# ---- runs


def run_content(found: FoundFolder, trial: int, data: DataFolder) -> Content:
    """Return the version of the page of a run or of a trial of a search, and a function that computes the content of the page.

    The content has the entry and the report data of the run, the names of its log and video files, and the numbers of the trials in its
    folder if there may be several.
    """
    if found.kind == "study":
        raise NotServed(f"{found.folder.name} is a study, not a run", 400)

    def compute() -> dict[str, Any]:
        paths = run_paths(found)
        trials, several = paths.trials(), found.kind == "search" or paths.has_several_trials
        if found.kind == "search" and trial not in trials and not paths.trial_spec(trial).is_file():
            raise NotServed(f"there is no trial {trial} in {found.folder.name}")
        # if the folder with the confirmations of a search does not have this trial, the first trial in the folder is shown
        shown = trial if found.kind == "search" or trial in trials or not trials else trials[0]
        entry = make_entry(FoundFolder(found.folder, "run", found.stem), shown)
        return {
            "entry": entry | {"path": relative_path(found.folder, data), "trial": shown, "kind": found.kind},
            "trials": trials if found.kind == "run" and several else [],
            "report": _without_links(report_data(Run(paths, shown))),
            "logs": _logs(paths, shown if several else None),
            "videos": _videos(paths),
        }

    return files_version(found), compute


def _without_links(report: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a report without the links to files, since the server does not send the linked files."""
    settings = dict(report["settings"])
    if settings["previous"] is not None:
        settings["previous"] = settings["previous"] | {"href": None}
    return report | {"files": [], "settings": settings}


def relative_path(folder: Path, data: DataFolder) -> str:
    """Return the path of a folder relative to the data folder."""
    return folder.relative_to(data.root).as_posix()


def log_folders(found: FoundFolder) -> tuple[str, ...]:
    """Return the folders that contain the log files of a run, relative to the run folder.

    If the run belongs to a study, the parent of the run folder also contains a log file.
    """
    of_study = StudyRunFolder(found.folder.parent).identity.is_file()
    return ("log", "..") if of_study else ("log",)


def _logs(paths: RunPaths, trial: int | None) -> list[str]:
    """Return the names of the log files of a run, or of a trial of a search."""
    pattern = re.compile(r".*\.log" if trial is None else rf".*_t{trial}(_s\d+.*)?\.log")
    found = [path.name for path in _files(paths.log_dir) if pattern.fullmatch(path.name)]
    beside = StudyRunFolder(paths.root.parent)
    return [*found, *([beside.log.name] if beside.identity.is_file() and beside.log.is_file() else [])]


def _videos(paths: RunPaths) -> list[str]:
    """Return the names of the video files of a run, newest first."""
    files = [path for folder in (paths.root / "video", paths.root) for path in _files(folder) if path.suffix == ".mp4"]
    return [path.name for path in sorted(files, key=lambda path: modification_time(path) or 0.0, reverse=True)]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []


def read_log_part(file: Path, after: int | None, before: int | None) -> dict[str, Any]:
    """Return a part of a log file: a dict with its text, the positions "begin" and "end" of the part, and the "size" of the file, in bytes.

    The returned part of the log file has at most _LOG_BYTES bytes.

    Args:
        after: position of the byte at which the part begins. If `after` is None or beyond the end of the file, the part consists of the
            last _LOG_BYTES bytes before the position `before`.
        before: position of the byte at which the part ends, or None for the end of the file. If `after` is a valid position, `before` is
            ignored.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        end = size if before is None else min(before, size)
        begin = max(end - _LOG_BYTES, 0)
        if after is not None and after <= size:
            begin, end = after, min(after + _LOG_BYTES, size)
        opened.seek(begin)
        content = opened.read(end - begin)
    skipped = content.find(b"\n") + 1 if begin and after is None else 0  # begin with a complete line
    content = content[skipped:]
    text = content.decode("utf-8", errors="replace")
    return {"text": text, "begin": begin + skipped, "end": begin + skipped + len(content), "size": size}


# ---- searches


def search_content(found: FoundFolder, data: DataFolder) -> Content:
    """Return the version of the page of a search, and a function that computes the content of the page.

    The content has the entry of the search, the searched keys, the trials with their values and results, and a curve of each trial.
    """
    if found.kind != "search":
        raise NotServed(f"{found.folder.name} is not a search", 400)

    def compute() -> dict[str, Any]:
        paths, state = run_paths(found), SearchState.load(found.paths.search_state)
        confirmed = {one.trial: one.metric for one in state.confirmations if one.metric is not None}
        importance = (read_json(paths.importance) or {}).get("shares") or {}
        trials = [
            {"trial": one.trial, "status": one.status, "values": one.values, "metric": one.metric, "frame": one.frame}
            | {"seconds": round(one.seconds, 1), "confirmed": confirmed.get(one.trial), "cause": last_line(one.cause)}
            | {"return": one.metrics.get("current_return"), "strength": one.metrics.get("strength")}
            for one in state.trials
        ]
        shown = [one.trial for one in state.trials[-_CURVES:]]
        return {
            "entry": make_entry(found) | {"path": relative_path(found.folder, data)},
            "metric": state.metric,
            "keys": [
                _searched_key(name, trials) | {"importance": importance.get(name.rpartition("__")[0])} for name in _searched_keys(found)
            ],
            "trials": trials,
            "curves": {str(trial): run_sparkline_points(Run(paths, trial)) for trial in shown},
            "confirm": relative_path(paths.confirmation, data) if confirmed else None,
            "logs": _logs(paths, None)[:50],
        }

    return files_version(found, ("", "info")), compute


def _searched_keys(found: FoundFolder) -> list[str]:
    """Return the searched keys in the saved spec of a search, as texts in the form "path__distribution", such as "agent.gamma__uniform"."""
    ((_, body),) = json.loads(found.paths.spec.read_text(encoding="utf-8")).items()
    return list(_leaves(body.get("search") or {}))


def _leaves(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in block.items():
        if isinstance(value, dict) and "__" not in key:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _searched_key(name: str, trials: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a dict about a searched key: its path, whether its axis is logarithmic, and its options.

    The options are the different values as JSON texts, or None if all values are numbers.
    """
    path, _, distribution = name.rpartition("__")
    path = path or name
    values = [one["values"][path] for one in trials if path in one["values"]]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    options = None if numbers else sorted({json.dumps(value, sort_keys=True) for value in values}, key=_option_sort_key)
    return {"path": path, "log": "log" in distribution and numbers and min(values, default=0) > 0, "options": options}


def _option_sort_key(text: str) -> tuple[int, str]:
    return len(text), text


# ---- studies


def study_content(found: FoundFolder, data: DataFolder) -> Content:
    """Return the version of the page of a study, and a function that computes the content of the page.

    The content has the entry of the study and the entries of its runs.
    """
    if found.kind != "study":
        raise NotServed(f"{found.folder.name} is not a study", 400)

    def compute() -> dict[str, Any]:
        runs = [entry | _identity(data.root / entry["path"]) for entry in study_runs(found, data.root)]
        return {"entry": make_entry(found) | {"path": relative_path(found.folder, data)}, "runs": runs}

    state = [files_version(found, ("", "results"))]
    state += [files_version(FoundFolder(paths.root, "run", ""), ("", "info")) for _, paths in begun_study_runs(found.study)]
    return f"{zlib.crc32(repr(state).encode()):08x}", compute


def _identity(folder: Path) -> dict[str, Any]:
    """Return a dict with the entry, env and random_seed of the study run in a run folder."""
    identity = read_json(StudyRunFolder(folder.parent).identity) or {}
    env = {"env": identity["env"]} if "env" in identity else {}
    return {"entry": identity.get("entry"), "random_seed": identity.get("random_seed"), **env}
