"""Tests of the report page of a run and of its data, on hand-made tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.files.lock import RunLock
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report import report_data as report_data_module
from slm_lab.experiment.report import report_page
from slm_lab.experiment.report.baseline import Baseline
from slm_lab.experiment.report.metrics import Curve
from slm_lab.experiment.report.report_data import report_data, thin_table
from slm_lab.experiment.report.report_origin import changed_settings, previous_run
from slm_lab.experiment.report.report_page import LiveReport, page, script_json, try_write_report, write_trial_report
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.seed_differences import first_frame_at_level, learned_return, seed_difference_sentences
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.models.spec import Spec
from tests.experiment.test_graph import write_rows, write_shared

MakeSpec = Callable[..., Spec]
HOSTILE = "</script><script>alert(1)</script><!-- é \u2028 ${x}"


@pytest.fixture(autouse=True)
def baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the random baseline to 20."""
    monkeypatch.setattr(report_data_module, "known_baseline", lambda spec: Baseline(20.0))


def save_spec(paths: RunPaths, name: str = "small", **sections: Any) -> None:
    """Save a spec with these sections, merged into the defaults."""
    body: dict[str, Any] = {
        "agent": {"name": "PPO", "algorithm": {"name": "PPO", "gamma": 0.98, "lam": 0.95}, "memory": {"name": "OnPolicyBatchReplay"}},
        "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 6000},
        "meta": {"max_session": 2, "random_seed": 7, "log_frequency": 1000},
    }
    for section, content in sections.items():
        body[section] = {**body[section], **content}
    paths.spec.write_text(json.dumps({name: body}), encoding="utf-8")


def two_seeds(paths: RunPaths, worse: Sequence[float] = (20.0, 60.0, 80.0, 70.0, 60.0, 50.0)) -> dict[str, Any]:
    """Return the data of a run of two seeds; the entropy of session 1 drops from its second row on."""
    save_spec(paths)
    current = {"current_return_se": [2] * 6, "current_epi": [20] * 6, "wall_t": [1, 2, 3, 4, 5, 6]}
    write_rows(paths, 0, [20.0, 60.0, 100.0, 200.0, 250.0, 300.0], columns={**current, "entropy_nats": [1] * 6})
    write_rows(paths, 1, worse, columns=current)
    for index, entropy in enumerate(([0.69, 0.65, 0.6, 0.55, 0.5, 0.5], [0.69, 0.1, 0.05, 0.01, 0.01, 0.01])):
        _set_column(paths.session_df(index), "entropy", entropy)
    return report_data(Run(paths))


def _set_column(path: Path, name: str, values: Sequence[float]) -> None:
    head, *lines = path.read_text().splitlines()
    at = head.split(",").index(name)
    rows = [line.split(",") for line in lines]
    for row, value in zip(rows, values, strict=True):
        row[at] = str(value)
    path.write_text("\n".join([head, *map(",".join, rows)]) + "\n")


# ---- the summary


def test_first_lines_say_which_seed_was_worse_and_what_differed(paths: RunPaths) -> None:
    data = two_seeds(paths)
    facts = {one["label"]: (one["value"], one["note"]) for one in data["facts"]}
    assert facts["current return"] == ("180 ± 120", "recent training episodes; mean of 2 sessions ± standard error")
    assert facts["frames"] == ("6,000", "100% of 6,000 for each session")
    assert facts["time"] == ("0:06", "1,000 frames/s per session")
    assert [row["cells"][0] for row in data["ranking"]["rows"]] == ["session 0", "session 1"]
    (text,) = data["sentences"]
    assert text.startswith("Session 1 ended worse than session 0: 50.0 ± 2.0 against 300.0 ± 2.0, more than two standard errors apart.")
    assert "by 98.3 on average; it never reached 272, but session 0 did at frame 6,000." in text  # 90 % of the way from 20 to 300
    assert "entropy 0.01 against 0.517 (it explored less)" in text


