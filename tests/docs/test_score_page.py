"""Tests of docs/BENCHMARKS.md: its tables of studies are made from the results that exist."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import score_page, studies
from bench.peers import peer_runs
from bench.score_page import (
    SECTIONS,
    command,
    explained,
    figures_of,
    over_envs,
    scored,
    seconds_to,
    section_text,
    tables_text,
    training_facts,
    write_figures,
)
from bench.studies import DOCS, STUDIES, TABLES, Kept, study_of
from slm_lab.experiment.report.baseline import SHIPPED
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.study_file import settings_that_affect_results
from tests.docs.results import write

MUJOCO = next(section for section in SECTIONS if section.study == "mujoco")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which all studies keep their results, and the figures."""
    for name, kept in STUDIES.items():
        monkeypatch.setitem(studies.STUDIES, name, Kept(kept.file, tmp_path / name))
    monkeypatch.setattr(score_page, "FIGURES", tmp_path / "figures")
    return tmp_path


def curve(*values: float, seconds: float = 10.0, frames: int = 2_000_000) -> dict[str, list[float]]:
    """Return table rows every `seconds` and `frames`; total_reward_ma and current_return have the given values."""
    count = range(1, len(values) + 1)
    own = {"frame": [frames * row for row in count], "wall_t": [seconds * row for row in count]}
    return own | {"total_reward_ma": list(values), "current_return": list(values), "epi_new": [1] * len(values)}


def results(folder: Path, name: str, env: str, *curves: dict[str, list[float]]) -> None:
    runs = [run for run in study_of(name).runs if run.env == env]
    for run, train in zip(runs, curves, strict=False):
        write(folder / name, run, train)


def cells(text: str, env: str) -> dict[str, str]:
    """Return a dict from header to cell for the row of an env in the first table."""
    head, _, *lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|"))
    return next(dict(zip(head, line, strict=True)) for line in lines if line[0].startswith(f"[{env}]"))


def test_a_study_without_results_has_one_line(folder: Path) -> None:
    for section in SECTIONS:
        title, blank, line = section_text(section).rstrip("\n").split("\n")
        assert (title, blank) == (f"## {section.title}", "")
        assert line == f"There are no results yet. To train the runs, use `make benchmarks NAME={section.study}`."
    write_figures("mujoco")
    assert not list((folder / "figures").iterdir())


def test_the_row_of_an_agent_has_score_interval_published_score_and_seconds(folder: Path) -> None:
    results(folder, "mujoco", "Hopper-v5", curve(1000, 1700), curve(1000, 1900, seconds=20))
    text = section_text(MUJOCO)
    assert "42 of 44 runs are not trained yet." in text
    row = cells(text, "Hopper-v5")
    assert (row["env"], row["algorithm"]) == ("[Hopper-v5](#mujoco-hopper-v5)", "[PPO](../slm_lab/spec/suites/mujoco.json)")
    # Student's t for one degree of freedom is 12.71, and the standard error 100
    assert (row["frames"], row["seeds"], row["score"]) == ("4,000,000", "2", "1,800 [529.4, 3,071]")
    assert row["SLM Lab v5"] == "1654 ≥"
    assert row["seconds to the score of SLM Lab v5"] == "30"  # both seeds reach it in their second row, after 20 s and 40 s
    assert '<a id="mujoco-hopper-v5"></a>' in text
    assert "Training these 2 runs took 2 seconds, on a processor, with" in text


def test_the_facts_of_a_training(tmp_path: Path) -> None:
    run = study_of("mujoco").runs[0]

    def facts(*contents: tuple[str, str | None, float]) -> str:
        files = []
        for index, (processor, version, seconds) in enumerate(contents):
            versions = {} if version is None else {"slm_lab": version}
            files.append(write(tmp_path / str(index), run, curve(1.0), processor=processor, versions=versions, seconds=seconds))
        return training_facts([ResultRun(file) for file in files])

    assert facts(("Zen", "0.2", 9.0)).startswith("Training this run took 9 seconds, on Zen, with slm_lab 0.2.")
    assert facts(("Zen", "0.2", 600.0), ("Zen", "0.1", 600.0), ("Xeon", None, 12_000.0)).startswith(
        "Training these 3 runs took 3.7 hours, on Zen (2 runs) and Xeon (1 run), with other libraries (1 run), slm_lab 0.1 (1 run) and "
        "slm_lab 0.2 (1 run)."
    )


def test_the_score_of_another_library_is_subtracted_from_that_of_slm_lab(folder: Path) -> None:
    """The mean of 1,900 and 2,100 minus 1,800 is +200; with one seed of the other library, the difference has no interval."""
    section = next(one for one in SECTIONS if one.study == "mujoco_1m")
    study = study_of("mujoco_1m")
    results(folder, "mujoco_1m", "Hopper-v5", *({**curve(value), "total_reward": [value]} for value in (1900.0, 2100.0)))
    assert "minus this library" not in section_text(section)
    peer = next(run for run in peer_runs(study, folder / "mujoco_1m") if run.beside.label == "CleanRL's PPO")
    own = next(run for run in study.runs if (run.env, run.random_seed) == (peer.env, peer.random_seed))
    write(peer.file.parent, replace(own, entry=peer.beside.label), {**curve(1800.0), "total_reward": [1800.0]}).rename(peer.file)
    found = scored(section.study)
    lines = [line for line in section_text(section).splitlines() if line.startswith("|")]
    head, _, ours, theirs = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4])
    column = head.index("slm_lab minus this library")
    assert (ours[column], theirs[column], theirs[1]) == ("", "+200", "[CleanRL's PPO](../bench/peers.py)")
    assert 'The column "slm_lab minus this library" has the score of the same algorithm in slm_lab minus' in explained(section, found)
    assert not explained(section, found).startswith("- why")
    assert explained(section, [one._replace(reason="why.") for one in found]).startswith("- why.\n- Each env links")


