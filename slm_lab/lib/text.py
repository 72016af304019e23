"""Functions that format text for the terminal: shortening, tables and wrapping."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80
"""Maximum width of tables and paragraphs, in characters."""
_MAX_KEY_LETTERS = 32
"""Maximum number of characters of the key columns (the first columns) together, in a table that is wider than `width`. Each cell of these
columns may have at least _MIN_KEY_LETTERS characters."""
_MIN_KEY_LETTERS = 8
"""Minimum number of characters to which cells in the key columns of a table are shortened. If a table is too wide even with key columns of
this width, cells in other columns are also shortened."""


def shorten(text: str, letters: int) -> str:
    """Shorten a text to at most `letters` characters: "…" replaces the middle of a longer text. The end of the text is kept, because the
    names of runs often differ at their ends."""
    if len(text) <= letters:
        return text
    end = (letters - 1) // 2
    return f"{text[: letters - 1 - end]}…{text[len(text) - end :]}"


def nonblank_lines(text: str) -> list[str]:
    """Return the nonblank lines of a text, each without leading and trailing whitespace."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def first_line(text: str) -> str:
    """Return the first nonblank line of a text, without leading and trailing whitespace, or "" if all lines are blank."""
    return next(iter(nonblank_lines(text)), "")


def last_line(text: str) -> str:
    """Return the last nonblank line of a text, without leading and trailing whitespace, or "" if all lines are blank.

    In a traceback, the last nonblank line contains the error.
    """
    return next(reversed(nonblank_lines(text)), "")


def error_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of the error's type if the message is empty."""
    return first_line(str(error)) or type(error).__name__


def format_table(rows: Sequence[Sequence[str]], width: int = WIDTH, key_columns: int = 1) -> list[str]:
    """Format a table with aligned columns, and return its lines.

    A table that is wider than `width` characters is divided into blocks of columns, which are placed one below the other. Each block begins
    with the first `key_columns` columns of the table.

    Args: rows: cells of each row of the table, beginning with the header.
    """
    columns = list(zip(*rows, strict=True))
    if sum(_width(column) + 2 for column in columns) - 2 <= width:
        return _rows(columns)
    widest = max(map(_width, columns[key_columns:]), default=0)
    letters = max(_MIN_KEY_LETTERS, min(_MAX_KEY_LETTERS // key_columns, (width - widest) // key_columns - 2))
    first = [_shorten_column(column, letters) for column in columns[:key_columns]]
    left = width - sum(_width(column) + 2 for column in first)
    blocks = [[*first]]
    for column in columns[key_columns:]:
        fitting = [shorten(cell, left) for cell in column]
        if len(blocks[-1]) > key_columns and sum(_width(one) + 2 for one in [*blocks[-1], fitting]) - 2 > width:
            blocks.append([*first])
        blocks[-1].append(fitting)
    return [line for number, block in enumerate(blocks) for line in [*([""] if number else []), *_rows(block)]]


def _shorten_column(column: Sequence[str], letters: int) -> list[str]:
    """Return the cells of a column, shortened to at most `letters` characters. If different cells would become equal, return the cells
    unchanged."""
    short = [shorten(cell, letters) for cell in column]
    return short if len(set(short)) == len(set(column)) else list(column)


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


def _rows(columns: Sequence[Sequence[str]]) -> list[str]:
    padded = [[cell.ljust(_width(column)) for cell in column] for column in columns]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def wrap_paragraph(text: str, width: int = WIDTH, indent: str = "  ") -> str:
    """Wrap a paragraph to lines of at most `width` characters, and indent all lines except the first.

    Words and paths are not divided, so that a line with a long word can exceed `width`.
    """
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
