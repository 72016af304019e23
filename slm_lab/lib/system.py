"""Features of operating systems that this package uses and that some systems lack, and what this package does without these features.

`FEATURES` lists all these features of operating systems, and docs/platforms.md shows this list. tools/platforms.py verifies that the code
uses no other features.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

VARIABLE = "SLM_LAB_PORTABLE"
"""Name of the environment variable that makes `has_feature` return False for some features, in order to test the code for other systems on
Linux. The value "1" denies all features that only Linux has. A comma-separated list of feature names denies these features. Child processes
inherit this environment variable."""

Name = Literal[
    "memfd", "fallocate", "pidfd", "proc", "affinity", "forkserver", "fcntl", "groups", "fork", "signals", "priority", "sysconf", "display"
]


class Feature(NamedTuple):
    """A feature of operating systems that some systems lack.

    Attributes:
        systems: operating systems that have the feature.
        exists: function that returns whether the current system has the feature.
        purpose: purpose for which this package uses the feature.
        fallback: behaviour of this package on a system without the feature.
        symbols: names that code needs to use the feature: attributes of Python modules, Python modules, or folders.
    """

    systems: str
    exists: Callable[[], bool]
    purpose: str
    fallback: str
    symbols: frozenset[str]


def _has_attributes(module: object, *names: str) -> Callable[[], bool]:
    return lambda: all(hasattr(module, name) for name in names)


def _is_call_permitted(name: str, *args: object) -> bool:
    """Return whether the function os.`name`, which returns a file descriptor, exists and can be called.

    (A sandbox or an old kernel may refuse the call.)
    """
    if not hasattr(os, name):
        return False
    try:
        os.close(getattr(os, name)(*args))
    except OSError as error:  # other errors, such as too many open files, do not mean that the call is refused
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


_LINUX, _POSIX = "Linux", "Linux, macOS"
FEATURES: dict[Name, Feature] = {
    "memfd": Feature(
        _LINUX,
        lambda: _is_call_permitted("memfd_create", "slm_lab"),
        "memory that processes share: arrays, heartbeats, output of child processes",
        "an unlinked file in the temporary folder",
        frozenset({"os.memfd_create"}),
    ),
    "fallocate": Feature(
        _LINUX,
        _has_attributes(os, "posix_fallocate"),
        "reservation of shared memory before it is used, so that a lack of memory is reported as an error",
        "the file is only extended: without enough memory a process is killed by SIGBUS later",
        frozenset({"os.posix_fallocate"}),
    ),
    "pidfd": Feature(
        _LINUX,
        lambda: _is_call_permitted("pidfd_open", os.getpid()),
        "detection of the end of a process that is not a child of this process",
        "the pipe that multiprocessing opens to each child; a child checks every 0.5 s whether its parent is alive",
        frozenset({"os.pidfd_open"}),
    ),
    "proc": Feature(
        _LINUX,
        lambda: Path("/proc/self").exists(),
        "limits of containers on cores and memory, the name of the processor, the processes of a local Ray cluster",
        "cores and memory of the machine; the name that Python reports; Ray ends its processes itself",
        frozenset({"/proc", "/sys/fs/cgroup"}),
    ),
    "affinity": Feature(
        _LINUX,
        _has_attributes(os, "sched_getaffinity", "sched_setaffinity"),
        "the cores that this process may use, which its child processes inherit",
        "all cores of the machine",
        frozenset({"os.sched_getaffinity", "os.sched_setaffinity"}),
    ),
    "forkserver": Feature(
        _LINUX,
        lambda: has_feature("pidfd") and has_feature("proc"),
        "start of child processes in about 0.02 s each, as copies of one process that has loaded torch (`meta.start_method`); uses pidfd "
        "and proc",
        "spawn: each child loads torch itself, in about 2 s",
        frozenset({"multiprocessing.forkserver"}),
    ),
    "fcntl": Feature(
        _POSIX,
        lambda: importlib.util.find_spec("fcntl") is not None,
        "locks: of run folders, trackers and shared arrays; copies of stdout and stderr",
        "run folders are not locked; `meta.track` is an error; several processes: see groups",
        frozenset({"fcntl", "os.set_blocking"}),
    ),
    "groups": Feature(
        _POSIX,
        _has_attributes(os, "setpgid", "killpg"),
        "child processes, each the leader of a process group that is killed with it",
        "only `meta.max_session` 1 without `meta.distributed`, and `meta.sampler.serial_mode`; otherwise an error before training. "
        'With `backend: "async"` the processes of envs form no groups',
        frozenset({"os.setpgid", "os.getpgid", "os.killpg", "signal.SIGKILL", "os.pread", "multiprocessing.reduction.DupFd", "AF_UNIX"}),
    ),
    "fork": Feature(
        _POSIX,
        _has_attributes(os, "fork", "register_at_fork"),
        "running the processes of `meta.track` in the background after the run; ending processes that an env forks by mistake",
        "no processes of `meta.track`, see fcntl; no copies",
        frozenset({"os.fork", "os.register_at_fork"}),
    ),
    "signals": Feature(
        _POSIX,
        _has_attributes(signal, "pthread_sigmask", "pthread_kill", "siginterrupt", "SIGURG"),
        "delay of Ctrl-C while a process starts; interruption of an env that blocks",
        "no delay; an env that blocks is only reported",
        frozenset(
            f"signal.{name}"
            for name in ("pthread_sigmask", "pthread_kill", "siginterrupt", "SIGURG", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK")
        ),
    ),
    "priority": Feature(
        _POSIX,
        _has_attributes(os, "getpriority", "setpriority", "nice"),
        "asynchronous rollout workers run at a lower priority than the learner",
        "equal priorities",
        frozenset({"os.getpriority", "os.setpriority", "os.nice", "os.PRIO_PROCESS"}),
    ),
    "sysconf": Feature(
        _POSIX,
        _has_attributes(os, "sysconf", "statvfs"),
        "the memory of the machine; distinction of a read-only file system from a lack of permission",
        "memory counts as unlimited; the message says no permission",
        frozenset({"os.sysconf", "os.statvfs", "os.ST_RDONLY"}),
    ),
    "display": Feature(
        "Linux without a display",
        lambda: sys.platform == "linux",
        "choice of EGL or OSMesa to render MuJoCo; check whether a window or browser can be opened; OpenGL for EnvPool",
        "the library's own choice; a display is assumed",
        frozenset({"sys.platform", "os.name"}),
    ),
}
LINUX_ONLY = frozenset(name for name, feature in FEATURES.items() if feature.systems == _LINUX)


def has_feature(name: Name) -> bool:
    """Return whether the current system has a feature and the environment variable SLM_LAB_PORTABLE does not deny this feature."""
    return name not in _denied_features() and FEATURES[name].exists()


def _denied_features() -> frozenset[str]:
    value = os.environ.get(VARIABLE, "")
    return LINUX_ONLY if value == "1" else frozenset(value.split(","))


def invalid_variable_message() -> str | None:
    """Return an error message if the environment variable SLM_LAB_PORTABLE has an invalid value, otherwise None."""
    unknown = sorted(_denied_features() - FEATURES.keys() - {"", "0"})
    allowed = f"1, or some of {', '.join(FEATURES)}, separated by commas"
    return f"{VARIABLE}: unknown feature {unknown[0]!r}; allowed: {allowed}" if unknown else None
