"""Notices: one-line messages to the user that are not errors."""

from __future__ import annotations

import logging

logger = logging.getLogger("slm_lab")


def notice(text: str) -> None:
    """Log one line for the user, on stderr unless the application configures logging otherwise."""
    logger.warning(text)
