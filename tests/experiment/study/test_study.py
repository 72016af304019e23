"""A study runs each listed run once, as `train` would, and runs only those that are missing."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slm_lab.cli import main
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.files.bundle import read_header, weights_sort_key
from slm_lab.experiment.files.lock import RunLock, in_use
from slm_lab.experiment.files.paths import StudyPaths, StudyRunFolder, find_study
from slm_lab.experiment.plan import Plan, Stop, TrialFailed, UserError
from slm_lab.experiment.report.metrics import Estimate, Median
from slm_lab.experiment.report.study_report import EntryResult, result_sentences
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.experiment.run.study.study import StudyExperiment, concurrent_gpu_runs
from slm_lab.experiment.run.study.study_run import RunJob, find_adopted_runs, run_key, run_study_task
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.training.resolve import select_device
from slm_lab.lib.files import with_checksum
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.study_file import load_study
from slm_lab.spec.models.spec import SPEC_VERSION
from slm_lab.spec.models.study import StudyRun
from slm_lab.spec.report import SpecError
from tests.blank import BlankRenderer
from tests.experiment.commands import rows
from tests.experiment.study.toys import STUDY, results, run, write, written

SEEDS = [("slow", 0), ("slow", 1), ("fast", 0), ("fast", 1)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    """Return a finished study of four runs, which tests copy."""
    return run(tmp_path_factory.mktemp("study"))


@pytest.fixture
def study(finished: StudyPaths, tmp_path: Path) -> StudyPaths:
    """Return a copy of the finished study."""
    root = tmp_path / "data" / finished.root.name
    shutil.copytree(finished.root, root, copy_function=shutil.copy2)
    return StudyPaths(root, finished.name)


def test_each_run_is_that_of_train(finished: StudyPaths, tmp_path: Path) -> None:
    file = write(tmp_path)
    assert set(results(finished)) == set(SEEDS)
    sets = ["agent.net.optim_spec.lr=0.001", "meta.random_seed=1"]
    trained = Trial(load_spec(file, "a2c", sets), data_dir=tmp_path / "data").run()
    (table,) = finished.runs.glob("slow_*seed1*/*/info/*_train.csv")
    assert rows(table) == rows(trained.paths.session_df(0))
    shown = results(finished)["slow", 1]
    assert shown.status == "done"
    assert shown.tables("train")[0]["total_reward"].tolist() == pytest.approx([float(row["total_reward"]) for row in rows(table)], rel=1e-4)


def test_the_answer_is_written(finished: StudyPaths) -> None:
    with finished.table("csv").open() as file:
        lines = {row["entry"]: row for row in csv.DictReader(file)}
    finals = {
        entry: [results(finished)[entry, seed].tables("train")[0]["total_reward"][-1] for seed in (0, 1)] for entry in ("slow", "fast")
    }
    for entry, values in finals.items():
        assert float(lines[entry]["score"]) == pytest.approx(sum(values) / 2)
    assert float(lines["fast"]["difference"]) == pytest.approx((sum(finals["fast"]) - sum(finals["slow"])) / 2)
    assert "fast" in finished.table("md").read_text()
    page = finished.report.read_text()
    for picture in finished.root.glob("graph/*.png"):
        assert f"graph/{picture.stem}.html" in page
    assert finished.graph("returns_vs_frames", "html").is_file()
    assert not list(finished.root.glob(".lock_*"))


def test_what_has_ended_does_not_run_again(study: StudyPaths, tmp_path: Path) -> None:
    before, table = written(study), study.table("json").read_bytes()
    study.table("json").unlink()
    run(tmp_path, study)
    assert written(study) == before
    assert study.table("json").read_bytes() == table


@pytest.mark.slow
def test_more_seeds_and_a_new_entry_run_alone(study: StudyPaths, tmp_path: Path) -> None:
    before = written(study)
    third = {"spec": "a2c", "label": "first", "set": {"agent.algorithm.gamma": 0.9}}
    run(tmp_path, study, random_seed=[5, 0, 1], entries=[third, *STUDY["entries"]])
    after = written(study)
    assert {key: after[key] for key in before} == before
    assert set(after) == {(entry, seed) for entry in ("first", "slow", "fast") for seed in (0, 1, 5)}
    assert set(results(study)) == set(after)


def test_runs_of_a_changed_entry_are_set_aside(study: StudyPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(study)
    changed = {**STUDY["entries"][1], "set": {"agent.net.optim_spec.lr": 0.02}}
    run(tmp_path, study, entries=[STUDY["entries"][0], changed])
    after = written(study)
    assert {key for key in after if after[key] != before[key]} == {("fast", 0), ("fast", 1)}
    assert len(list(study.outdated_runs.glob("fast_*/*/info/*_train.csv"))) == len(list(study.outdated_runs.glob("fast_*.json"))) == 2
    assert "agent.net.optim_spec.lr: 0.01 → 0.02" in capsys.readouterr().out
    assert {one.settings()["agent.net.optim_spec.lr"] for (entry, _), one in results(study).items() if entry == "fast"} == {0.02}


@pytest.mark.parametrize("content", ["", '{"entry": "fast"', "[]"])
def test_a_damaged_identity_file_is_written_again(content: str, study: StudyPaths, tmp_path: Path) -> None:
    before = written(study)
    identity, *_ = sorted(study.runs.glob("*/study_run.json"))
    text = identity.read_text(encoding="utf-8")
    identity.write_text(content, encoding="utf-8")
    study.result(identity.parent.name).unlink()
    run(tmp_path, study)
    assert identity.read_text(encoding="utf-8") == text
    assert written(study) == before


def test_runs_of_another_version_are_refused(study: StudyPaths, tmp_path: Path) -> None:
    """Keys may have another meaning in another version, so its runs are not compared, moved or trained."""
    before = written(study)
    identity = next(study.runs.glob("*/study_run.json"))
    text = identity.read_text(encoding="utf-8")
    identity.write_text(text.replace(f'"spec_version": {SPEC_VERSION}', f'"spec_version": {SPEC_VERSION - 1}'), encoding="utf-8")
    with pytest.raises(UserError, match=f"has spec_version {SPEC_VERSION - 1}; expected {SPEC_VERSION}") as error:
        run(tmp_path, study)
    assert str(identity) in str(error.value)
    assert written(study) == before


def test_a_continued_study_keeps_what_set_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A continued study keeps the changes of --set; otherwise its runs would be set aside and trained with other values."""
    file, found = write(tmp_path), list[tuple[str, ...]]()

    class Recorder(StudyExperiment):
        def run(self, stop: Stop | None = None) -> StudyPaths:
            found.append(self.study.sets)
            return self._create_study_folder()

    monkeypatch.setattr("slm_lab.experiment.run.study.study.StudyExperiment", Recorder)
    data = ["--data-dir", str(tmp_path / "data")]
    for words in (
        ["study", "-s", "set.env.max_frame=300"],
        ["study@latest"],
        ["study@latest", "-s", "set.env.max_frame=200"],
        ["study@latest"],
    ):
        assert main([str(file), "small", *words, *data]) == 0
    assert found == [(f"set.env.max_frame={frames}",) for frames in (300, 300, 200, 200)]


