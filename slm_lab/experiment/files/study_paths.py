"""The files of a study.

{name}_{time}/
  {name}_study.json          the study as it was run last
  runs/{run}/                study_run.json, log.txt, and the run folder as `train` makes it; a second one after a failure
  results/{run}.json         what the tables and figures are made from
  aside/                     runs of entries that have changed since
  {name}_study_table.md …    the comparison
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.paths import FileIn, RunPaths, file_stem, run_paths_in, stamped_folders
from slm_lab.experiment.plan import UserError
from slm_lab.spec.models.study import StudyRun

SUFFIX = "_study.json"


@dataclass(frozen=True)
class StudyPaths:
    """The files of the study `name` in the folder `root`."""

    root: Path
    name: str
    kept: Path | None = None
    """Where the results are, if not in the folder of the study."""

    study = FileIn(f"{{stem}}{SUFFIX}")
    lock = FileIn(".lock")
    """Locked while a process runs the study; says which."""
    runs = FileIn("runs")
    aside = FileIn("aside")
    page = FileIn("{stem}_study.html")

    @property
    def stem(self) -> str:
        return file_stem(self.name)

    def lock_of(self, run: str) -> Path:
        """Locked while a process trains a run: it may outlive a killed study for some seconds."""
        return self.root / f".lock_{run}"

    @property
    def results(self) -> Path:
        return self.kept or self.root / "results"

    def result(self, run: str) -> Path:
        """The result of a run, by the name of its folder."""
        return self.results / f"{run}.json"

    def table(self, ext: str) -> Path:
        return self.root / f"{self.stem}_study_table.{ext}"

    def graph(self, what: str, ext: str) -> Path:
        return self.root / "graph" / f"{self.stem}_study_graph_{what}.{ext}"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run of a study below `runs`."""

    root: Path

    identity = FileIn("study_run.json")
    """Which run it is: entry, env, random_seed, digest, settings and spec_version."""
    log = FileIn("log.txt")
    """What the run would print on the screen."""

    def starts(self) -> list[RunPaths]:
        """Return the run folders in it, oldest first: more than one if an earlier one failed."""
        found = (run_paths_in(folder) for folder in sorted(self.root.iterdir()) if folder.is_dir())
        return [paths for paths in found if paths is not None]


def run_name(run: StudyRun) -> str:
    """Return the name of a run's folder and of its result file, which does not depend on the place of the run in the study."""
    return f"{file_stem(run.entry)}_{file_stem(run.env)}_seed{run.random_seed}_{run.digest[:8]}"


def study_in(folder: Path) -> StudyPaths | None:
    """Return the paths of the study in a folder; None if it is not the folder of a study."""
    found = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    return StudyPaths(folder, found[0].name.removesuffix(SUFFIX)) if found else None


def find_study(where: str, name: str, data_dir: Path) -> StudyPaths:
    """Return the study in a folder (as given, or under the data folder), or the latest one of this name. Raises UserError."""
    if where == "latest":
        stem = file_stem(name)
        found = [path for path in stamped_folders(data_dir, stem) if (path / f"{stem}{SUFFIX}").is_file()]
        if not found:
            raise UserError(f"no study '{name}' in {data_dir}; start one first: FILE {name} study")
        return StudyPaths(found[-1], name)
    for folder in (Path(where), data_dir / where):
        paths = study_in(folder)
        if paths is not None:
            if paths.stem != file_stem(name):
                raise UserError(f"{folder} is a study of '{paths.name}', not of '{name}'")
            return StudyPaths(folder, name)
    what = f"has no *{SUFFIX}" if any(path.is_dir() for path in (Path(where), data_dir / where)) else "does not exist"
    raise UserError(f"'{where}' is not the folder of a study: it {what}")


def about_study(paths: StudyPaths) -> dict[str, Any]:
    """Return version, source and `--set` arguments of the last start of a study; {} if there are only its results.

    Raises UserError if its file cannot be read.
    """
    try:
        return dict(json.loads(paths.study.read_text(encoding="utf-8"))["$study"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{paths.study} cannot be read as a study: {error}") from None
