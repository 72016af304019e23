"""Tests of the parsers: JSON with comments and trailing commas, and YAML."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slm_lab.spec.load.files import parse_file, parse_json, parse_yaml
from slm_lab.spec.report import SpecError


def problem(call: Any, *args: Any) -> str:
    with pytest.raises(SpecError) as caught:
        call(*args)
    return str(caught.value.problems[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": [1, 2,], /* , */ }', {"a": 1, "b": [1, 2]}),
        ('{"a": "// not, a /* comment */ ,]"}', {"a": "// not, a /* comment */ ,]"}),
        ('{"a": "quote \\" // still,}"}', {"a": 'quote " // still,}'}),
        ('{"a": [1 /* x */ , // y\n /* z */ ],}', {"a": [1]}),
        ('{"a": ${max_frame}, "b": [${x}]}', {"a": "${max_frame}", "b": ["${x}"]}),
        ('{"a": "${x}-${y}"}', {"a": "${x}-${y}"}),
        ("/* a ** b */ [1e6, 1.5e-4]", [1e6, 1.5e-4]),
    ],
)
def test_json_with_comments_and_trailing_commas(text: str, value: Any) -> None:
    assert parse_json(text) == value


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('{\n  "a": 1\n  "b": 2\n}', "line 3, column 3", "expecting ',' delimiter"),
        ('{\n // comment\n /* two\n lines */ "a": nope }', "line 4, column 16", "expecting value"),
        ('{"a": 1,\n "b": {"c": 1, "c": 2}}', "line 2, column 16", "'c'"),
        ('{"a": {"x": 1}, "b": {"x": 2}, "a": 3}', "line 1, column 32", "'a'"),
        ('{"a": 1, /* x\n "b": 2}', "line 1, column 10", "comment"),
        ('{"a": [1, NaN]}', "line 1, column 11", "NaN"),
        ('{"a": ${x}, "b": ${y}, c}', "line 1, column 24", "property name"),
        ('{"a": ${x}, c, "b": ${y}}', "line 1, column 13", "property name"),
        ("[,]", "line 1, column 2", "expecting value"),
        ("[1,,]", "line 1, column 4", "expecting value"),
    ],
)
def test_broken_json_is_told_with_line_and_column(text: str, place: str, words: str) -> None:
    message = problem(parse_json, text)
    assert message.startswith(place), message
    assert words in message


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 80 + "]" * 80, "1" * 5000, "1e999", "-Infinity", '{"a": "\\ud800"}\x00'])
def test_json_that_no_spec_has(text: str) -> None:
    assert problem(parse_json, text)


def test_yaml() -> None:
    text = """
_base: &base {lr: 1e-3, decay: 1.5E+2, count: 1_000, word: no, clock: 1:30, empty: ~, off: True}
_more: &more
  <<: *base
  lr: 2.0e-4
spec:
  <<: *more
  decay: 3
  layers:
  - Tanh:
"""
    value = parse_yaml(text)
    base = {"lr": 0.001, "decay": 150.0, "count": 1000, "word": "no", "clock": "1:30", "empty": None, "off": True}
    assert value["_base"] == base
    assert value["_more"] == base | {"lr": 0.0002}
    assert value["spec"] == base | {"lr": 0.0002, "decay": 3, "layers": [{"Tanh": None}]}
    assert isinstance(value["_base"]["lr"], float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4, column 3: "),
        ("a: [1\nb: 2", "line 2"),
        ("1: a", "keys must be strings, not 1"),
        ("a: &a [*a]", "nested too deep"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("a: !!timestamp 2020-01-01", "a: "),
        ("a: *x", "undefined alias"),
        ("a: .inf", "a: must be a finite number"),
        ("\x00", "0000"),
    ],
)
def test_broken_yaml(text: str, words: str) -> None:
    assert words in problem(parse_yaml, text)


def test_yaml_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_lab.spec.load.files.MAX_NODES", 10_000)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert "too large" in problem(parse_yaml, "\n".join(lines))


def test_anchors_give_trees_of_their_own() -> None:
    value = parse_yaml("a: &a {x: 1}\nb: *a")
    value["a"]["x"] = 2
    assert value["b"] == {"x": 1}


def test_a_file_that_is_no_text(tmp_path: Any) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"\xff\xfe\x00{")
    assert "not UTF-8" in problem(parse_file, file)
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert parse_file(file) == {}


def test_parsing_is_fast() -> None:
    text = "{\n" + ",\n".join(f'"spec_{n}": {{"a": [1, 2, 3,], "b": "text", // comment\n "c": 1e-3}}' for n in range(3000)) + "}"
    start = time.process_time()
    parse_json(text)
    assert time.process_time() - start < 1.0  # 170 KB


@pytest.mark.parametrize(
    "text", ['"' * 20_000, "/*" * 20_000, ", " * 20_000, "[" + ", " * 20_000 + "]", "${" * 20_000, " " * 50_000 + ",]"]
)
def test_no_text_is_slow(text: str) -> None:
    start = time.process_time()
    with pytest.raises(SpecError):
        parse_json(text)
    assert time.process_time() - start < 2.0
