"""Test that docs/notebook.ipynb runs from the first cell to the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from tools.notebook import execute

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = execute(tmp_path)
    last = book.cells[-1].outputs[-1].data["text/plain"]
    assert float(last) >= 100  # the return of the trained agent's episode
    assert list(tmp_path.glob("data/notebook_*/*.png"))
