"""Tests of comparisons over several envs and of searches and studies, and of the page of a comparison."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab import cli
from slm_lab.experiment.files.find import TrainingChoice
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.baseline import SHIPPED
from slm_lab.experiment.report.compare import read_settings
from slm_lab.experiment.report.compare_report import compare
from slm_lab.lib.text import format_table
from tests.experiment.study.toys import write_made_up
from tests.experiment.test_compare import make_run

ENVS = {"CartPole-v1": {"A": [100, 300], "B": [500, 500]}, "Acrobot-v1": {"A": [-400, -200], "B": [-300, -100]}}
"""Final returns by env and setting."""


def in_two_envs(folder: Path, envs: dict[str, dict[str, list[float]]] = ENVS, **options: Any) -> dict[str, Any]:
    """Compare A and B in each env, and return the content of the JSON file."""
    words, labels = [], []
    for env, settings in envs.items():
        for name, finals in settings.items():
            words.append(str(make_run(folder / f"{name}_{env}", [[0, final] for final in finals], spec={"env": {"name": env}})))
            labels.append(name)
    options["text"] = compare(words, labels=labels, out=folder / "out", metric="total_reward")
    return dict(json.loads((folder / "out/compare_table.json").read_text()), **options)


def test_settings_over_several_envs_by_hand(tmp_path: Path) -> None:
    found = in_two_envs(tmp_path)
    pairs = {one["env"]: one for one in found["pairs"]}
    assert [(one["a"], one["b"], one["difference"], one["improvement"]) for one in pairs.values()] == [
        ("A", "B", 300, 1.0),
        ("A", "B", 100, 0.75 + 0.0),
    ]
    assert pairs["CartPole-v1"]["difference_high"] == 500, "no difference is larger than the range"
    baselines = json.loads(SHIPPED.read_text())
    zero, low = baselines["CartPole-v1"], baselines["Acrobot-v1"]
    assert [(one["env"], one["zero"], one["one"]) for one in found["scales"]] == [("CartPole-v1", zero, 500), ("Acrobot-v1", low, 0)]
    normalised = sorted([*((x - zero) / (500 - zero) for x in (100, 300)), *((x - low) / -low for x in (-400, -200))])
    a, b = found["overall"]
    assert (a["name"], a["seeds"], a["improvement"]) == ("A", 4, None)
    assert a["interquartile_mean"] == pytest.approx(sum(normalised[1:3]) / 2)
    assert a["optimality_gap"] == pytest.approx(1 - sum(normalised) / 4)
    assert b["improvement"] == (1.0 + 0.75) / 2
    profile = found["profiles"]["A"]
    half = [x > 0.5 for x in profile["threshold"]].index(True)
    assert profile["fraction"][half] == sum(x > profile["threshold"][half] for x in normalised) / 4
    assert (tmp_path / "out/compare_graph_performance_profiles.png").is_file()


def test_no_line_of_the_text_is_wider_than_a_terminal(tmp_path: Path) -> None:
    names = {"a spec with quite a long name": [100, 300], "another one with an even longer name, for its parameters": [500.123456, 499]}
    text = in_two_envs(tmp_path, dict.fromkeys(ENVS, names))["text"]
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    table = format_table([["name", *"abc"], ["x", "1" * 40, "2" * 40, "3"]])
    assert [line.split() for line in table] == [["name", "a"], ["x", "1" * 40], [], ["name", "b", "c"], ["x", "2" * 40, "3"]]


def test_a_setting_in_one_env_alone_is_not_aggregated(tmp_path: Path) -> None:
    found = in_two_envs(tmp_path, {"CartPole-v1": ENVS["CartPole-v1"], "Acrobot-v1": {"C": [-100]}})
    assert (found["overall"], found["profiles"], len(found["pairs"])) == ([], {}, 1)


def test_a_search_is_compared_by_its_best_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_run(tmp_path / "search", [[0, 10], [0, 20]])
    paths = RunPaths(root, "a2c")
    for trial, finals in ((1, (50, 60)), (2, (30, 40))):
        paths.trial_spec(trial).write_text(paths.trial_spec(0).read_text().replace('"lr": 0.1', f'"lr": 0.{trial + 1}'))
        for session, final in enumerate(finals):
            table = paths.session_df(session).read_text()
            paths.session_df(session, t=trial).write_text(table.replace(f"{10 * session + 10}", f"{final}"))
    for trial in range(3):
        (checkpoint := paths.checkpoint(0, "best", trial)).parent.mkdir(exist_ok=True)
        assert isinstance(checkpoint, Path)
        checkpoint.touch()
    states = [TrialState(trial, {}, "finished", metric=value) for trial, value in enumerate((15.0, 55.0, 35.0))]
    SearchState("current_return", None, False, trials=states).save(paths.search_state)
    (best,) = read_settings([str(root)])
    assert (best.runs[0].trial, best.runs[0].settings()["agent.net.lr"], len(best.seeds)) == (1, 0.2, 2)
    assert caplog.messages[0] == f"{root}: comparing trial 1 of the search"
    (chosen,) = read_settings([str(root)], choice=TrainingChoice(trial=2))
    assert chosen.runs[0].trial == 2
    with pytest.raises(UserError, match="trial 7"):
        read_settings([str(root)], choice=TrainingChoice(trial=7))


def make_study(folder: Path, baseline: str | None = None) -> Path:
    (folder / "results").mkdir(parents=True)
    entries = [{"spec": "a2c", "label": "slow"}, {"spec": "a2c", "label": "fast"}]
    (folder / "small_study.json").write_text(json.dumps({"small": {"study": {"entries": entries, "baseline": baseline}}, "$study": {}}))
    for entry in ("slow", "fast"):
        for seed in range(3):
            identity = {"entry": entry, "env": "CartPole-v1", "random_seed": seed, "digest": entry, "spec_version": 1}
            identity["settings"] = {"env.name": "CartPole-v1", "agent.net.lr": entry}
            write_made_up(folder / f"results/{entry}_{seed}.json", identity)
    return folder


def test_a_study_is_compared_with_all_entries_or_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = make_study(tmp_path / "study")
    assert [(one.name, one.bounds, len(one.seeds)) for one in read_settings([str(study)])] == [
        ("slow", (0.0, 500.0), 3),
        ("fast", (0.0, 500.0), 3),
    ], "in the order of the study"
    (fast,) = read_settings([str(study)], choice=TrainingChoice(entry="fast", seed=1))
    assert fast.scores().tolist() == [479.0]
    first, _ = read_settings([str(make_study(tmp_path / "other", baseline="fast"))])
    assert first.name == "fast", "the baseline is what the others are compared with"
    assert cli.main(["compare", str(study), "--entry", "fsat", "--out", str(tmp_path / "out")]) == 2
    assert f"entry fsat: the runs of {study} have fast, slow; did you mean 'fast'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_stands_alone_and_names_are_text(tmp_path: Path) -> None:
    names = {"</script><b>x": [100.0, 300.0], "B": [500.0, 500.0]}
    in_two_envs(tmp_path, dict.fromkeys(ENVS, names))
    page = (tmp_path / "out/compare.html").read_text()
    assert "<b>x" not in page
    assert 'src="plotly.min.js"' in page
    assert "http:" not in page
    assert "https:" not in page
    assert "P(better) = 1" in page
    for link in ("B_CartPole-v1", "B_Acrobot-v1"):
        assert f'href="../{link}"' in page
    assert (tmp_path / "out/plotly.min.js").is_file()


@pytest.mark.slow
def test_graphs_of_the_page_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    in_two_envs(tmp_path)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([browser, *options, (tmp_path / "out/compare.html").as_uri()], capture_output=True, text=True, timeout=240)
    assert done.stdout.count('class="plot js-plotly-plot"') == 7
    assert "performance profiles over 2 envs" in done.stdout
    assert "CONSOLE" not in done.stderr


def test_bands_stay_within_the_range(tmp_path: Path) -> None:
    from slm_lab.experiment.report.compare_report import comparison_graphs

    run = make_run(tmp_path / "a", [[0, 500], [0, 500], [0, 100]], norms=[0.1, 9.0, 0.1])
    graphs = comparison_graphs(read_settings([str(run)]), "frame", metric="total_reward")
    for name, (low, high) in {"mean_returns": (0, 500), "grad_norm": (0, np.inf)}.items():
        (line,) = graphs[name].first_panel.lines
        assert line.band is not None
        assert (line.band[0] >= low).all()
        assert (line.band[1] <= high).all()
        assert line.band[1][-1] > line.curve.value[-1]
