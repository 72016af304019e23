from __future__ import annotations

from pathlib import Path

import numpy as np

from slm_lab.experiment.analysis.table import Curve, align, curve, read_table


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_and_empty_cells(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", "frame,total_reward,loss\n10,,0.5\n20,3.5,nan\n30,4,x\n"))
    assert table["frame"].tolist() == [10, 20, 30]
    assert curve(table, "total_reward").frame.tolist() == [20, 30]
    assert curve(table, "total_reward").value.tolist() == [3.5, 4]
    assert curve(table, "loss").value.tolist() == [0.5]
    assert len(curve(table, "entropy").frame) == 0


def test_what_a_killed_writer_leaves(tmp_path: Path) -> None:
    cut = read_table(write(tmp_path / "a.csv", "frame,total_reward\n10,1\n20,2\n3"))
    assert cut["frame"].tolist() == [10, 20]
    holed = read_table(write(tmp_path / "b.csv", "frame,total_reward\n10,1\n\0\0\0\0"))
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
    common = align([left, right], least=2)
    assert common.frame.tolist() == [20]
    assert common.mean().value.tolist() == [3]


def test_align_nothing() -> None:
    for aligned in (align([]), align([Curve(np.empty(0), np.empty(0))])):
        assert len(aligned.mean().value) == len(aligned.std()) == 0
