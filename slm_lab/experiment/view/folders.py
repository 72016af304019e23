"""Find the folders of runs in the data folder that `slm-lab view` shows, and decide which files the server may read.

A request to the server names a folder by its path relative to the data folder. Files outside the data folder are never read, not even
through a symbolic link.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slm_lab.experiment.files.paths import SUFFIX, RunPaths, StudyPaths, StudyRunFolder

Kind = Literal["run", "search", "study"]
_READ = ("", "info", "log", "video")
"""Subfolders of a run folder whose files the server may send. The name "" means the run folder itself."""
_NOT_READ = ("graph", "model")
_SPEC, _SEARCH = "_spec.json", "_search_state.json"


class NotServed(Exception):
    """Raised if the server cannot answer a request.

    Args: text: message with the reason, which is shown to the user. status: HTTP status of the response.
    """

    def __init__(self, text: str, status: int = 404) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class FoundFolder:
    """The folder of a run, search or study.

    The attribute `stem` is the name of the spec or study in the form that is used in file names.
    """

    folder: Path
    kind: Kind
    stem: str

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder, self.stem)

    @property
    def study(self) -> StudyPaths:
        return StudyPaths(self.folder, self.stem)


class DataFolder:
    """A data folder, which contains the folders of runs, searches and studies.

    The attribute `root` is the real path of the data folder, without symbolic links.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the folders in the data folder, except hidden folders and links that lead out of the data folder."""
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.is_dir() and not entry.name.startswith(".") and not (entry.is_symlink() and self.is_outside(Path(entry.path))):
                        yield entry.name
        except OSError:  # the data folder was deleted
            return

    def is_outside(self, path: Path) -> bool:
        """Return whether the real path of a file, after following symbolic links, is outside the data folder."""
        return not path.resolve().is_relative_to(self.root)

    def folder(self, path: str) -> Path:
        """Return the folder with the path `path`, which is relative to the data folder and has `/` between names.

        Raises NotServed if the folder does not exist.
        """
        names = path.split("/")
        if "\0" in path or any(name in ("", ".", "..") for name in names):
            raise NotServed(f"'{path}' is not a path of a run folder")
        folder = self.root.joinpath(*names)
        try:
            if folder.is_dir() and not self.is_outside(folder):
                return folder
        except OSError:  # the name is too long, or there is no permission
            pass
        raise NotServed(f"there is no folder '{path}' in {self.root}; it may have been deleted")

    def find(self, path: str) -> FoundFolder:
        """Return the run, search or study in the folder `path`, which is relative to the data folder.

        Raises NotServed if the folder does not exist, contains no run, search or study, or contains files that are refused by `check`.
        """
        folder = self.folder(path)
        found = recognise_folder(folder)
        if found is None:
            raise NotServed(f"'{path}' is not the folder of a run, search or study: it has no *{_SPEC} and no *{SUFFIX}")
        self.check(folder)
        return found

    def check(self, folder: Path, names: tuple[str, ...] = _READ) -> None:
        """Raise NotServed if a subfolder of a run folder contains an unsafe link or a special file.

        A link is unsafe if its target is outside the data folder. A special file is neither a regular file nor a folder.

        Args: names: names of the subfolders of `folder` that are checked.
        """
        for name in names:
            self._check(folder / name if name else folder)

    def _check(self, folder: Path) -> None:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        except OSError as error:
            raise NotServed(f"{folder.name} cannot be read: {error.strerror}", 403) from None
        for entry in entries:
            if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.name in _NOT_READ:
                continue
            if not entry.is_symlink() or (Path(entry.path).exists() and not entry.is_file() and not entry.is_dir()):
                raise NotServed(f"{entry.name} in {folder.name} is neither a file nor a folder; this folder is not shown", 403)
            if self.is_outside(Path(entry.path)):
                raise NotServed(f"{entry.name} in {folder.name} is a link out of the data folder; this folder is not shown", 403)

    def file(self, found: FoundFolder, folders: tuple[str, ...], name: str, suffixes: tuple[str, ...]) -> Path:
        """Return the path of the file `name` of a run. The subfolders `folders` of the run folder are searched in this order.

        Raises NotServed if the file does not exist, or if `name` does not end in one of `suffixes`.
        """
        if name.endswith(suffixes) and os.path.basename(name) == name and "\0" not in name:
            for path in (found.folder / folder / name for folder in folders):
                if path.is_file() and not self.is_outside(path):
                    return path
        raise NotServed(f"there is no file '{name}' in {found.folder.name}")


def recognise_folder(folder: Path) -> FoundFolder | None:
    """Return the run, search or study in a folder, recognised by the names of the files in the folder.

    Returns None if the folder contains no run, search or study.
    """
    try:
        names = sorted(os.listdir(folder), key=len)
    except OSError:
        return None
    for name in names:
        if name.endswith(SUFFIX):
            return FoundFolder(folder, "study", name.removesuffix(SUFFIX))
    specs = [name for name in names if name.endswith(_SPEC)]  # the names of trial specs are longer
    if not specs:
        return recognise_folder(folder / "retro_analyze") if "retro_analyze" in names else None
    stem = specs[0].removesuffix(_SPEC)
    return FoundFolder(folder, "search" if f"{stem}{_SEARCH}" in names else "run", stem)


def begun_study_runs(study: StudyPaths) -> Iterator[tuple[str, RunPaths]]:
    """For each run of a study that has begun, yield the name of the run and the RunPaths of its last run folder."""
    try:
        folders = sorted(study.runs.iterdir())
    except OSError:
        return
    for folder in folders:
        try:
            starts = StudyRunFolder(folder).run_folders()
        except OSError:
            continue
        if starts:
            yield folder.name, starts[-1]
