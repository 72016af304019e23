"""The code blocks of README.md and docs/ work: specs load, Python blocks run, commands are accepted and train."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.cli.files import resolve_file_and_name, resolve_request
from slm_lab.cli.parser import COMMANDS, check_options_apply, make_parser
from slm_lab.spec.load.files import SPEC_FOLDER, is_study, parse_json
from slm_lab.spec.load.loader import load_spec, load_specs
from slm_lab.spec.load.study_file import load_study
from tests.docs.blocks import ALL, ROOT, Block, commands, words_of
from tests.docs.left_out import LEFT_OUT

SPECS = [block for block in ALL if block.language == "json"]
SCRIPTS = {
    block.page: [one for one in ALL if one.page == block.page and one.language == "python"] for block in ALL if block.language == "python"
}
LINES = list(dict.fromkeys((block.page, line) for block in ALL if block.language in ("bash", "sh") for line in commands(block)))


def skip_without_its_package(text: str) -> None:
    for begin, package in (("MinAtar/", "minatar"), ("AntMaze_", "gymnasium_robotics")):
        if begin in text:
            pytest.importorskip(package)


@pytest.mark.parametrize("block", SPECS, ids=lambda block: block.page)
def test_specs_load(block: Block, place: Path) -> None:
    skip_without_its_package(block.text)
    if block.text.startswith("{"):
        content = parse_json(block.text)
        studies = [name for name, raw in content.items() if is_study(raw)]
        assert load_specs(content) or studies
        for name in studies:
            assert load_study(block.file, name).runs
        return
    part = parse_json(f"{{{block.text}}}")
    sections = {key: part.pop(key) for key in ("algorithm", "memory", "net") if key in part}
    demo = parse_json((SPEC_FOLDER / "demo.json").read_text(encoding="utf-8"))["ppo_cartpole"]
    load_spec(_merged(demo, {**part, "agent": {**part.get("agent", {}), **sections}}))


def _merged(spec: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the spec updated with `part`: sections that have a name are replaced, others are merged key by key."""
    changed = {
        key: _merged(spec[key], value)
        if isinstance(value, dict) and isinstance(spec.get(key), dict) and (key == "env" or "name" not in value)
        else value
        for key, value in part.items()
    }
    return {**spec, **changed}


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda text: text)
def test_commands_are_accepted(page: str, line: str, place: Path) -> None:
    skip_without_its_package(line)
    words = words_of(line)
    if words[0] == "make":
        assert f"\n{words[1]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")
    elif words[0] in ("pip", "hf", "podman"):
        assert any(fnmatchcase(line, pattern) for pattern in LEFT_OUT), "another program; tests/docs/left_out.py says why it is not run"
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2])
    else:
        arguments = make_parser().parse_intermixed_args(_words(line))
        words = arguments.words
        name = words.pop(0) if words and words[0] in COMMANDS else "run"
        check_options_apply(name, arguments)
        if name == "run":
            request = resolve_request(words)
            if request.mode == "study":
                assert request.name is not None
                load_study(request.file, request.name, arguments.set)
            elif request.name is not None:
                load_spec(request.file, request.name, arguments.set)


OF_RUNS = [
    line
    for _, line in LINES
    if any(word in line for word in (" enjoy@", " train@", " compare ", " export ", " retro_analyze ", "init_from"))
]
"""Commands that need runs."""
SHOWN = "ppo_cartpole_2026_01_31_120000"
"""Run folder in the pages."""


TRAININGS = [
    line
    for _, line in LINES
    if line not in OF_RUNS and (" train" in line or " check " in line) and not any(fnmatchcase(line, pattern) for pattern in LEFT_OUT)
]


@pytest.mark.slow
@pytest.mark.parametrize("line", TRAININGS, ids=lambda text: text)
def test_commands_run(line: str, place: Path) -> None:
    skip_without_its_package(line)
    words = _words(line)
    assert main([*words, *(_small(words) if "train" in words else ())]) == 0


STUDIES = [line for _, line in LINES if any(word.partition("@")[0] == "study" for word in line.split())]


@pytest.mark.slow
@pytest.mark.parametrize("line", STUDIES, ids=lambda text: text)
def test_studies_run(line: str, place: Path) -> None:
    """Each study command runs with one seed and a few updates; a `study@` command runs after the study was started."""
    words = [*_words(line), "-s", "random_seed=[100]", "-s", "set.env.max_frame=2560", "-s", "set.meta.max_session=1"]
    if "a3c" in line:
        words = [*words[:-2], "-s", "set.agent.net.lr_scheduler_spec.frame=2560"]
    assert main([word.partition("@")[0] for word in words]) == 0
    if "@" in line:
        assert main(words) == 0


COMPARED = {
    "ppo_cartpole_*": ("ppo_cartpole.json", "ppo_cartpole"),
    "dqn_cartpole_*": ("dqn_cartpole.json", "dqn_cartpole"),
    "a3c_gae_cartpole_2*": ("a3c_gae_cartpole.json", "a3c_gae_cartpole"),
    "a3c_gae_cartpole_locked*": ("a3c_gae_cartpole.json", "a3c_gae_cartpole_locked"),
    "a2c*": ("a3c_gae_cartpole.json", "a2c_gae_cartpole"),
}
"""Pattern of a run folder in a `compare` line → a spec that produces such a run."""


