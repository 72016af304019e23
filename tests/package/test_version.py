"""Tests that slm_lab.__version__, CITATION.cff and CHANGELOG.md state the same version."""

from __future__ import annotations

import re

from packaging.version import Version
from ruamel.yaml import YAML

import slm_lab
from tests.docs.blocks import ROOT

VERSION = Version(slm_lab.__version__)


def test_the_citation() -> None:
    citation = YAML(typ="safe").load(ROOT / "CITATION.cff")
    assert citation["version"] == slm_lab.__version__
    assert ("date-released" in citation) == (not VERSION.is_devrelease)


def test_the_changelog_is_unreleased_until_the_version_is_no_development_version() -> None:
    newest = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION.base_version
    assert (newest[2] == "unreleased") == VERSION.is_devrelease
