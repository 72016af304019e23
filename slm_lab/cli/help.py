"""The command `help [COMMAND | MODE]`, which shows the options of all commands, or of one command or mode."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import print_result
from slm_lab.cli.parser import COMMANDS, MODES, UsageError, did_you_mean, make_parser


def show_help(words: list[str], arguments: Namespace) -> int:
    """Print the usage and the options of one command or mode or, if `words` is empty, of all commands. Return the exit code."""
    if len(words) > 1:
        raise UsageError(f"too many arguments after help {words[0]}: {' '.join(words[1:])}")
    word = words[0].rstrip("@") if words else None
    if word is not None and word not in (*COMMANDS, *MODES):
        known = [*COMMANDS, *MODES]
        raise UsageError(f"no command or mode '{words[0]}'{did_you_mean(words[0], known)} (commands and modes: {', '.join(known)})")
    return print_result(make_parser(word).format_help().rstrip("\n"))
