"""Tests of Containerfile: tools/container_steps.py knows its instructions, and the files that it copies exist and are not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tools import container_steps
from tools.container_steps import Steps, StepsInRoot, instructions


def test_continued_lines_and_comments() -> None:
    text = "# a\nFROM x\n# b\nRUN one \\\n    && two\nworkdir /lab\n"
    assert [*instructions(text)] == [("FROM", "x"), ("RUN", "one && two"), ("WORKDIR", "/lab")]


def test_the_files_that_it_copies(tmp_path: Path) -> None:
    steps = Steps(tmp_path, index=False)
    for word, rest in instructions((ROOT / "Containerfile").read_text(encoding="utf-8")):
        if word in ("WORKDIR", "COPY", "ENTRYPOINT"):
            steps.run(word, rest)
    assert (tmp_path / "src/slm_lab/spec/demo.json").exists()
    assert not [*tmp_path.rglob("__pycache__")]
    assert steps.entry == ["slm-lab"]
    assert steps.folder == tmp_path / "lab"


def test_a_file_that_is_ignored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"copies README\.md, which \.containerignore leaves out"):
        Steps(tmp_path, index=False).run("COPY", "README.md ./")


def test_docker_ignores_the_same_files() -> None:
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


def test_in_a_debian_commands_run_unchanged_and_the_program_as_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(container_steps.subprocess, "run", lambda words, **_: called.append([*words]))
    steps = StepsInRoot(tmp_path, index=True)
    install = "apt-get install --yes one && useradd lab && chown lab /lab"
    for word, rest in (("WORKDIR", "/src"), ("RUN", install), ("USER", "1000"), ("WORKDIR", "/lab"), ("ENTRYPOINT", '["slm-lab"]')):
        steps.run(word, rest)
    steps.start("demo.json")
    shell, program = called
    assert shell[-3:] == ["sh", "-euc", install]
    assert any("cd /src && exec setpriv --reuid 0 " in word for word in shell)
    assert program[-2:] == ["slm-lab", "demo.json"]
    assert any("cd /lab && exec setpriv --reuid 1000 " in word for word in program)
    assert all(words[words.index("--root") + 1] == str(tmp_path) for words in called)
