"""FILE and NAME on the command line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from slm_lab.cli.commands import COMMANDS, DEMO, MODES
from slm_lab.cli.parser import UsageError, did_you_mean


def resolve_file_and_name(words: list[str]) -> tuple[str, str]:
    """Return FILE and NAME, filling in what is left out."""
    if not words:
        return DEMO
    file = check_file_argument(words[0])
    is_mode = len(words) > 1 and words[1].partition("@")[0] in MODES
    if len(words) > 1 and not is_mode:
        return file, words[1]
    from slm_lab.spec.loader import spec_names

    names = spec_names(file)
    if is_mode and words[1] not in names:
        raise UsageError(f"'{words[1]}' is a MODE; expected NAME before it: {file} NAME {words[1]} (names: {', '.join(names)})")
    if is_mode:
        return file, words[1]
    if len(names) != 1:
        raise UsageError(f"{file}: NAME is missing; expected one of {', '.join(names)}")
    return file, names[0]


def check_file_argument(word: str) -> str:
    """Return `word`; raise UsageError if it looks like a command or a spec's name rather than a file."""
    if not word:
        raise UsageError("FILE is empty; expected a spec file, such as demo.json")
    with suppress(OSError):  # a name too long
        if "/" in word or "." in word or Path(word).exists():
            return word
    message = f"unknown command or spec file '{word}'"
    if files := _files_with(word):
        raise UsageError(f"{message}; it is a spec: {' or '.join(f'{file} {word}' for file in files)}")
    raise UsageError(f"{message}{did_you_mean(word, [*COMMANDS, DEMO[0]])} (commands: {', '.join(COMMANDS)})")


def _files_with(name: str) -> list[Path]:
    """Return the shipped spec files that contain the spec `name`, as they can be given on the command line."""
    from slm_lab.spec.base import SpecError
    from slm_lab.spec.loader import SPEC_FOLDER, spec_names

    found = []
    for file in sorted(SPEC_FOLDER.rglob("*.json"), key=lambda file: (len(file.parts), file)):
        with suppress(SpecError):  # the schema
            if name in spec_names(file):
                found.append(file.relative_to(SPEC_FOLDER))
    return found
