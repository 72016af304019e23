"""Tests of the descriptions of errors."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable

import pytest

from slm_lab.lib.log import error_location, error_summary


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raise_unprintable() -> None:
    raise Unprintable


def parse() -> None:
    json.loads("{")


def import_missing() -> None:
    importlib.import_module("no_such_package.module")


@pytest.mark.parametrize("fail", [parse, import_missing, raise_unprintable])
def test_the_location_of_an_error_is_the_line_of_the_user(fail: Callable[[], None]) -> None:
    """Frames of the standard library, of slm_lab and of frozen modules are skipped, and an error without a text has a summary."""
    with pytest.raises((ValueError, ImportError, Unprintable)) as raised:
        fail()
    line = fail.__code__.co_firstlineno + 1
    assert error_location(raised.value) == f" in {__file__}, line {line}"
    assert error_summary(raised.value).endswith(f" (file {__file__}, line {line})")
