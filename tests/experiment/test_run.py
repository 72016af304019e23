"""Tests of reading run folders and their tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.metrics import Curve, align, curve
from slm_lab.experiment.report.run import last_row, load_run, read_columns, read_table


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("columns", [2, 2_000])
def test_last_complete_row_of_a_table(tmp_path: Path, columns: int) -> None:
    """The row is found also if header and rows are longer than the part of the file that is read first."""
    names = ["frame", *(f"column_{i}" for i in range(1, columns))]
    rows = [",".join([str(frame), *["0.123456"] * (columns - 2), ""]) for frame in (10, 20)]
    path = write(tmp_path / "a.csv", "\n".join([",".join(names), *rows, "30,0.1"]))
    found = last_row(path)
    assert found["frame"] == 20
    assert len(found) == columns - 1, "without the empty cell"
    assert last_row(write(tmp_path / "b.csv", ",".join(names) + "\n")) == {} == last_row(tmp_path / "absent.csv")


def test_columns_and_empty_cells(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", "frame,total_reward,loss\n10,,0.5\n20,3.5,nan\n30,4,x\n"))
    assert table["frame"].tolist() == [10, 20, 30]
    assert curve(table, "total_reward").frame.tolist() == [20, 30]
    assert curve(table, "total_reward").value.tolist() == [3.5, 4]
    assert curve(table, "loss").value.tolist() == [0.5]
    assert len(curve(table, "entropy").frame) == 0


def test_a_torn_last_line_is_never_read(tmp_path: Path) -> None:
    """A last line without a line end is not read even if it looks complete: a killed writer may have written 20 of 2000."""
    cut = read_table(write(tmp_path / "a.csv", "frame,total_reward\n10,1\n20,2\n3"))
    assert cut["frame"].tolist() == [10, 20]
    whole = "frame,total_reward\n10,1\n20,2\n30,345\n"
    for end in range(len(whole)):
        assert read_table(write(tmp_path / "b.csv", whole[:end])).get("total_reward", np.empty(0)).tolist() in ([], [1], [1, 2])
    assert read_columns(write(tmp_path / "c.csv", "process,kind\nlearner,train\nlearner,tra")) == {
        "process": ["learner"],
        "kind": ["train"],
    }
    holed = read_table(write(tmp_path / "d.csv", "frame,total_reward\n10,1\n\0\0\0\0"))
    assert holed["total_reward"].tolist() == [1]


def test_no_rows(tmp_path: Path) -> None:
    for table in (
        read_table(tmp_path / "none.csv"),
        read_table(write(tmp_path / "empty.csv", "")),
        read_table(write(tmp_path / "head.csv", "frame,total_reward\n")),
        read_table(write(tmp_path / "other.csv", "a,b\n1,2\n")),
    ):
        assert len(table["frame"]) == 0
        assert len(curve(table, "total_reward").value) == 0


def test_align_fills_by_frame() -> None:
    left, right = Curve(np.array([10.0, 20.0, 30.0]), np.array([1.0, 2.0, 3.0])), Curve(np.array([20.0, 25.0]), np.array([4.0, 9.0]))
    both = align([left, right])
    assert both.frame.tolist() == [10, 20, 25, 30]
    assert both.mean().value.tolist() == [1, 3, 9, 3]
    assert both.std().tolist() == [0, 1, 0, 0]
    common = align([left, right], 2)
    assert common.frame.tolist() == [20]
    assert common.mean().value.tolist() == [3]
    for nothing in (align([]), align([Curve(np.empty(0), np.empty(0))])):
        assert len(nothing.mean().value) == len(nothing.std()) == 0


def make_run(folder: Path, policies: int = 1) -> RunPaths:
    paths = RunPaths(folder, "small")
    paths.make_dirs()
    meta = {"max_session": 2, "random_seed": 1} | ({"sampler": {"num_policies": policies}} if policies > 1 else {})
    paths.spec.write_text(json.dumps({"small": {"env": {"name": "CartPole-v1", "max_frame": 20}, "meta": meta}}))
    for index in range(2 * policies):
        write(paths.session_df(index), f"frame,total_reward,loss\n10,{index},\n20,{index + 0.5},1\n3")
    write(paths.session_df(0, "eval"), "frame,total_reward\n20,7\n")
    return paths


def test_a_run_as_data_frames(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    run = load_run(tmp_path)
    assert list(run.train) == ["session", "policy", "frame", "total_reward", "loss"]
    assert run.train.session.tolist() == [0, 0, 1, 1]
    assert run.train.frame.tolist() == [10, 20, 10, 20]
    assert str(run.train.frame.dtype) == "int64"
    assert run.train.groupby("session").total_reward.last().tolist() == [0.5, 1.5]
    assert run.train.loss.isna().tolist() == [True, False, True, False]
    assert run.eval.total_reward.tolist() == [7]
    assert (run.name, run.spec["env"]["name"], run.env, run.paths) == ("small", "CartPole-v1", "CartPole-v1", paths)
    assert (run.status, run.metrics, run.sessions) == ("stopped", {}, {0: "stopped", 1: "stopped"})
    assert repr(run) == f"Run({str(tmp_path)!r}, stopped)"
    (tmp_path / "several").mkdir()
    several = load_run(str(make_run(tmp_path / "several", policies=3).root)).train
    assert (several.policy.tolist(), several.session.tolist()) == ([0, 0, 1, 1, 2, 2] * 2, [0] * 6 + [1] * 6)
    for file in paths.info_dir.iterdir():
        file.unlink()
    empty = load_run(tmp_path)
    assert (len(empty.train), len(empty.eval), empty.status, empty.sessions) == (0, 0, "stopped", {})


def test_status_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = make_run(tmp_path)
    paths.trial_metrics().write_text('{"strength": 1.0}')  # written by a version without the key status
    assert (load_run(tmp_path).status, load_run(tmp_path).metrics) == ("done", {"strength": 1.0})
    paths.trial_metrics().write_text('{"status": "stopped"}')
    paths.session_metrics(0).write_text('{"status": "done"}')
    paths.session_metrics(1).write_text('{"status": "stopped"}')
    assert load_run(tmp_path).sessions == {0: "done", 1: "stopped"}
    assert load_run(tmp_path).status == "stopped"
    paths.session_metrics(1).write_text('{"failed": "killed by SIGKILL", "status": "failed"}')
    paths.trial_metrics().write_text('{"failed": 1, "status": "failed", "failures": {"1": "killed by SIGKILL"}}')
    assert (load_run(tmp_path).status, load_run(tmp_path).sessions) == ("failed", {0: "done", 1: "failed"})
    assert caplog.messages == []
    paths.trial_metrics().write_text('{"fai')
    assert load_run(tmp_path).metrics == {}
    assert caplog.messages[0].startswith(f"cannot read {paths.trial_metrics()}: ")


def test_what_is_not_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=r"is not a run folder: it (has no|does not exist)"):
            load_run(folder)


def test_pandas_is_imported_by_those_who_ask_for_a_data_frame(tmp_path: Path) -> None:
    make_run(tmp_path)
    code = f"""
import sys
import slm_lab
from slm_lab.experiment.report.run import load_run
run = load_run({str(tmp_path)!r})
run.status, run.metrics, run.tables("train")
assert "pandas" not in sys.modules
assert len(run.train) == 4
assert "pandas" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
