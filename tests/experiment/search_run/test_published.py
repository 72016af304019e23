"""Tests of the searches in SLM Lab's published specs, which are read from $SLM_LAB_SPECS, a checkout's slm_lab/spec folder."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.spec.compat.env_ids import unavailable_reason
from slm_lab.spec.load.files import parse_file
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.search import parse_search
from slm_lab.spec.report import SpecError
from tests.experiment.commands import ROOT

FOLDER = os.environ.get("SLM_LAB_SPECS")
FRAMES = 2000


def searches() -> Iterator[tuple[Path, str]]:
    """Yield the published specs with a search block."""
    for file in sorted(path for path in Path(FOLDER).rglob("*") if path.suffix in (".json", ".yaml")) if FOLDER else []:
        for name, body in parse_file(file).items():
            if isinstance(body, dict) and body.get("search"):
                yield file, name


def variables(file: Path, name: str) -> list[str]:
    """Return assignments of the `${...}` in a spec."""
    env = "ALE/Pong-v5" if "atari" in f"{file.stem} {name}" else "HalfCheetah-v5"
    found = set(re.findall(r"\$\{(\w+)\}", json.dumps(parse_file(file)[name])))
    return [f"{variable}={env if variable == 'env' else 1_000_000}" for variable in sorted(found)]


def short(file: Path, name: str) -> list[str]:
    """Return assignments for 2 trials of 2,000 frames, or of more if 2,000 are too few to learn. Raises SpecError if none are valid."""
    frames = FRAMES
    while True:
        sets = [*variables(file, name), f"env.max_frame={frames}", "meta.max_trial=2", "meta.max_session=1"]
        try:
            load_spec(file, name, sets)
        except SpecError as error:
            if "nothing would be learned" not in str(error) or frames > 50 * FRAMES:
                raise
            frames *= 2
        else:
            return sets


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="$SLM_LAB_SPECS is not set")
@pytest.mark.parametrize(("file", "name"), [pytest.param(*one, id=f"{one[0].stem}-{one[1]}") for one in searches()])
def test_two_trials(file: Path, name: str, tmp_path: Path) -> None:
    """The search block is valid; if the whole spec is valid and its env is installed, two trials run without an error."""
    if not parse_search(parse_file(file)[name]["search"]):
        pytest.skip("nothing is searched")
    invalid, spec = "", None
    try:
        spec = load_spec(file, name, variables(file, name))
    except SpecError as error:
        invalid = str(error)
    assert "\n  search." not in invalid
    if spec is None:
        pytest.skip(invalid)
    if reason := unavailable_reason(spec.env.name):
        pytest.skip(reason)
    words = [word for one in short(file, name) for word in ("--set", one)]
    command = [sys.executable, str(ROOT / "run_lab.py"), str(file), name, "search", *words, "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with RunPaths(folder, spec.name).experiment_df.open(newline="") as table:
        rows = list(csv.DictReader(table))
    status = [row["status"] for row in rows]
    assert len(status) == 2
    assert set(status) <= {"finished", "stopped"}  # stopped early by the spec's own scheduler
    assert "finished" in status
