"""Limits of containers."""

from pathlib import Path

import pytest

from slm_lab.lib import machine


def test_a_container_has_the_resources_of_its_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free, cores = machine.memory_bytes(), machine.cpu_count()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert (machine.memory_bytes(), machine.cpu_count()) == (free, cores)
    (tmp_path / "memory.max").write_text("123456\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert (machine.memory_bytes(), machine.cpu_count()) == (123456, 1)


def test_older_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("654321\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.memory_bytes() == 654321
    assert machine.cpu_count() >= 1
