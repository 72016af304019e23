"""Commands for finished runs: `compare RUN RUN …`, `export RUN` and `retro_analyze RUN …`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slm_lab.cli.output import OK, print_error, print_result
from slm_lab.cli.parser import USER_ERROR, UsageError


def compare(words: list[str], arguments: Namespace) -> int:
    """Compare runs in one graph and print a table."""
    from slm_lab.experiment.files.find import Choice
    from slm_lab.experiment.report.compare_report import compare as report

    by, metric, labels = arguments.by or "frame", arguments.metric or "current_return", arguments.label or ()
    choice = Choice(arguments.trial, arguments.entry, arguments.env, arguments.seed)
    options = {"by": by, "metric": metric, "solve": arguments.solve, "labels": labels, "choice": choice}
    return print_result(report(words, **options, data_dir=arguments.data_dir, out=arguments.out))


def export(words: list[str], arguments: Namespace) -> int:
    """Write the policy of a run to a file, check it against the agent, and print how closely they agree."""
    if len(words) != 1:
        given = f"too many arguments after the run folder: {' '.join(words[1:])}" if words else "the run folder is missing"
        raise UsageError(f"export: {given}; expected export {{run folder | latest}}")
    from slm_lab.experiment.deploy.export import export_training, summary
    from slm_lab.experiment.files.find import Choice, find_training, notify_if_unfinished

    choice = Choice(arguments.trial, arguments.entry, arguments.env, arguments.seed)
    training = find_training(words[0], None, arguments.data_dir, choice)
    notify_if_unfinished(training.paths)
    which = arguments.checkpoint or "best"
    return print_result(summary(export_training(training, arguments.format, arguments.out, which, arguments.session)))


def retro_analyze(words: list[str], arguments: Namespace) -> int:
    """Rebuild metrics and graphs from the files of runs; print the results of each run, or an error if it cannot be analyzed."""
    if not words:
        raise UsageError("RUN is missing; expected run folders, such as data/ppo_cartpole_2026_01_31_120000 or 'data/ppo_*', or latest")
    from slm_lab.experiment.files.find import newest_run
    from slm_lab.experiment.plan import UserError
    from slm_lab.experiment.report.retro_analyze import retro_analyze as analyze
    from slm_lab.experiment.report.run import run_folders

    folders, code = dict[Path, Path](), OK
    for word in words:
        try:
            for folder in [newest_run(arguments.data_dir).root] if word == "latest" else run_folders(word):
                folders.setdefault(folder.resolve(), folder)
        except UserError as error:
            print_error(str(error))
            code = USER_ERROR
    for folder in folders.values():
        try:
            code = max(code, print_result(analyze(folder)))
        except UserError as error:
            print_error(str(error))
            code = USER_ERROR
    return code
