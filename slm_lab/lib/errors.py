"""Errors of which the message is enough."""


class PlainError(Exception):
    """Shown as its message, without a traceback."""
