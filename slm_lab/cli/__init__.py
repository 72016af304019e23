"""The command line: parser, and one module per command. Loads what a command needs only when it runs."""

from slm_lab.cli.entry import console, main

__all__ = ["console", "main"]
