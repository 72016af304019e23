"""The names of all files below the data folder: files of runs, comparisons and studies.

{name}_{time}/               folder of a study
  {name}_study.json          the study as of the last start
  runs/{run}/                study_run.json, log.txt, and run folders as written by `train` (one, and another after each failed start)
  results/{run}.json         results of a run, which are the source of the tables and figures
  aside/                     outdated runs of entries that were changed after the runs were made
  {name}_study_table.md …    the tables and figures that compare the entries
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slm_lab.experiment.files.storage import Location, StoredPath
from slm_lab.experiment.plan import UserError
from slm_lab.spec.models.study import StudyRun

DataMode = Literal["train", "eval"]
_STAMP = "%Y_%m_%d_%H%M%S"
_STAMP_PATTERN = r"\d{4}_\d{2}_\d{2}_\d{6}"


def file_stem(spec_name: str) -> str:
    """Return the name of a spec as used in file names. Each character other than letters, digits, '.', '-' and '_' is replaced by '_'."""
    return re.sub(r"[^\w.-]", "_", spec_name)


class PathDescriptor:
    """Descriptor of a class attribute. For an object `paths` of the class, the value of the attribute is the path `paths.root / name`.

    Args: name: name of a file or folder. The text "{stem}" in the name is replaced by `paths.stem`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, paths: Any, owner: type) -> Path:
        root: Path = paths.root
        return root / (self.name.format(stem=paths.stem) if "{stem}" in self.name else self.name)


def number_of_policies(body: Mapping[str, Any]) -> int:
    """Return the number of policies that each Session of a saved spec trains. If the spec is damaged, 1 is returned."""
    try:
        return len(body["agent"]["policies"])
    except (KeyError, TypeError):
        pass
    try:
        return int(body["meta"]["sampler"]["num_policies"])
    except (KeyError, TypeError, ValueError):
        return 1


def policy_names(body: Mapping[str, Any]) -> list[str]:
    """Return the names of the policies that each Session of a saved spec trains.

    The names are those in agent.policies or, if the spec does not have this key, the numbers "0", "1", ….
    """
    try:
        return [str(name) for name in dict(body["agent"]["policies"])]
    except (KeyError, TypeError, ValueError):
        return [str(policy) for policy in range(number_of_policies(body))]


