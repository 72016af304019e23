"""Tests of bench.lower_scores: the list of the scores that are lower than a published score."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lower_scores import TITLE, lower_scores, lower_scores_text, unused_remarks
from bench.studies import STUDIES
from tests.docs.test_score_page import curve, folder, results

__all__ = ["folder"]


def test_without_results_there_is_no_list(folder: Path) -> None:
    assert lower_scores_text() == ""


def test_only_lower_scores_are_listed(folder: Path) -> None:
    """The published scores are 1,654 for Hopper and -5.03 for Reacher."""
    results(folder, "mujoco", "Hopper-v5", curve(1000, 1500), curve(1200, 1400))
    results(folder, "mujoco", "Reacher-v5", curve(-9, -4), curve(-8, -3))
    text = lower_scores_text()
    assert text.startswith(TITLE)
    (row,) = [line for line in text.splitlines() if line.startswith("| Hopper-v5")]
    assert [cell.strip() for cell in row.split("|")][5:8] == ["SLM Lab v5: 1654 ≈", "1400 to 1500", "+70"]
    assert "Reacher-v5" not in text


@pytest.mark.skipif(not STUDIES["benchmarks"].results.exists(), reason="the source distribution has no results of benchmarks")
def test_each_remark_belongs_to_a_lower_score() -> None:
    assert unused_remarks(lower_scores()) == set()
