"""The wheel and the source distribution."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tools import package_check


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("dist")
    copy = tmp_path_factory.mktemp("source") / "slm_lab"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    code = "import sys; from setuptools import build_meta as b; folder = sys.argv[1]; b.build_sdist(folder); b.build_wheel(folder)"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=copy, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_files_of_the_packages(dist: Path) -> None:
    """Of the last commit: files that are not committed are missing."""
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