@dataclass(frozen=True)
class RunPaths:
    """The paths of the files of one run, or of one search.

    In the arguments of all methods, t is the index of a trial, and s is the index of a Session. If each Session trains P > 1 policies
    (agent.policies, or num_policies of meta.sampler), each policy has separate tables, graphs and checkpoints. With P > 1 policies, the
    argument s for policy p of Session i is i · P + p, and the file names contain s{i}_p{p}.

    Attributes:
        root: the run folder.
        spec_name: name of the spec.
    """

    root: Path
    spec_name: str

    graph_dir = PathDescriptor("graph")
    info_dir = PathDescriptor("info")
    log_dir = PathDescriptor("log")
    model_dir = PathDescriptor("model")
    spec = PathDescriptor("{stem}_spec.json")
    """Path of the file with the spec and its defaults, which can be loaded like a spec file of the user."""
    report = PathDescriptor("report.html")
    """HTML page with all results of the run, or of the search."""
    lock = PathDescriptor(".lock")
    """Lock file of the run folder. While a process trains the run, the file is locked and describes the process."""

    # ---- of a search
    search_state = PathDescriptor("{stem}_search_state.json")
    """State of a search: the trials, the metrics that the trials have reported, and the state of the proposer of hyperparameter values."""
    experiment_df = PathDescriptor("{stem}_experiment_df.csv")
    """Table (CSV) of a search, with one row per trial."""
    importance = PathDescriptor("{stem}_importance.json")
    """Importance of each searched key for the search metric."""
    best_spec = PathDescriptor("{stem}_best_spec.json")
    """Path of the file with the spec of the best trial of a search, which can be loaded like a spec file of the user."""
    search_log = PathDescriptor("log/{stem}_search.log")
    """Log file with the messages of a search."""
    confirmation = PathDescriptor("confirm")
    """Run folder in which the best trials of a search are trained again. A trial has the same index in the folder of confirmations as in
    the search."""

    @property
    def stem(self) -> str:
        return file_stem(self.spec_name)

    @property
    def output_dir(self) -> Path:
        """Folder in which videos of the trained agent, and the exported files of a pretrained agent, are written."""
        return self.root

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling.

        If the file of the saved spec exists, the state also contains `policies` and `checkpoint_dir`. These values come from the file,
        which a process on another machine may not be able to read.
        """
        from_file = {"policies": self.policies, "checkpoint_dir": self.checkpoint_dir} if self.spec.is_file() else {}
        return {**self.__dict__, **from_file}

    @cached_property
    def policies(self) -> int:
        """Number of policies that each Session trains, according to the saved spec, or 1 if no spec is saved yet."""
        try:
            return number_of_policies(self._saved_spec())
        except (OSError, ValueError):
            return 1

    @cached_property
    def checkpoint_dir(self) -> Location:
        """Location of the checkpoints: the URL that is recorded in meta.run of the saved spec or, if no URL is recorded, the folder
        `model_dir`."""
        try:
            return StoredPath(next(start["checkpoints"] for start in self._saved_meta()["run"] if "checkpoints" in start))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
            return self.model_dir

    def _saved_spec(self) -> dict[str, Any]:
        ((_, body),) = json.loads(self.spec.read_text(encoding="utf-8")).items()
        return dict(body)

    def _saved_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = self._saved_spec()["meta"]
        return meta

    def _table_part(self, index: int) -> str:
        """Return the part of file names that identifies a table.

        The returned text is "s0" for Session 0 with a single policy, and "s0_p1" for policy 1 of Session 0 with several policies.

        Args: index: number of the table, see events.Row.
        """
        session, policy = divmod(index, self.policies)
        return f"s{session}" if self.policies == 1 else f"s{session}_p{policy}"

    def make_dirs(self) -> None:
        """Create the subfolders of the run folder. The run folder itself must exist. Raises OSError if a folder cannot be created."""
        for folder in (self.graph_dir, self.info_dir, self.log_dir, self.model_dir):
            folder.mkdir(exist_ok=True)

    def remove_temporaries(self) -> None:
        """Delete the temporary files of killed processes. This method may be called only while no process writes to the run folder."""
        for folder in (self.root, self.graph_dir, self.info_dir, self.log_dir, self.model_dir):
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def trial_spec(self, t: int = 0) -> Path:
        return self.root / f"{self.stem}_t{t}_spec.json"

    def trial_metrics(self, t: int = 0) -> Path:
        return self.root / f"{self.stem}_t{t}_trial_metrics_scalar.json"

    def trial_report(self, t: int = 0) -> Path:
        """Return the path of the HTML page of a trial, which is `report` unless the folder belongs to a search.

        In the folder of a search, where `report` is the page of the search, each trial has a separate page.
        """
        return self.root / f"{self.stem}_t{t}_report.html" if self.has_several_trials else self.report

    def trial_graph(self, what: str, ext: str, t: int = 0) -> Path:
        """Return the path of the graph that shows a quantity of a trial over frames. `what` is "mean_returns" or "mean_returns_ma" (moving
        average)."""
        return self.root / f"{self.stem}_t{t}_trial_graph_{what}_vs_frames.{ext}"

    def experiment_graph(self, what: str, ext: str) -> Path:
        """Return the path of a figure of a search. `what` names the content of the figure. With `what` = "", the figure shows the metrics
        over the values of the searched keys."""
        return self.root / f"{self.stem}_experiment_graph{f'_{what}' if what else ''}.{ext}"

    def multi_trial_graph(self, what: str, ext: str) -> Path:
        """Return the path of the graph that shows a quantity of all trials of a search over frames. `what` is "mean_returns" or
        "mean_returns_ma" (moving average)."""
        return self.root / f"{self.stem}_multi_trial_graph_{what}_vs_frames.{ext}"

    def session_df(self, s: int, mode: DataMode = "train", t: int = 0) -> Path:
        """Return the path of the table (CSV) with the training or evaluation rows of a Session, or of one policy of a Session."""
        return self.info_dir / f"{self.stem}_t{t}_{self._table_part(s)}_session_df_{mode}.csv"

    def session_metrics(self, s: int, t: int = 0) -> Path:
        return self.info_dir / f"{self.stem}_t{t}_{self._table_part(s)}_session_metrics_scalar.json"

    def session_graph(self, s: int, what: str, ext: str, mode: DataMode = "train", t: int = 0) -> Path:
        return self.graph_dir / f"{self.stem}_t{t}_{self._table_part(s)}_session_graph_{mode}_{what}_vs_frames.{ext}"

    def timeline(self, s: int, t: int = 0) -> Path:
        """Return the path of the table (CSV) that shows what each process of a Session with rollout workers did in a few updates.

        The columns of the table are process, kind (of work), begin (in seconds) and end (in seconds).
        """
        return self.info_dir / f"{self.stem}_t{t}_s{s}_timeline.csv"

    def timeline_graph(self, s: int, ext: str, t: int = 0) -> Path:
        """Return the path of the figure that shows the timeline of a Session's processes as bars over time."""
        return self.graph_dir / f"{self.stem}_t{t}_s{s}_session_graph_timeline.{ext}"

    def pbt(self, s: int, t: int = 0) -> Path:
        """Return the path of the table (CSV) of population-based training. The table has a row for each policy and round, and a column for
        each hyperparameter."""
        return self.info_dir / f"{self.stem}_t{t}_s{s}_pbt.csv"

    def elo(self, s: int, t: int = 0) -> Path:
        """Return the path of the table (CSV) of self-play, which contains the frame, Elo rating, standard error and scores of each
        snapshot."""
        return self.info_dir / f"{self.stem}_t{t}_s{s}_elo.csv"

    def session_log(self, s: int, t: int = 0) -> Path:
        return self.log_dir / f"{self.stem}_t{t}_s{s}.log"

    def tensorboard(self, s: int, t: int = 0) -> Path:
        """Return the path of the folder with the TensorBoard events of a Session, or of one policy of a Session."""
        return self.log_dir / f"{self.stem}_t{t}_{self._table_part(s)}_tensorboard"

    def tracker(self, s: int, name: str, ext: str, t: int = 0) -> Path:
        """Return the path of a file of the experiment tracker `name` (meta.track) for a Session, or for one policy of a Session.

        `ext` is "json" for the saved state of the tracker, "log" for its output, or "lock" for its lock file.
        """
        return self.log_dir / f"{self.stem}_t{t}_{self._table_part(s)}_{name}.{ext}"

    def checkpoint(self, s: int, which: str | int, t: int = 0) -> Location:
        """Return the path of a checkpoint of a Session, or of one policy of a Session.

        The checkpoints "last" and "previous" contain the last two saved states of a Session with all its policies. The checkpoint "best"
        and checkpoints with a frame number contain the weights of one policy.
        """
        name = f"s{s // self.policies}" if which in ("last", "previous") else self._table_part(s)
        return self.checkpoint_dir / f"{self.stem}_t{t}_{name}_ckpt-{which}.pt"

    def trial_checkpoint(self, t: int = 0) -> Location:
        """Return the path of the checkpoint with the arrays that the Sessions of a trial share (meta.distributed)."""
        return self.checkpoint_dir / f"{self.stem}_t{t}_ckpt-last.pt"

    def session_lock(self, s: int, t: int = 0) -> Path:
        """Return the path of the lock file that is locked while a separate process trains a Session."""
        return self.root / (f".lock_t{t}_s{s}" if t else f".lock_s{s}")

    def trial_lock(self, t: int) -> Path:
        """Return the path of the lock file that is locked while a process runs a trial of a search."""
        return self.root / f".lock_t{t}"

    def trial_log(self, t: int = 0) -> Path:
        """Return the path of the log file with the messages of a trial."""
        return self.log_dir / f"{self.stem}_t{t}.log"

    def checkpoints(self, t: int) -> list[Path]:
        """Return the paths of all checkpoints of a trial in `model_dir`."""
        pattern = re.compile(re.escape(f"{self.stem}_t{t}_") + r"(?:s\d+(?:_p\d+)?_)?ckpt-\w+\.pt")
        return [path for path in self.model_dir.glob("*.pt") if pattern.fullmatch(path.name)]

    def _table_indices(self, mode: DataMode) -> set[tuple[int, int]]:
        """Return the set of (index of the trial, number of the table) for all existing tables of `mode` ("train" or "eval"). Table numbers
        are defined in events.Row."""
        pattern = re.compile(re.escape(f"{self.stem}_t") + rf"(\d+)_s(\d+)(?:_p(\d+))?_session_df_{mode}\.csv")
        matches = (pattern.fullmatch(path.name) for path in self.info_dir.glob("*.csv"))
        return {(int(match[1]), int(match[2]) * self.policies + int(match[3] or 0)) for match in matches if match}

    def trials(self) -> list[int]:
        """Return the indices of the trials that have a table with training rows."""
        return sorted({trial for trial, _ in self._table_indices("train")})

    @property
    def has_several_trials(self) -> bool:
        """Whether the folder contains trials with different hyperparameter values, because it belongs to a search or to the confirmations
        of a search."""
        is_confirmation = self.root.name == "confirm" and any(self.root.parent.glob("*_search_state.json"))
        return self.search_state.exists() or is_confirmation or len(self.trials()) > 1

    @property
    def is_training_run(self) -> bool:
        """Whether the folder belongs to a run of mode train, and not to a run of mode dev or to a search."""
        try:
            starts = self._saved_meta().get("run") or [{}]
            return starts[0].get("mode", "train") == "train" and not self.has_several_trials
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return not self.has_several_trials

    def table_numbers(self, mode: DataMode = "train", t: int = 0) -> list[int]:
        """Return the numbers of a trial's existing tables (see events.Row), which are the indices of the Sessions if each Session trains
        one policy."""
        return sorted(index for trial, index in self._table_indices(mode) if trial == t)


