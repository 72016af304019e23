"""What the system says of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the description of the first core: maker, model and instructions on Linux, elsewhere as much as is known."""
    try:
        return cpuinfo.read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
