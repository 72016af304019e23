"""Named models: policies that were exported under a name, and the pretrained agents of this package.

models/{name}/         below the data folder, or slm_lab/pretrained/{name}/ for a pretrained agent
  model.safetensors    weights, statistics of the observation normaliser, spaces, and the header of the checkpoint
  spec.json            the spec that was trained
  policy.onnx          the exported policy, or policy.pt2 for torch.export.load
  README.md            the model card
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from slm_lab.experiment.files.lock import in_use, mark_in_use
from slm_lab.experiment.files.paths import DataMode, PathDescriptor, RunPaths, run_paths_in, study_in
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.files.tensor_file import SUFFIX, load_values
from slm_lab.experiment.plan import UserError
from slm_lab.spec.load.files import spec_names
from slm_lab.spec.report import nearest_hint

WEIGHTS, SPEC, CARD = f"model{SUFFIX}", "spec.json", "README.md"
POLICIES = ("policy.onnx", "policy.pt2")
FILES = (WEIGHTS, SPEC, *POLICIES, CARD)
"""Names of all files that the folder of a named model can contain."""
PRETRAINED = Path(__file__).parents[2] / "pretrained"
"""Folder of the pretrained agents that this package contains. The folder may be read-only."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


_LEFT_OVER_SECONDS = 3_600.0
"""Age in seconds after which an unused temporary folder is deleted. A newer temporary folder is kept, since on a file system without locks
the folder may be in use."""


@dataclass(frozen=True)
class ModelPaths(RunPaths):
    """The paths of the files of a named model. A named model can be read like a run with one Session and one checkpoint."""

    spec = PathDescriptor(SPEC)
    model_dir = PathDescriptor("")
    weights = PathDescriptor(WEIGHTS)

    @cached_property
    def checkpoint_dir(self) -> Location:
        return self.root

    def checkpoint(self, s: int, which: str | int, t: int = 0) -> Location:
        """Return the path of the weights for Session 0 and the checkpoint "best". For other arguments, return a path that does not
        exist."""
        return self.weights if (s, which) == (0, "best") else self.root / f"s{s}_{which}{SUFFIX}"

    def table_numbers(self, mode: DataMode = "train", t: int = 0) -> list[int]:
        return [0]

    @property
    def has_several_trials(self) -> bool:
        return False

    @property
    def policy(self) -> Path | None:
        """Path of the exported policy, or None if the model has no exported policy."""
        return next((self.root / name for name in POLICIES if (self.root / name).is_file()), None)


@dataclass(frozen=True)
class PretrainedPaths(ModelPaths):
    """The paths of the files of a pretrained agent of this package."""

    data_dir: Path

    @property
    def output_dir(self) -> Path:
        """Folder for the files that are written about the agent. This folder is below the data folder, since the folder of the package may
        be read-only."""
        return self.data_dir / "pretrained" / self.root.name

    model_dir = output_dir


def models_dir(data_dir: Path) -> Path:
    return data_dir / "models"


def model_in(folder: Path) -> ModelPaths | None:
    """Return the paths of the named model in a folder, or None if the folder contains no named model. Raises SpecError if the saved spec of
    the model is damaged."""
    if not all((folder / name).is_file() for name in (WEIGHTS, SPEC)):
        return None
    return ModelPaths(folder, spec_names(folder / SPEC)[0])


def find_model(where: str | Path, data_dir: Path) -> ModelPaths | None:
    """Return the paths of a named model or a pretrained agent, or None if `where` refers to neither of them.

    If `where` is the folder of a run, search or study, None is returned. If `where` is a name, a model of the user takes precedence over a
    pretrained agent with the same name.

    Args: where: path of the folder of a model, path of such a folder relative to `data_dir`, or name of a model or pretrained agent.
    """
    for folder in (Path(where), data_dir / where):
        if (model := model_in(folder)) is not None:
            return model
        if run_paths_in(folder) or study_in(folder):
            return None
    return model_in(models_dir(data_dir) / where) or find_pretrained(str(Path(where)), data_dir)


def find_pretrained(name: str, data_dir: Path) -> PretrainedPaths | None:
    """Return the paths of the pretrained agent `name`, or None if this package contains no pretrained agent with this name."""
    if not _NAME.fullmatch(name) or (model := model_in(PRETRAINED / name)) is None:
        return None
    return PretrainedPaths(model.root, model.spec_name, data_dir)


