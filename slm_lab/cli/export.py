"""`export {run folder | latest}`: the policy of a run as a file."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import print_result
from slm_lab.cli.parser import UsageError


def export(words: list[str], arguments: Namespace) -> int:
    """Write the policy, check it against the agent, and print how closely they agree."""
    if len(words) != 1:
        given = f"too many arguments after the run folder: {' '.join(words[1:])}" if words else "the run folder is missing"
        raise UsageError(f"export: {given}; expected export {{run folder | latest}}")
    from slm_lab.experiment.deploy.export import export, summary
    from slm_lab.experiment.files.find import find_run, tell_unfinished

    paths = find_run(words[0], None, arguments.data_dir)
    tell_unfinished(paths)
    which = arguments.checkpoint or "best"
    return print_result(summary(export(paths, arguments.format, arguments.out, which, arguments.session)))
