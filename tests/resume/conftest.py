"""Fixtures of the resume tests: commands that start quickly, and projects with runs to resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files.paths import RunPaths, runs_of_spec
from tests.resume.launcher import Launcher, Running


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.close()


class Project:
    """Folder in which commands run, with a spec file and a data folder."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.folder, self.data = launcher, folder, folder / "data"

    def write(self, body: dict[str, Any]) -> None:
        """Write the spec file, which has one spec called small."""
        (self.folder / "spec.json").write_text(json.dumps({"small": body}))

    def start(self, *words: object) -> Running:
        """Start a command."""
        return self.launcher.start([*words, "--data-dir", self.data], self.folder)

    def run(self, *words: object, code: int = 0) -> str:
        """Run a command, check its exit code, and return its output."""
        running = self.start(*words)
        assert running.wait() == code, running.text
        assert "Traceback" not in running.text, running.text
        return running.text

    def train(self, body: dict[str, Any], *words: object, code: int = 0) -> RunPaths:
        """Train a spec; return the paths of the run."""
        self.write(body)
        self.run("spec.json", "small", "train", *words, code=code)
        return self.paths

    @property
    def paths(self) -> RunPaths:
        """Paths of the latest run."""
        return RunPaths(runs_of_spec(self.data, "small")[-1], "small")


@pytest.fixture
def project(launcher: Launcher, tmp_path: Path) -> Iterator[Project]:
    """Project whose commands are killed at the end of the test: a command that kept training would slow down all later tests."""
    yield Project(launcher, tmp_path)
    launcher.kill_commands()
