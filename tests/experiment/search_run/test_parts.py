"""Tests of the resources of trials, the display of a search, and the check that values can be built."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import TrialState
from slm_lab.experiment.plan import Plan, Stop
from slm_lab.experiment.run.search import prepare
from slm_lab.experiment.run.search.prepare import TrialShare, trial_resources
from slm_lab.experiment.run.search.search import Search
from slm_lab.experiment.run.search.stage import SearchTable, Totals, format_values
from slm_lab.experiment.run.search.trial_task import Update
from slm_lab.experiment.training.resolve import number_of_gpus
from slm_lab.spec.models.spec import Spec
from tests.experiment.search_run.conftest import ScriptedExecutor, failing, finishing


@pytest.mark.parametrize(
    ("meta", "jobs", "gpus", "expected"),
    [
        ({}, None, 0, TrialShare(8, 1, 0, 1)),
        ({}, 3, 0, TrialShare(3, 1, 0, 1)),
        ({"max_session": 4}, None, 0, TrialShare(2, 4, 0, 4)),
        ({"max_session": 20}, None, 0, TrialShare(1, 8, 0, 8)),
        ({"max_session": 20, "search_scheduler": {}}, None, 0, TrialShare(1, 8, 0, 20)),
        ({"search_resources": {"cpu": 4}}, None, 0, TrialShare(2, 4, 0, 1)),
        ({"search_resources": {"cpu": 1, "gpu": 0.25}}, None, 1, TrialShare(4, 1, 0.25, 1)),
        ({"search_resources": {"cpu": 1, "gpu": 0.25}}, None, 0, TrialShare(8, 1, 0, 1)),
        ({"max_trial": 2}, None, 0, TrialShare(2, 1, 0, 1)),
        ({"search_algorithm": "pbt", "max_trial": 16}, None, 0, TrialShare(16, 0.5, 0, 1)),
    ],
)
def test_trials_share_the_machine(
    search_spec: Callable[..., Spec],
    monkeypatch: pytest.MonkeyPatch,
    meta: dict[str, object],
    jobs: int | None,
    gpus: int,
    expected: TrialShare,
) -> None:
    monkeypatch.setattr(prepare, "cores", lambda: 8)
    spec = search_spec(meta={"max_trial": 100} | meta)
    assert trial_resources(spec, Plan(jobs=jobs), spec.meta.max_trial, gpus) == expected


def test_values_are_shown_by_the_shortest_names_that_tell_them_apart() -> None:
    values = {"agent.net.actor_optim_spec.lr": 0.00012345, "agent.net.critic_optim_spec.lr": 1e-3, "agent.algorithm.gamma": 0.99}
    assert format_values(values) == "actor_optim_spec.lr 0.0001234  critic_optim_spec.lr 0.001  gamma 0.99"


def test_the_summary_counts_and_names_the_best() -> None:
    trials = [
        TrialState(0, {"a": 1}, "finished", seconds=10, metric=3.0),
        TrialState(1, {"a": 2}, "stopped", seconds=4, metric=9.0),
        TrialState(2, {"a": 3}, "running", seconds=2, frame=50, metric=1.0),
    ]
    table = SearchTable("strength")
    table.totals = Totals(trials, 6, 2, 100)
    assert table.summary() == "2/6 trials done, 1 running, 1 stopped, eta 0:12; best strength 3: trial 0  a 1"
    table.totals = Totals([], 6, 2, 100)
    assert table.summary() == "0/6 trials done, 0 running, eta -; no trial has finished yet"


def test_a_terminal_shows_a_table_of_running_trials() -> None:
    printed = StringIO()
    console = Console(file=printed, force_terminal=True, width=100, color_system=None)
    trials = [TrialState(7, {"agent.algorithm.gamma": 0.97}, "running", frame=500, metric=1.5)]
    with SearchTable("strength", console) as table:
        table.totals = Totals(trials, 8, 2, 1000)
        table.show(now=True)
    for text in ("500/1,000", "gamma 0.97", "0/8 trials done, 1 running"):
        assert text in printed.getvalue()


def test_checkpoints_of_a_trial_are_found_among_those_of_others(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small")
    paths.make_dirs()
    own = [paths.checkpoint(0, "last", 1), paths.checkpoint(1, "best", 1), paths.checkpoint(0, 500, 1), paths.trial_checkpoint(1)]
    for file in [*own, paths.checkpoint(0, "last", 11), paths.checkpoint(0, "last", 0)]:
        file.touch()
    assert sorted(paths.checkpoints(1)) == sorted(own)


@pytest.mark.parametrize(("device", "expected"), [(None, 3), ("cuda:1", 3), ("cpu", 0)])
def test_a_run_on_the_cpu_has_no_gpus(device: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert number_of_gpus(Plan(device=device)) == expected


def test_what_a_failed_trial_reported_before_is_not_its_result(tmp_path: Path, search_spec: Callable[..., Spec]) -> None:
    """A failed trial has no result, whatever it reported before: proposals near its values would probably fail too."""
    spec = search_spec(meta={"max_trial": 3, "search_metric": "final_strength", "search_algorithm": "random"})
    search: Any = Search(spec, Plan(data_dir=tmp_path))
    told: dict[int, float | None] = {}
    search.paths = RunPaths(tmp_path, "small")
    search._proposer = SimpleNamespace(ask=lambda trial: {"agent.algorithm.gamma": 0.95}, tell=told.__setitem__, state_dict=dict)
    search._share = TrialShare(1, 1, 0.0, 1)

    def script(trial: int, start: int) -> list[Update]:
        return [Update(50, ((50, 99.0),)), *failing(retry=False)] if trial == 1 else finishing(float(trial))

    table = SearchTable("final_strength", Console(file=StringIO()))
    search._search_stage(ScriptedExecutor(script), table).run(Stop())
    assert told == {0: 0.0, 1: None, 2: 2.0}
    assert [trial.status for trial in search.state.trials] == ["finished", "failed", "finished"]