def check_no_model(where: str | Path, data_dir: Path) -> None:
    """Raise UserError if `where` is the name or the folder of a named model, since a named model has no table of training rows.

    The error message contains the folder of the run from which the model was exported, if this folder exists.
    """
    if not where or where == "latest" or (model := find_model(where, data_dir)) is None:
        return
    if isinstance(model, PretrainedPaths):
        raise UserError(f"'{where}' is a pretrained agent: it has no rows and no training state; expected the folder of a run")
    source = ""
    with suppress(OSError, ValueError):
        source = str(load_values(model.weights).get("source", "")).partition("/")[0]
    run = data_dir / source
    origin = f" from which it was exported: {run}" if source and run.is_dir() else ""
    raise UserError(f"{model.root} is a model: it has no rows and no training state; expected the folder of the run{origin}")


def model_names(data_dir: Path) -> list[str]:
    """Return the names of all models below the data folder, sorted."""
    return _model_folder_names(models_dir(data_dir))


def pretrained_names() -> list[str]:
    """Return the names of all pretrained agents, sorted."""
    return _model_folder_names(PRETRAINED)


def _model_folder_names(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    return []


def similar_name_hint(where: str, data_dir: Path) -> str:
    """Return a suggestion for an error message ("did you mean …?") with the model name that is most similar to `where`, or "" if no name is
    similar."""
    return nearest_hint(Path(where).name, {*model_names(data_dir), *pretrained_names()})


def get_model(name: str, data_dir: Path) -> ModelPaths:
    """Return the paths of the named model `name` in the data folder. Raises UserError if this model does not exist."""
    check_name(name)
    if (model := model_in(models_dir(data_dir) / name)) is None:
        if find_pretrained(name, data_dir) is not None:
            raise UserError(f"'{name}' is a pretrained agent of slm_lab; register it first: slm-lab export {name} --as NAME")
        raise UserError(f"no model '{name}' in {models_dir(data_dir)}{similar_name_hint(name, data_dir)}; slm-lab models lists them")
    return model


def check_name(name: str) -> None:
    """Raise UserError if `name` is not a valid name for a model."""
    if not _NAME.fullmatch(name) or ".." in name or name == "latest":
        rule = "expected letters, digits, '.', '_' and '-', at most 96, the first a letter or digit, without '..'; 'latest' is reserved"
        raise UserError(f"invalid name of a model {name!r}; {rule}")


def check_name_available(name: str, data_dir: Path, replace: bool) -> None:
    """Raise UserError if `name` cannot be used for a new model, because the name is invalid or already used.

    Args: replace: whether the new model may replace a model with the same name.
    """
    check_name(name)
    if run_paths_in(data_dir / name) or study_in(data_dir / name):
        raise UserError(f"the name '{name}' is taken: {data_dir / name} is a folder of results, which takes precedence over a name")
    if (models_dir(data_dir) / name).exists() and not replace:
        raise UserError(f"the model '{name}' exists in {models_dir(data_dir)}; choose another name, or replace it (--replace)")


@contextmanager
def new_model(name: str, data_dir: Path, replace: bool) -> Iterator[Path]:
    """Context manager that yields a temporary folder for the files of a new model.

    If the with-block succeeds, the temporary folder becomes the folder of the model `name`. If the with-block fails, the temporary folder
    is deleted.

    Args: replace: whether to replace an existing model with this name. Other files in the folder of the existing model are kept.

    Raises UserError if the name cannot be used, and OSError if a file or folder cannot be written.
    """
    check_name_available(name, data_dir, replace)
    folder = models_dir(data_dir) / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_old_temporaries(folder.parent)
    temporary = folder.with_name(f".{uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        with mark_in_use(temporary):
            yield temporary
        if replace and folder.exists():
            _replace(folder, temporary)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_old_temporaries(models: Path) -> None:
    """Delete the temporary folders that killed processes have left behind. Only folders that are old and not in use are deleted."""
    for path in models.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_SECONDS and not in_use(path):
                shutil.rmtree(path, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Replace the folder of a model by the folder `new`. If the replacement fails, the old folder of the model is restored."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    for path in old.iterdir():
        if path.name not in FILES:
            os.replace(path, folder / path.name)
    shutil.rmtree(old, ignore_errors=True)
