"""Number of CPU cores and size of the memory that this process may use in its control groups (containers, Slurm), and name of the
processor."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from slm_lab.lib.system import has_feature

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")


def cores(root: Path = _ROOT, groups: Path = _GROUPS) -> int:
    """Return the number of CPU cores that this process may use, at least 1. If the limit is not an integer, such as 1.5 cores, the limit is
    rounded up.

    Args: root: mount point of the control groups. groups: file that lists the control groups of this process.
    """
    count: float = len(os.sched_getaffinity(0)) if has_feature("affinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root, groups, "cpu"):
        quota = _read_integers(folder / "cpu.max") or (
            *_read_integers(folder / "cpu.cfs_quota_us"),
            *_read_integers(folder / "cpu.cfs_period_us"),
        )
        if len(quota) == 2 and min(quota) > 0:
            count = min(count, quota[0] / quota[1])
    return max(1, math.ceil(count))


def memory_bytes(root: Path = _ROOT, groups: Path = _GROUPS) -> int:
    """Return the amount of memory in bytes that this process may use, or 2**63 if the system does not report the amount."""
    size = 2**63
    with suppress(OSError, ValueError):
        if has_feature("sysconf"):
            size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders(root, groups, "memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            size = min([size, *_read_integers(folder / name)])
    return size


def _cgroup_folders(root: Path, groups: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all parent groups, each of which may set a limit.

    In a container, the file `groups` may contain a path of the host, while the root folder of the control groups is the folder of the
    container's own group. Some of the yielded folders may not exist.

    Args: controller: name of the controller, "cpu" or "memory".
    """
    if not has_feature("proc"):
        return
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):  # control groups version 1
                mounts = [root / controllers, root / controller]
            elif number == "0":
                mounts = [root, root / "unified"]
            else:
                continue
            inside = PurePosixPath(path.lstrip("/"))
            for mount in mounts:
                for folder in (inside, *inside.parents):
                    if ".." not in folder.parts:
                        yield mount / folder


def _read_integers(file: Path) -> tuple[int, ...]:
    """Return the integers in a file, or an empty tuple if the file contains "max" (no limit) or is missing."""
    try:
        return tuple(int(word) for word in file.read_text().split())
    except (OSError, ValueError):
        return ()


def processor_description(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return a description of the processor: on Linux the vendor, model and instructions of the first core, on other systems
    `platform.processor()`."""
    with suppress(OSError):
        if has_feature("proc"):
            return cpuinfo.read_text().split("\n\n")[0]
    return platform.processor()


def processor_name() -> str:
    """Return the name of the processor, such as "AMD EPYC 7763 64-Core Processor", or "" if the system does not report a name."""
    lines = (line.partition(":") for line in processor_description().splitlines())
    return next((name.strip() for key, _, name in lines if key.strip() == "model name"), platform.processor())
