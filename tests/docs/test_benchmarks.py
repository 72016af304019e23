"""Tables of the documentation are those of the kept results of studies."""

from __future__ import annotations

import json

from bench.benchmarks import DOCS, PAGES, results_of, with_table
from slm_lab.spec.study import differing, load_study


def test_the_exercise_is_that_of_its_results() -> None:
    page = PAGES["a3c_vs_a2c"]
    study = load_study(page.file, "a3c_vs_a2c")
    text = (DOCS / "hogwild.md").read_text(encoding="utf-8")
    assert with_table(study, page.results) == text
    (line,) = (line for line in text.splitlines() if line.startswith("| A2C, 1 env |"))
    files = (run.paths.root for run in results_of(study, page.results) if run.content["entry"] == "A2C, 1 env")
    finals = [json.loads(file.read_text())["eval"]["0"]["total_reward"][-1] for file in files]
    assert len(finals) == 16
    assert line.split("|")[3].split()[0] == f"{sum(finals) / 16:.4g}"


def test_kept_results_are_of_the_studies_as_they_are() -> None:
    """A result whose entry has changed since would be set aside and measured again."""
    for name, page in PAGES.items():
        study = load_study(page.file, name)
        wanted = {(run.entry, run.env, run.random_seed): run for run in study.runs}
        for kept in (one.content for one in results_of(study, page.results)):
            run = wanted[kept["entry"], kept["env"], kept["random_seed"]]
            assert not differing(kept["settings"], run.settings, run.spec), f"{run.name}: make benchmarks"
