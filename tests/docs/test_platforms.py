"""Tests of the table in docs/platforms.md against the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slm_lab.lib.system import LINUX_ONLY
from tools import platforms

pytest.importorskip("mypy", reason="its stubs say which systems lack a name")
PACKAGE = platforms.ROOT / "slm_lab"


def test_the_page_is_current() -> None:
    assert platforms.PAGE.read_text(encoding="utf-8") == platforms.text()


def test_uses_are_found(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        '''"""Reads /proc."""
import os, sys as system
from fcntl import flock
from multiprocessing import reduction as r, shared_memory

def read(pid: int) -> None:
    """Reads /proc."""
    os.kill(pid, 9)
    os.pidfd_open(pid)
    r.DupFd(3)
    if system.platform == "linux":
        open(f"/proc/{pid}/status")
'''
    )
    assert platforms.uses(tmp_path).keys() == {"fcntl", "os.pidfd_open", "multiprocessing.reduction.DupFd", "sys.platform", "/proc"}


def test_a_use_without_a_feature_and_a_feature_without_a_use_are_errors() -> None:
    used = platforms.uses(PACKAGE)
    with pytest.raises(ValueError, match=r"no feature of lib/system\.py lists os\.eventfd, which a\.py uses"):
        platforms.modules_of({**used, "os.eventfd": {"a.py"}})
    with pytest.raises(ValueError, match=r"feature 'memfd' of lib/system\.py lists os\.memfd_create, which the code does not use"):
        platforms.modules_of({symbol: files for symbol, files in used.items() if symbol != "os.memfd_create"})


def test_what_only_linux_has_is_used_only_after_a_question() -> None:
    """Each module that uses a Linux feature calls `has_feature` with its name, except preload.py, which only the fork server runs."""
    modules = platforms.modules_of(platforms.uses(PACKAGE))
    for name in LINUX_ONLY:
        for module in modules[name] - {"experiment/execute/local/preload.py"}:
            tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node) == f"has_feature('{name}')"]
            assert calls, f"{module} uses {name}"
