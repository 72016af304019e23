"""Find the run, and the checkpoint of it, that the user specified."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.lock import unfinished
from slm_lab.experiment.files.paths import RunPaths, belongs_to_other_spec, names_with_runs, not_a_run, run_paths_in, runs
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice
from slm_lab.spec.load.files import spec_names

CheckpointName = str | int
"""A checkpoint: "best", "last", or the frame of a numbered one."""
_STAMPED = re.compile(r".+_(\d{4}_\d{2}_\d{2}_\d{6})")


def find_run(where: str, spec_name: str | None, data_dir: Path) -> RunPaths:
    """Return the run in a folder (as given, or under the data folder), or the latest run of `spec_name` (of all specs if None).

    Raises UserError; SpecError if the saved spec of the folder cannot be read.
    """
    return _find_any(where, data_dir) if spec_name is None else _find(where, spec_name, data_dir)


def notify_if_unfinished(paths: RunPaths) -> None:
    """Print a notice if the process of a run ended before the run was finished."""
    if (text := unfinished(paths.root, paths.lock)) is not None:
        notice(text)


def find_search(where: str, spec_name: str | None, data_dir: Path) -> RunPaths:
    """Return the search in a folder, or the latest search; otherwise like `find_run`."""
    if where != "latest":
        return find_run(where, spec_name, data_dir)
    for folder in _newest_first(data_dir):
        paths = run_paths_in(folder)
        if paths is not None and paths.search_state.is_file():
            name = spec_names(paths.spec)[0]
            if spec_name in (None, name):
                return RunPaths(folder, name)
    raise UserError(f"no search{f' of {spec_name!r}' if spec_name else ''} in {data_dir}; start one first: FILE NAME search")


def _find(where: str, spec_name: str, data_dir: Path) -> RunPaths:
    known = [folder for folder in runs(data_dir, spec_name) if RunPaths(folder, spec_name).spec.is_file()]
    if where == "latest":
        if not known:
            others = names_with_runs(data_dir, spec_name)
            hint = f"did you mean {' or '.join(others)}?" if others else "train it first"
            raise UserError(f"no run of '{spec_name}' in {data_dir}; {hint}")
        return RunPaths(known[-1], spec_name)
    for folder in (Path(where), data_dir / where):
        paths = RunPaths(folder, spec_name)
        if paths.spec.is_file() and not belongs_to_other_spec(folder, spec_name):
            return paths
        if folder.name and (other := run_paths_in(folder)) and other.stem.startswith(f"{paths.stem}_"):
            raise UserError(f"no run of '{spec_name}' in the folder '{where}'; did you mean {other.spec_name}?")
    raise UserError(f"no run of '{spec_name}' in the folder '{where}'" + (f"; the latest is {known[-1]}" if known else ""))


def _find_any(where: str, data_dir: Path) -> RunPaths:
    given = Path(where)
    if where != "latest":
        for folder in (given, data_dir / where):
            if (paths := run_paths_in(folder)) is not None:
                return RunPaths(folder, spec_names(paths.spec)[0])
        given = data_dir / where if (data_dir / where).is_dir() else given
    for folder in _newest_first(data_dir):
        if (paths := run_paths_in(folder)) is not None:
            if where == "latest":
                return RunPaths(folder, spec_names(paths.spec)[0])
            raise UserError(f"{not_a_run(given)} (latest run: {folder})")
    raise UserError(f"no run in {data_dir}; train one first" if where == "latest" else not_a_run(given))


def _newest_first(data_dir: Path) -> list[Path]:
    """Return the folders with a start time in their names, newest first."""
    try:
        folders = [path for path in data_dir.iterdir() if path.is_dir()]
    except OSError:
        return []
    stamped = [(match[1], path) for path in folders if (match := _STAMPED.fullmatch(path.name))]
    return [path for _, path in sorted(stamped, reverse=True)]


def checkpoints(paths: RunPaths, session: int | None = None, trial: int = 0) -> list[str]:
    """Return the valid values of `--checkpoint` ("best", "last" and frames) for all Sessions of a trial, or for one Session."""
    found = set()
    for index in paths.sessions(t=trial) if session is None else [session]:
        prefix = paths.checkpoint(index, "best", trial).name.removesuffix("best.pt")
        pattern = re.compile(re.escape(prefix) + r"(best|\d+)\.pt")
        found |= {"last"} if paths.checkpoint(index, "last", trial).is_file() else set()
        found |= {match[1] for path in _files(paths.checkpoint_dir) if (match := pattern.fullmatch(path.name))}
    return sorted(found, key=lambda which: (which.isdecimal(), int(which) if which.isdecimal() else 0, which))


def readable_checkpoint(paths: RunPaths, session: int | None = None, trial: int = 0) -> Location | None:
    """Return a readable checkpoint of all Sessions, or of one Session: "best" if possible, else "last", else a numbered one."""
    for which in sorted(checkpoints(paths, session, trial), key=lambda which: (which.isdecimal(), -int(which) if which.isdecimal() else 0)):
        for index in paths.sessions(t=trial) if session is None else [session]:
            path = paths.checkpoint(index, which, trial)
            with suppress(state.BundleError, OSError):
                if path.is_file() and state.read_header(path, check=True):
                    return path
    return None


def _files(folder: Location) -> list[Location]:
    if isinstance(folder, Path) and not folder.is_dir():
        return []
    return list(folder.iterdir())


def find_weights(where: str, data_dir: Path) -> tuple[Location, dict[str, Any]]:
    """Return a checkpoint file and its content. `where` is the file itself, or a run folder (its best checkpoint). Raises UserError."""
    for path in (Path(where), data_dir / where):
        if path.is_file():
            return path, _playable(path)
        paths = run_paths_in(path) if path.is_dir() else None
        if paths is not None:
            if paths.holds_trials:
                raise UserError(f"meta.init_from: {where} contains the trials of a search; give the checkpoint file of one of them")
            found = [file for index in paths.sessions() if (file := paths.checkpoint(index, "best")).is_file()]
            if not found:
                raise UserError(f"meta.init_from: {where} has no checkpoint")
            best = max(found, key=lambda file: state.rank(_read(file, paths, state.read_header)))
            return best, _playable(best, paths)
    raise UserError(f"meta.init_from: '{where}' is neither a run folder nor a checkpoint file")


def _playable(path: Location, paths: RunPaths | None = None) -> dict[str, Any]:
    bundle = _read(path, paths, state.load)
    return dict(bundle["policies"][0]) if "policies" in bundle else bundle


def _read(path: Location, paths: RunPaths | None, read: Callable[[Location], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(path)
    except state.BundleError as error:
        other = None if paths is None else readable_checkpoint(paths)
        instead = "give another checkpoint file" if other is None else f"this one can be read: {other}"
        raise UserError(f"meta.init_from: {error}; {instead}") from None
