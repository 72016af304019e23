"""The code blocks of README.md and docs/."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`(\w+\.json)`[^`]*$")
_LOOP = re.compile(r"^\s*for (\w+) in (.*); do$|^\s*done$")
_REDIRECTION = re.compile(r"\d?>")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*$")


@dataclass(frozen=True)
class Block:
    """A code block: its page, language and text, and the last file name in the text before it."""

    page: str
    language: str
    text: str
    file: str


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = _FILE.search(paragraph)
        found.append(Block(page.name, match[1], match[2], named[1] if named else ""))
    return found


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block. The commands in a `for` loop are returned once, with the first value of the loop variable."""
    lines, values = list[str](), dict[str, str]()
    for raw in block.text.replace("\\\n", " ").splitlines():
        line = f" {raw}".partition(" #")[0].strip().removeprefix("$ ")
        if loop := _LOOP.match(line):
            if loop[1]:
                values[loop[1]] = loop[2].split()[0]
            continue
        for name, value in values.items():
            line = line.replace(f"${name}", value)
        if line:
            lines.append(line)
    return lines


def words_of(line: str) -> list[str]:
    """Return the words of a command line without redirections and leading assignments (`NAME=value command …`)."""
    words = [word for word in shlex.split(line) if not _REDIRECTION.match(word)]
    while _ASSIGNMENT.match(words[0]):
        del words[0]
    return words


ALL = [block for page in PAGES for block in blocks(page)]