def test_equal_seeds_are_called_equal(paths: RunPaths) -> None:
    (text,) = two_seeds(paths, (20.0, 60.0, 100.0, 200.0, 250.0, 299.0))["sentences"]
    assert "did not end worse" in text
    assert "ended worse" not in text.replace("not end worse", "")


def test_levels_and_falls_by_hand() -> None:
    frame = np.array([10.0, 20.0, 30.0, 40.0])
    up, down = Curve(frame, np.array([0.0, 50.0, 90.0, 100.0])), Curve(frame, np.array([0.0, 80.0, 20.0, 10.0]))
    assert learned_return([up, down], 0.0) == 90
    assert learned_return([up, down], None) == 90
    assert learned_return([], None) is None
    assert (first_frame_at_level(up, 90.0), first_frame_at_level(down, 90.0), first_frame_at_level(up, None)) == (30, None, None)
    tables = {index: {"frame": frame, "current_return": one.value} for index, one in enumerate((up, down))}
    (text,) = seed_difference_sentences(tables, tables, {0: "a", 1: "b"}, 0.0)
    assert "It fell from 80 at frame 20 to 10 at frame 40." in text
    assert seed_difference_sentences({0: tables[0]}, {0: tables[0]}, {0: "a"}) == []


def test_intervals_stay_within_the_possible_returns(paths: RunPaths) -> None:
    """Without the bounds, Student's interval of 50 and 450 with one degree of freedom would be 250 ± 2541."""
    save_spec(paths)
    for index, value in enumerate((50.0, 450.0)):
        write_rows(paths, index, [value])
    rows = {row[0]: row[1:] for row in report_data(Run(paths))["metrics"]["rows"]}
    assert rows["current return"] == ["250", "0 to 500", "50", "450"]
    assert rows["final strength"][1] == "-20 to 480"  # the baseline is 20
    write_rows(paths, 0, [501.0])  # 501 shows that the env has other rewards
    assert report_data(Run(paths))["bounds"] is None


# ---- graphs


def test_tables_panels_and_axes(paths: RunPaths) -> None:
    data = two_seeds(paths)
    assert data["tables"]["train"]["1"]["current_return"] == [20, 60, 80, 70, 60, 50]
    assert data["tables"]["train"]["0"]["strength"] == [0, 40, 80, 180, 230, 280]
    assert data["tables"]["trial"]["0"]["frame"] == [2000, 3000, 4000, 5000, 6000]  # no strength in the first row
    assert data["means"] == [{"name": "mean of sessions", "indices": [0, 1]}]
    assert [axis["column"] for axis in data["axes"]] == ["frame", "opt_step", "wall_t"]
    assert {"value": 20.0, "label": "random agent"} in data["levels"]
    drawn = [panel["columns"][0]["column"] for panel in data["panels"]]
    assert [name for name in drawn if name in ("entropy", "loss", "grad_norm", "strength", "consistency", "entropy_nats")] == [
        "entropy", "loss", "grad_norm", "strength", "consistency", "entropy_nats",
    ]  # fmt: skip
    assert "explore_var" not in drawn  # no values
    json.dumps(data, allow_nan=False)


def test_workers_share_one_bold_line(paths: RunPaths) -> None:
    save_spec(paths, meta={"distributed": "synced"})
    for index in (0, 1):
        write_shared(paths, index, [30.0, 50.0, 70.0], lock_wait=0.25 * index, new=60.0)
    data = report_data(Run(paths))
    assert data["axis"] == "global_frame"
    assert data["means"] == [{"name": "all workers", "indices": [-1], "workers": [0, 1]}]
    assert data["tables"]["train"]["-1"]["frame"] == [200, 250, 400, 450, 600, 650]
    groups = {panel["columns"][0]["column"]: panel["group"] for panel in data["panels"]}
    assert groups["staleness"] == groups["lock_wait"] == "Off-policy data and shared weights"
    assert [row["cells"][0] for row in data["ranking"]["rows"]] == ["all workers"]


