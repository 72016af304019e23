"""Tests of --until-decided: it adds paired seeds until the interval of each difference excludes 0, and continues after an interruption."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli import main
from slm_lab.cli.run import _max_seeds
from slm_lab.experiment.files.paths import StudyPaths, study_start_info
from slm_lab.experiment.plan import Plan, TrialFailed
from slm_lab.experiment.report.decision import decisions
from slm_lab.experiment.report.study_report import study_settings
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.experiment.run.study.study import StudyExperiment
from slm_lab.spec.load.study_file import load_study
from slm_lab.testing import FakeExecutor
from tests.experiment.study.toys import STUDY, evaluated_run, failing_run, made_up_run, results, write, write_made_up
from tests.experiment.test_report_folder import data_of


@pytest.fixture
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tasks of a study in this process."""
    monkeypatch.setattr("slm_lab.experiment.run.study.study.LocalExecutor", lambda stall_notice: FakeExecutor())
    monkeypatch.setattr("slm_lab.experiment.run.study.study.ensure_server", lambda: None)
    monkeypatch.setattr(StudyExperiment, "_check_builds", lambda *_: 0)


def study_until(folder: Path, max_seeds: int, paths: StudyPaths | None = None, target: Any = made_up_run, **keys: Any) -> StudyPaths:
    study = load_study(write(folder, **keys), "small")
    return StudyExperiment(study, Plan(data_dir=folder / "data", jobs=2), paths=paths, max_seeds=max_seeds, target=target).run()


def decided(paths: StudyPaths) -> list[dict[str, Any]]:
    return list(json.loads(paths.table("json").read_text())["decisions"])


@pytest.mark.usefixtures("_no_processes")
def test_seeds_are_added_until_the_difference_is_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Differences of 460, 458, …, of at most 500, are decided after eight seeds; a study stopped after four continues from there."""
    paths = study_until(tmp_path, max_seeds=4)
    assert (len(results(paths)), decided(paths)[0]["decided_after"]) == (8, None)
    assert "Not decided after 4 seeds: fast and slow" in capsys.readouterr().out.replace("\n", " ")
    before = {file.name: file.read_bytes() for file in paths.results.iterdir()}
    study_until(tmp_path, max_seeds=20, paths=paths)
    assert {file.name: file.read_bytes() for file in paths.results.iterdir() if file.name in before} == before
    (one,) = decided(paths)
    assert (one["entry"], one["reference"], one["seeds"], one["decided_after"]) == ("fast", "slow", 8, 8)
    assert one["difference"] == pytest.approx(460 - 7)
    assert one["difference_low"] > 0
    assert set(results(paths)) == {(entry, seed) for entry in ("slow", "fast") for seed in range(8)}
    sentences = data_of(paths.report)["paragraphs"]
    assert any(one.startswith("Decided after 8 seeds: fast is above slow") for one in sentences)
    assert not any("interval of the difference" in one for one in sentences), "which holds only for a number of seeds that was fixed before"
    assert study_start_info(paths)["max_seeds"] == 20
    for again in (False, True):  # the page written by the study, and the page of the command
        if again:
            paths.report.unlink()
            assert main(["report", str(paths.root)]) == 0
        data = data_of(paths.report)
        assert (data["facts"][0]["value"], data["status"]) == ("16 of 16", "done")
        assert "Decided after 8 seeds: fast is above slow" in " ".join(data["paragraphs"])


@pytest.mark.usefixtures("_no_processes")
def test_files_are_named_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = study_until(tmp_path, max_seeds=4)
    lines = capsys.readouterr().out.splitlines()
    assert f"open data/{paths.root.name}/report.html" in lines
    assert str(tmp_path) not in "".join(lines)


@pytest.mark.usefixtures("_no_processes")
def test_only_undecided_entries_get_more_seeds_and_a_failure_ends_it(tmp_path: Path) -> None:
    third = {"spec": "a2c", "label": "same", "set": {"agent.algorithm.gamma": 0.9}}
    paths = study_until(tmp_path, max_seeds=11, entries=[*STUDY["entries"], third])
    counts = {entry: sum(key[0] == entry for key in results(paths)) for entry in ("slow", "fast", "same")}
    assert counts == {"slow": 11, "fast": 9, "same": 11}, "each of two intervals at 97.5 %: one more seed"
    assert [(one["entry"], one["decided_after"]) for one in decided(paths)] == [("fast", 9), ("same", None)]
    with pytest.raises(TrialFailed, match="the env is gone"):
        study_until(tmp_path / "failing", max_seeds=20, target=failing_run)
    (failed,) = (tmp_path / "failing/data").iterdir()
    assert {seed for _, seed in results(StudyPaths(failed, "small"))} == {0, 1}


@pytest.mark.usefixtures("_no_processes")
def test_decisions_do_not_compare_evaluations_with_training_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If only one entry has evaluations, training episodes decide; a comparison with its evaluations would rank slow above fast."""
    paths = study_until(tmp_path, max_seeds=20, target=evaluated_run, metric="current_return", solve=100)
    assert [(one["seeds"], one["decided_after"], one["difference"] > 0) for one in decided(paths)] == [(8, 8, True)]
    table = json.loads(paths.table("json").read_text())
    reason = "The current returns at the end differ in kind (slow: training episodes; fast: evaluation with deterministic actions)"
    assert table["metric"] == "training_return"
    assert "solved if the column current_return reaches 100 in at least one table row" in paths.table("md").read_text()
    assert f"\n\n- {reason}" in paths.table("md").read_text()
    assert table["metric_reason"].startswith(reason)
    assert data_of(paths.report)["paragraphs"][0] == table["metric_reason"]
    out, err = capsys.readouterr()
    assert (" ".join(out.split()).count(reason), reason in err) == (1, False)


