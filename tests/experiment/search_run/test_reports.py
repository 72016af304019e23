"""Tests of the metric that a trial reports: the mean over its Sessions at the frames that all of them have reached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.report.analyze import analyze_trial
from slm_lab.experiment.report.run import read_table
from slm_lab.experiment.run.search.trial_task import ReportReader, trial_metric
from slm_lab.spec.models.spec import Spec

HEAD = "frame,opt_step,wall_t,total_reward,total_reward_ma\n"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path, "small")
    found.make_dirs()
    return found


def test_reports_are_means_at_common_frames(paths: RunPaths, make_spec: Callable[..., Spec]) -> None:
    spec = make_spec(meta={"max_session": 2})
    reader = ReportReader(paths, 3, spec, "final_strength", 10.0)
    assert reader.read() == []
    one, two = (paths.session_df(session, t=3) for session in range(2))
    one.write_text(HEAD + "250,1,1,20,20\n500,2,2,30,25\n750,3,3,40,30\n")
    assert reader.read() == []
    two.write_text(HEAD + "250,1,1,40,40\n500,2,2,50,45\n75")  # the last row is being written
    assert reader.read() == [(250, 20.0), (500, 30.0)]
    assert reader.frame == 500
    assert reader.read() == []
    two.write_text(HEAD + "250,1,1,40,40\n500,2,2,50,45\n750,3,3,,45\n")
    assert reader.read() == [(750, 35.0)]  # with the last known return of the second Session
    assert ReportReader(paths, 3, spec, "total_reward_ma", None, after=250).read() == [(500, 35.0), (750, 37.5)]


def test_a_row_without_an_episode_is_no_report(paths: RunPaths, make_spec: Callable[..., Spec]) -> None:
    paths.session_df(0).write_text(HEAD + "250,1,1,,\n500,2,2,30,30\n")
    assert ReportReader(paths, 0, make_spec(), "final_strength", 10.0).read() == [(500, 20.0)]


@pytest.mark.parametrize(
    "metric",
    [
        *("final_strength", "strength", "max_strength", "total_reward_ma", "final_return"),
        *("sample_efficiency", "training_efficiency", "stability", "consistency"),
    ],
)
def test_the_last_report_is_the_metric_of_the_trial(
    paths: RunPaths, make_spec: Callable[..., Spec], metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session, returns in enumerate([(20, 60, 40), (30, 25, 80)]):
        rows = [f"{250 * (row + 1)},{row + 1},1,{value},{value / 2}\n" for row, value in enumerate(returns)]
        paths.session_df(session).write_text(HEAD + "".join(rows))
    metrics = analyze_trial(make_spec(meta={"max_session": 2}, env={"max_frame": 750}), paths)
    tables = [read_table(paths.session_df(session)) for session in range(2)]
    assert trial_metric(tables, metric, metrics["random_baseline"]) == pytest.approx(metrics[metric])
