"""Tests of the table of code sizes in docs/algorithms.md."""

from __future__ import annotations

import re

from bench.code_size import PEERS, ours
from tests.docs.blocks import ROOT

_ROW = re.compile(r"^\| (\w+)(?: \([^|]*\))? \| (\d+) \| (\d+) \|", re.MULTILINE)
_NAMES = {"REINFORCE": "Reinforce"}


def test_the_sizes_of_the_table_are_current() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("\n## Size of the code\n")[2]
    shown = {_NAMES.get(name, name): (int(file), int(bases)) for name, file, bases in _ROW.findall(page)}
    assert shown.keys() == PEERS.keys()
    for name, sizes in shown.items():
        assert all(abs(a - b) <= 5 for a, b in zip(sizes, ours(name), strict=True)), (name, sizes, ours(name))