def test_operational_keys_and_labels_change_nothing(study: StudyPaths, tmp_path: Path) -> None:
    before = sorted(written(study).values())
    renamed = {**STUDY["entries"][1], "label": "faster", "set": {"meta.save_interval": 7}}
    run(tmp_path, study, entries=[STUDY["entries"][0], renamed])
    assert sorted(written(study).values()) == before
    assert {entry for entry, _ in results(study)} == {"slow", "faster"}


def test_one_deleted_result_is_made_again(study: StudyPaths, tmp_path: Path) -> None:
    before = written(study)
    shutil.rmtree(next(study.runs.glob("slow_*seed0*")))
    next(study.results.glob("slow_*seed0*")).unlink()
    run(tmp_path, study)
    after = written(study)
    assert {key for key in before if after[key] != before[key]} == {("slow", 0)}


def test_a_result_is_made_of_a_finished_run(study: StudyPaths, tmp_path: Path) -> None:
    """A missing result is written again from the finished run, without a duration: only that of the last start would be known."""
    before = written(study)
    file = next(study.results.glob("slow_*seed0*"))
    content = ResultRun(file).content
    file.unlink()
    run(tmp_path, study)
    assert written(study) == before
    assert ResultRun(file).content == {**content, "seconds": None}


def test_the_lock_of_a_run_is_held_until_its_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another study that waits for the lock would start the run again."""
    (own, *_) = load_study(write(tmp_path), "small").runs
    folder = StudyRunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.identity.write_text(json.dumps({"entry": own.entry, "env": own.env, "random_seed": 0, "digest": own.digest, "settings": {}}))
    job = RunJob(own.spec, folder, tmp_path / "result.json", tmp_path / ".lock_run", None, 0, None)
    held: list[bool] = []
    monkeypatch.setattr("slm_lab.experiment.report.study_result.write_result", lambda *_: held.append(in_use(job.lock)))
    monkeypatch.setattr("slm_lab.experiment.report.writer.PNGRenderer", BlankRenderer)
    sent: list[tuple[str, ...]] = []
    context = SimpleNamespace(redirect_output=lambda file: None, send=lambda *words: sent.append(words), stop=Stop())
    run_study_task(cast(Context, context), job)
    assert (sent, held, in_use(job.lock)) == ([("outcome", "done", "")], [True], False)


def test_results_of_another_version_are_refused(study: StudyPaths, tmp_path: Path) -> None:
    file = next(study.results.glob("slow_*seed0*"))
    file.write_text(json.dumps({"version": 99, "of": "another form"}))
    with pytest.raises(UserError, match=r"has version 99; expected"):
        ResultRun(file)


def test_finished_runs_are_adopted(finished: StudyPaths, tmp_path: Path) -> None:
    (folder,) = finished.runs.glob("fast_*seed1*/a2c_*")
    paths = run(tmp_path, adopt=[str(folder)], random_seed=[1])
    assert set(results(paths)) == {("slow", 1), ("fast", 1)}
    assert results(paths)["fast", 1].content["adopted"] == str(folder)
    assert list(written(paths)) == [("slow", 1)]


def test_other_runs_are_not_adopted(finished: StudyPaths, tmp_path: Path) -> None:
    (folder,) = finished.runs.glob("fast_*seed1*/a2c_*")
    for keys, word in (
        ({"set": {"agent.algorithm.gamma": 0.5}}, "agent.algorithm.gamma: 0.99 → 0.5"),
        ({"random_seed": [7]}, "random_seed"),
    ):
        with pytest.raises(UserError, match=word):
            run(tmp_path, adopt=[str(folder)], **keys)
    with pytest.raises(UserError, match="no folder matches"):
        run(tmp_path, adopt=[str(tmp_path / "none*")])
    assert not (tmp_path / "data").exists()


def test_a_run_of_a_short_spec_is_adopted(tmp_path: Path) -> None:
    """A study uses an existing run of a short spec, although the saved spec of the run also has a net, which the short spec lacks."""
    short = {"agent": {"algorithm": {"name": "ActorCritic"}}, "env": {"name": "CartPole-v1", "max_frame": 64}}
    file = tmp_path / "short.json"
    file.write_text(json.dumps({"short": short, "one": {"study": {"entries": [{"spec": "short"}], "random_seed": [3]}}}))
    trained = Trial(load_spec(file, "short", ["meta.random_seed=3"]), data_dir=tmp_path / "runs").run()
    study = load_study(file, "one")
    assert find_adopted_runs(study, [str(tmp_path / "runs" / "*")]) == {run_key(study.runs[0]): trained.paths.root}


def test_runs_share_the_gpus(tmp_path: Path) -> None:
    def runs(**keys: object) -> tuple[StudyRun, ...]:
        return load_study(write(tmp_path, set={"agent.net.gpu": "auto", **keys}), "small").runs

    assert concurrent_gpu_runs(runs(), 8, 2) == 8  # the share of a GPU that a run needs is unknown
    assert concurrent_gpu_runs(runs(**{"meta.search_resources.gpu": 0.5}), 8, 2) == 4
    assert concurrent_gpu_runs(runs(**{"meta.search_resources.gpu": 4}), 8, 2) == 1
    assert concurrent_gpu_runs(runs(**{"meta.search_resources.gpu": 0.5}), 8, 0) == 8
    assert concurrent_gpu_runs(runs(**{"meta.search_resources.gpu": 0.5, "agent.net.gpu": False}), 8, 2) == 8


def test_first_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    write(tmp_path)
    auto, second = (load_spec(tmp_path / "study.json", "a2c", ["agent.net.gpu=auto", *sets]) for sets in ([], ["agent.net.cuda_id=1"]))
    assert [select_device(auto, Plan(first_gpu=1), session) for session in (0, 1)] == ["cuda:1", "cuda:0"]
    assert select_device(second, Plan(first_gpu=0), 0) == select_device(second, Plan(first_gpu=1), 0) == "cuda:1"


def test_a_run_that_fails_is_tried_twice_and_marked(tmp_path: Path) -> None:
    fatal = {"env.name": "tests.experiment.fatal_env:Fatal-v0", "env.does": "ValueError", "env.after": 10}
    entries = [STUDY["entries"][0], {"spec": "a2c", "label": "broken", "set": fatal}]
    with pytest.raises(TrialFailed, match=r"1 of 2 runs failed: broken.*random_seed 0"):
        run(tmp_path, entries=entries, random_seed=[0])
    paths = find_study("latest", "small", tmp_path / "data")
    assert len(list(paths.runs.glob("broken_*/a2c_*"))) == 2
    rows = {row["entry"]: row for row in json.loads(paths.table("json").read_text())["rows"]}
    assert (rows["broken"]["seeds"], rows["broken"]["failed"], rows["slow"]["seeds"]) == (0, 1, 1)
    with pytest.raises(TrialFailed):
        run(tmp_path, paths, entries=entries, random_seed=[0])
    assert len(list(paths.runs.glob("broken_*/a2c_*"))) == 2


def test_a_study_in_use_says_by_whom(study: StudyPaths, tmp_path: Path) -> None:
    lock = RunLock(study.lock)
    try:
        with pytest.raises(UserError, match=r"the study in .* is in use by process \d+"):
            run(tmp_path, study)
    finally:
        lock.release()


def test_other_folders_are_refused(study: StudyPaths, tmp_path: Path) -> None:
    for where in (str(tmp_path), "none", str(next(study.runs.glob("*/a2c_*")))):
        with pytest.raises(UserError, match="is not the folder of a study"):
            find_study(where, "small", tmp_path)
    content = json.loads(study.study.read_text())
    content["$study"]["version"] = 99
    study.study.write_text(json.dumps(content))
    with pytest.raises(UserError, match="version 99; expected"):
        run(tmp_path, study)


def test_an_env_that_an_entry_cannot_take_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    entries = [*STUDY["entries"], {"spec": "a2c", "label": "new", "set": {"agent.algorithm.action_pdtype": "Normal"}}]
    with pytest.raises(SpecError, match=r"new in CartPole-v1: agent\.algorithm\.action_pdtype"):
        run(tmp_path, entries=entries)
    assert not (tmp_path / "data").exists()


def test_kept_results_are_enough(study: StudyPaths, tmp_path: Path) -> None:
    """With kept results and without run folders, no run is repeated unless its result is deleted."""
    shutil.rmtree(study.runs)
    study.study.unlink()
    run(tmp_path, study)
    assert written(study) == {}
    next(study.results.glob("fast_*seed1*")).unlink()
    run(tmp_path, study)
    assert list(written(study)) == [("fast", 1)]


def test_a_key_that_is_newer_than_a_result_changes_nothing(study: StudyPaths, tmp_path: Path) -> None:
    """A key added later, at its default, invalidates no results, although older results lack it and have another digest."""
    before = written(study)
    for file in (*study.results.glob("*.json"), *study.runs.glob("*/study_run.json")):
        content = json.loads(file.read_text())
        del content["settings"]["agent.algorithm.rho_bar"]
        content["digest"] = "0" * 16
        content.pop("crc32", None)
        file.write_text(json.dumps(with_checksum(content) if file.parent == study.results else content))
    run(tmp_path, study)
    assert written(study) == before
    assert all("agent.algorithm.rho_bar" in one.settings() for one in results(study).values())
    changed = {**STUDY["entries"][1], "set": {"agent.algorithm.rho_bar": 2.0, "agent.algorithm.with_vtrace": True}}
    run(tmp_path, study, entries=[STUDY["entries"][0], changed])
    assert {key for key, time in written(study).items() if time != before[key]} == {("fast", 0), ("fast", 1)}


def test_a_damaged_result_is_refused(study: StudyPaths, tmp_path: Path) -> None:
    """A damaged result is refused, because the comparison uses its rows. If it is deleted, it is written again from the run's folder."""
    file = next(iter(sorted(study.results.glob("*.json"))))
    whole = file.read_text()
    file.write_text(whole.replace('"frame": [', '"frame": [1', 1))
    with pytest.raises(UserError, match=re.escape(f"{file} cannot be read as a result of a study: its content does not match")):
        run(tmp_path, study)
    file.unlink()
    run(tmp_path, study)
    assert json.loads(file.read_text())["train"] == json.loads(whole)["train"]


