"""Find the run, and the checkpoint of it, that the user specified."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.lock import unfinished
from slm_lab.experiment.files.paths import (
    RunFolder,
    RunPaths,
    StudyPaths,
    belongs_to_other_spec,
    names_with_runs,
    not_a_run,
    run_paths_in,
    runs,
    study_in,
)
from slm_lab.experiment.files.search_state import SearchState, best_first
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice
from slm_lab.spec.load.files import spec_names
from slm_lab.spec.report import nearest

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
        for folder in reversed(known):
            if (paths := RunPaths(folder, spec_name)).is_of_train:
                return paths
        others = names_with_runs(data_dir, spec_name)
        hint = f"did you mean {' or '.join(others)}?" if others else _no_train(known[::-1])
        raise UserError(f"no run of '{spec_name}' in {data_dir}; {hint}")
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
    found = [paths for folder in _newest_first(data_dir) if (paths := run_paths_in(folder)) is not None]
    latest = next((paths for paths in found if paths.is_of_train), None)
    if where == "latest":
        if latest is None:
            raise UserError(f"no run of train in {data_dir}; {_no_train([paths.root for paths in found])}")
        return RunPaths(latest.root, spec_names(latest.spec)[0])
    raise UserError(not_a_run(given) if latest is None else f"{not_a_run(given)} (latest run: {latest.root})")


def _no_train(others: Sequence[Path]) -> str:
    return f"the latest of dev, search or study is {others[0]}: give this folder to use it" if others else "train it first"


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


class Choice(NamedTuple):
    """Which training of a search or of a study to use; None: the best."""

    trial: int | None = None
    entry: str | None = None
    env: str | None = None
    seed: int | None = None


BEST = Choice()


@dataclass(frozen=True)
class Training:
    """A training whose agent can be used: a run of train, a trial of a search, or a run of a study."""

    paths: RunPaths
    trial: int = 0
    name: str = ""
    """What it is in its search or study, such as "trial 3"; "" for a run of train."""
    of_search: bool = False
    """Whether it is a trial of a search, whose values are in a spec of its own."""

    @property
    def spec_file(self) -> Path:
        """The spec that it trained."""
        return self.paths.trial_spec(self.trial) if self.of_search else self.paths.spec

    @property
    def spec_name(self) -> str:
        return spec_names(self.spec_file)[0]


def find_training(where: str | Path, spec_name: str | None, data_dir: Path, choice: Choice = BEST) -> Training:
    """Return the training that `where` and `choice` name: a run folder, or the folder of a search or study, or "latest" (of train).

    Of a search the best confirmed trial is used, or else the best trial; of a study the run with the highest current return. Raises
    UserError if there is none, or if `choice` does not fit the folder.
    """
    for folder in (Path(where), data_dir / where):
        if (study := study_in(folder)) is not None:
            return _of_study(study, choice)
    paths = find_run(str(where), spec_name, data_dir)
    for option, value in zip(Choice._fields[1:], choice[1:], strict=True):
        if value is not None:
            raise UserError(f"--{option} {value}: {paths.root} is not the folder of a study")
    return _of_search(paths, choice.trial) if paths.holds_trials else _of_train(paths, choice.trial)


def _of_train(paths: RunPaths, trial: int | None) -> Training:
    if trial:
        raise UserError(f"--trial {trial}: {paths.root} is a run of train, whose only trial is 0")
    return Training(paths)


def _of_search(paths: RunPaths, trial: int | None) -> Training:
    confirmed = RunPaths(paths.confirmation, paths.spec_name)
    if paths.search_state.is_file():
        state = SearchState.load(paths.search_state)
        ranked = [(confirmed, one.trial) for one in best_first(state.confirmations)]
        ranked += [(paths, one.trial) for one in best_first(state.trials)]
        known = [one.trial for one in state.trials]
    else:  # the folder of confirmations
        known = paths.trials()
        ranked = sorted(((paths, one) for one in known), key=lambda one: _best_rank(*one), reverse=True)
    if trial is not None and trial not in known:
        raise UserError(
            f"--trial {trial}: {paths.root} has the trials {known[0]} to {known[-1]}" if known else f"{paths.root} has no trial"
        )
    usable = [one for one in ranked if trial in (None, one[1]) and checkpoints(one[0], trial=one[1])]
    if trial is not None and not usable and checkpoints(paths, trial=trial):
        usable = [(paths, trial)]  # failed, or still training
    if not usable:
        kept = "a search keeps the checkpoints of its best trials only (meta.search_keep)"
        raise UserError(
            f"no trial of {paths.root} has ended" if trial is None else f"trial {trial} of {paths.root} has no checkpoint: {kept}"
        )
    where, best = usable[0]
    return Training(where, best, f"trial {best} of the search{', confirmed' if where is confirmed else ''}", of_search=True)


def _of_study(study: StudyPaths, choice: Choice) -> Training:
    if choice.trial is not None:
        raise UserError(f"--trial {choice.trial}: {study.root} is the folder of a study, whose runs have --entry, --env and --seed")
    found = list(_runs_of_study(study))
    for option, key in (("entry", "entry"), ("env", "env"), ("seed", "random_seed")):
        value = getattr(choice, option)
        known = list(dict.fromkeys(str(about[key]) for about, _ in found))
        if value is not None and str(value) not in known:
            raise UserError(f"--{option} {value}: the runs of {study.root} have {', '.join(known) or 'none'}{nearest(str(value), known)}")
        found = [(about, paths) for about, paths in found if value is None or str(about[key]) == str(value)]
        if option == "env" and value is None and len(known) > 1:
            raise UserError(f"{study.root} has several envs; choose one with --env: {', '.join(known)}")
    found = [(about, paths) for about, paths in found if checkpoints(paths)]
    if not found:
        raise UserError(f"no run of {study.root} has a checkpoint here")
    about, paths = max(found, key=lambda one: _best_rank(one[1]))
    return Training(paths, name=f"{about['entry']} of the study, in {about['env']}, seed {about['random_seed']}")


def _runs_of_study(study: StudyPaths) -> Iterator[tuple[Mapping[str, Any], RunPaths]]:
    """Yield what each run of a study is, and its folder."""
    for folder in sorted(study.runs.iterdir()) if study.runs.is_dir() else ():
        run = RunFolder(folder)
        with suppress(OSError, ValueError):
            about = json.loads(run.identity.read_text(encoding="utf-8"))
            if starts := run.starts():
                yield about, starts[-1]


def _best_rank(paths: RunPaths, trial: int = 0) -> tuple[bool, float]:
    """Return the rank of the best weights of a training over its Sessions, see bundle.rank."""
    ranks = [state.rank(None)]
    for index in paths.sessions(t=trial):
        with suppress(state.BundleError, OSError):
            ranks.append(state.rank(state.read_header(paths.checkpoint(index, "best", trial))))
    return max(ranks)


def find_weights(where: str, data_dir: Path) -> tuple[Location, dict[str, Any]]:
    """Return a checkpoint file and its content. `where` is the file itself, or the folder of a run, search or study (its best checkpoint).

    Raises UserError.
    """
    for path in (Path(where), data_dir / where):
        if path.is_file():
            return path, _playable(path)
        if path.is_dir() and (run_paths_in(path) or study_in(path)):
            try:
                training = find_training(path, None, data_dir)
            except UserError as error:
                raise UserError(f"meta.init_from: {error}") from None
            paths, trial = training.paths, training.trial
            found = [file for index in paths.sessions(t=trial) if (file := paths.checkpoint(index, "best", trial)).is_file()]
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
