"""The command `new FILE [NAME] --env ENV [--like SPEC] [--comments]`, which writes a spec file."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

from slm_lab.cli.output import print_result
from slm_lab.cli.parser import UsageError


def new(words: list[str], arguments: Namespace) -> int:
    """Write a spec for an env, and print a summary and the command that runs the spec. Return the exit code."""
    if not words or not words[0]:
        raise UsageError("new: FILE is missing; expected new FILE [NAME] --env ENV, such as: new my_spec.json --env CartPole-v1")
    if len(words) > 2:
        raise UsageError(f"too many arguments after new FILE NAME: {' '.join(words[2:])}")
    if not arguments.env:
        raise UsageError("new: --env is missing; expected a Gymnasium id, such as --env CartPole-v1 (slm-lab list envs shows them)")
    from slm_lab.experiment.run.new_spec import write_new_spec

    file, name = words[0], words[1] if len(words) > 1 else None
    made = write_new_spec(Path(file), name, arguments.env, arguments.like, comments=arguments.comments)
    return print_result(f"{file}: {made.summary}\nrun it: slm-lab {shlex.quote(file)} {shlex.quote(made.name)} train")
