from __future__ import annotations

import os
from pathlib import Path

import pytest

from slm_lab.lib import limits
from slm_lab.lib.system import VARIABLE


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.__getitem__)


def groups(folder: Path, listed: str, files: dict[str, str]) -> tuple[Path, Path]:
    (folder / "listed").write_text(listed)
    for name, text in files.items():
        file = folder / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "root", folder / "listed"


V1 = "12:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n1:name=systemd:/docker/abc\n"


@pytest.mark.parametrize(
    ("listed", "files", "cores", "memory"),
    [
        ("0::/\n", {}, 16, 2**32),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, 16, 2**32),
        ("0::/\n", {"cpu.max": "200000 100000\n", "memory.max": "1073741824\n"}, 2, 2**30),
        ("0::/job/step\n", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "400000 100000\n", "job/memory.max": "9\n"}, 2, 9),
        ("0::/of/the/host\n", {"cpu.max": "20000 100000\n", "memory.max": "99\n", "memory.high": "98"}, 1, 98),
        ("0::/../above\n", {"cpu.max": "300000 100000\n"}, 3, 2**32),
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, 16, 2**32),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": "7"}, 3, 7),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": str(2**63 - 4096)}, 16, 2**32),
        ("0::/\n", {"cpu.max": "garbage", "memory.max": ""}, 16, 2**32),
        ("0::/\n", {"cpu.max": "3200000 100000\n"}, 16, 2**32),
    ],
)
def test_limits_of_control_groups(listed: str, files: dict[str, str], cores: int, memory: int, tmp_path: Path) -> None:
    where = groups(tmp_path, listed, files)
    assert limits.cores(*where) == cores
    assert limits.memory_bytes(*where) == memory


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert limits.cores(tmp_path, tmp_path / "none") == 16
    assert limits.memory_bytes(tmp_path, tmp_path / "none") == 2**32


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= limits.cores() <= (os.cpu_count() or 1)
    assert limits.memory_bytes() > 2**20
