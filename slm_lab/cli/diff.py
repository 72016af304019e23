"""The command `diff A B`, which shows what differs between two runs."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import print_json, print_result
from slm_lab.cli.parser import UsageError


def diff(words: list[str], arguments: Namespace) -> int:
    """Print the differences between two runs: in the keys of their specs, in versions and machines, in the first table rows that differ,
    and in the returns. Return the exit code."""
    if len(words) != 2:
        given = f"too many arguments after A B: {' '.join(words[2:])}" if len(words) > 2 else "two runs are needed"
        raise UsageError(f"diff: {given}; expected diff A B, such as diff data/ppo_cartpole_2026_01_31_120000 latest")
    from slm_lab.experiment.files.find import find_training
    from slm_lab.experiment.report.run import Run
    from slm_lab.experiment.report.run_difference import difference_json, difference_text, run_difference

    trainings = [find_training(word, None, arguments.data_dir) for word in words]
    a, b = (Run(training.paths, training.trial) for training in trainings)
    if a.paths.root.resolve() == b.paths.root.resolve() and a.trial == b.trial:
        raise UsageError(f"diff: A and B are both {a.paths.root}")
    found = run_difference(a, b)
    return print_json(difference_json(found)) if arguments.json else print_result(difference_text(found))
