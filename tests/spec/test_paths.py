"""Tests of dotted paths of keys."""

from __future__ import annotations

import pytest

from slm_lab.spec.report import KeyPath, diff, show_path, to_path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("env", ("env",)),
        ("agent.net.hid_layers[0]", ("agent", "net", "hid_layers", 0)),
        ("agent[0].net", ("agent", 0, "net")),
        ("a[1][-2].b", ("a", 1, -2, "b")),
        (r"env.kwargs.a\.b", ("env", "kwargs", "a.b")),
        ("[3]", (3,)),
        ("a[b].c[", ("a[b]", "c[")),
        ("", ("",)),
        ("a..b.", ("a", "", "b", "")),
    ],
)
def test_parsing(text: str, path: KeyPath) -> None:
    assert to_path(text) == path


def test_a_shown_path_is_parsed_to_itself() -> None:
    path = ("agent", "net", "hid_layers", 0, 12, "x")
    assert to_path(show_path(path)) == path


def test_changed_values_are_ordered_like_the_first_mapping() -> None:
    before, after = {"b": 1, "same": [2], "gone": 3, "none": None}, {"new": 4, "b": 1.5, "same": [2]}
    assert list(diff(before, after).items()) == [("b", (1, 1.5)), ("gone", (3, None)), ("new", (None, 4))]
    assert diff({"none": None}, {}) == diff(before, before) == {}
