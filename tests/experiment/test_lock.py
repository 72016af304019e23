"""Tests of queries whether a run folder is locked."""

from __future__ import annotations

import fcntl
from pathlib import Path

from slm_lab.experiment.files.lock import RunLock, in_use, mark_in_use


def test_several_may_ask_at_once(tmp_path: Path) -> None:
    """Two `view` pages that query the lock at the same time must not mistake each other for the process that trains."""
    path = tmp_path / ".lock"
    RunLock(path).release()
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as in_use locks the file
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
