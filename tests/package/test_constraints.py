"""Tests of constraints.txt against pyproject.toml and the installed packages."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.docs.blocks import ROOT
from tools.constraints import pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DIRECT = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    if not text.startswith("slm-lab[")
]


def needed() -> dict[str, str]:
    """Return a dict from each installed package that the extras need, directly or indirectly, to the package that requires it."""
    found: dict[str, str] = {}
    seen, open_ = set[tuple[str, tuple[str, ...]]](), [(one, "slm-lab") for one in DIRECT]
    while open_:
        requirement, owner = open_.pop()
        name = canonicalize_name(requirement.name)
        if (name, tuple(requirement.extras)) in seen:
            continue
        seen.add((name, tuple(requirement.extras)))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        for text in installed.requires or ():
            child = Requirement(text)
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                open_.append((child, name))
        found.setdefault(name, owner)
    return found


def test_each_package_is_pinned_once_in_order() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [canonicalize_name(line.partition("==")[0]) for line in lines if line and not line.startswith("#")]
    assert names == sorted(set(names))


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_pins_fit_the_ranges(requirement: Requirement) -> None:
    version = pins().get(canonicalize_name(requirement.name))
    assert version is not None, "make constraints"
    assert requirement.specifier.contains(version, prereleases=True)


def test_what_is_needed_is_pinned_and_nothing_else() -> None:
    """Every needed package is pinned and no other; only installed ones are compared, since other systems and Pythons need others."""
    wanted, pinned = needed(), pins()
    assert {name: owner for name, owner in wanted.items() if name not in pinned} == {}, "lacks a package; make constraints"
    left_over = pinned.keys() - wanted.keys()
    assert {name for name in left_over if _is_installed(name)} <= {"pip", "setuptools"}, "has a package that nothing needs"


def test_what_is_installed_has_the_pinned_version() -> None:
    different = {}
    for name, version in pins().items():
        if _is_installed(name) and Version(distribution(name).version).public != version:
            different[name] = (distribution(name).version, version)
    assert different == {}


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
