"""The table of dependencies in CONTRIBUTING.md, and where the packages are used."""

from __future__ import annotations

import ast
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.blocks import ROOT
from tools import dependencies


def test_the_table_has_a_row_for_each_package() -> None:
    assert dependencies.rows(dependencies.PAGE.read_text(encoding="utf-8")) == list(dependencies.requirements()), "make dependencies"


def test_each_purpose_belongs_to_a_package() -> None:
    named = {canonicalize_name(Requirement(text).name) for text in dependencies.requirements()}
    assert named == dependencies.PURPOSES.keys()


@cache
def imported() -> set[str]:
    """Return the modules that slm_lab imports, whole names."""
    found = set[str]()
    for path in (ROOT / "slm_lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return found


@pytest.mark.parametrize("name", [name for name, extras in dependencies.requirements().items() if extras == ["core"]])
def test_the_core_imports_what_it_installs(name: str) -> None:
    module = dependencies.PURPOSES[canonicalize_name(name)].module.partition(".")[0]
    assert any(one.partition(".")[0] == module for one in imported())
