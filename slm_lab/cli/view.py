"""The command `view [DATA_DIR] [--port N] [--no-browser]`, which shows the runs of a data folder in a browser."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slm_lab.cli.output import OK, print_result
from slm_lab.cli.parser import UsageError


def view(words: list[str], arguments: Namespace) -> int:
    """Serve a local web page that shows the runs of a data folder, until Ctrl-C. Return the exit code."""
    if len(words) > 1:
        raise UsageError(f"view: too many arguments after DATA_DIR: {' '.join(words[1:])}; expected view [DATA_DIR]")
    from slm_lab.experiment.view.serve import serve

    folder = Path(words[0]) if words else arguments.data_dir
    serve(folder, arguments.port, print_result, browser=not arguments.no_browser)
    return OK
