"""Tests of the command report, and of the pages of a search and of a study, on hand-made folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.experiment.files.paths import RunPaths, StudyPaths
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.study_result import write_result
from slm_lab.spec.load.study_file import load_study
from tests.experiment.test_graph import write_rows
from tests.experiment.test_report import save_spec, two_seeds

SpecBody = Callable[..., dict[str, Any]]
GAMMA, LR = "agent.algorithm.gamma", "agent.net.optim_spec.lr"


def data_of(path: Path) -> Mapping[str, Any]:
    text = path.read_text(encoding="utf-8")
    return dict(json.loads(text.partition('id="data">')[2].partition("</script>")[0]))


def report(capsys: pytest.CaptureFixture[str], *words: str) -> Path:
    """Run the command report and return the page that it names."""
    assert main(["report", *words]) == 0
    return Path(capsys.readouterr().out.strip())


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["report", *words]) == 2
    return capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "data" / "small_2026_01_01_120000", "small")
    paths.root.mkdir(parents=True)
    paths.make_dirs()
    two_seeds(paths)
    return paths


@pytest.fixture
def search(tmp_path: Path, spec_body: SpecBody) -> RunPaths:
    """Return a search of three trials: one finished, one finished and confirmed, one failed."""
    paths = RunPaths(tmp_path / "data" / "small_2026_01_02_120000", "small")
    paths.root.mkdir(parents=True)
    paths.make_dirs()
    space = {f"{GAMMA}__uniform": [0.8, 0.99], f"{LR}__loguniform": [1e-4, 0.1]}
    paths.spec.write_text(json.dumps({"small": {**spec_body(), "search": space}}))
    trials = [
        TrialState(0, {GAMMA: 0.9, LR: 0.01}, "finished", frame=3000, seconds=5.0, metric=40.0, metrics={"strength": 20.0}),
        TrialState(1, {GAMMA: 0.95, LR: 0.001}, "finished", frame=3000, seconds=6.0, metric=30.0, metrics={"strength": 10.0}),
        TrialState(2, {GAMMA: 0.85, LR: 0.1}, "failed", cause="Traceback\nValueError: <b>bad</b>"),
    ]
    confirmations = [TrialState(1, trials[1].values, "finished", metric=44.0)]
    SearchState("current_return", 20.0, False, trials, confirmations=confirmations).save(paths.search_state)
    for trial in (0, 1):
        write_rows(paths, 0, [20.0, 30.0, 40.0 - 10 * trial], t=trial)
    return paths


@pytest.fixture
def study(tmp_path: Path, spec_body: SpecBody) -> StudyPaths:
    """Return a study of two entries and two seeds, of which one run has ended."""
    file = tmp_path / "study.json"
    entries = [{"spec": "small", "label": "A"}, {"spec": "small", "label": "B", "set": {GAMMA: 0.5}}]
    body = {"study": {"entries": entries, "random_seed": [0, 1], "baseline": "A"}}
    file.write_text(json.dumps({"small": spec_body(), "st": body}))
    paths = StudyPaths(tmp_path / "data" / "st_2026_01_03_120000", "st")
    paths.results.mkdir(parents=True)
    about = {"version": 1, "source": str(file), "set": [], **load_study(file, "st").plan_json}
    paths.study.write_text(json.dumps({"st": body, "$study": about}))
    file.unlink()  # the page must need only the folder
    name = "A_CartPole-v1_seed0_12345678"
    run = RunPaths(paths.runs / name / "small_2026_01_03_120001", "small")
    run.root.mkdir(parents=True)
    run.make_dirs()
    save_spec(run)
    write_rows(run, 0, [20.0, 30.0])
    run.trial_metrics().write_text(json.dumps({"status": "done"}))
    identity = {"entry": "A", "env": "CartPole-v1", "random_seed": 0, "digest": "1", "settings": {}, "spec_version": 3}
    (run.root.parent / "study_run.json").write_text(json.dumps(identity))
    write_result(paths.result(name), Run(run), identity, 3.0)
    return paths


def test_report_of_a_run_by_folder_name_and_latest(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("latest", run.root.name, str(run.root)):
        run.report.unlink(missing_ok=True)
        assert report(capsys, word) == Path("data") / run.root.name / "report.html"
        assert data_of(run.report)["kind"] == "trial"


def test_latest_is_the_newest_run_search_or_study(
    run: RunPaths, search: RunPaths, study: StudyPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = RunPaths(tmp_path / "data" / "dev_2026_01_04_120000", "dev")
    dev.root.mkdir()
    saved = json.loads(run.spec.read_text())
    (body,) = saved.values()
    dev.spec.write_text(json.dumps({"dev": {**body, "meta": {**body.get("meta", {}), "run": [{"mode": "dev"}]}}}))
    monkeypatch.chdir(tmp_path)
    for newest in (study, search, run):
        assert report(capsys, "latest").resolve() == newest.report
        newest.root.rename(tmp_path / newest.root.name)
    assert "no run" in refused(capsys, "latest")


def test_a_folder_of_a_study_and_a_file_are_not_runs(study: StudyPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"train@{study.root}"]) == 2
    assert f"to continue it: FILE st study@{study.root}" in capsys.readouterr().err
    (file := tmp_path / "c.json").write_text("{}")
    assert main(["verify", str(file)]) == 2
    assert f"'{file}' is not a run folder: it is a file" in capsys.readouterr().err


def test_report_of_nothing_is_refused(run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "RUN is missing" in refused(capsys)
    assert "too many arguments" in refused(capsys, "a", "b")
    assert "'nothing' is not a run folder" in refused(capsys, "nothing", "--data-dir", str(tmp_path / "data"))
    assert "not the folder of a study" in refused(capsys, str(run.root), "--entry", "A")
    assert "trial 4" in refused(capsys, str(run.root), "--trial", "4")
    run.spec.write_text("{")
    assert "small_spec.json" in refused(capsys, str(run.root))
    assert not run.report.exists()


def test_page_of_a_search_ranks_its_trials(search: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(capsys, str(search.root), "--trial", "1")
    assert page.name == "small_t1_report.html"
    assert data_of(page)["title"] == "small, trial 1"
    assert report(capsys, str(search.root)) == search.report
    data = data_of(search.report)
    assert (data["kind"], data["status"]) == ("search", "done")
    assert data["facts"][0] == {"label": "trials", "value": "3", "note": "2 finished, 1 failed"}
    (ranking,) = data["tables_of"]
    assert ranking["columns"][1:7] == ["trial", "status", "current_return", "with new seeds", "gamma", "optim_spec.lr"]
    assert [row[1]["text"] for row in ranking["rows"]] == ["trial 1", "trial 0", "trial 2"]  # the confirmed trial comes first
    assert [row[1]["href"] for row in ranking["rows"]] == ["small_t1_report.html", None, None]
    assert ranking["rows"][2][-1] == "ValueError: <b>bad</b>"
    kinds = [figure["plot"]["data"][0]["type"] for figure in data["figures"]]
    assert "parcoords" in kinds
    assert kinds.count("scatter") >= 2
    assert any("search@" in one["command"] for one in data["commands"])


def test_a_search_without_an_ended_trial_has_a_page(search: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    SearchState("current_return", 20.0, False, [TrialState(0, {GAMMA: 0.9, LR: 0.01}, "running")]).save(search.search_state)
    for table in search.info_dir.glob("*.csv"):
        table.unlink()
    data = data_of(report(capsys, str(search.root)))
    assert data["tables_of"][0]["rows"][0][2] == "running"
    assert (data["figures"], data["status"]) == ([], "stopped")


def test_page_of_a_study_compares_and_links_to_its_runs(study: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = study.runs.glob("*/small*")
    report(capsys, str(run))
    assert report(capsys, str(study.root)) == study.report
    data = data_of(study.report)
    assert (data["kind"], data["status"]) == ("study", "stopped")
    assert data["facts"][0] == {"label": "runs", "value": "1 of 4", "note": "3 not run yet"}
    comparison, runs, terms, machines = data["tables_of"]
    assert comparison["rows"][0][:2] == ["A", "1"]
    assert runs["rows"][0][0] == {"text": "A", "href": f"{run.relative_to(study.root)}/report.html"}
    assert "score" in dict(terms["rows"])
    assert machines["rows"][0][0].endswith("(1 run)")
    assert data["figures"][0]["plot"]["data"]


def test_runs_of_a_study_without_current_return_are_compared_by_total_reward(study: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,), (result,) = study.runs.glob("*/small*"), study.results.glob("*.json")
    run = RunPaths(folder, "small")
    table = run.session_df(0)
    table.write_text(table.read_text().replace("current_return", "earlier_return"))
    write_result(result, Run(run), json.loads((folder.parent / "study_run.json").read_text()), 3.0)
    assert report(capsys, str(study.root)) == study.report
    data = data_of(study.report)
    comparison, runs, *_ = data["tables_of"]
    assert data["paragraphs"][0].startswith("A has no column current_return, so the comparison uses total_reward")
    assert comparison["note"].startswith("The score of a seed is the mean return of the last 100 training episodes")
    assert runs["rows"][0][4] == "30"


@pytest.mark.parametrize(
    ("content", "why", "ends"),
    [
        ("{", "Expecting property name", ""),
        ('{"st": {}, "$study": {"version": 1}}', "'scores' is missing", "; slm-lab FILE st study@ROOT writes it again"),
        (
            '{"st": {"study": {}}, "$study": {"source": "a.json", "set": [], "scores": [], "runs": []}}',
            "2 validation errors",
            "ROOT writes it again",
        ),
    ],
)
def test_a_damaged_study_file(content: str, why: str, ends: str, study: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    study.study.write_text(content)
    error = refused(capsys, str(study.root)).rstrip()
    assert f"{study.study} cannot be read as a study: {why}" in error
    assert error.endswith(ends.replace("ROOT", str(study.root)))
