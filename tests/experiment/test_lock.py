"""Locks of run folders, seen by those who only ask."""

from __future__ import annotations

import fcntl
from pathlib import Path

from slm_lab.experiment.files.lock import RunLock, in_use, mark_in_use


def test_several_may_ask_at_once(tmp_path: Path) -> None:
    """Two pages of `view` do not take each other for the process that trains."""
    path = tmp_path / ".lock"
    RunLock(path).release()
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as in_use does
        assert not in_use(path)
    lock = RunLock(path)
    assert in_use(path)
    lock.release()
    assert not in_use(path)


def test_a_marked_folder_is_in_use(tmp_path: Path) -> None:
    assert not in_use(tmp_path)
    with mark_in_use(tmp_path):
        assert in_use(tmp_path)
    assert not in_use(tmp_path)