@dataclass(frozen=True)
class ComparisonPaths:
    """The paths of the files that the comparison of several runs writes to the folder `root`."""

    root: Path

    page = PathDescriptor("compare.html")

    def table(self, ext: str) -> Path:
        return self.root / f"compare_table.{ext}"

    def graph(self, what: str, ext: str, axis: str = "frames") -> Path:
        """Return the path of the graph of a quantity, such as "mean_returns" or "grad_norm", over `axis`.

        If `axis` is "", the file name contains no axis.
        """
        return self.root / f"compare_graph_{what}{f'_vs_{axis}' if axis else ''}.{ext}"


def new_run(data_dir: Path, spec_name: str) -> RunPaths:
    """Create the folder of a new run, and return the paths of the run. Raises OSError if a folder cannot be created."""
    paths = RunPaths(new_folder(data_dir, spec_name), spec_name)
    try:
        paths.make_dirs()
    except OSError:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return paths


def new_comparison(data_dir: Path, out: Path | None = None) -> ComparisonPaths:
    """Create the folder of a new comparison, and return the paths of the comparison. Raises OSError if the folder cannot be created.

    Args: out: the folder to use, which may exist already, or None for a new folder in `data_dir`.
    """
    if out is None:
        return ComparisonPaths(new_folder(data_dir, "compare"))
    out.mkdir(parents=True, exist_ok=True)
    return ComparisonPaths(out)