def test_findings_say_what_the_rows_show(study: StudyPaths, tmp_path: Path) -> None:
    loaded = load_study(write(tmp_path, solve=20), "small")
    slow = EntryResult("CartPole-v1", "slow", 4, 0, Estimate(10.0, None, None), solved=1, solve_frames=Median(math.inf, None, None))
    fast = EntryResult(
        "CartPole-v1",
        "fast",
        4,
        0,
        difference=Estimate(15.0, 5.0, 25.0),
        p_holm=0.0123,
        solved=4,
        solve_frames=Median(12_800.0, None, None, at_most=True),
    )
    assert result_sentences(loaded, [slow, fast]) == [
        "fast scored 15 above slow (95 % interval of the difference 5 to 25, p (Holm) 0.012).",
        "slow reached 20 in 1 of 4 seeds; at least half of the seeds never did.",
        "fast reached 20 in 4 of 4 seeds; the median is at most 12,800 global frames.",
    ]
    level = fast._replace(difference=Estimate(15.0, -5.0, 25.0))
    assert result_sentences(loaded, [level])[0].endswith("with 4 seeds (95 % interval of the difference -5 to 25, p (Holm) 0.012).")
    paired = result_sentences(loaded, [level._replace(pairs=3, p_holm=None)])[0]
    assert paired.endswith("with 3 pairs of runs (95 % interval of the difference -5 to 25).")
    assert result_sentences(loaded, [slow._replace(solved=None)]) == []


