"""The commands that read existing runs: `compare RUN RUN …`, `export RUN`, `doctor RUN`, `report RUN` and `retro_analyze RUN …`."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

from slm_lab.cli.files import agent_arguments, model_lines
from slm_lab.cli.output import OK, print_error, print_json, print_result
from slm_lab.cli.parser import USER_ERROR, UsageError


def compare(words: list[str], arguments: Namespace) -> int:
    """Compare runs: write graphs and tables, and print a table. Return the exit code."""
    from slm_lab.experiment.files.find import TrainingChoice
    from slm_lab.experiment.report.compare_report import write_comparison

    by, metric, labels = arguments.by or "frame", arguments.metric or "current_return", arguments.label or ()
    choice = TrainingChoice(arguments.trial, arguments.entry, arguments.env, arguments.seed)
    options = {"by": by, "metric": metric, "solve": arguments.solve, "labels": labels, "choice": choice}
    found = write_comparison(words, **options, data_dir=arguments.data_dir, out=arguments.out)
    return print_json({**found.content, "files": list(map(str, found.files))}) if arguments.json else print_result(found.text)


def export(words: list[str], arguments: Namespace) -> int:
    """Export the policy of a run to a file, compare the actions that the exported file computes with the actions of the agent, and print
    how closely the actions agree. Return the exit code."""
    if len(words) != 1:
        given = f"too many arguments after the run folder: {' '.join(words[1:])}" if words else "the run folder is missing"
        raise UsageError(f"export: {given}; expected export {{folder | model | latest}}")
    name = getattr(arguments, "as")
    if name is not None and arguments.out is not None:
        raise UsageError(f"--out {arguments.out} has no effect with --as {name}: the file is written to the folder of the model; remove it")
    if arguments.replace and name is None:
        raise UsageError("--replace has no effect without --as NAME; remove it")
    from slm_lab.experiment.deploy.export import format_summary
    from slm_lab.experiment.deploy.register import export_with_card, register
    from slm_lab.experiment.files.find import TrainingChoice, find_training, notify_if_unfinished

    choice = TrainingChoice(arguments.trial, arguments.entry, arguments.env, arguments.seed, arguments.policy)
    training = find_training(words[0], None, arguments.data_dir, choice)
    notify_if_unfinished(training.paths)
    which = arguments.checkpoint or "best"
    if name is None:
        result = format_summary(export_with_card(training, arguments.format, arguments.out, which, arguments.session))
        where, *options = agent_arguments(words[0], training.paths.root, arguments)
        return print_result(f"{result}\nplay it:   slm-lab {shlex.join([f'enjoy@{where}', *options])}")
    done = register(training, name, arguments.data_dir, arguments.format, which, arguments.session, replace=arguments.replace)
    return print_result(f"{format_summary(done)}\n{model_lines(name, arguments.data_dir)}")


def doctor(words: list[str], arguments: Namespace) -> int:
    """Print the problems of a run, ranked by severity. The returned exit code is 0 even if the run has problems. Raises UserError if the
    run has no table rows."""
    if len(words) != 1:
        given = f"too many arguments after the run folder: {' '.join(words[1:])}" if words else "the run folder is missing"
        raise UsageError(f"doctor: {given}; expected doctor {{run folder | latest}}")
    from slm_lab.experiment.files.find import TrainingChoice
    from slm_lab.experiment.report.doctor import check_rows, diagnose_run, diagnosis_dict, diagnosis_text, find_trial

    run = find_trial(words[0], arguments.data_dir, TrainingChoice(arguments.trial, arguments.entry, arguments.env, arguments.seed))
    check_rows(run)
    found = diagnose_run(run)
    return print_json(diagnosis_dict(run, found)) if arguments.json else print_result(diagnosis_text(run, found))


def report(words: list[str], arguments: Namespace) -> int:
    """Write the report page (report.html) of an existing run, search or study again, and print the path of the page. Return the exit
    code."""
    if len(words) != 1:
        given = f"too many arguments after the folder: {' '.join(words[1:])}" if words else "RUN is missing"
        raise UsageError(f"report: {given}; expected report {{folder | latest}}")
    from slm_lab.experiment.files.find import TrainingChoice
    from slm_lab.experiment.report.report_folder import write_folder_report
    from slm_lab.lib.files import display_path

    choice = TrainingChoice(arguments.trial, arguments.entry, arguments.env, arguments.seed)
    return print_result(str(display_path(write_folder_report(words[0], arguments.data_dir, choice))))


def retro_analyze(words: list[str], arguments: Namespace) -> int:
    """Rebuild metrics and graphs from the files of runs. Print the results of each run, or an error message if the run cannot be analyzed.
    Return the exit code."""
    if not words:
        raise UsageError("RUN is missing; expected run folders, such as data/ppo_cartpole_2026_01_31_120000 or 'data/ppo_*', or latest")
    from slm_lab.experiment.files.find import newest_run
    from slm_lab.experiment.plan import UserError
    from slm_lab.experiment.report.retro_analyze import retro_analyze as analyze
    from slm_lab.experiment.report.run import run_folders, with_data_dir

    folders, code = dict[Path, Path](), OK
    for word in words:
        try:
            named = with_data_dir(word, arguments.data_dir)
            for folder in [newest_run(arguments.data_dir).root] if word == "latest" else run_folders(named):
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
