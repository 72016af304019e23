"""Helpers that write result files of runs with made-up values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slm_lab.experiment.files.paths import run_name
from slm_lab.experiment.report.study_result import VERSION
from slm_lab.lib.files import with_checksum
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.models.study import StudyRun


def write(folder: Path, run: StudyRun, train: Mapping[str, Sequence[Any]], **more: Any) -> Path:
    """Write the result of a run with one Session whose training table is `train`."""
    content = {
        "version": VERSION,
        "entry": run.entry,
        "env": run.env,
        "random_seed": run.random_seed,
        "digest": run.digest,
        "settings": dict(run.settings),
        "spec_version": SPEC_VERSION,
        "status": "done",
        "spec_name": run.spec.name,
        "policies": 1,
        "seconds": 1.0,
        "versions": {},
        "git": None,
        "processor": "a processor",
        "sessions": {"0": "done"},
        "failures": {},
        "train": {"0": train},
        "eval": {},
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{run_name(run)}.json"
    file.write_text(json.dumps(with_checksum(content)), encoding="utf-8")
    return file