def test_evaluation_is_the_return_where_there_is_one(paths: RunPaths) -> None:
    save_spec(paths, meta={"rigorous_eval": 4})
    for index in (0, 1):
        write_rows(paths, index, [10.0, 10.0])
        write_rows(paths, index, [100.0, 200.0 + 20 * index], "eval")
    data = report_data(Run(paths))
    assert data["facts"][0] == {"label": "current return", "value": "210 ± 10", "note": "evaluation; mean of 2 sessions ± standard error"}
    assert data["returns"][0] == {"column": "total_reward", "label": "evaluation (4 episodes)", "mode": "eval"}
    assert data["ranking"]["rows"][0]["cells"][0] == "session 1"


def test_a_recent_evaluation_of_each_seed_leads_and_the_curve_stays_that_of_training(paths: RunPaths) -> None:
    """Summary, ranking, sentences and metrics show the same current return as the metrics file and the terminal."""
    save_spec(paths, meta={"eval_episodes": 3})
    for index in (0, 1):
        current = {"current_return_se": [5] * 6, "current_epi": [20] * 6}
        write_rows(paths, index, [20.0, 60.0, 100.0, 200.0, 250.0, 300.0 - index], columns=current)
        write_rows(
            paths,
            index,
            [100.0, 200.0, 300.0, 400.0, 480.0 + 20 * index],
            "eval",
            columns={"current_return_se": [1] * 5, "current_epi": [3] * 5},
        )
    data = report_data(Run(paths))
    assert data["facts"][0] == {"label": "current return", "value": "490 ± 10", "note": "evaluation; mean of 2 sessions ± standard error"}
    assert [row["cells"][:4] for row in data["ranking"]["rows"]] == [
        ["session 1", "500.0 ± 1.0", "3", "154.8"],
        ["session 0", "480.0 ± 1.0", "3", "155"],
    ]
    assert data["sentences"][0].startswith("Session 0 ended worse than session 1: 480.0 ± 1.0 against 500.0 ± 1.0")
    assert data["metrics"]["rows"][0][:2] == ["current return", "490"]
    assert data["returns"][0]["mode"] == "train"
    write_rows(paths, 0, [100.0, 200.0, 300.0, 400.0], "eval")  # the last evaluation is older than a fifth of the run
    assert report_data(Run(paths))["facts"][0]["value"] == "299.50 ± 0.50"


def test_thinned_rows_keep_their_last_return_and_their_mean_loss() -> None:
    table = {"frame": np.arange(1.0, 11), "current_return": np.arange(10.0), "loss": np.array([1.0, 3.0, np.nan, 5.0, *np.zeros(6)])}
    thinned = thin_table(table, 5)
    assert thinned["frame"].tolist() == [2, 4, 6, 8, 10]
    assert thinned["current_return"].tolist() == [1, 3, 5, 7, 9]
    assert thinned["loss"].tolist() == [2, 5, 0, 0, 0]
    assert thin_table(table, 10) is table


def test_a_long_run_of_many_sessions_stays_below_a_megabyte(paths: RunPaths) -> None:
    save_spec(paths)
    columns = {name: np.linspace(0, 1, 5000).round(6).tolist() for name in ("wall_t", "approx_kl", "clip_fraction", "explained_variance")}
    for index in range(4):
        write_rows(paths, index, np.linspace(0, 500, 5000).round(3).tolist(), columns=columns)
    data = report_data(Run(paths))
    assert data["thinned"] > 1
    assert len(page(data)) < 1_000_000


# ---- events


