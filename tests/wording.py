"""The wording of messages in one snapshot file: tests check paths and codes, and only this file has the texts.

`WORDING=write pytest -n 0 -m "slow or not slow" tests/spec tests/cli` replaces the entries of the tests that ran, so all cases of a test
must run in one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "wording.json"
_written: dict[str, set[str]] = {}


@cache
def _snapshot() -> dict[str, list[str]]:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def check_wording(test: str, messages: Iterable[str]) -> None:
    """Compare the messages of a test with the snapshot, in any order."""
    messages = list(messages)
    if os.environ.get("WORDING") == "write":
        assert "PYTEST_XDIST_WORKER" not in os.environ, "write the snapshot with -n 0"
        _written.setdefault(test, set()).update(messages)
        kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        content = {**kept, **{key: sorted(lines) for key, lines in _written.items() if lines}}
        FILE.write_text(json.dumps(dict(sorted(content.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    new = [message for message in messages if message not in _snapshot().get(test, [])]
    assert not new, f"the wording changed; see {__name__}: {new}"
