"""The command line `slm-lab`: a parser, and one module per command. The modules that a command needs are imported only when the command
runs."""

from slm_lab.cli.entry import console, main

__all__ = ["console", "main"]
