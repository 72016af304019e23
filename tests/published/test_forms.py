"""Tests that every form of SLM Lab's published specs is accepted unchanged, builds and trains."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.spec.load.loader import load_with_notices
from slm_lab.spec.models.spec import Spec
from tests.published.forms import FORMS


def written(name: str, folder: Path, frames: int | None = None) -> Path:
    """Write the spec of a form with the given number of frames to a file."""
    raw = FORMS[name].raw()
    if frames is not None:
        raw["env"]["max_frame"] = frames
    path = folder / "theirs.json"
    path.write_text(json.dumps({"theirs": raw}), encoding="utf-8")
    return path


def enough(spec: Spec) -> int:
    """Return a number of frames in which each Session trains at least twice."""
    algorithm, envs = spec.agent.algorithm, spec.env.num_envs
    if not algorithm.learns:
        return 200
    if not algorithm.on_policy:
        steps = spec.agent.training_start + 40 * algorithm.training_frequency + 40 * envs
        if spec.agent.net is not None and spec.agent.net.recurrent:  # a batch of sequences
            steps += 32 * spec.agent.net.seq_len  # type: ignore[attr-defined]
        frames: int = steps
    elif spec.agent.memory.episodes:
        longest = {"CartPole-v1": 120, "LunarLander-v3": 400, "Acrobot-v1": 500}.get(spec.env.name, 200)
        frames = 3 * spec.agent.rollout_len * longest
    else:
        frames = 3 * spec.agent.rollout_len * envs
    return frames * (spec.meta.max_session if spec.meta.distributed else 1)


def most_updates(folder: Path) -> int:
    """Return the greatest number of optimizer steps in the tables below a folder."""
    rows: list[dict[str, Any]] = [row for table in folder.rglob("*session_df_train.csv") for row in csv.DictReader(table.open())]
    return max((int(row["opt_step"] or 0) for row in rows), default=0)


def test_there_are_enough() -> None:
    assert len(FORMS) >= 60


@pytest.mark.parametrize("name", FORMS)
def test_is_valid(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The spec is recognised as written for SLM Lab, and the last line of `check` lists the differences."""
    path = written(name, tmp_path)
    loaded = load_with_notices(str(path), "theirs")
    if FORMS[name].net is not None:
        assert loaded.differences is not None
        assert main(["check", str(path)]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"written for SLM Lab; differs here: {', '.join(loaded.differences)} (docs/from_slm_lab.md)"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FORMS)
def test_builds_and_trains(name: str, tmp_path: Path) -> None:
    """`check --build` passes, and mode dev makes at least two updates."""
    if "atari" in name or "atari" in FORMS[name].env:
        pytest.importorskip("ale_py")
    spec = load_with_notices(str(written(name, tmp_path)), "theirs").specs[0]
    frames = enough(spec)
    path = written(name, tmp_path, frames)
    assert main(["check", str(path), "--build"]) == 0
    small = ["--set", f"meta.log_frequency={frames // 2}"]
    assert main([str(path), "theirs", "dev", *small, "--data-dir", str(tmp_path / "data")]) == 0
    assert most_updates(tmp_path) >= 2 or not spec.agent.algorithm.learns