def new_folder(data_dir: Path, name: str) -> Path:
    """Create and return a new folder whose name ends with the current time. Raises OSError if the folder cannot be created.

    If a folder with the current time in its name exists, the name contains the next free second.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    begin = datetime.now()
    while True:
        root = data_dir / f"{file_stem(name)}_{begin.strftime(_STAMP)}"
        try:
            root.mkdir()
        except FileExistsError:
            begin += timedelta(seconds=1)
        else:
            return root


def parse_folder_time(name: str) -> datetime | None:
    """Return the time in the name of a folder that `new_folder` created, or None if the name contains no time."""
    match = re.fullmatch(f".+_({_STAMP_PATTERN})", name)
    try:
        return datetime.strptime(match[1], _STAMP) if match else None
    except ValueError:  # such as the 31st of February
        return None


def stamped_folders(data_dir: Path, stem: str) -> list[Path]:
    """Return the folders in `data_dir` that `new_folder` created for the name `stem`, oldest first."""
    pattern = re.compile(re.escape(stem) + f"_{_STAMP_PATTERN}")
    return sorted(path for path in data_dir.iterdir() if path.is_dir() and pattern.fullmatch(path.name)) if data_dir.is_dir() else []


def not_a_run_message(folder: Path | str) -> str:
    """Return the error message that a folder is not a run folder, with the reason."""
    if (study := study_in(Path(folder))) is not None:
        return f"'{folder}' is the folder of the study '{study.name}', not of a run; to continue it: FILE {study.name} study@{folder}"
    reason = "has no *_spec.json" if Path(folder).is_dir() else "is a file" if Path(folder).is_file() else "does not exist"
    return f"'{folder}' is not a run folder: it {reason}"


def run_paths_in(folder: Path) -> RunPaths | None:
    """Return the paths of the run in a folder, or None if the folder is not a run folder. A run folder contains a file *_spec.json."""
    specs = sorted((path.name for path in folder.glob("*_spec.json")), key=len)  # the names of trial specs are longer
    return RunPaths(folder, specs[0].removesuffix("_spec.json")) if specs else None


def retro_analyze_paths(folder: Path, spec_name: str) -> RunPaths:
    """Return the paths of the files that retro_analyze writes about a run folder of SLM Lab.

    The files are in a subfolder of the run folder, since SLM Lab uses the same file names.
    """
    return RunPaths(folder / "retro_analyze", spec_name)


def runs_of_spec(data_dir: Path, spec_name: str) -> list[Path]:
    """Return the run folders of the spec `spec_name` in `data_dir`, oldest first."""
    return [path for path in stamped_folders(data_dir, file_stem(spec_name)) if not belongs_to_other_spec(path, spec_name)]


def names_with_runs(data_dir: Path, spec_name: str) -> list[str]:
    """Return the file stems of all specs that have runs and whose names consist of `spec_name` and the values of variables (`${…}`)."""
    pattern = re.compile(f"({re.escape(file_stem(spec_name))}_.+)_{_STAMP_PATTERN}")
    matches = [pattern.fullmatch(path.name) for path in data_dir.iterdir()] if data_dir.is_dir() else []
    return sorted({match[1] for match in matches if match})


def belongs_to_other_spec(folder: Path, spec_name: str) -> bool:
    """Return whether a run folder belongs to a spec other than `spec_name` that has the same file stem.

    For example, the names "a b" and "a+b" both become "a_b".
    """
    try:
        return spec_name not in json.loads(RunPaths(folder, spec_name).spec.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the spec is not written yet, or is damaged, which is reported when it is loaded
        return False


SUFFIX = "_study.json"


@dataclass(frozen=True)
class StudyPaths:
    """The paths of the files of the study `name`, whose folder is `root`."""

    root: Path
    name: str
    results_folder: Path | None = None
    """Folder of the result files, or None for the subfolder "results" of `root`."""

    study = PathDescriptor(f"{{stem}}{SUFFIX}")
    lock = PathDescriptor(".lock")
    """Lock file of the study folder. While a process runs the study, the file is locked and describes the process."""
    runs = PathDescriptor("runs")
    outdated_runs = PathDescriptor("aside")
    log = PathDescriptor("{stem}_study.log")
    """Log file with the messages of the study."""
    report = PathDescriptor("report.html")
    """HTML page with all results of the study."""

    @property
    def stem(self) -> str:
        return file_stem(self.name)

    def lock_of(self, run: str) -> Path:
        """Return the path of the lock file that is locked while a process trains a run of the study.

        The process that trains the run may continue for some seconds after the process of the study was killed.

        Args: run: name of the run's folder.
        """
        return self.root / f".lock_{run}"

    @property
    def results(self) -> Path:
        return self.results_folder or self.root / "results"

    def result(self, run: str) -> Path:
        """Return the path of the result file of a run.

        Args: run: name of the run's folder.
        """
        return self.results / f"{run}.json"

    def table(self, ext: str) -> Path:
        return self.root / f"{self.stem}_study_table.{ext}"

    def graph(self, what: str, ext: str) -> Path:
        return self.root / "graph" / f"{self.stem}_study_graph_{what}.{ext}"


@dataclass(frozen=True)
class StudyRunFolder:
    """The folder of one run of a study, which is a subfolder of the study's folder `runs`."""

    root: Path

    identity = PathDescriptor("study_run.json")
    """File that identifies the run by its entry, env, random_seed, digest, settings and spec_version."""
    log = PathDescriptor("log.txt")
    """Log file with the output of the process that trains the run."""

    def run_folders(self) -> list[RunPaths]:
        """Return the paths of the run folders inside this folder, oldest first. A run of a study has several run folders if an earlier
        start of the run failed."""
        runs = (run_paths_in(folder) for folder in sorted(self.root.iterdir()) if folder.is_dir())
        return [paths for paths in runs if paths is not None]


