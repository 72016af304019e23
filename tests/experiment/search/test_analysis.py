"""Tests of the files that a search writes, finished or not."""

from __future__ import annotations

import csv
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report import search_report
from slm_lab.experiment.report.search_report import (
    SearchSummary,
    confidence_interval,
    grid_figure,
    parallel_figure,
    return_figures,
    short_names,
    write_search,
)
from slm_lab.experiment.report.trial_record import Importance, TrialRecord, TrialStatus, key_importance, rank_trials
from slm_lab.experiment.run.search.proposer import make_proposer
from slm_lab.experiment.training.observers.base import COLUMNS
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.search_space import SearchSpace
from tests.experiment.search.landscape import toy_return, toy_space
from tests.experiment.search.test_proposer import CONDITIONAL


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    run = RunPaths(tmp_path, "spec")
    run.make_dirs()
    return run


def records_of(space: SearchSpace, count: int, seed: int = 0) -> list[TrialRecord]:
    proposer = make_proposer(space, "random", seed)
    found = []
    for trial in range(count):
        values = proposer.ask(trial)
        assert values is not None
        found.append(record(trial, values, toy_return(values) if "agent.algorithm.width" in values else 100.0 * trial))
    return found


def record(trial: int, values: dict[str, Any], metric: float | None, status: TrialStatus = "finished", **more: Any) -> TrialRecord:
    metrics = {"final_strength": metric, "strength": metric, "stability": 0.5, "consistency": None, "frame": 1000}
    return TrialRecord(trial, values, metrics, metric, 1000, 2.5, status, 7, **more)


def write_table(paths: RunPaths, trial: int, level: float) -> None:
    lines = [",".join(COLUMNS)]
    for row in range(1, 6):
        cells = {"frame": 1000 * row, "total_reward": level * row, "total_reward_ma": level * row, "current_return": level * row}
        lines.append(",".join(str(cells.get(name, "")) for name in COLUMNS))
    paths.session_df(0, "train", trial).write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows(paths: RunPaths) -> list[dict[str, str]]:
    with paths.experiment_df.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["none", "one", "running", "failed", "equal", "mixed", "conditional", "one key"])
