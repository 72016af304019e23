"""A fixture for tests that need optional packages."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def needs(*names: str) -> Callable[[], None]:
    """Return a fixture that skips the tests of a module where a package is missing, and imports it only when these tests run.

    `pytest.importorskip` at the top of a module imports it in every process that collects tests: envpool and ray.tune take 3 s.
    """

    @pytest.fixture(scope="module", autouse=True)
    def packages() -> None:
        for name in names:
            pytest.importorskip(name)

    return packages