MODELS = ("cartpole", "winner", "theirs")
"""Names of models in the pages."""
SEARCHED = "dqn_cartpole_search_2026_01_31_120000"
"""Folder of a search in the pages."""


def _search() -> None:
    """Run a short search whose folder has the name that the pages use."""
    pytest.importorskip("optuna")
    words = ["dqn_cartpole_search.json", "dqn_cartpole_search", "search"]
    assert main([*words, "-s", "meta.max_trial=2", "-s", "meta.max_session=1", "-s", "env.max_frame=3000"]) == 0
    next(Path("data").glob("dqn_cartpole_search_*")).rename(Path("data") / SEARCHED)


def _register(words: list[str]) -> None:
    """Register the latest run under each model name that the command uses."""
    for name in MODELS if "--as" not in words else ():
        if any(word.rpartition("@")[2].rpartition("=")[2] == name for word in words):
            assert main(["export", "latest", "--as", name]) == 0


TWO_PLAYER_SPECS = {"PerfectTicTacToe": "ppo_tictactoe", "OnePlyConnectFour": "ppo_connect_four"}
"""Scripted player in an `--against` line → the spec whose agent plays against it."""


@pytest.mark.slow
@pytest.mark.parametrize("line", OF_RUNS, ids=lambda text: text)
def test_commands_about_runs_run(line: str, place: Path) -> None:
    """Commands about runs work after a short run of each spec that they refer to."""
    words = _words(line)
    if SEARCHED in line:
        _search()
        assert main(words) == 0
        return
    arguments = make_parser().parse_intermixed_args(words).words
    runs = [] if arguments[0] == "compare" else [("demo.json", "ppo_cartpole", "data")]
    if "@" in arguments[-1] and len(arguments) > 1:
        runs = [(*arguments[:2], "data")]
    runs = [("agents.json", spec, "data") for player, spec in TWO_PLAYER_SPECS.items() if player in line] or runs
    for pattern in arguments[1:] if arguments[0] == "compare" else ():
        folder, _, name = pattern.rpartition("/")
        runs.append((*COMPARED[name], folder))
    for file, name, folder in runs:
        train = [file, name, "train", "--data-dir", folder]
        assert main([*train, *_small(train)]) == 0
    if SHOWN in line:
        next(Path("data").glob("ppo_cartpole_*")).rename(Path("data") / SHOWN)
    _register(words)
    assert main([*words, *(_small(words) if "train" in words else ())]) == 0


def _words(line: str) -> list[str]:
    """Return the words of a command line after the program's name."""
    words = words_of(line)
    if words[0] == "python":
        assert words[1] == "run_lab.py"
        return words[2:]
    assert words[0].removeprefix(".venv/bin/") == "slm-lab"
    return words[1:]


def _small(words: list[str]) -> list[str]:
    """Return options that make a training short: a few updates, at most two Sessions."""
    arguments = make_parser().parse_intermixed_args(words)
    file, name = resolve_file_and_name(arguments.words)
    if "pong" in name:
        pytest.importorskip("ale_py")
    spec = load_spec(file, name, arguments.set)
    algorithm, sampler, sessions = spec.agent.algorithm, spec.meta.sampler, min(2, spec.meta.max_session)
    small = {"meta.max_session": sessions}
    envs = spec.env.num_envs if sampler is None else sampler.num_envs
    if algorithm.on_policy:
        dataset = 0 if sampler is None else spec.rollouts_per_dataset * spec.worker_rollout_len
        frames = max(2 * max(spec.agent.rollout_len * envs, dataset), 1000)
    else:
        small["agent.algorithm.training_start_step"] = start = spec.agent.memory.batch_size
        frames = start + max(4 * spec.agent.algorithm.training_frequency, 4 * envs)
    small["env.max_frame"] = frames * (sessions if spec.meta.distributed else 1)
    small["meta.log_frequency"] = frames
    return [word for key, value in small.items() for word in ("-s", f"{key}={value}")]


@pytest.mark.parametrize("page", SCRIPTS)
def test_python_compiles_and_its_imports_exist(page: str, place: Path) -> None:
    for block in SCRIPTS[page]:
        compile(block.text, page, "exec")
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slm_lab"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) or _is_module(f"{node.module}.{alias.name}") for alias in node.names), page


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS)
def test_python_runs(page: str, place: Path) -> None:
    """The Python blocks of a page run one after the other in one namespace, as a reader would run them."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in SCRIPTS[page]:
        exec(compile(block.text, page, "exec"), names)


def test_what_is_shown_as_an_error_is_the_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program prints each line of the error messages that README.md and docs/index.md show."""
    shown = [line.strip() for block in ALL if not block.language and " problems" in block.text for line in block.text.splitlines()[1:]]
    assert shown
    mistakes = {
        "my_cartpole": {"agent": {"algorithm": {"name": "PPO", "gama": 0.98, "lam": 9}}, "env": {"name": "CartPol-v1", "max_frame": 20000}}
    }
    (place / "wrong.json").write_text(json.dumps(mistakes), encoding="utf-8")
    assert main(["check", "wrong.json"]) == 2
    printed = capsys.readouterr().err
    assert [line for line in shown if line not in printed] == []