@pytest.mark.usefixtures("pictures")
def test_every_search_has_its_files(paths: RunPaths, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    caplog.set_level(logging.WARNING, logger="slm_lab")
    search = {"conditional": CONDITIONAL, "one key": {"bonus__uniform": [0, 1]}}.get(kind)
    space = toy_space(search)
    every = records_of(space, 12)
    values = every[0].values
    records = {
        "none": [],
        "one": every[:1],
        "running": [record(0, values, None, "running")],
        "failed": [record(0, values, None, "failed", cause="Traceback\nValueError: bad"), record(1, values, float("nan"))],
        "equal": [record(trial, values, 1.0) for trial in range(9)],
        "mixed": [*every[:9], record(9, values, None, "failed"), record(10, values, 3.0, "stopped"), record(11, values, 4.0, "running")],
    }.get(kind, every)
    for one in records:
        if one.trial % 2:
            write_table(paths, one.trial, 1.0 + one.trial)
    summary = write_search(paths, space.spec, records, "final_strength")
    assert [message.getMessage() for message in caplog.records] == []
    assert (summary.best is None) == (kind in ("none", "running", "failed"))
    expected = {file.name for file in summary.files} | ({"spec_best_spec.json"} if summary.best is None else set())
    assert len(expected) == 13
    for file in summary.files:
        if file.suffix == ".png":
            assert Image.open(file).size[0] >= 800
    assert len(rows(paths)) == len(records)
    if kind == "mixed":
        assert {row["status"] for row in rows(paths)} == {"finished", "failed", "stopped", "running"}


def test_the_table_is_ranked_and_the_best_trial_can_be_trained(paths: RunPaths) -> None:
    """The table is ranked by the metric of the search, even if trials have strengths because they measured a baseline later."""
    space = toy_space()
    records = records_of(space, 10)
    best = max(records, key=lambda one: one.metric or 0)
    summary = write_search(paths, space.spec, records, "total_reward_ma")
    assert (summary.best, summary.metric) == (best, "total_reward_ma")
    assert load_spec(paths.best_spec) == space.trial_spec(best.values)
    comment = " ".join(json.loads(paths.best_spec.read_text(encoding="utf-8"))["_comment"])
    for words in (f"Trial {best.trial}, the best by total_reward_ma (", "10 trials", "agent.algorithm.rate loguniform [1e-05, 0.1]"):
        assert words in comment
    assert json.loads(paths.importance.read_text(encoding="utf-8"))["metric"] == "total_reward_ma"
    table = rows(paths)
    header = paths.experiment_df.read_text().splitlines()[0].split(",")
    assert len(header) == len(set(header))
    assert [float(row["metric"]) for row in table] == sorted((one.metric for one in records if one.metric is not None), reverse=True)
    first = records[int(table[0]["trial"])]
    assert {key: table[0][key] for key in first.values} == {key: str(value) for key, value in first.values.items()}
    assert [table[0][name] for name in ("consistency", "frame", "seconds", "random_seed")] == ["", "1000", "2.5", "7"]


def test_rank() -> None:
    """Confirmed trials rank before others, and a stopped trial ranks after each finished one."""
    records = [
        record(0, {}, 5.0),
        record(1, {}, 9.0, "stopped"),
        record(2, {}, 7.0, confirmed=2.0, confirmed_interval=(1.0, 3.0)),
        record(3, {}, 6.0, confirmed=4.0),
        record(4, {}, 99.0, "failed"),
        record(5, {}, None, "running"),
    ]
    assert [one.trial for one in rank_trials(records)] == [3, 2, 0, 1, 4, 5]


def test_importance_ranks_the_key_that_decides_first() -> None:
    """The key with the largest effect has the largest importance; with too few or equal returns there is no importance."""
    space = toy_space()
    for seed in range(5):
        found = key_importance(space, records_of(space, 40, seed))
        assert found is not None
        assert next(iter(found.shares)) == "agent.algorithm.rate"
        assert found.shares["agent.algorithm.noise"] < 0.1
    records = records_of(space, 12)
    assert key_importance(space, records[:7]) is None
    assert key_importance(space, [record(one.trial, one.values, 3.0) for one in records]) is None
    assert key_importance(space, [record(one.trial, one.values, None, "failed") for one in records]) is None


def test_importance_of_a_key_inside_a_choice() -> None:
    """A key that exists for only one value of a choice gets the largest importance if it determines the return."""
    space = toy_space({"explore_var_spec__choice": CONDITIONAL["explore_var_spec__choice"], "action_policy__choice": ["epsilon_greedy"]})
    name = "agent.algorithm.explore_var_spec.end_step"
    records = [record(one.trial, one.values, float(one.values.get(name, 100))) for one in records_of(space, 60)]
    found = key_importance(space, records)
    assert next(iter(found.shares)) == name
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["agent.algorithm.action_policy"] == 0


def test_figures_show_what_the_records_say(paths: RunPaths) -> None:
    space = toy_space()
    records = rank_trials([*records_of(space, 14), record(14, records_of(space, 1)[0].values, None, "failed")])
    for one in records:
        write_table(paths, one.trial, 2.0)
    view = SearchSummary("spec (Toy)", space, records, "final_strength", None)
    grid = grid_figure(view)
    assert [scale.label for scale in grid.columns] == ["rate", "bonus", "rule", "width", "noise"]
    assert [scale.label for scale in grid.rows] == ["final_strength", "strength", "stability"]
    assert [text for _, text in grid.columns[2].ticks] == ["sum", "mean", "max"]
    assert [text for _, text in grid.columns[0].ticks] == ["1e-05", "0.0001", "0.001", "0.01", "0.1"]
    assert "14 finished, 1 failed (not shown)" in grid.subtitle
    assert grid.x_KT.shape == (5, 14)
    assert parallel_figure(view).axes[-1].label == "final_strength"
    panel = return_figures(view, paths, "train")["mean_returns"].first_panel
    assert [line.name.split(":")[0] for line in panel.lines[-2:]] == [f"2. trial {records[1].trial}", f"1. trial {records[0].trial}"]
    assert {line.group for line in panel.lines if line.faint} == {"4 other trials"}


def test_of_many_keys_a_grid_shows_the_most_important_or_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_report, "_MAX_COLUMNS", 2)
    space = toy_space()
    view = SearchSummary("spec", space, records_of(space, 6), "final_strength", None)
    grid = grid_figure(view)
    assert [scale.label for scale in grid.columns] == ["rate", "bonus"]
    assert grid.subtitle.endswith("; the first 2 of 5 keys")
    known = Importance(dict.fromkeys(reversed(space.keys), 0.2), 6, 6)
    grid = grid_figure(replace(view, importance=known))
    assert [scale.label for scale in grid.columns] == ["width", "noise"]
    assert grid.subtitle.endswith("; the 2 most important of 5 keys")


def test_keys_that_are_not_active_are_below_their_axis() -> None:
    space = toy_space(CONDITIONAL)
    figure = parallel_figure(SearchSummary("spec", space, records_of(space, 12), "final_strength", None))
    index = space.keys.index("agent.algorithm.explore_var_spec.end_step")
    assert figure.axes[index].unused
    assert not figure.axes[0].unused
    assert (figure.position_AT[index] < 0).any()


def test_short_names() -> None:
    names = short_names(
        ["agent.net.optim_spec.lr", "agent.net.critic_optim_spec.lr", "agent.algorithm.gamma", "env.name", "agent.net.name"]
    )
    assert list(names.values()) == ["optim_spec.lr", "critic_optim_spec.lr", "gamma", "env.name", "net.name"]


def test_the_interval_of_a_confirmation_is_within_the_possible_returns(tmp_path: Path) -> None:
    """The confidence interval is clipped to the range of possible returns.

    For two CartPole sessions with the returns 400 and 480, Student's t gives 440 ± 508.
    """
    paths = RunPaths(tmp_path, "cartpole")
    paths.make_dirs()
    paths.spec.write_text(json.dumps({"cartpole": {"env": {"name": "CartPole-v1", "max_frame": 1000}, "agent": {}, "meta": {}}}))
    for session, value in enumerate((400.0, 480.0)):
        paths.session_metrics(session).write_text(json.dumps({"current_return": value, "strength": value}))
        paths.session_df(session).write_text("frame,total_reward\n")
    assert confidence_interval(paths, 0, "current_return") == (0.0, 500.0)
    low, high = confidence_interval(paths, 0, "strength") or (0.0, 0.0)
    assert (round(low), round(high)) == (-68, 948)
