"""Interpretation of the arguments FILE, NAME and MODE of the command line."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from slm_lab.cli.parser import COMMANDS, DATA_DIR, DEMO, MODES, UsageError, did_you_mean

_EXAMPLES = ("train", "dev", "search", "train@latest", "search@latest", "study", "study@latest", "enjoy@latest")


class Request(NamedTuple):
    """The parsed positional arguments of the command `run`."""

    file: str
    name: str | None
    """Name of the spec, or None if the command line contains MODE@where without FILE and NAME."""
    mode: str
    where: str
    """Text after the "@" of the mode, which is a run folder or "latest", or "" if the mode has no "@"."""


def resolve_request(words: list[str]) -> Request:
    """Return FILE, NAME and MODE of the command line, with defaults for omitted arguments. The two words `enjoy RUN` are read as
    `enjoy@RUN`."""
    if len(words) == 2 and words[0] == "enjoy" and "@" not in words[1] and not Path("enjoy").exists():
        words = [f"enjoy@{words[1]}"]
    if words and _is_mode_at(words[0]):
        mode = _read_mode(words[0])
        if len(words) > 1:
            raise UsageError(f"too many arguments after {words[0]}: {' '.join(words[1:])}; FILE and NAME come before it")
        return Request("", None, *mode)
    if len(words) > 3:
        raise UsageError(f"too many arguments after FILE NAME MODE: {' '.join(words[3:])}")
    file, name = resolve_file_and_name(words)
    return Request(file, name, *_read_mode(words[2] if len(words) > 2 else "train"))


def _is_mode_at(word: str) -> bool:
    """Return whether an argument has the form MODE@where and is not the path of a file. The result is also true if MODE is misspelt."""
    mode, at, _ = word.partition("@")
    return bool(at) and (mode in MODES or bool(did_you_mean(mode, MODES))) and not Path(word).is_file()


def _read_mode(word: str) -> tuple[str, str]:
    """Return the mode of a command-line argument, and the text after its "@". Raises UsageError for an unknown mode."""
    mode, at, where = word.partition("@")
    forms = MODES.get(mode, "")
    if (where and f"{mode}@" in forms) or (not at and mode in forms.split(", ")):
        return mode, where
    if at and f"{mode}@" in forms:
        raise UsageError(f"'{word}': expected a run folder or latest after the @, such as {mode}@latest")
    hint = did_you_mean(word, _EXAMPLES) or did_you_mean(mode, _EXAMPLES)
    raise UsageError(f"unknown mode '{word}'" + (hint or f"; expected one of {', '.join(MODES.values())}"))


def resolve_file_and_name(words: list[str]) -> tuple[str, str]:
    """Return FILE and NAME of the command line, with defaults for omitted arguments. Raises UsageError."""
    if not words:
        return DEMO
    if len(words) == 2 and _is_mode_at(words[1]) and "." not in words[0] and not Path(words[0]).exists():
        file, alone = next(map(str, _files_with(words[0])), "FILE"), "" if words[1].startswith("study@") else f" or {words[1]}"
        raise UsageError(f"'{words[0]}' is not a spec file; expected {file} {words[0]} {words[1]}{alone}")
    file = check_file_argument(words[0])
    is_mode = len(words) > 1 and words[1].partition("@")[0] in MODES
    if len(words) > 1 and not is_mode:
        return file, words[1]
    from slm_lab.spec.load.files import spec_names

    names = spec_names(file)
    if is_mode and words[1] not in names:
        mode = "enjoy@latest" if words[1] == "enjoy" else words[1]
        raise UsageError(f"'{words[1]}' is a mode, not a name; expected {file} NAME {mode} (names: {', '.join(names)})")
    if not is_mode and len(names) != 1:
        raise UsageError(f"{file}: NAME is missing; expected one of {', '.join(names)}")
    return file, words[1] if is_mode else names[0]


def check_file_argument(word: str) -> str:
    """Return the argument `word` unchanged if it may be the path of a file. Raises UsageError if `word` looks like a command or the name of
    a spec."""
    if not word:
        raise UsageError("FILE is empty; expected a spec file, such as demo.json")
    with suppress(OSError):  # the name is too long
        if "/" in word or "." in word or Path(word).exists():
            return word
    if word in MODES:
        raise UsageError(f"'{word}' is a mode, not a file; expected {_mode_forms(word)}")
    message = f"unknown command or spec file '{word}'"
    if files := _files_with(word):
        raise UsageError(f"{message}; it is a spec: {' or '.join(f'{file} {word}' for file in files)}")
    raise UsageError(f"{message}{did_you_mean(word, [*COMMANDS, DEMO[0]])} (commands: {', '.join(COMMANDS)})")


def _mode_forms(mode: str) -> str:
    """Return the command-line forms of a mode as text for a message. Forms that continue or play a run are shown without FILE and NAME, but
    forms that continue a study are shown with FILE and NAME."""
    forms = MODES[mode].split(", ")
    return " or ".join(form if "@" in form and mode != "study" else f"FILE NAME {form}" for form in forms)


def _files_with(name: str) -> list[Path]:
    """Return the paths of the spec files shipped with slm_lab that contain the spec `name`, as command-line arguments."""
    from slm_lab.spec.load.files import SPEC_FOLDER, shipped_spec_files, spec_names

    return [file for file in shipped_spec_files() if file.suffix == ".json" and name in spec_names(SPEC_FOLDER / file)]


@contextmanager
def mark_set_keys(file: str, name: str | None, sets: Sequence[str]) -> Iterator[None]:
    """Context manager that adds FILE and NAME to a SpecError that is raised in the `with` block, and marks the keys that --set has
    given."""
    from slm_lab.spec.load.files import find_spec_file
    from slm_lab.spec.load.loader import mark_set_arguments
    from slm_lab.spec.report import SpecError

    try:
        yield
    except SpecError as error:
        raise mark_set_arguments(error, " ".join([str(find_spec_file(file)), *([name] if name else [])]), sets) from None


def agent_arguments(where: str, root: Path, arguments: Namespace) -> list[str]:
    """Return the command-line arguments with which another command uses the same agent: a folder, and the options that select the agent in
    the folder.

    Args: where: folder as the user has written it, or "latest". root: run folder to which `where` refers.
    """
    from slm_lab.lib.files import display_path

    folder = str(display_path(root)) if where == "latest" else where
    options = {name: getattr(arguments, name) for name in ("checkpoint", "session", "trial", "entry", "env", "seed", "policy")}
    if not Path(folder).exists():  # the folder was found in the data folder
        options["data-dir"] = None if arguments.data_dir == DATA_DIR else arguments.data_dir
    given = ((f"--{name}", str(value)) for name, value in options.items() if value is not None)
    return [folder, *(word for pair in given for word in pair)]


def model_lines(name: str, data_dir: Path) -> str:
    """Return lines of text with the commands that play, load and upload a named model."""
    from slm_lab.experiment.files.named_model import models_dir

    other = data_dir != DATA_DIR
    options = ["--data-dir", str(data_dir)] if other else []
    loaded = str(models_dir(data_dir) / name) if other else name
    play, push = shlex.join(["slm-lab", f"enjoy@{name}", *options]), shlex.join(["slm-lab", "push", name, "USER/REPO", *options])
    return f"play it:   {play}\nload it:   load_agent({loaded!r})\nshare it:  {push}"
