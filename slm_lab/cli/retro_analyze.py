"""`retro_analyze RUN …`: rebuild metrics and graphs from the files of runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slm_lab.cli.output import OK, print_error, print_result
from slm_lab.cli.parser import USER_ERROR, UsageError


def retro_analyze(words: list[str], arguments: Namespace) -> int:
    """Analyze runs one after another; print the results of each, and an error for each that cannot be analyzed."""
    if not words:
        raise UsageError("RUN is missing; expected run folders, such as data/ppo_cartpole_2026_01_31_120000 or 'data/ppo_*', or latest")
    from slm_lab.experiment.files.find import find_run
    from slm_lab.experiment.plan import UserError
    from slm_lab.experiment.report.retro_analyze import retro_analyze as analyze
    from slm_lab.experiment.report.run import run_folders

    folders, code = dict[Path, Path](), OK
    for word in words:
        try:
            for folder in [find_run(word, None, arguments.data_dir).root] if word == "latest" else run_folders(word):
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
