"""The command line: a parser, and one module per command. The imports of a command are loaded only when it runs."""

from slm_lab.cli.entry import console, main

__all__ = ["console", "main"]
