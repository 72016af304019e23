"""Every command of README.md and docs/ is run by a test or listed with a reason in left_out.py; complete specs are trained."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.request import urlopen

import pytest

from slm_lab.cli.entry import main
from slm_lab.spec.load.files import is_study, parse_json
from tests.docs.blocks import ALL, ROOT, Block, commands, words_of
from tests.docs.left_out import LEFT_OUT
from tests.docs.test_code_blocks import OF_RUNS, STUDIES, TRAININGS, _small, skip_without_its_package
from tests.experiment.hub_server import Hub, running_hub

LINES = list(dict.fromkeys(line for block in ALL if block.language in ("bash", "sh", "console") for line in commands(block)))
ELSEWHERE = {*TRAININGS, *STUDIES, *OF_RUNS}
"""Lines that tests/docs/test_code_blocks.py runs."""
VIEWS = [line for line in LINES if " view" in line and line not in ELSEWHERE]
OTHERS = [line for line in LINES if line not in {*ELSEWHERE, *VIEWS} and not any(fnmatchcase(line, pattern) for pattern in LEFT_OUT)]
COMPLETE = [block for block in ALL if block.language == "json" and block.text.startswith("{")]
_FOLDER = re.compile(r"\bdata/(\w+?)_\d{4}_\d\d_\d\d_\d{6}\b")
"""A run folder that a line names."""


def test_what_is_left_out_is_still_there() -> None:
    assert [pattern for pattern in LEFT_OUT if not any(fnmatchcase(line, pattern) for line in LINES)] == []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local server in place of the Hugging Face Hub."""
    with running_hub(tmp_path, monkeypatch) as server:
        yield server


def train() -> None:
    """Train the demo spec briefly."""
    words = ["demo.json", "ppo_cartpole", "train"]
    assert main([*words, *_small(words)]) == 0


def search() -> None:
    """Run a short search."""
    pytest.importorskip("optuna")
    words = ["dqn_cartpole_search.json", "dqn_cartpole_search", "search"]
    assert main([*words, "-s", "meta.max_trial=4", "-s", "meta.max_session=1", "-s", "env.max_frame=1500"]) == 0


def prepare(line: str) -> None:
    """Create the runs, searches and models that a command line refers to."""
    for match in _FOLDER.finditer(line):
        (search if "search" in match[1] else train)()
        newest = max((path for path in Path("data").iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        newest.rename(match[0])
    if "latest" in line:
        (search if "search@" in line else train)()
    if " new " in line:
        Path(words_of(line)[2]).unlink(missing_ok=True)  # written by another page
    if " push winner" in line:
        train()
        assert main(["export", "latest", "--as", "winner"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("line", OTHERS, ids=lambda text: text)
def test_other_commands_run(line: str, place: Path, hub: Hub) -> None:
    skip_without_its_package(line)
    words = words_of(line.replace("USER/", "me/"))  # the user name on the test server
    if words[0] == "python":
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, *words[1:]], cwd=place, env=environment, timeout=280).returncode == 0
        return
    prepare(line)
    if " pull " in line:
        train()
        assert main(["export", "latest", "--as", "winner"]) == 0
        assert main(["push", "winner", words[2]]) == 0
    small = {
        "search": ["-s", "meta.max_trial=2", "-s", "meta.max_session=1", "-s", "env.max_frame=1500"],
        "search@latest": ["-s", "meta.max_trial=5"],
    }
    code = main([*words[1:], *next((options for word, options in small.items() if word in words), [])])
    assert code in {"doctor": (0, 1), "diff": (0, 1)}.get(words[1], (0,))


@pytest.mark.slow
@pytest.mark.parametrize("line", VIEWS, ids=lambda text: text)
def test_views_are_served(line: str, place: Path) -> None:
    """The view serves its page until Ctrl-C."""
    pytest.importorskip("uvicorn")
    train()
    (place / "results").mkdir()
    (place / "results/monday").symlink_to(place / "data")
    words = [sys.executable, "-m", "slm_lab", *words_of(line)[1:], *([] if "--no-browser" in line else ["--no-browser"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        address = re.search(r"http://\S+/", said)
        assert address is not None, said
        with urlopen(address[0], timeout=60) as page:
            assert b"<html" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
    finally:
        process.kill()
        process.stdout.close()


NO_DATA = {"BC.md": "needs recorded episodes", "IQL.md": "needs recorded episodes", "demonstrations.md": "needs recorded episodes"}
"""Page → reason why its specs are not trained; tests/docs/test_code_blocks.py loads them."""


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in COMPLETE if block.page not in NO_DATA], ids=lambda block: block.page)
def test_complete_specs_train(block: Block, place: Path) -> None:
    """Each complete spec in the pages trains for a few updates."""
    skip_without_its_package(block.text)
    content = parse_json(block.text)
    if "agent" in content:  # the body of a spec
        content = {"spec": content}
    Path("block.json").write_text(json.dumps(content), encoding="utf-8")
    for name, raw in content.items():
        if not is_study(raw):
            words = ["block.json", name, "train"]
            assert main([*words, *_small(words)]) == 0
