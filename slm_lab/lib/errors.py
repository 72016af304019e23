"""Errors of which the message is enough."""


class PlainError(Exception):
    """Shown as its message, without a traceback."""


class NotWritable(PlainError, OSError):
    """A file of the run cannot be written: the folder has become read-only."""
