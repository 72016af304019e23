"""Tests of PYPI.md: it is README.md with links that work outside the repository."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT
from tools import package_page

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_is_current() -> None:
    assert (ROOT / "PYPI.md").read_text(encoding="utf-8") == package_page.text()


def test_no_link_is_relative() -> None:
    for repository in (None, "https://example.org/slm_lab/"):
        page = package_page.page(README, repository)
        assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []
        assert "<!--" not in page
        assert "`make " not in page
        assert ("## Documentation" in page) == (repository is not None)


def test_links_and_parts() -> None:
    text = (
        "A\n<!-- checkout -->\nmake\n<!-- end of checkout -->\n"
        "![i](docs/i.png) [a](docs/a.md#b) [x](https://x.org)<!-- checkout --> here<!-- end of checkout -->\n"
    )
    page = package_page.page(text, "https://example.org/lab")
    assert "pip install slm-lab" in page
    assert page.endswith(
        "![i](https://example.org/lab/raw/main/docs/i.png) [a](https://example.org/lab/blob/main/docs/a.md#b) [x](https://x.org)\n"
    )
    assert package_page.page(text, None).endswith(" a [x](https://x.org)\n")
