"""Index of a data folder, with an entry for each run, search and study.

An entry is computed again only if the files of its run, search or study have changed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from slm_lab.experiment.view.entries import Entry, make_entry, modification_time
from slm_lab.experiment.view.folders import DataFolder, FoundFolder, NotServed, recognise_folder

_FRESH = 0.5
"""Minimum time in seconds between two refreshes of the index. Because of this time, several open pages share one refresh."""
Signature = tuple[float | None, ...]


@dataclass
class _CachedEntry:
    """An entry of the index, the modification times of its files (`signature`), and the index version in which the entry last changed."""

    signature: Signature
    entry: Entry | None
    version: int


class Index:
    """The entries of all runs, searches and studies in a data folder. An Index can be used by several threads.

    For a run that has ended, a refresh of the index checks only the modification times of the run folder and of the lock file. The
    modification time of the run folder changes when a file in the folder is created or replaced by renaming, and a new start of the run
    changes the lock file. The entry of a run that is still running is computed again at each refresh.
    """

    def __init__(self, data: DataFolder) -> None:
        self.data = data
        self.version = 0
        """Version of the index, which increases when an entry changes or is removed."""
        self._removed = 0
        """The version of the index at which an entry was last removed."""
        self._known: dict[str, _CachedEntry] = {}
        self._lock = threading.Lock()
        self._read_at = float("-inf")

    def changes(self, since: int = 0) -> dict[str, Any]:
        """Return the entries that have changed since version `since` of the index.

        If `since` is 0, or if an entry has been removed since this version, all entries are returned.

        The returned dict has the keys "version", "all" (whether the result contains all entries) and "runs" (the entries, newest first).
        """
        with self._lock:
            if time.monotonic() - self._read_at >= _FRESH:
                self._refresh()
                self._read_at = time.monotonic()
            complete = not 0 < since <= self.version or self._removed > since
            known = self._known.values()
            entries = [one.entry for one in known if one.entry is not None and (complete or one.version > since)]
            return {"version": self.version, "all": complete, "runs": sorted(entries, key=_start_sort_key, reverse=True)}

    def _refresh(self) -> None:
        version, names = self.version + 1, set(self.data)
        for name in names:
            known = self._known.get(name)
            signature = self._signature(name)
            running = known is not None and known.entry is not None and known.entry["status"] == "running"
            if known is not None and known.signature == signature and not running:
                continue
            entry = self._entry(name)
            if known is None or known.entry != entry:
                self._known[name] = _CachedEntry(signature, entry, version)
                self.version = version
            else:
                known.signature = signature
        for name in self._known.keys() - names:
            del self._known[name]
            self.version = self._removed = version

    def _signature(self, name: str) -> Signature:
        folder = f"{self.data.root}/{name}"
        known = self._known.get(name)
        is_study = known is not None and known.entry is not None and known.entry["kind"] == "study"
        files = ("", "/.lock", "/results", "/runs") if is_study else ("", "/.lock")
        return tuple(modification_time(f"{folder}{file}") for file in files)

    def _entry(self, name: str) -> Entry | None:
        """Return the entry of a folder, or None if the folder does not contain a run, search or study (yet)."""
        folder = self.data.root / name
        found = recognise_folder(folder)
        if found is None:
            return None
        path = {"path": found.folder.relative_to(self.data.root).as_posix()}
        try:
            self.data.check(found.folder, ("", "info"))
        except NotServed as error:
            return _refused_entry(found, str(error)) | path
        return make_entry(found) | path


def _refused_entry(found: FoundFolder, text: str) -> Entry:
    return {"kind": found.kind, "name": found.stem, "env": "", "algorithm": "", "mode": "", "status": "unreadable", "text": text}


def _start_sort_key(entry: Entry) -> tuple[float, str]:
    return entry.get("began") or 0.0, str(entry["path"])
