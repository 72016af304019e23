"""The command `verify RUN`, which trains a part of a run again and compares the results."""

from __future__ import annotations

import sys
from argparse import Namespace

from slm_lab.cli.output import FAILED, print_json, print_result
from slm_lab.cli.parser import UsageError


def verify(words: list[str], arguments: Namespace) -> int:
    """Train the frames between two checkpoints of a run again, and compare the new table rows and weights byte by byte with the rows and
    weights of the run.

    Returns the exit code 1 if rows or weights differ, else 0. If the run cannot be verified, the exit code of the process is 2. The run
    folder is not changed.
    """
    if len(words) != 1:
        given = f"too many arguments after the run folder: {' '.join(words[1:])}" if words else "the run folder is missing"
        raise UsageError(f"verify: {given}; expected verify {{run folder | latest}}")
    from slm_lab.experiment.files.find import TrainingChoice, find_training
    from slm_lab.experiment.files.named_model import check_no_model
    from slm_lab.experiment.report.screen import console_on
    from slm_lab.experiment.run.verify.verify import verify as check

    check_no_model(words[0], arguments.data_dir)
    choice = TrainingChoice(arguments.trial, arguments.entry, arguments.env, arguments.seed)
    found = check(
        find_training(words[0], None, arguments.data_dir, choice),
        arguments.session or 0,
        begin=getattr(arguments, "from"),
        end=arguments.to,
        frames=arguments.frames,
        device=arguments.device,
        console=console_on(sys.stderr),
    )
    code = print_json(found.to_dict()) if arguments.json else print_result(found.text())
    return code or (0 if found.is_equal else FAILED)
