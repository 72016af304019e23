from __future__ import annotations

import sys
from pathlib import Path

import gymnasium as gym
import pytest

from tests.docs.blocks import ALL, ROOT


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the files that the pages tell the reader to write in a temporary folder, and make it the current folder."""
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
    for name in ("Line-v0", "Catch-v0"):
        gym.registry.pop(name, None)
    return tmp_path
