"""What the machine has."""

from __future__ import annotations

import os


def memory_bytes() -> int:
    """Physical memory of this machine in bytes; a great number where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on this system
        return 2**63
