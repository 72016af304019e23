"""Tests of the table of dependencies in CONTRIBUTING.md, and of the modules that import each package."""

from __future__ import annotations

from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import dependencies


@pytest.mark.parametrize(("package", "extras"), dependencies.requirements().items())
def test_the_table_says_what_a_package_is_for_and_who_imports_it(package: str, extras: list[str]) -> None:
    row = dict(zip(("package", "extra", "for", "by"), _table()[package], strict=False))
    purpose = dependencies.purpose(package).text
    assert row == {"package": package, "extra": ", ".join(extras), "for": purpose, "by": dependencies.users(package)}, "make dependencies"


def test_the_table_has_a_row_for_each_package_in_order() -> None:
    assert list(_table()) == list(dependencies.requirements()), "make dependencies"


@cache
def _table() -> dict[str, list[str]]:
    return {row[0]: row for row in dependencies.rows(dependencies.PAGE.read_text(encoding="utf-8"))}


def test_each_purpose_belongs_to_a_package() -> None:
    named = {canonicalize_name(Requirement(text).name) for text in dependencies.requirements()}
    assert named == dependencies.PURPOSES.keys()


@pytest.mark.parametrize("name", [name for name, extras in dependencies.requirements().items() if extras == ["core"]])
def test_the_core_imports_what_it_installs(name: str) -> None:
    assert dependencies.users(name) != ""