def run_name(run: StudyRun) -> str:
    """Return the name of the folder and of the result file of a study's run. The name does not depend on the run's position in the
    study."""
    return f"{file_stem(run.entry)}_{file_stem(run.env)}_seed{run.random_seed}_{run.digest[:8]}"


def study_in(folder: Path) -> StudyPaths | None:
    """Return the paths of the study in a folder, or None if the folder contains no study."""
    files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    return StudyPaths(folder, files[0].name.removesuffix(SUFFIX)) if files else None


def find_study(where: str, name: str, data_dir: Path) -> StudyPaths:
    """Return the paths of the study in the folder `where` or, if `where` is "latest", of the latest study with the name `name`.

    Raises UserError if there is no such study.

    Args: where: path of the folder of a study, name of such a folder in `data_dir`, or "latest".
    """
    if where == "latest":
        stem = file_stem(name)
        folders = [path for path in stamped_folders(data_dir, stem) if (path / f"{stem}{SUFFIX}").is_file()]
        if not folders:
            raise UserError(f"no study '{name}' in {data_dir}; start one first: FILE {name} study")
        return StudyPaths(folders[-1], name)
    for folder in (Path(where), data_dir / where):
        paths = study_in(folder)
        if paths is not None:
            if paths.stem != file_stem(name):
                raise UserError(f"{folder} is a study of '{paths.name}', not of '{name}'")
            return StudyPaths(folder, name)
    what = f"has no *{SUFFIX}" if any(path.is_dir() for path in (Path(where), data_dir / where)) else "does not exist"
    raise UserError(f"'{where}' is not the folder of a study: it {what}")


def study_start_info(paths: StudyPaths) -> dict[str, Any]:
    """Return a dict with the version of the study file's format, and with the source and the `--set` arguments of the last start.

    Returns {} if the study has results but no study file. Raises UserError if the study file cannot be read.
    """
    try:
        return dict(json.loads(paths.study.read_text(encoding="utf-8"))["$study"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{paths.study} cannot be read as a study: {error}") from None