def test_decisions_against_the_first_entry_without_a_baseline(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, baseline=None, random_seed=[5, 3, 4]), "small")
    found = []
    for index, run in enumerate(study.runs):
        identity = {
            "entry": run.entry,
            "env": run.env,
            "random_seed": run.random_seed,
            "digest": run.digest,
            "settings": dict(run.settings),
        }
        write_made_up(tmp_path / f"{index}.json", identity)
        found.append(ResultRun(tmp_path / f"{index}.json"))
    (one,) = decisions(study, study_settings(study, found[1:]))
    assert (one.entry, one.reference, one.pairs, one.after, one.bounded) == ("fast", "slow", 2, None, True)
    assert one.difference is not None
    assert one.difference.value == pytest.approx(460 - 2 * 3.5)
    extended = study.with_additional_seed({("fast", "CartPole-v1")})
    assert [(run.entry, run.random_seed) for run in extended.runs[len(study.runs) :]] == [("fast", 0)]
    assert extended.runs[-1].digest == study.runs[-1].digest


@pytest.mark.parametrize(
    ("until_decided", "max_seeds", "saved", "expected"),
    [(False, None, None, None), (True, None, None, 32), (True, 9, None, 9), (False, None, 9, 9), (False, 20, 9, 20), (True, None, 9, 9)],
)
def test_a_continued_study_keeps_its_limit(until_decided: bool, max_seeds: int | None, saved: int | None, expected: int | None) -> None:
    assert _max_seeds(Namespace(until_decided=until_decided, max_seeds=max_seeds), saved) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["study", "--max-seeds", "4"], "--max-seeds 4 has no effect without --until-decided"),
        (["train", "--until-decided"], "--until-decided has no effect with train"),
        (["study", "--until-decided", "--max-seeds", "0"], "invalid number of seeds '0'"),
        (
            ["study", "--until-decided", "-s", 'entries=[{"spec": "a2c"}]', "-s", "baseline=null"],
            "has only one entry, which is compared with nothing",
        ),
    ],
)
def test_an_error_of_the_user(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([str(write(tmp_path)), "small", *words, "--data-dir", str(tmp_path / "data")])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert (code, says in capsys.readouterr().err, (tmp_path / "data").exists()) == (2, True, False)
