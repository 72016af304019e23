"""Tests of the state file of a search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.run.search.search import next_commands


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = SearchState("final_strength", -1.5, True)
    state.trials = [
        TrialState(0, {"a.b": [1, 2]}, "finished", frame=5, metric=2.0, metrics={"strength": None}),
        TrialState(1, {"a.b": "x"}),
    ]
    state.reports = [(0, 5, 2.0)]
    state.proposer = {"sampler": b"\x00\xff", "rng": {"state": 2**100}, "seen": {1: (2.0, float("inf"))}, "$odd": None}
    state.save(tmp_path / "state.json")
    assert SearchState.load(tmp_path / "state.json") == state
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("content", ["", "{}", '{"version": 99}', '{"version": 1, "unknown": 2}', "[1]"])
def test_a_file_that_cannot_be_used_is_a_user_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json"):
        SearchState.load(tmp_path / "state.json")


def test_the_file_is_json(tmp_path: Path) -> None:
    SearchState("strength", None, False).save(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text())["metric"] == "strength"


def test_only_commands_that_work_are_named(tmp_path: Path) -> None:
    """The summary names only commands that work: confirming needs an ended trial, and playing needs its checkpoint."""
    paths = RunPaths(tmp_path, "small")
    paths.make_dirs()
    paths.session_df(0).write_text("frame\n")
    state = SearchState("strength", None, False, [TrialState(0, {}, "running", metric=2.0)])
    paths.checkpoint(0, "best").write_bytes(b"")
    assert next_commands(state, paths) == []
    state.trials[0].status = "stopped"
    assert [line.split()[0] for line in next_commands(state, paths)] == ["play", "confirm:"]
    paths.checkpoint(0, "best").unlink()
    assert [line.split()[0] for line in next_commands(state, paths)] == ["confirm:"]
    state.confirm = 3
    assert next_commands(state, paths) == []
