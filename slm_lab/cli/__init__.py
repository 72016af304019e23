"""The command line: a parser, and one module per command. The imports that a command needs are loaded only when the command runs."""

from slm_lab.cli.entry import console, main

__all__ = ["console", "main"]
