"""Tests of --json, --seed and help."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli import main
from slm_lab.cli.output import print_json
from slm_lab.cli.parser import COMMANDS, MODES, make_parser
from slm_lab.spec.load.files import spec_summaries
from slm_lab.spec.models.algorithm import ALGORITHMS
from tests.experiment.test_compare import make_run

Answered = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answered(capsys: pytest.CaptureFixture[str]) -> Answered:
    """Return a function that runs a command, such as answered("list", "envs"), and returns its exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def document(answer: tuple[int, str, str]) -> Any:
    code, out, _ = answer
    assert code == 0
    return json.loads(out)


def test_check(spec_file: Path, answered: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    content = document(answered("check", spec_file, "--json"))
    assert content == {
        "file": str(spec_file),
        "specs": [{"name": "small", "builds": None}, {"name": "other", "builds": None}],
        "slm_lab": None,
        "studies": [],
    }
    monkeypatch.setattr("slm_lab.experiment.run.engine.check_builds", lambda specs, plan, source: ["observation: 4"])
    assert document(answered("check", spec_file, "other", "--build", "--json"))["specs"] == [{"name": "other", "builds": "observation: 4"}]
    study = document(answered("check", "a3c_vs_a2c.json", "a3c_vs_a2c_short", "--json"))["studies"][0]
    assert study["runs"] == len(study["entries"]) * len(study["random_seed"]) == sum(len(one["random_seed"]) for one in study["entries"])


def test_an_error_is_text_on_stderr(spec_file: Path, answered: Answered) -> None:
    """With --json, an error is text on stderr and stdout is empty, also if some specs of the file are valid."""
    specs = json.loads(spec_file.read_text())
    specs["other"] = specs["other"] | {"env": {"name": "CartPole-v1", "max_frame": -1}}
    spec_file.write_text(json.dumps(specs))
    code, out, err = answered("check", spec_file, "--json")
    assert (code, out, "other.env.max_frame" in err) == (2, "", True)
    assert answered("train", "--json")[:2] == (2, "")
    assert answered("compare", "nowhere", "--json")[:2] == (2, "")


def test_lists(answered: Answered) -> None:
    counts = document(answered("list", "--json"))
    assert counts["algorithms"]["entries"] == len(ALGORITHMS)
    listed = document(answered("list", "algorithms", "--json"))["algorithms"]
    assert [one["name"] for one in listed] == list(ALGORITHMS)
    specs = {(one["file"], one["name"]): one for one in document(answered("list", "specs", "--json"))["specs"]}
    assert len(specs) == len(list(spec_summaries()))
    assert specs["demo.json", "ppo_cartpole"]["frames"] == 80000
    found = document(answered("list", "--search", "pendulum", "--json"))
    assert {"name": "Pendulum-v1", "group": found["envs"][0]["group"]} in found["envs"]


def test_compare(tmp_path: Path, answered: Answered) -> None:
    """`compare --json` prints the content of the JSON file of the comparison and the names of the files that it wrote."""
    runs = [make_run(tmp_path / name, [[0, 10], [0, 20]], name=name) for name in ("a", "b")]
    content = document(answered("compare", *runs, "--solve", "15", "--out", tmp_path / "out", "--json"))
    files = content.pop("files")
    assert content == json.loads((tmp_path / "out/compare_table.json").read_text())
    assert str(tmp_path / "out/compare_table.csv") in files
    assert [one["final_return"] for one in content["settings"]] == [15.0, 15.0]


def test_numbers_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("inf"), (float("nan"), 1.5)], "ä": "é"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "ä": "é"}


def test_the_seed_of_new_runs(spec_file: Path, answered: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    """--seed sets meta.random_seed of a trial or a search, and the list of seeds of a study."""
    given: list[Any] = []

    class Fake:
        display = None

        def __init__(self, spec: Any, *arguments: object, **options: object) -> None:
            given.append(spec)

        def run(self) -> None:
            return None

    for name in ("trial.Trial", "search.search.Search", "study.study.StudyExperiment"):
        monkeypatch.setattr(f"slm_lab.experiment.run.{name}", Fake)
    specs = json.loads(spec_file.read_text())
    specs["small"]["search"] = {"agent": {"algorithm": {"gamma__uniform": [0.9, 0.99]}}}
    spec_file.write_text(json.dumps(specs))
    for mode in ("train", "dev", "search"):
        assert answered(spec_file, "small", mode, "--seed", "7")[0] == 0
    assert answered("a3c_vs_a2c.json", "a3c_vs_a2c_short", "study", "--seed", "7")[0] == 0
    assert [one.meta.random_seed for one in given[:3]] == [7, 7, 7]
    assert given[3].spec.random_seed == [7]


def test_a_seed_given_twice(spec_file: Path, answered: Answered) -> None:
    code, _, err = answered(spec_file, "small", "train", "--seed", "7", "--set", "meta.random_seed=3")
    assert (code, "--seed 7" in err) == (2, True)


@pytest.mark.parametrize("word", [*COMMANDS, *MODES])
def test_help_of_one_command_or_mode(word: str, answered: Answered) -> None:
    """The help of a command shows its options and no others."""
    code, text, err = answered("help", word)
    assert (code, err) == (0, "")
    options = set(re.findall(r"^  (?:-\w(?: \S+)?, )?(--[\w-]+)", text, re.MULTILINE))
    known = {f"--{name.replace('_', '-')}" for name in COMMANDS.get(word, COMMANDS["run"]).options}
    assert options - {"--help", "--version"} <= known
    if word in COMMANDS:
        assert options - {"--help", "--version"} == known
        assert COMMANDS[word].usage in " ".join(text.split())
        assert answered(word, "--help")[1] == text if word != "run" else True


def test_help_of_a_mode_leaves_out_options_of_others() -> None:
    text = make_parser("train").format_help()
    assert ("--seed" in text, "--video" in text, "--adopt" in text) == (True, False, False)
    assert "continue a run" in text
    assert "--video" in make_parser("enjoy").format_help()


def test_help_of_a_command_names_no_other_command() -> None:
    """The help of a command describes an option for that command alone; the full help describes it for each command that accepts it."""
    text = " ".join(make_parser("export").format_help().split())
    assert "--out PATH file (default: in the run folder)" in text
    assert "--session N session of the checkpoint (default: the best session) --" in text
    assert "--cluster" not in make_parser("enjoy").format_help(), "it is accepted, to say what it is for"
    assert "--session N enjoy, export: session of the checkpoint (default: the best session); verify: session to" in " ".join(
        make_parser().format_help().split()
    )


def test_help(answered: Answered) -> None:
    assert answered("help")[1] == answered("--help")[1]
    code, out, err = answered("help", "comparre")
    assert (code, out, "did you mean 'compare'" in err) == (2, "", True)
    assert answered("help", "compare", "diff")[0] == 2


def test_every_json_flag_is_read() -> None:
    """The commands that accept --json are those that the help text names."""
    with_json = [name for name, command in COMMANDS.items() if "json" in command.options]
    assert with_json == ["check", "models", "compare", "diff", "doctor", "verify", "list"]
    assert make_parser().parse_args(["list", "--json"]) == Namespace(**{**vars(make_parser().parse_args(["list"])), "json": True})
