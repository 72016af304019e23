"""Tests of tables that fit the terminal, and of functions that shorten and wrap text."""

from __future__ import annotations

from slm_lab.lib.text import error_line, first_line, format_table, last_line, nonblank_lines, shorten, wrap_paragraph


def test_a_table_that_fits_is_one_block() -> None:
    assert format_table([["name", "seeds", "return"], ["a", "4", "12.5"], ["long", "10", "-"]]) == [
        "name  seeds  return",
        "a     4      12.5",
        "long  10     -",
    ]


def test_a_wide_table_is_divided_by_columns() -> None:
    head, line = ["run", "first", "second", "third"], ["ab", "1" * 10, "2" * 12, "3" * 30]
    assert format_table([head, line], 30) == [
        "run  first       second",
        f"ab   {'1' * 10}  {'2' * 12}",
        "",
        "run  third",
        f"ab   {'3' * 12}…{'3' * 12}",
    ]


def test_names_that_differ_only_in_the_middle_are_not_shortened() -> None:
    """Labels of keys are such names: "ppo_cartpole gamma=0.9 lr=…"."""
    names = [f"{'a' * 20}{number}{'b' * 20}" for number in (1, 2)]
    lines = format_table([["run", "x", "y"], *([name, "1" * 20, "2" * 20] for name in names)], 60)
    assert [line.split()[0] for line in lines if line] == ["run", *names, "run", *names]


def test_long_names_keep_their_ends() -> None:
    assert shorten("ppo_cartpole_2026_11_27_232513", 13) == "ppo_ca…232513"
    assert shorten("short", 5) == "short"
    path = "/data/" + "x" * 90
    assert wrap_paragraph(f"all files are in {path} now", 40) == f"all files are in\n  {path}\n  now"


def test_the_last_line_of_a_traceback_is_the_error() -> None:
    assert last_line("Traceback:\n  File x\n  ValueError: no \n\n") == "ValueError: no"
    assert last_line("one") == "one"
    assert last_line("") == last_line(" \n") == ""


def test_the_first_line_of_an_error() -> None:
    assert error_line(ValueError("\n  no: 1 \n 2\n")) == first_line("\n  no: 1 \n 2\n") == "no: 1"
    assert nonblank_lines(" a \n\n\tb\n") == ["a", "b"]
    assert first_line("") == first_line(" \n") == ""
    assert error_line(ValueError()) == error_line(ValueError(" \n")) == "ValueError", "an error without a message"