def test_seconds_are_infinite_if_most_seeds_stay_below(folder: Path) -> None:
    results(folder, "mujoco", "Hopper-v5", curve(1000, 1700), curve(1000, 1500), curve(900, 1100))
    (one,) = scored("mujoco")
    assert seconds_to(one, 1653.74) == (float("inf"), None, None, False)
    assert cells(section_text(MUJOCO), "Hopper-v5")["SLM Lab v5"] == "1654 ≈"


def test_scores_over_envs_are_scaled_by_random_actions_and_the_published_score(folder: Path) -> None:
    """The aggregate score is the interquartile mean: of 8 scaled scores, the mean of the middle four."""
    random = json.loads(SHIPPED.read_text(encoding="utf-8"))
    for env, published in (("Hopper-v5", 1653.74), ("Reacher-v5", -5.03)):
        zero, scale = random[env], published - random[env]
        results(folder, "mujoco", env, *(curve(zero + part * scale) for part in (0.1, 0.5, 1.0, 2.0)))
    text = over_envs(MUJOCO, scored("mujoco"))
    # 0.1 0.1 | 0.5 0.5 1.0 1.0 | 2.0 2.0
    assert "| PPO | 8 | 0.75 [" in text
    assert "each of the 2 envs are normalised linearly: 0 is the return of random actions and 1 is the score of SLM Lab v5." in text


def test_there_is_no_mean_over_a_single_env(folder: Path) -> None:
    results(folder, "mujoco", "Hopper-v5", curve(1, 2), curve(2, 3))
    assert over_envs(MUJOCO, scored("mujoco")) == ""


def test_a_figure_has_the_published_score_as_a_line(folder: Path) -> None:
    results(folder, "mujoco", "Hopper-v5", curve(1000, 1700), curve(1000, 1900))
    (figure,) = figures_of(scored("mujoco")).values()
    level, mean = figure.first_panel.lines
    assert (level.name, level.curve.value[0], level.dashed) == ("published: 1654", 1653.74, True)
    assert mean.curve.value.tolist() == [1000, 1800]


def test_writing_again_changes_nothing(folder: Path) -> None:
    results(folder, "mujoco", "Hopper-v5", curve(1000, 1700), curve(1000, 1900))
    text = section_text(MUJOCO)
    write_figures("mujoco")
    (figure,) = (folder / "figures").iterdir()
    assert figure.name == "mujoco_frames_Hopper-v5.png"
    assert f"(scores/{figure.name})" in text
    before = figure.read_bytes()
    write_figures("mujoco")
    assert figure.read_bytes() == before
    assert section_text(MUJOCO) == text


@pytest.mark.skipif(not STUDIES["benchmarks"].results.exists(), reason="the source distribution has no results of benchmarks")
def test_figures_and_anchors_of_the_page_exist() -> None:
    text = tables_text()
    assert set(re.findall(r"\(scores/(.*?)\)", text)) == {file.name for file in (DOCS / "scores").glob("*.png")}
    anchors = re.findall(r'<a id="(.*?)">', text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"^\| \[.*?\]\(#(.*?)\)", text, flags=re.MULTILINE)) == set(anchors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TABLES)
def test_a_command_repeats_its_run(name: str) -> None:
    """The command of an entry loads the spec of its run; checked in the first and last env of each entry."""
    study = study_of(name)
    for run in {run.entry: run for run in (*study.runs, *reversed(study.runs))}.values():
        program, file, spec, mode, flag, seed, *sets = command(study, run)
        assert (program, mode, flag, seed) == ("slm-lab", "train", "--seed", str(run.random_seed))
        assert sets[::2] == ["-s"] * (len(sets) // 2)
        assert settings_that_affect_results(load_spec(file, spec, sets[1::2])) == dict(run.settings)


def test_a_section_names_a_known_study() -> None:
    assert sorted(section.study for section in SECTIONS) == sorted(TABLES)
    assert {line["section"] for line in score_page.published()} <= set(TABLES)


def test_published_scores_beside_a_study_are_of_its_envs() -> None:
    for line in score_page.published():
        assert line["env"] in {run.env for run in study_of(line["section"]).runs}, line
        float(line["score"])


def test_a_run_with_other_settings_has_another_command() -> None:
    study = study_of("mujoco")
    run = study.runs[0]
    other = replace(run, settings={**run.settings, "agent.algorithm.gamma": 0.5})
    assert "agent.algorithm.gamma=0.5" in command(study, other)
    assert "agent.algorithm.gamma=0.5" not in command(study, run)
