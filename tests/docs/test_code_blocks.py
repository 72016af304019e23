"""What README.md and docs/ tell the reader to type works: specs load, Python runs, commands are accepted and train."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli.commands import COMMANDS
from slm_lab.cli.entry import main
from slm_lab.cli.files import resolve_file_and_name
from slm_lab.cli.parser import check_options_apply, make_parser
from slm_lab.spec.loader import SPEC_FOLDER, load_spec, load_specs
from slm_lab.spec.text import parse_json
from tests.docs.blocks import PAGES, ROOT, Block, blocks, commands

ALL = [block for page in PAGES for block in blocks(page)]
SPECS = [block for block in ALL if block.language == "json"]
SCRIPTS = {
    block.page: [one for one in ALL if one.page == block.page and one.language == "python"] for block in ALL if block.language == "python"
}
LINES = list(dict.fromkeys((block.page, line) for block in ALL if block.language in ("bash", "sh") for line in commands(block)))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages tell the reader to write, as the current folder."""
    for block in ALL:
        first = block.text.partition("\n")[0]
        if block.language == "python" and first.startswith("# ") and first.endswith(".py"):
            (tmp_path / first[2:]).write_text(block.text, encoding="utf-8")
        if block.language == "json" and block.file and block.text.startswith("{"):
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)
    return tmp_path


@pytest.mark.parametrize("block", SPECS, ids=lambda block: block.page)
def test_specs_load(block: Block, place: Path) -> None:
    if block.text.startswith("{"):
        assert load_specs(parse_json(block.text))
        return
    part = parse_json(f"{{{block.text}}}")
    sections = {key: part.pop(key) for key in ("algorithm", "memory", "net") if key in part}
    demo = parse_json((SPEC_FOLDER / "demo.json").read_text(encoding="utf-8"))["ppo_cartpole"]
    load_spec(_merged(demo, {**part, "agent": {**part.get("agent", {}), **sections}}))


def _merged(spec: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with a part of it replaced: a section that has a name as a whole, another key by key."""
    changed = {
        key: _merged(spec[key], value)
        if isinstance(value, dict) and isinstance(spec.get(key), dict) and (key == "env" or "name" not in value)
        else value
        for key, value in part.items()
    }
    return {**spec, **changed}


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda text: text)
def test_commands_are_accepted(page: str, line: str, place: Path) -> None:
    words = shlex.split(line)
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        assert f"\n{words[1]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")
    elif program == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2])
    else:
        arguments = _slm_lab(line)
        words = arguments.words
        name = words.pop(0) if words and words[0] in COMMANDS else "run"
        check_options_apply(name, arguments)
        if name == "run":
            file, spec = resolve_file_and_name(words)
            load_spec(file, spec, arguments.set)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for _, line in LINES if " train" in line or " check" in line], ids=lambda text: text)
def test_commands_run(line: str, place: Path) -> None:
    """Train for a few updates, with at most two Sessions."""
    words = shlex.split(line)
    words = words[2:] if words[0] == "python" else words[1:]
    arguments = _slm_lab(line)
    if "train" in arguments.words:
        file, name = resolve_file_and_name(list(arguments.words))
        pytest.importorskip("ale_py") if "pong" in name else None
        spec = load_spec(file, name, arguments.set)
        frames = 2 * max(_frames_of_an_update(spec), 512) * (2 if spec.meta.distributed else 1)
        words += [
            "-s",
            f"env.max_frame={frames}",
            "-s",
            f"meta.max_session={min(2, spec.meta.max_session)}",
            "-s",
            f"meta.log_frequency={frames}",
        ]
    assert main([*words]) == 0


def _frames_of_an_update(spec: Any) -> int:
    """Return the frames until the first update of a Session."""
    algorithm, sampler = spec.agent.algorithm, spec.meta.sampler
    envs = spec.env.num_envs if sampler is None else sampler.num_envs
    rows = getattr(algorithm, "training_start_step", 0) or 0
    if not algorithm.on_policy:
        return rows + 2 * envs
    dataset = spec.dataset_columns * spec.rollout_rows if sampler is not None else 0
    return max(spec.agent.rollout_len * envs, dataset)


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS)
def test_python_runs(page: str, place: Path) -> None:
    """The blocks of a page run one after the other, as the reader would run them."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in SCRIPTS[page]:
        exec(compile(block.text, page, "exec"), names)


def test_what_is_shown_as_an_error_is_the_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages of mistakes are shown in README.md and docs/index.md: the program prints each of their lines."""
    shown = [line.strip() for block in ALL if not block.language and " problems" in block.text for line in block.text.splitlines()[1:]]
    assert shown
    mistakes = {
        "my_cartpole": {"agent": {"algorithm": {"name": "PPO", "gama": 0.98, "lam": 9}}, "env": {"name": "CartPol-v1", "max_frame": 20000}}
    }
    (place / "wrong.json").write_text(json.dumps(mistakes), encoding="utf-8")
    assert main(["check", "wrong.json"]) == 2
    printed = capsys.readouterr().err
    assert [line for line in shown if line not in printed] == []


def _slm_lab(line: str) -> Any:
    """Return the parsed arguments of a command line of slm_lab."""
    words = shlex.split(line)
    program = words[0].removeprefix(".venv/bin/")
    assert program == "slm-lab" or words[1] == "run_lab.py", line
    return make_parser().parse_intermixed_args(words[1:] if program == "slm-lab" else words[2:])
