"""The table of commands and the modes of `run`."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command of the command line."""

    run: str
    """"module:function", imported when the command runs: function(words, arguments) → exit code."""
    usage: str
    options: tuple[str, ...]
    """Options that it accepts, by their name in argparse's namespace."""


COMMANDS = {
    "run": Command(
        "slm_lab.cli.run:run",
        "[run] [FILE [NAME [MODE]]] [options]",
        (
            *("set", "device", "jobs", "cluster", "storage", "data_dir"),
            *("episodes", "deterministic", "render", "video", "checkpoint", "session"),
            *("confirm", "common_seeds", "adopt"),
        ),
    ),
    "check": Command(
        "slm_lab.cli.check:check",
        "check FILE [NAME] [--build] [options]",
        ("set", "device", "build"),
    ),
    "export": Command(
        "slm_lab.cli.export:export",
        "export {run folder | latest} [--format onnx | torch] [--out FILE] [options]",
        ("data_dir", "format", "out", "checkpoint", "session"),
    ),
    "compare": Command(
        "slm_lab.cli.compare:compare",
        "compare RUN RUN ... [--by COLUMN] [--metric COLUMN] [--solve RETURN] [--label NAME ...] [--out DIR]",
        ("data_dir", "by", "metric", "solve", "label", "out"),
    ),
    "retro_analyze": Command(
        "slm_lab.cli.retro_analyze:retro_analyze",
        "retro_analyze {RUN ... | latest}",
        ("data_dir",),
    ),
    "list": Command(
        "slm_lab.cli.list_names:list_names",
        "list [specs | studies | algorithms | nets | memories | envs] [--search WORD ...]",
        ("search",),
    ),
    "new": Command(
        "slm_lab.cli.new:new",
        "new FILE [NAME] --env ENV [--like SPEC | ALGORITHM]",
        ("env", "like"),
    ),
}
MODES = {
    "train": "train, train@{run folder | latest}",
    "dev": "dev",
    "search": "search, search@{run folder | latest}",
    "study": "study, study@{folder | latest}",
    "enjoy": "enjoy@{run folder | latest}",
}
"""Mode → how it is written."""
DEMO = ("demo.json", "ppo_cartpole")
"""FILE and NAME if neither is given."""
