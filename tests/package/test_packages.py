"""Tests of the wheel and the source distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import slm_lab
from tests.docs.blocks import ROOT
from tools import package_check


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the source distribution, built from a clone of the repository."""
    folder = tmp_path_factory.mktemp("dist")
    copy = tmp_path_factory.mktemp("source") / "slm_lab"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    code = "import sys; from setuptools import build_meta as b; folder = sys.argv[1]; b.build_sdist(folder); b.build_wheel(folder)"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=copy, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_files_of_the_packages(dist: Path) -> None:
    """The packages contain the expected files; they are built from the last commit, so uncommitted files are missing."""
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert [*package_check.wheel_problems(wheel)] == []
    assert [*package_check.source_problems(source)] == []


@pytest.mark.slow
def test_what_is_wrong_with_a_wheel_is_reported(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    damaged = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(damaged, "w") as archive:
        for name in whole.namelist():
            if name != "slm_lab/py.typed":
                archive.writestr(name, whole.read(name))
        archive.writestr("slm_lab/left_over.py", "")
    assert [*package_check.wheel_problems(damaged)] == [
        f"{wheel.name}: lacks slm_lab/py.typed",
        f"{wheel.name}: has slm_lab/left_over.py, which git does not track",
    ]


@pytest.mark.slow
def test_the_source_distribution_passes_its_tests(dist: Path, tmp_path: Path) -> None:
    """The tests that read files other than modules pass in the unpacked source distribution."""
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/package", "tests/docs"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", slm_lab.__all__)
def test_public_names_can_be_imported(name: str) -> None:
    assert getattr(slm_lab, name).__name__ == name
