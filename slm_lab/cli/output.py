"""Functions that write to stdout and stderr, and that do not raise an error if writing fails."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from slm_lab.experiment.report.screen import Screen, copy_standard_streams
from slm_lab.lib.files import nonfinite_to_none

OK, FAILED = 0, 1


def prepare_streams() -> None:
    """Open the null device in place of each closed standard stream. Let stdout and stderr replace characters that their encoding does not
    contain."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # a stream that `>&-` has closed is reopened before another file gets its number
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    copy_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8" and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def print_result(text: str) -> int:
    """Write the result of a command to stdout and return the exit code, which is FAILED if writing fails. If stdout is a pipe and its
    reader has closed it, the exit code is OK."""
    screen = Screen(sys.stdout)
    screen.write(f"{text}\n")
    screen.flush()
    if screen.error is None or isinstance(screen.error, BrokenPipeError):
        return OK
    print_error(f"cannot write to stdout: {screen.error.strerror}")
    return FAILED


def print_json(content: Mapping[str, Any]) -> int:
    """Write the result of a command to stdout as a single JSON document, and return the exit code. The JSON document contains null in place
    of infinite numbers and NaN."""
    return print_result(json.dumps(nonfinite_to_none(dict(content)), indent=2, ensure_ascii=False, allow_nan=False))


def print_error(text: str, colour: str = "") -> None:
    """Write an error message to stderr, in the colour `colour` if stderr is a terminal.

    Args: colour: ANSI colour code, such as "31", or "" for no colour.
    """
    screen = Screen(sys.stderr)
    if text:
        coloured = colour and screen.isatty() and not os.environ.get("NO_COLOR")
        screen.write(f"\033[{colour}m{text}\033[0m\n" if coloured else f"{text}\n")
        screen.flush()


def flush() -> None:
    """Flush stdout and stderr and ignore errors, so that Python does not report an error at exit."""
    for stream in (sys.stdout, sys.stderr):
        Screen(stream).flush()
