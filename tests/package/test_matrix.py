"""Tests of tools/matrix.py with scripts in place of uv and the Python interpreters of its environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import matrix

CASE = f"{sys.version_info.major}.{sys.version_info.minor}-newest"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the environments; a fake uv reports that torch 9.1 is installed."""
    monkeypatch.setattr(matrix, "HOME", tmp_path)
    monkeypatch.setattr(matrix.shutil, "which", lambda name: name)
    monkeypatch.setattr(matrix, "_works", lambda python: True)
    script(tmp_path / "uv/bin/uv", "echo torch==9.1")
    return tmp_path


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["matrix", CASE, *words])
    return matrix.main()


def test_a_step_is_run_in_an_environment_that_an_earlier_call_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(home / CASE / "bin/python", "echo '12 tests collected in 1.00s'")
    assert run(monkeypatch, "--steps", "collect") == 0
    assert (home / "table.md").read_text().splitlines()[2] == f"| {CASE} | 9.1 |  |  |  |  |  |  | 12 tests |  |  |"


def test_a_step_that_fails_ends_with_exit_status_1(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(home / CASE / "bin/python", "echo '12 tests collected, 1 error in 1.00s'; exit 1")
    assert run(monkeypatch, "--steps", "collect") == 1
    assert "12 tests, 1 error: 12 tests collected, 1 error in 1.00s" in (home / "table.md").read_text()


def test_without_an_environment_the_step_install_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--steps", "test") == 1
    assert f"{CASE}: test FAILED: not installed; add install to --steps" in capsys.readouterr().out