def test_the_agent_of_a_study_is_that_of_its_best_run(finished: StudyPaths, capsys: pytest.CaptureFixture[str]) -> None:
    returns = {}
    for entry, seed in SEEDS:
        agent = load_agent(finished.root, entry=entry, seed=seed)
        assert f"{entry} of the study, in CartPole-v1, seed {seed}" in repr(agent)
        returns[entry, seed] = weights_sort_key(read_header(agent.path))
    entry, seed = max(returns, key=lambda key: returns[key])
    assert load_agent(finished.root).path == load_agent(finished.root, entry=entry, seed=seed).path
    with pytest.raises(UserError, match=r"entry fsat: .*did you mean 'fast'"):
        load_agent(finished.root, entry="fsat")
    with pytest.raises(UserError, match=r"seed 7: .* have 0, 1"):
        load_agent(finished.root, seed=7)
    with pytest.raises(UserError, match=r"trial 0: .* is the folder of a study"):
        load_agent(finished.root, trial=0)
    assert main([str(finished.study), "other", f"enjoy@{finished.root}"]) == 2
    assert main([f"enjoy@{finished.root}", "--entry", "fast", "--seed", "1", "--episodes", "1"]) == 0
    assert "fast of the study, in CartPole-v1, seed 1" in capsys.readouterr().out
