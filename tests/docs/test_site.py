"""Tests of the documentation site: it builds without warnings, and its pages load nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href", "object": "data", "use": "href"}
"""Tag → attribute whose address the browser loads."""


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for key, value in attrs if key == LOADS.get(tag) and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert [address for address in parser.addresses if re.match(r"(https?:)?//", address)] == [], page
        files = [address.partition("#")[0].partition("?")[0] for address in parser.addresses if not address.startswith("data:")]
        if page.name != "404.html":  # its URLs are absolute
            assert [file for file in files if file and not (page.parent / file).exists()] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_formulas_are_drawn(site: Path) -> None:
    page = (site / "equations.html").read_text(encoding="utf-8")
    assert page.count('<svg class="math"') > 100
    assert "arithmatex" not in page


@pytest.mark.slow
def test_links_to_the_code_lead_to_pages(site: Path) -> None:
    page = (site / "reading_order.html").read_text(encoding="utf-8")
    assert 'href="source/slm_lab/agent/algorithm/ppo.py.html"' in page
    assert "class PPO" in re.sub(r"<[^>]*>", "", (site / "source/slm_lab/agent/algorithm/ppo.py.html").read_text(encoding="utf-8"))
