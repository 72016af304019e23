"""Resources of this machine, or of the container that limits them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Return the memory that this process may use in bytes; a very large number where it is unknown."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on this system
        physical = 2**63
    limits = [int(text) for text in _limits("memory.max", "memory/memory.limit_in_bytes") if text.isdigit()]
    return min([physical, *limits])


def cpu_count() -> int:
    """Return the number of cores that this process may use, at least one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in _limits("cpu.max", "cpu/cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            count = min(count, -(-int(quota) // int(period or 100_000)))
    return max(count, 1)


def _limits(v2: str, v1: str) -> Iterator[str]:
    """Yield the limits of this process's control group and of the groups around it."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))[3:].strip("/")
    except (OSError, StopIteration):
        own = ""
    group = CGROUP / own
    for path in [*(folder / v2 for folder in (group, *group.parents) if folder.is_relative_to(CGROUP)), CGROUP / v1]:
        try:
            yield path.read_text().strip()
        except OSError:
            continue