def test_notices_and_restarts_have_a_place_on_the_time_axis(paths: RunPaths) -> None:
    save_spec(paths)
    write_rows(paths, 0, [1.0, 2.0, 3.0, 4.0], columns={"wall_t": [10, 20, 30, 40]})
    paths.session_log(0).write_text(
        "2026-01-01 10:00:00,000 begins: index 0, backend native, device cpu, frame 0\n"
        "what the env prints\n"
        "2026-01-01 10:00:15,000 the gradient was not finite\n"
        "2026-01-01 10:00:16,000 the gradient was not finite\n"
        "2026-01-01 11:00:00,500 begins: index 0, backend native, device cpu, frame 3000\n"
        f"2026-01-01 11:00:05,500 {HOSTILE}\n"
        "2026-01-01 11:00:09,000 time: 3.00 s collecting, 1.00 s learning\n"
        "2026-01-01 11:00:10,000 ends at frame 4000\n",
        encoding="utf-8",
    )
    paths.trial_metrics().write_text(json.dumps({"status": "failed", "failed": 1, "failures": {"1": "ValueError: bad"}}))
    data = report_data(Run(paths))
    events = data["events"]
    found = [(one["kind"], one["seconds"], one["frame"]) for one in events]
    assert found == [("failed", None, None), ("notice", 15.0, 1500), ("start", 30.0, 3000), ("notice", 35.0, 3500)]
    assert events[1]["text"] == "the gradient was not finite (× 2)"
    assert events[0]["text"] == "ValueError: bad"
    (bottleneck,) = (one for one in data["facts"] if one["label"] == "bottleneck")
    assert bottleneck["value"] == "envs and acting"
    assert "75%" in bottleneck["note"]


# ---- settings and origin


def test_settings_that_differ_from_defaults_and_from_the_run_before(tmp_path: Path) -> None:
    folders = [RunPaths(tmp_path / f"small_2026_01_0{day}_120000", "small") for day in (1, 2, 3)]
    for paths, gamma in zip(folders, (0.9, 0.95, 0.98), strict=True):
        paths.root.mkdir()
        paths.make_dirs()
        save_spec(paths, agent={"algorithm": {"name": "PPO", "gamma": gamma, "lam": 0.95}})
        write_rows(paths, 0, [1.0])
    folders[1].report.write_text("page")
    run = Run(folders[2])
    assert {path: (value, default) for path, value, default in changed_settings(run.spec)}["agent.algorithm.gamma"] == (0.98, 0.99)
    assert "agent.algorithm.lam" not in [path for path, *_ in changed_settings(run.spec)]  # the value is the default
    data = report_data(run)
    previous = data["settings"]["previous"]
    assert (previous["name"], previous["href"]) == (folders[1].root.name, f"../{folders[1].root.name}/report.html")
    assert previous["rows"] == [["agent.algorithm.gamma", "0.98", "0.95"]]
    assert previous_run(Run(folders[0])) is None
    assert any(one["command"].startswith("slm-lab compare ") for one in data["commands"])


def test_a_run_of_a_study_shows_its_published_score(tmp_path: Path) -> None:
    folder = tmp_path / "st_2026_01_01_120000" / "runs" / "A_CartPole-v1_seed0_12345678"
    paths = RunPaths(folder / "small_2026_01_01_120000", "small")
    paths.root.mkdir(parents=True)
    paths.make_dirs()
    save_spec(paths)
    write_rows(paths, 0, [1.0])
    (folder / "study_run.json").write_text(json.dumps({"entry": "A", "env": "CartPole-v1", "random_seed": 0}))
    entries = [{"spec": "small", "label": "A", "published": 480}, {"spec": "small", "label": "B", "published": 10}]
    study = {"st": {"study": {"entries": entries, "solve": 475, "random_seed": [0]}}, "$study": {}}
    (folder.parents[1] / "st_study.json").write_text(json.dumps(study))
    levels = {one["label"]: one["value"] for one in report_data(Run(paths))["levels"]}
    assert (levels["published score"], levels["solved"]) == (480, 475)


# ---- the page


