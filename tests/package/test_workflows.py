"""Tests that workflows and hooks run only make targets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.docs.blocks import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def test_targets_are_declared() -> None:
    """All targets are declared as phony: otherwise a file with the name of a target would prevent make from running it."""
    declared = set(" ".join(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)).split())
    assert declared == TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_steps_of_workflows(path: Path) -> None:
    workflow = read(path)
    assert workflow["env"]["MAKE"] == "make PYTHON=python"
    for name, job in workflow["jobs"].items():
        lines = [step["run"] for step in job["steps"] if "run" in step]
        assert lines, name
        for line in lines:
            program, target, *_ = line.split()
            assert program == "$MAKE"
            assert target in TARGETS


def test_the_hooks_together_are_make_check() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    rules = re.findall(
        r"^(?:check: (\w+)|\t@\$\(MAKE\) --no-print-directory (\w+) & .*--no-print-directory (\w+);)",
        Path(ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert entries == [f"make {target}" for rule in rules for target in rule if target]
