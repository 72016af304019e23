"""The tables in the documentation show the values of the kept results of studies."""

from __future__ import annotations

import json

import pytest

from bench.benchmarks import (
    SHORT_TABLES,
    rows_of,
    scores,
    with_column_texts,
    with_short_table,
    with_table,
    write_page,
    write_tables,
    writer,
)
from bench.studies import DOCS, LEARNING_CURVES, STUDIES, TABLES, results_of
from slm_lab.spec.load.files import spec_names
from slm_lab.spec.load.study_file import differing_paths, load_study
from slm_lab.spec.models.spec import SPEC_VERSION

with_results = pytest.mark.skipif(not STUDIES["benchmarks"].results.exists(), reason="the source distribution has no results of benchmarks")


@with_results
def test_the_exercise_is_that_of_its_results() -> None:
    page = STUDIES["a3c_vs_a2c"]
    study = load_study(page.file, "a3c_vs_a2c")
    text = (DOCS / "hogwild.md").read_text(encoding="utf-8")
    assert with_table(study, page.results) == text
    (line,) = (line for line in text.splitlines() if line.startswith("| A2C, 1 env |"))
    files = (run.paths.root for run in results_of(study, page.results) if run.content["entry"] == "A2C, 1 env")
    finals = [json.loads(file.read_text())["eval"]["0"]["total_reward"][-1] for file in files]
    assert len(finals) == 16
    assert line.split("|")[6].split()[0] == f"{sum(finals) / 16:.4g}"


@with_results
def test_the_table_of_synchronous_and_asynchronous_runs_is_that_of_its_results() -> None:
    page = STUDIES["sync_async"]
    study = load_study(page.file, "sync_async")
    text = (DOCS / "sync_async.md").read_text(encoding="utf-8")
    assert with_table(study, page.results) == text
    kept = (one.content for one in results_of(study, page.results))
    runs = [one["train"] for one in kept if (one["entry"], one["env"]) == ("asynchronous", "LunarLander-v3")]
    finals = [session["total_reward_ma"][-1] for run in runs for session in run.values()]
    assert len(finals) == 8
    (line,) = (line for line in text.splitlines() if line.startswith("| LunarLander-v3 | asynchronous |"))
    assert line.split("|")[4].split()[0] == f"{sum(finals) / 8:.4g}"


@pytest.mark.parametrize("name", LEARNING_CURVES)
def test_the_tables_of_learning_curves_are_those_of_their_results(name: str) -> None:
    page, text = STUDIES[name], (DOCS / "learning_curves.md").read_text(encoding="utf-8")
    study = load_study(page.file, name)
    if results_of(study, page.results):
        assert with_table(study, page.results) == text
    else:
        assert f"<!-- study {name} -->" not in text


@with_results
def test_the_columns_of_learning_curves_are_explained_once() -> None:
    page = DOCS / "learning_curves.md"
    text = page.read_text(encoding="utf-8")
    assert with_column_texts(page) == text
    for part in ("The interquartile mean is", "Welch's t-test", "at least six seeds", "The gradient norm is averaged", "Beside a"):
        assert text.count(part) == 1, part
    shown = [name for name in LEARNING_CURVES if f"<!-- study {name} -->" in text]
    assert text.count("- The score of a seed is") == len(shown)


@with_results
def test_scores_are_those_of_their_results() -> None:
    page = STUDIES["benchmarks"]
    study, text = load_study(page.file, "benchmarks"), (DOCS / "BENCHMARKS.md").read_text(encoding="utf-8")
    rows = rows_of(study, page.results)
    assert scores(study, rows) == text
    kept = (one.content for one in results_of(study, page.results))
    runs = [one["train"] for one in kept if (one["entry"], one["env"]) == ("REINFORCE", "CartPole-v1")]
    finals = [session["total_reward_ma"][-1] for run in runs for session in run.values()]
    mean = sum(finals) / len(finals)
    (line,) = (line for line in text.splitlines() if line.startswith("| CartPole-v1 | REINFORCE |"))
    score = float(line.split("**")[1])
    assert score == pytest.approx(mean, abs=0.051)  # the page rounds to one decimal place
    for path in SHORT_TABLES:
        shown = path.read_text(encoding="utf-8")
        assert with_short_table(path, rows) == shown
        assert "\n| PPO | 499.9 (498.9) | " in shown


def test_kept_results_are_of_the_studies_as_they_are() -> None:
    """The kept results belong to the current studies: a result whose entry has changed since would be set aside and measured again."""
    for name, page in STUDIES.items():
        study = load_study(page.file, name)
        wanted = {(run.entry, run.env, run.random_seed): run for run in study.runs}
        for kept in (one.content for one in results_of(study, page.results)):
            run = wanted[kept["entry"], kept["env"], kept["random_seed"]]
            assert not differing_paths(kept["settings"], run.settings, run.spec), f"{run.name}: make benchmarks"
            assert kept["spec_version"] == SPEC_VERSION, f"{run.name}: make benchmarks"


def test_each_study_of_the_documentation_is_known_with_its_pages() -> None:
    folder = DOCS.parent / "slm_lab" / "spec" / "study"
    assert set(spec_names(folder / "tables.json")) == set(TABLES)
    assert set(spec_names(folder / "learning_curves.json")) == set(LEARNING_CURVES)
    assert writer("mujoco") is write_tables
    assert writer("hindsight") is write_page
