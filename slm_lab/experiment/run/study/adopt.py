"""Match finished run folders of `train` to the runs of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.resolve import completed
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.study_file import differing, settings
from slm_lab.spec.models.study import Study, StudyRun


def key_of(run: StudyRun) -> tuple[str, int]:
    """Return digest and random_seed, which identify a run."""
    return run.digest, run.random_seed


def adopted_runs(study: Study, patterns: Sequence[str]) -> dict[tuple[str, int], Path]:
    """Return key → run folder for the folders that match patterns of --adopt. Raises UserError for a folder that is no run of the study."""
    found: dict[tuple[str, int], Path] = {}
    for pattern in patterns:
        folders = [Path(word) for word in sorted(glob(pattern)) if Path(word).is_dir()]
        if not folders:
            raise UserError(f"--adopt: no folder matches '{pattern}'")
        for folder in folders:
            found[_adoptable(folder, study)] = folder
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences: "agent.algorithm.gamma: 0.98 → 0.99"."""
    paths = [*before, *(path for path in after if path not in before)]
    return [f"{path}: {_shown(before.get(path))} → {_shown(after.get(path))}" for path in paths if before.get(path) != after.get(path)]


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value, ensure_ascii=False)


def _adoptable(folder: Path, study: Study) -> tuple[str, int]:
    """Return the key of the run in a folder. Raises UserError if the run is not one of the study's or has not finished."""
    from slm_lab.experiment.report.run import load_run

    run = load_run(folder)
    if run.status != "done" or run.mode != "train":
        raise UserError(
            f"--adopt: {folder} cannot be adopted: {'it is a run of mode dev' if run.mode == 'dev' else f'its status is {run.status}'}"
        )
    spec = load_spec(run.paths.spec, run.name)
    own, seed = settings(spec), spec.meta.random_seed
    alike = [one for one in study.runs if one.spec.name == spec.name] or list(study.runs)
    first = {one.digest: one.spec for one in alike}
    saved = {digest: completed(spec) for digest, spec in first.items()}  # a spec without a net is saved with the net for its env
    wanted = {name: settings(one) for name, one in saved.items()}
    for one in alike:
        if one.random_seed == seed and not differing(own, wanted[one.digest], saved[one.digest]):
            return key_of(one)
    nearest = min(alike, key=lambda one: (len(changes(own, wanted[one.digest])), one.random_seed != seed))
    listed = changes(own, wanted[nearest.digest]) or [
        f"meta.random_seed: {seed}; the study has {', '.join(str(one.random_seed) for one in alike if one.digest == nearest.digest)}"
    ]
    near = f"the nearest is {nearest.entry}, {nearest.env}, which differs in {', '.join(listed)}"
    raise UserError(f"--adopt: {folder} is not a run of the study; {near}")