def test_no_text_of_a_spec_or_a_log_can_leave_its_place(paths: RunPaths) -> None:
    paths = RunPaths(paths.root, "hostile")
    save_spec(paths, HOSTILE, env={"name": HOSTILE, "max_frame": 10})
    write_rows(paths, 0, [1.0, 2.0])
    text = write_trial_report(paths).read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text
    assert "<!--" not in text
    assert text.count("</script>") == 3
    content = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(content)["title"] == HOSTILE
    assert json.loads(script_json({"a": "\ud800", "b": float("nan")})) == {"a": "?", "b": None}


@pytest.mark.parametrize("torn", ["metrics", "no metrics", "cut", "empty", "no columns", "log", "no tables"])
def test_a_torn_folder_has_a_page(paths: RunPaths, torn: str) -> None:
    two_seeds(paths)
    table = paths.session_df(1)
    match torn:
        case "metrics":
            paths.trial_metrics().write_text("{")
        case "cut":
            table.write_text(table.read_text()[:-40])
        case "empty":
            table.write_text("")
        case "no columns":
            table.write_text("frame,total_reward\n1000,5\n2000,x\n")
        case "log":
            paths.session_log(1).write_bytes(b"\xff\x00 begins: index\n2026-99-99 10:00:00,000 x\n")
        case "no tables":
            for index in (0, 1):
                paths.session_df(index).unlink()
    assert write_trial_report(paths).stat().st_size > 10_000


def test_a_damaged_spec_is_named(paths: RunPaths) -> None:
    two_seeds(paths)
    paths.spec.write_text('{"small": ')
    with pytest.raises(UserError, match=r"small_spec\.json"):
        write_trial_report(paths)


def test_a_running_page_is_loaded_again_and_one_of_an_ended_run_is_not(paths: RunPaths) -> None:
    two_seeds(paths)
    assert "refresh" not in _data(write_trial_report(paths))
    lock = RunLock(paths.lock)
    try:
        running = _data(write_trial_report(paths))
        assert (running["status"], running["refresh"]) == ("running", report_page.REFRESH)
        assert _data(write_trial_report(paths, ended=True))["status"] == "stopped"
    finally:
        lock.release()


def _data(path: Path) -> Mapping[str, Any]:
    text = path.read_text(encoding="utf-8")
    return dict(json.loads(text.partition('id="data">')[2].partition("</script>")[0]))


def test_a_live_page_is_written_seldom_and_never_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that takes 2 s is followed by a pause of 300 s."""
    now, written = 100.0, list[float]()
    monkeypatch.setattr(report_page, "perf_counter", lambda: now)

    def write() -> Path:
        nonlocal now
        written.append(now)
        now += 2.0 if len(written) < 3 else 0.001
        if len(written) == 4:
            raise ValueError("torn")
        return tmp_path

    live = LiveReport(write)
    for _ in range(2000):
        live.write_if_due()
        now += 1.0
    assert written == pytest.approx([120, 422, 724, 744], abs=0.01)
    with caplog.at_level(logging.WARNING):
        assert try_write_report(lambda: _fail()) is None
    assert caplog.messages[-1] == "report not written: ZeroDivisionError: division by zero"


def _fail() -> Path:
    raise ZeroDivisionError("division by zero")


@pytest.mark.usefixtures("no_baseline")
def test_a_run_writes_its_page_at_the_end_and_while_it_trains(tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "REFRESH", 0.0)
    monkeypatch.setattr(report_page, "_COST", 0.0)
    statuses = []
    write_pages = report_page.write_report

    def noted(root: Path, path: Path, data: Mapping[str, Any]) -> Path:
        statuses.append(data["status"])
        return write_pages(root, path, data)

    monkeypatch.setattr(report_page, "write_report", noted)
    result = Trial(make_spec(), tmp_path).run()
    assert statuses[-1] == "done"
    assert set(statuses[:-1]) == {"running"}
    assert result.paths.report.is_file()
    assert (result.paths.root / "plotly.min.js").is_file()
