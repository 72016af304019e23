"""Tests of bench.peers, runs of other libraries beside a study: their episodes become table rows like those of a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.peers import PEERS, PeerRun, evaluation_rows, peer_runs, result, rows, run_peers, with_peers
from bench.studies import STUDIES, Kept, study_of
from slm_lab.experiment.report.setting import Setting
from slm_lab.experiment.report.study_report import study_settings
from slm_lab.lib.files import with_checksum
from slm_lab.spec.models.study import Study

CONTENT = {
    "episodes": [[4, 1.0, 10.0], [5, 2.0, 20.0], [9, 4.0, 60.0]],
    "evaluations": [],
    "frames": 10,
    "seconds": 5.0,
    "versions": {"gymnasium": "1"},
    "settings": {"program": "PPO of a library"},
}


def study() -> Study:
    return study_of("mujoco_1m")


def first_run(folder: Path) -> PeerRun:
    return next(peer_runs(study(), folder))


def test_rows_are_at_multiples_of_the_spacing_and_at_the_end() -> None:
    table = rows(CONTENT["episodes"], 10, 4)
    assert table["frame"] == [4, 8, 10]
    assert table["wall_t"] == [1.0, 2.0, 4.0]
    assert table["epi_new"] == [1, 1, 1]
    assert table["return_new"] == [10.0, 20.0, 60.0]
    assert table["total_reward"] == [10.0, 15.0, 30.0]
    assert table["current_return"][-1] == 60.0  # the other episodes ended before the last fifth of the frames


def test_rows_before_the_first_episode_have_no_return() -> None:
    table = rows([[7, 3.0, 1.0]], 8, 4)
    assert table["frame"] == [4, 8]
    assert table["total_reward"] == [None, 1.0]
    assert table["epi_new"] == [0, 1]


def test_an_evaluation_is_the_mean_of_its_returns() -> None:
    table = evaluation_rows([(10, 1.0, [1.0, 3.0]), (20, 2.0, [5.0])])
    assert table == {"frame": [10, 20], "wall_t": [1.0, 2.0], "total_reward": [2.0, 5.0]}


def test_each_peer_has_a_run_for_each_run_of_its_entry(tmp_path: Path) -> None:
    runs = list(peer_runs(study(), tmp_path))
    assert len(runs) == len(study().runs) * len(PEERS["mujoco_1m"])
    assert len({run.file for run in runs}) == len(runs)
    one = runs[0]
    assert (one.env_id, one.frames, one.random_seed, one.log_frequency) == ("Hopper-v5", 1_000_000, 0, 10_000)


def test_labels_of_peers_are_of_entries_that_exist() -> None:
    for name, besides in PEERS.items():
        entries = study_of(name).entries
        assert {beside.of for beside in besides} <= set(entries)
        assert not {beside.label for beside in besides} & set(entries)


@pytest.mark.parametrize("evaluations", [[], [[10, 5.0, [40.0, 60.0]]]])
def test_a_result_is_read_beside_the_runs_of_the_study(evaluations: list[Any], tmp_path: Path) -> None:
    run = first_run(tmp_path)
    run.file.parent.mkdir()
    content = result(run, {**CONTENT, "evaluations": evaluations}, "a processor")
    run.file.write_text(json.dumps(with_checksum(content)))
    plan, (found,) = with_peers(study(), tmp_path)
    setting = study_settings(plan, [found])["Hopper-v5", run.beside.label]
    assert isinstance(setting, Setting)
    assert setting.scores("total_reward").tolist() == [30.0]
    assert setting.scores().tolist() == [50.0 if evaluations else 60.0]
    assert len(plan.runs) == len(study().runs) + 1


def test_a_finished_run_is_kept_and_a_peer_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.STUDIES, "mujoco_1m", Kept(STUDIES["mujoco_1m"].file, tmp_path))
    done = first_run(tmp_path)
    done.file.parent.mkdir()
    done.file.write_text("kept")
    started: list[PeerRun] = []

    def train(run: PeerRun) -> None:
        started.append(run)
        if run.beside.program == "sb3_ppo":
            raise SystemExit("it does not run here")

    monkeypatch.setattr(peers, "train", train)
    run_peers("mujoco_1m", ["random_seed=[0,1000]"])
    assert done.file.read_text() == "kept"
    assert done.file not in [run.file for run in started]
    assert sum(run.beside.program == "cleanrl_ppo" for run in started) == 7
    assert sum(run.beside.program == "sb3_ppo" for run in started) == 1
    assert "it does not run here\nStable-Baselines3's PPO is left out" in capsys.readouterr().err


def test_the_error_of_a_peer_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no such env\n")

    monkeypatch.setattr(peers, "peer_python", lambda _: Path("python"))
    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(SystemExit, match="CleanRL's PPO failed with exit code 1: ValueError: no such env"):
        peers.train(first_run(tmp_path))
    assert not first_run(tmp_path).file.exists()
