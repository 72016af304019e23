"""Notices: one-line remarks for the user that are no errors."""

from __future__ import annotations

import logging

logger = logging.getLogger("slm_lab")


def notice(text: str) -> None:
    """Tell the user something in one line, on stderr unless the application set up logging otherwise."""
    logger.warning(text)
