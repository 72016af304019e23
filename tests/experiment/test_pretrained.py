"""Tests of the pretrained agents in the package: their returns, how they are found, and that their folder is never written to."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import slm_lab
from bench.pretrained import MAX_BYTES, best_seeds, finished_run
from slm_lab.cli import main
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy
from slm_lab.experiment.deploy.export import export_training
from slm_lab.experiment.files.find import find_training, find_weights
from slm_lab.experiment.files.named_model import CARD, PRETRAINED, SPEC, WEIGHTS, find_model, pretrained_names
from slm_lab.experiment.files.tensor_file import load_values
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.models.spec import Spec


@cache
def lowest_scores() -> dict[str, float | None]:
    """Return the lower end of the interval of each spec's score in docs/BENCHMARKS.md, by the spec's name."""
    return {name: best.row.score.low for name, best in best_seeds().items() if best.row.score is not None}


@pytest.fixture
def files() -> dict[Path, bytes]:
    """Return the path and the content of each file of the agent that the tests use."""
    return {path: path.read_bytes() for path in (PRETRAINED / "ppo_cartpole").rglob("*")}


@pytest.mark.parametrize("name", pretrained_names())
def test_the_files_of_an_agent(name: str) -> None:
    assert sorted(path.name for path in (PRETRAINED / name).iterdir()) == [CARD, WEIGHTS, SPEC]
    assert (PRETRAINED / name / WEIGHTS).stat().st_size <= MAX_BYTES
    saved, low = load_values(PRETRAINED / name / WEIGHTS), lowest_scores()[name]
    assert low is not None
    assert saved["current_return"] >= low
    assert f"at frame {saved['frame']:,})" in (PRETRAINED / name / CARD).read_text(encoding="utf-8")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", pretrained_names())
def test_an_agent_reaches_its_return(name: str, tmp_path: Path) -> None:
    """The agent plays 20 episodes; the margin is four standard errors of their mean."""
    saved = load_values(PRETRAINED / name / WEIGHTS)
    played = enjoy(find_training(name, None, tmp_path), EnjoyOptions(episodes=20), Plan(data_dir=tmp_path))
    assert fmean(played.returns) >= saved["current_return"] - 4 * saved["current_return_se"] * math.sqrt(100 / 20)


def test_every_agent_belongs_to_the_table() -> None:
    assert set(pretrained_names()) <= lowest_scores().keys()
    assert "ppo_cartpole" in pretrained_names()


def test_results_are_written_below_the_data_folder(
    tmp_path: Path, files: dict[Path, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["enjoy", "ppo_cartpole", "--video", "--episodes", "1"]) == 0
    assert main(["export", "ppo_cartpole", "--format", "torch"]) == 0
    assert main(["export", "ppo_cartpole", "--as", "mine"]) == 0
    folder = tmp_path / "data/pretrained/ppo_cartpole"
    assert [path.suffix for path in (folder / "video").iterdir()] == [".mp4"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["policy.md", "policy.pt2"]
    assert (tmp_path / "data/models/mine" / WEIGHTS).is_file()
    assert {path: path.read_bytes() for path in (PRETRAINED / "ppo_cartpole").rglob("*")} == files
    capsys.readouterr()
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("pretrained agents:") > next(i for i, line in enumerate(lines) if line.startswith("mine"))


def test_own_results_take_precedence(tmp_path: Path) -> None:
    found = find_model("ppo_cartpole", tmp_path)
    assert found is not None
    assert found.root == PRETRAINED / "ppo_cartpole"
    shutil.copytree(PRETRAINED / "ppo_cartpole", tmp_path / "models/ppo_cartpole")
    found = find_model("ppo_cartpole", tmp_path)
    assert found is not None
    assert found.root == tmp_path / "models/ppo_cartpole"
    assert find_model("../pretrained/ppo_cartpole", tmp_path) is None


def test_an_agent_is_loaded_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = slm_lab.load_agent("ppo_cartpole")
    falling = np.array([[0.0, 0.0, 0.15, 1.0], [0.0, 0.0, -0.15, -1.0]], np.float32)
    assert agent.act(falling, deterministic=True)[0].tolist() == [1, 0]
    path, _ = find_weights("ppo_cartpole", tmp_path, None)
    assert path == PRETRAINED / "ppo_cartpole" / WEIGHTS


def test_a_similar_name_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["enjoy", "ppo_cartpol", "--data-dir", str(tmp_path)]) == 2
    assert "did you mean 'ppo_cartpole'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["push", "ppo_cartpole", "me/x"], ["verify", "ppo_cartpole"], ["doctor", "ppo_cartpole"]])
def test_commands_that_need_a_run_or_a_registered_model(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--data-dir", str(tmp_path)]) == 2
    assert "'ppo_cartpole' is a pretrained agent" in capsys.readouterr().err


def test_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        export_training(find_training("ppo_cartpole", None, tmp_path / "file"), "torch")


@pytest.mark.usefixtures("no_baseline")
def test_the_run_of_a_study_is_used_only_if_it_is_finished(tmp_path: Path, make_spec: Callable[..., Spec]) -> None:
    assert finished_run(tmp_path / "missing") is None
    paths = Trial(make_spec(), data_dir=tmp_path / "run").run().paths
    assert finished_run(tmp_path / "run") == paths
    stopped = shutil.copytree(paths.root, tmp_path / "run/a_stopped_run")  # an earlier start of the same run
    (stopped / paths.trial_metrics(0).relative_to(paths.root)).unlink()
    assert finished_run(tmp_path / "run") == paths
    shutil.rmtree(paths.root)
    assert finished_run(tmp_path / "run") is None


def test_an_agent_is_used_without_the_package_of_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: None if name == "envpool" else find_spec(name, *package))
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("mujoco")
    assert np.abs(slm_lab.load_agent("ppo_mujoco_hopper").act(np.zeros((1, 11)), deterministic=True)[0]).max() <= 1.0
    assert main(["export", "ppo_mujoco_hopper", "--as", "mine"]) == 0
    capsys.readouterr()
    assert main(["models"]) == 0
    assert "needs the package" not in capsys.readouterr().out
    assert main(["enjoy", "ppo_mujoco_hopper", "--episodes", "1"]) == 2
    assert "env.backend: needs the package envpool" in capsys.readouterr().err
    assert main(["enjoy", "ppo_mujoco_hopper", "--episodes", "1", "-s", "env.backend=auto"]) == 0
