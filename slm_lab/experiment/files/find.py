"""Find the run folder, the named model or the checkpoint that the user has specified."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.lock import unfinished_notice
from slm_lab.experiment.files.named_model import ModelPaths, check_no_model, find_model, similar_name_hint
from slm_lab.experiment.files.paths import (
    RunPaths,
    StudyPaths,
    StudyRunFolder,
    belongs_to_other_spec,
    names_with_runs,
    not_a_run_message,
    parse_folder_time,
    policy_names,
    run_paths_in,
    runs_of_spec,
    study_in,
)
from slm_lab.experiment.files.search_state import SearchState, best_first
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.lib.log import notice
from slm_lab.spec.load.files import spec_names
from slm_lab.spec.report import nearest_hint

CheckpointName = str | int
"""Name of a checkpoint: "best", "last", or the frame number of a numbered checkpoint."""


def find_run(where: str, spec_name: str | None, data_dir: Path) -> RunPaths:
    """Return the paths of the run in the folder `where` or, if `where` is "latest", of the latest run of mode train.

    Raises UserError if there is no such run, or SpecError if the saved spec in the folder cannot be read.

    Args:
        where: path of a run folder, name of a run folder in `data_dir`, or "latest".
        spec_name: name of the spec that the run must have trained, or None for any spec.
    """
    return _find_any_run(where, data_dir) if spec_name is None else _find_run_of_spec(where, spec_name, data_dir)


def newest_run(data_dir: Path) -> RunPaths:
    """Return the paths of the newest run of any mode in `data_dir`. Raises UserError if `data_dir` contains no run."""
    for folder in _newest_first(data_dir):
        if (paths := run_paths_in(folder)) is not None:
            return RunPaths(folder, spec_names(paths.spec)[0])
    raise UserError(f"no run in {data_dir}; train one first")


def notify_if_unfinished(paths: RunPaths) -> None:
    """Print a notice if a run is unfinished because the process that trained the run was killed or exited."""
    if (text := unfinished_notice(paths.root, paths.lock)) is not None:
        notice(text)


def newest_folder(data_dir: Path) -> Path:
    """Return the newest folder in `data_dir` that contains a run of mode train, a search or a study.

    Raises UserError if there is no such folder.
    """
    for folder in _newest_first(data_dir):
        paths = run_paths_in(folder)
        if study_in(folder) is not None or (paths is not None and (paths.is_training_run or paths.search_state.is_file())):
            return folder
    raise UserError(f"no run, search or study in {data_dir} (runs of mode dev are not used); train first, or give a folder")


def find_search(where: str, spec_name: str | None, data_dir: Path) -> RunPaths:
    """Return the paths of the search in the folder `where` or, if `where` is "latest", of the latest search.

    The arguments and errors are those of `find_run`.
    """
    if where != "latest":
        return find_run(where, spec_name, data_dir)
    for folder in _newest_first(data_dir):
        paths = run_paths_in(folder)
        if paths is not None and paths.search_state.is_file():
            name = spec_names(paths.spec)[0]
            if spec_name in (None, name):
                return RunPaths(folder, name)
    raise UserError(f"no search{f' of {spec_name!r}' if spec_name else ''} in {data_dir}; start one first: FILE NAME search")


def _find_run_of_spec(where: str, spec_name: str, data_dir: Path) -> RunPaths:
    runs = [folder for folder in runs_of_spec(data_dir, spec_name) if RunPaths(folder, spec_name).spec.is_file()]
    if where == "latest":
        latest, advice = _newest_training_run(RunPaths(folder, spec_name) for folder in reversed(runs))
        if latest is not None:
            return latest
        others = names_with_runs(data_dir, spec_name)
        hint = f"did you mean {' or '.join(others)}?" if others else advice
        raise UserError(f"no run of mode train of '{spec_name}' in {data_dir}; {hint}")
    for folder in (Path(where), data_dir / where):
        paths = RunPaths(folder, spec_name)
        if paths.spec.is_file() and not belongs_to_other_spec(folder, spec_name):
            return paths
        if folder.name and (other := run_paths_in(folder)) and other.stem.startswith(f"{paths.stem}_"):
            raise UserError(f"no run of '{spec_name}' in the folder '{where}'; did you mean {other.spec_name}?")
    raise UserError(f"no run of '{spec_name}' in the folder '{where}'" + (f"; the latest is {runs[-1]}" if runs else ""))


def _find_any_run(where: str, data_dir: Path) -> RunPaths:
    given = Path(where)
    if where != "latest":
        for folder in (given, data_dir / where):
            if (paths := run_paths_in(folder)) is not None:
                return RunPaths(folder, spec_names(paths.spec)[0])
        check_no_model(where, data_dir)
        given = data_dir / where if (data_dir / where).is_dir() else given
    latest, advice = _newest_training_run(paths for folder in _newest_first(data_dir) if (paths := run_paths_in(folder)) is not None)
    if where == "latest":
        if latest is None:
            raise UserError(f"no run of mode train in {data_dir}; {advice}")
        return RunPaths(latest.root, spec_names(latest.spec)[0])
    raise UserError(not_a_run_message(given) if latest is None else f"{not_a_run_message(given)} (latest run: {latest.root})")


def _newest_training_run(newest_first: Iterable[RunPaths]) -> tuple[RunPaths | None, str]:
    """Return (paths of the newest run of mode train, ""). If there is no such run, return (None, advice for the error message)."""
    other: Path | None = None
    for paths in newest_first:
        if paths.is_training_run:
            return paths, ""
        other = other or paths.root
    return None, "train it first" if other is None else f"the newest run, of mode dev or search, is {other}; to use it, give this folder"


def _newest_first(data_dir: Path) -> list[Path]:
    """Return the folders in `data_dir` whose names contain a start time, newest first."""
    try:
        folders = [path for path in data_dir.iterdir() if path.is_dir()]
    except OSError:
        return []
    dated = [(time, path) for path in folders if (time := parse_folder_time(path.name)) is not None]
    return [path for _, path in sorted(dated, reverse=True)]


def checkpoint_names(paths: RunPaths, session: int | None = None, trial: int = 0) -> list[str]:
    """Return the names of the existing checkpoints ("best", "last" and frame numbers), which are the valid values of `--checkpoint`.

    Args: session: index of the Session whose checkpoints are listed, or None for the checkpoints of all Sessions of the trial.
    """
    if isinstance(paths, ModelPaths):
        return ["best"] if session in (None, 0) and paths.weights.is_file() else []
    names = set()
    for index in paths.table_numbers(t=trial) if session is None else [session]:
        prefix = paths.checkpoint(index, "best", trial).name.removesuffix("best.pt")
        pattern = re.compile(re.escape(prefix) + r"(best|\d+)\.pt")
        names |= {"last"} if paths.checkpoint(index, "last", trial).is_file() else set()
        names |= {match[1] for path in _files_in_folder(paths.checkpoint_dir) if (match := pattern.fullmatch(path.name))}
    return sorted(names, key=lambda which: (which.isdecimal(), int(which) if which.isdecimal() else 0, which))


def readable_checkpoint(paths: RunPaths, session: int | None = None, trial: int = 0) -> Location | None:
    """Return the location of an undamaged checkpoint, or None if no checkpoint of the trial can be read.

    The order of preference is: the "best" checkpoint, the "last" checkpoint, and then the numbered checkpoints, highest frame first.

    Args: session: index of the Session whose checkpoint is returned, or None for any Session.
    """
    for which in sorted(
        checkpoint_names(paths, session, trial), key=lambda which: (which.isdecimal(), -int(which) if which.isdecimal() else 0)
    ):
        for index in paths.table_numbers(t=trial) if session is None else [session]:
            path = paths.checkpoint(index, which, trial)
            with suppress(state.BundleError, OSError):
                if path.is_file() and state.read_header(path, check=True):
                    return path
    return None


def _files_in_folder(folder: Location) -> list[Location]:
    if isinstance(folder, Path) and not folder.is_dir():
        return []
    return list(folder.iterdir())


class TrainingChoice(NamedTuple):
    """The user's choice of a training in a search or study, and of a policy in agent.policies.

    If neither a trial nor an entry, env or seed is chosen, the best training is used. If `policy` is None, no policy was chosen.
    """

    trial: int | None = None
    entry: str | None = None
    env: str | None = None
    seed: int | None = None
    policy: str | None = None


_OF_STUDY = ("entry", "env", "seed")
BEST = TrainingChoice()


@dataclass(frozen=True)
class Training:
    """A training whose checkpoints can be used: a run of mode train, a trial of a search, a run of a study, or a named model."""

    paths: RunPaths
    trial: int = 0
    name: str = ""
    """Text that names the training in messages, such as "trial 3 of the search", or "" for a run of mode train."""
    of_search: bool = False
    """Whether the training is a trial of a search. Each trial of a search has a separate spec file with the values of this trial."""
    policy: str | None = None
    """Name of the chosen policy in agent.policies, or None if no policy was chosen."""

    @property
    def spec_file(self) -> Path:
        """Path of the file with the spec that was trained."""
        return self.paths.trial_spec(self.trial) if self.of_search else self.paths.spec

    @property
    def spec_name(self) -> str:
        return spec_names(self.spec_file)[0]

    @property
    def policies(self) -> list[str]:
        """Names of the policies in agent.policies. `policies` is empty if the spec has no key agent.policies, or for a named model, which
        has one policy."""
        if isinstance(self.paths, ModelPaths):
            return []
        with suppress(OSError, ValueError, AttributeError):
            ((_, body),) = json.loads(self.spec_file.read_text(encoding="utf-8")).items()
            return policy_names(body) if body.get("agent", {}).get("policies") else []
        return []


def find_training(where: str | Path, spec_name: str | None, data_dir: Path, choice: TrainingChoice = BEST) -> Training:
    """Return the training to which `where` and `choice` refer.

    If `where` is a search and `choice` names no trial, the best confirmed trial is returned or, if no trial was confirmed, the best trial.
    If `where` is a study, the run with the best weights (see bundle.weights_sort_key) is returned among the runs that fit `choice`.

    Args: where: the folder of a run, search or study, "latest" (the latest run of mode train), or the name or the folder of a named model.
        The folder of a run, search or study takes precedence over a named model of the same name.

    Raises UserError if there is no such training, or if `choice` does not fit `where`.
    """
    training = _find_training(where, spec_name, data_dir, choice)
    if choice.policy is None:
        return training
    root, policies = training.paths.root, training.policies
    if choice.policy not in policies:
        expected = f"the policies of {root} are {', '.join(policies)}" if policies else f"{root} has one policy"
        raise UserError(f"policy {choice.policy}: {expected}{nearest_hint(choice.policy, policies)}")
    return replace(training, policy=choice.policy)


def _find_training(where: str | Path, spec_name: str | None, data_dir: Path, choice: TrainingChoice) -> Training:
    for folder in (Path(where), data_dir / where):
        if (study := study_in(folder)) is not None:
            return _training_of_study(study, spec_name, choice)
    if where != "latest" and (model := find_model(where, data_dir)) is not None:
        return _training_of_model(model, spec_name, choice)
    try:
        paths = find_run(str(where), spec_name, data_dir)
    except UserError as error:
        raise UserError(f"{error}{similar_name_hint(str(where), data_dir)}") from None
    for option in _OF_STUDY:
        if (value := getattr(choice, option)) is not None:
            raise UserError(f"{option} {value}: {paths.root} is not the folder of a study")
    return _training_of_search(paths, choice.trial) if paths.has_several_trials else _training_of_run(paths, choice.trial)


def _training_of_model(model: ModelPaths, spec_name: str | None, choice: TrainingChoice) -> Training:
    if spec_name not in (None, model.spec_name):
        raise UserError(f"{model.root} is a model of '{model.spec_name}', not of '{spec_name}'")
    for option in ("trial", *_OF_STUDY):
        if (value := getattr(choice, option)) is not None:
            raise UserError(f"{option} {value}: {model.root} is a model, which was trained once")
    return Training(model, name=f"model {model.root.name}")


def _training_of_run(paths: RunPaths, trial: int | None) -> Training:
    if trial:
        raise UserError(f"trial {trial}: {paths.root} is a run of mode train, which has only trial 0")
    return Training(paths)


def _training_of_search(paths: RunPaths, trial: int | None) -> Training:
    """Return the Training for a trial of a search. If the trial was confirmed (trained again with new seeds), the Training of the
    confirmation is returned.

    Args: trial: index of the trial, or None for the best trial.
    """
    confirmed = RunPaths(paths.confirmation, paths.spec_name)
    if paths.search_state.is_file():
        search = SearchState.load(paths.search_state)
        ranked = [(confirmed, trial_state.trial) for trial_state in best_first(search.confirmations)]
        ranked += [(paths, trial_state.trial) for trial_state in best_first(search.trials)]
        status: dict[int, str] = {trial_state.trial: trial_state.status for trial_state in search.trials}
    else:  # the folder of confirmations
        status = dict.fromkeys(paths.trials(), "finished")
        ranked = sorted(((paths, index) for index in status), key=lambda pair: _best_weights_key(*pair), reverse=True)
    if trial is not None:
        if trial not in status:
            raise UserError(f"trial {trial}: the trials of {paths.root} are {', '.join(map(str, status)) or 'none'}")
        ranked = [pair for pair in ranked if pair[1] == trial] or [(paths, trial)]
    best = next((pair for pair in ranked if checkpoint_names(pair[0], trial=pair[1])), None)
    if best is None:
        counts = Counter(status.values() if trial is None else [status[trial]])
        ended = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none yet"
        kept = "; only the checkpoints of the best finished trials are kept (meta.search_keep)" if "finished" in counts else ""
        if trial is None:
            raise UserError(f"no trial of {paths.root} has ended with a checkpoint; trials: {ended}{kept}")
        raise UserError(f"trial {trial} of {paths.root} has no checkpoint; it is {status[trial]}{kept}")
    where, number = best
    return Training(where, number, f"trial {number} of the search{', confirmed' if where is confirmed else ''}", of_search=True)


def _training_of_study(study: StudyPaths, name: str | None, choice: TrainingChoice) -> Training:
    if name is not None and name != study.name:
        raise UserError(f"{study.root} is a study of '{study.name}', not of '{name}'")
    if choice.trial is not None:
        raise UserError(f"trial {choice.trial}: {study.root} is the folder of a study; its runs have an entry, an env and a seed")
    runs = list(_runs_of_study(study))
    for part, wanted in (("entry", choice.entry), ("env", choice.env), ("seed", choice.seed)):
        values = list(dict.fromkeys(description[part] for description, _ in runs))
        if wanted is not None:
            if wanted not in values:
                near = nearest_hint(str(wanted), map(str, values))
                raise UserError(f"{part} {wanted}: the runs of {study.root} have {', '.join(map(str, values)) or 'none'}{near}")
            runs = [run for run in runs if run[0][part] == wanted]
        elif part == "env" and len(values) > 1:
            advice = f"choose one of {', '.join(values)} (--env), or give the folder of a run"
            raise UserError(f"{study.root} has runs in several envs; {advice}")
    runs = [run for run in runs if checkpoint_names(run[1])]
    if not runs:
        raise UserError(f"no finished run of {study.root} has a checkpoint here")
    chosen, paths = max(runs, key=lambda run: _best_weights_key(run[1]))
    return Training(paths, name=f"{chosen['entry']} of the study, in {chosen['env']}, seed {chosen['seed']}")


def _runs_of_study(study: StudyPaths) -> Iterator[tuple[dict[str, Any], RunPaths]]:
    """Yield (description, paths) for each run of a study that ended without failure. The description is a dict with the entry, env and
    seed."""
    for folder in sorted(study.runs.iterdir()) if study.runs.is_dir() else ():
        run = StudyRunFolder(folder)
        with suppress(OSError, ValueError, KeyError, TypeError):
            identity = json.loads(run.identity.read_text(encoding="utf-8"))
            description = {"entry": identity["entry"], "env": identity["env"], "seed": identity["random_seed"]}
            for paths in run.run_folders()[-1:]:
                if json.loads(paths.trial_metrics().read_text(encoding="utf-8")).get("status") != "failed":
                    yield description, paths


def _best_weights_key(paths: RunPaths, trial: int = 0) -> tuple[int, float]:
    """Return the highest sort key (see bundle.weights_sort_key) among the "best" checkpoints of all Sessions of a training."""
    ranks = [state.weights_sort_key(None)]
    for index in paths.table_numbers(t=trial):
        with suppress(state.BundleError, OSError):
            ranks.append(state.weights_sort_key(state.read_header(paths.checkpoint(index, "best", trial))))
    return max(ranks)


def find_weights(where: str, data_dir: Path, policy: str | None = None) -> tuple[Location, dict[str, Any]]:
    """Return the location of a checkpoint file, and the saved dict (bundle) of one policy in this file.

    Args:
        where: a checkpoint file, the folder of a run, search or study (whose best checkpoint is used), or the name or folder of a named
            model.
        policy: name of a policy in agent.policies of the training. If the training has a single policy, `policy` is ignored, since the
            weights of a single policy fit every policy.

    Raises UserError if there is no such checkpoint, or if the checkpoint cannot be used.
    """
    for path in (Path(where), data_dir / where):
        if path.is_file():
            return path, _load_policy_bundle(path, policy)
        if path.is_dir() and (run_paths_in(path) or study_in(path)):
            return _best_weights(path, data_dir, policy)
    if find_model(where, data_dir):
        return _best_weights(Path(where), data_dir, policy)
    near = similar_name_hint(where, data_dir)
    raise UserError(f"meta.init_from: '{where}' is not a run folder, a checkpoint file or the name of a model{near}")


def _best_weights(where: Path, data_dir: Path, policy: str | None) -> tuple[Location, dict[str, Any]]:
    """Return the location of the best checkpoint of a training, or of one of its policies, and the content of this checkpoint."""
    try:
        training = find_training(where, None, data_dir)
    except UserError as error:
        raise UserError(f"meta.init_from: {error}") from None
    paths, trial, names = training.paths, training.trial, training.policies
    indices = paths.table_numbers(t=trial)
    if names:
        wanted = _policy_index(policy, names, where)
        indices = [index for index in indices if index % len(names) == wanted]
    files = [file for index in indices if (file := paths.checkpoint(index, "best", trial)).is_file()]
    if not files:
        raise UserError(f"meta.init_from: {where} has no checkpoint")
    best = max(files, key=lambda file: state.weights_sort_key(_read(file, training, state.read_header)))
    return best, _load_policy_bundle(best, policy, training)


def _policy_index(policy: str | None, names: Sequence[str], where: Location) -> int:
    """Return the index of `policy` in `names`, the names of the policies in agent.policies. Raises UserError if no policy has this name.

    Args: where: folder or file of the checkpoints, for the error message.
    """
    if policy in names:
        return names.index(policy)
    if policy is None:
        raise UserError(f"meta.init_from: {where} has the policies {', '.join(names)}; give the file of the best checkpoint of one of them")
    raise UserError(f"meta.init_from: {where} has no policy {policy!r}{nearest_hint(policy, names)}; its policies: {', '.join(names)}")


def _load_policy_bundle(path: Location, policy: str | None, training: Training | None = None) -> dict[str, Any]:
    """Load a checkpoint file, and return the saved dict (bundle) of one policy. The arguments are those of `_read` and `find_weights`."""
    bundle = _read(path, training, state.load)
    if "policies" not in bundle:
        return bundle
    (body,) = bundle["spec"].values()
    names = policy_names(body) if body["agent"].get("policies") else []
    return dict(bundle["policies"][_policy_index(policy, names, path) if names else 0])


def _read(path: Location, training: Training | None, read: Callable[[Location], dict[str, Any]]) -> dict[str, Any]:
    """Return read(path). If the checkpoint cannot be used, raise UserError, which names a readable checkpoint of `training` if possible."""
    try:
        return read(path)
    except state.BundleError as error:
        other = None if training is None else readable_checkpoint(training.paths, None, training.trial)
        instead = "give another checkpoint file" if other is None else f"this one can be read: {other}"
        raise UserError(f"meta.init_from: {error}; {instead}") from None
