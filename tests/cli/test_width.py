"""Every table that a command prints fits 80 columns, however long the names in it are."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from slm_lab import cli
from slm_lab.cli.list_names import KINDS
from slm_lab.cli.parser import COMMANDS, MODES, make_parser
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.report.compare_report import settings_table
from slm_lab.experiment.report.metrics import Estimate, Median
from slm_lab.experiment.report.search_report import SearchSummary
from slm_lab.experiment.report.setting import Summary
from slm_lab.experiment.report.study_report import EntryResult, text_lines
from slm_lab.experiment.report.trial_record import Importance, TrialRecord
from slm_lab.experiment.run.search.stage import SearchTable, Totals, result_lines
from slm_lab.experiment.run.study.study_table import RunState, StudyTable
from slm_lab.experiment.run.trial import _summary
from slm_lab.lib.text import WIDTH, format_table

LONG = "soft_actor_critic_with_a_very_long_label_"
ESTIMATE = Estimate(-12_345_678.9, -123_456_789.1, 123_456_789.2)
MEDIAN = Median(*ESTIMATE, at_most=True)
VALUES = {f"agent.algorithm.some_long_key_{i}.start_val": 0.123456 * 10**-i for i in range(6)} | {"agent.net.hid_layers": [256, 256, 256]}


def too_wide(lines: list[str]) -> list[str]:
    return [line for line in lines if len(line) > WIDTH]


def test_compare() -> None:
    rows = [
        Summary(
            f"{LONG}{i}", LONG, f"package.module:Env{LONG}-v{i}", 10, 40, "3 stopped, 2 running (left out)", 7, "evaluation",
            MEDIAN, MEDIAN, ESTIMATE, -123_456.7, ESTIMATE, 12_345.6, 98_765.4,
        )
        for i in range(3)
    ]  # fmt: skip
    lines = format_table(settings_table(rows), key_columns=2)
    assert too_wide(lines) == []
    assert sum(line.startswith("name") for line in lines) > 1, "several blocks, each with the names"


def test_study() -> None:
    study: Any = SimpleNamespace(
        envs=[f"Env{LONG}-v0", "B-v0"], metric="evaluation", solve_score=lambda env: 475.0, spec=SimpleNamespace(baseline=LONG, paired=True)
    )
    numbers = dict.fromkeys(("updates_per_second", "grad_norm", "grad_norm_variance", "staleness", "lock_wait", "lag"), 12_345.6)
    row = EntryResult(
        f"Env{LONG}-v0", f"{LONG}0", 10, 3, ESTIMATE, -123_456.7, ESTIMATE, ESTIMATE, 10, ESTIMATE, 0.012, 7, MEDIAN, MEDIAN, 1234.5,
        "below", **cast(Any, numbers),
    )  # fmt: skip
    assert too_wide(text_lines(study, [row, row._replace(entry=LONG, difference=None)])) == []


def test_search() -> None:
    records = [
        TrialRecord(i, VALUES, {}, -12_345.678, 1000, 12.5, "finished", 7, -12_345.6, (-123_456.7, 123_456.8)) for i in range(100, 104)
    ]
    importance = Importance(dict.fromkeys(VALUES, 1 / 7), 100, 10)
    state = SearchState("training_efficiency", None, False)
    lines = result_lines(state, SearchSummary("spec", cast(Any, None), records, "training_efficiency", importance))
    assert too_wide(lines) == []
    assert all(any(name in line for line in lines) for name in ("some_long_key_0", "some_long_key_5", "hid_layers"))


def test_live_tables() -> None:
    """The live tables of a search and of a study fit 80 columns."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH)
    search = SearchTable("training_efficiency", console)
    trial = TrialState(100, VALUES)
    trial.status, trial.frame, trial.metric = "running", 12_345_678, -12_345.6
    search.totals = Totals([trial], 100, 4, 100_000_000)
    run: Any = SimpleNamespace(entry=LONG * 2, env=f"Env{LONG}-v0", random_seed=10_000)
    study = StudyTable([RunState(run, "running")], 4, console)
    for table in (search.active_runs_table(), study.active_runs_table()):
        console.print(table)
    lines = file.getvalue().splitlines()
    assert len(lines) == 4
    assert too_wide(lines) == []
    assert "12,345,678/100,000,000" in lines[1]
    assert "-12346" in lines[1]


def test_metrics_of_a_trial() -> None:
    metrics = dict.fromkeys(("final_return", "training_efficiency", "random_baseline"), -123_456_789.123) | {"frame": 100_000_000}
    assert too_wide([f"  {line}" for line in _summary(metrics, 1_000_000_000)]) == []


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_list(kind: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert cli.main(["list", *([kind] if kind else [])]) == 0
    assert too_wide(capsys.readouterr().out.splitlines()) == []


@pytest.mark.parametrize("word", [None, *COMMANDS, *MODES])
def test_help(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert too_wide(make_parser(word).format_help().splitlines()) == []


@pytest.mark.slow
def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo.json", "--build"]) == 0
    assert too_wide(capsys.readouterr().out.splitlines()) == []
