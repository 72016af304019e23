"""A private Ray cluster on this machine for a single search or run."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Self

from slm_lab.experiment.plan import UserError
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.log import notice
from slm_lab.lib.process import stop_signals_blocked, temporary_environment
from slm_lab.lib.system import has_feature

_STORE_BYTES = (80 * 2**20, 256 * 2**20)
"""Minimum and maximum size in bytes of Ray's object store, which contains only specs and reports. (Ray requires at least 75 MiB.)"""
_REMOVE = """pids=$(cat)
sleep 1
for pid in $pids; do
    case "$(tr '\\0' ' ' 2>/dev/null </proc/$pid/cmdline)" in ray::*) kill -9 $pid 2>/dev/null;; esac
done
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    rm -rf "$1" 2>/dev/null
    [ -e "$1" ] || exit 0
    sleep 0.5
done"""
"""Shell script that waits until the parent process closes its end of the pipe or is killed. When the pipe is closed, the script kills those
Ray processes listed in the pipe that are still running, and removes a folder. (Ray's agents outlive a killed raylet for minutes.)"""
_REMOVE_SECONDS = 10.0
_ATTEMPTS = 2
"""Maximum number of attempts to start Ray. On a busy machine an attempt may fail, since Ray's start has a fixed timeout."""


def check_installed(*packages: str, extra: str = "search", what: str = "a search") -> None:
    """Raise UserError if one of the packages is not installed.

    Args:
        extra: extra of slm-lab that installs the packages.
        what: subject of the error message.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(f"{what} needs the package {' and '.join(missing)}: pip install 'slm-lab[{extra}]'")


class LocalCluster:
    """Context manager that runs a Ray cluster on this machine, with separate processes, ports and a separate folder.

    The cluster has no dashboard and reports no usage. The operating system chooses all ports. Requests need a token that only this process
    and its children have (RAY_AUTH_MODE=token). The folder of the cluster has a short path below the system's temporary folder, since the
    path of a Unix socket may have at most 107 bytes. Ray's processes end with this process, even if this process is killed. When this
    process has ended, a waiting shell script removes the folder of the cluster.

    Args:
        cores: number of CPUs that the cluster offers.
        gpus: number of GPUs that the cluster offers, or None for all GPUs that Ray finds.

    Raises UserError if this process is already connected to a Ray cluster, or if Ray cannot start.
    """

    def __init__(self, cores: int, gpus: int | None = None) -> None:
        self.cores, self.gpus = cores, gpus
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder, pipe = stack.enter_context(_temporary_folder())
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)  # restore the folder, which Ray sets from TMPDIR
            stack.enter_context(temporary_environment(_variables(folder)))
            import ray

            if ray.is_initialized():
                raise UserError("--cluster local: this process is already connected to a Ray cluster; call ray.shutdown() first")
            store = min(max(memory_bytes() // 50, _STORE_BYTES[0]), _STORE_BYTES[1])
            stack.callback(ray.shutdown)
            for attempt in range(_ATTEMPTS):
                try:
                    # Ray inherits the signal mask, so that a signal to the process group does not stop Ray
                    with stop_signals_blocked(), _start_fewer_processes():
                        ray.init(
                            address="local",
                            num_cpus=self.cores,
                            num_gpus=self.gpus,
                            include_dashboard=False,
                            object_store_memory=store,
                            log_to_driver=False,
                            configure_logging=False,
                            logging_level=logging.ERROR,
                            _temp_dir=str(folder),
                            _node_ip_address="127.0.0.1",
                        )
                    break
                except Exception as error:
                    if attempt == _ATTEMPTS - 1 or "timed out" not in str(error):
                        raise UserError(f"Ray could not start: {error}") from error
                    notice("Ray did not start within 30 s; it is started again")
                    ray.shutdown()
            for pid in _descendant_pids():
                pipe.write(f"{pid}\n".encode())
            pipe.flush()
            resources: dict[str, float] = ray.cluster_resources()
            self.gpus = int(resources.get("GPU", 0))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _variables(folder: Path) -> dict[str, str]:
    """Return the environment variables for this process and Ray's processes, which must be set before ray is imported."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a trial that requests no GPU still sees the GPUs
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # with Ray's default, 15, other programs would slow down a trial more than a run of `train`
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TMPDIR": str(folder),  # files that killed processes leave in the folder are removed with the folder
    }


@contextmanager
def _temporary_folder() -> Iterator[tuple[Path, IO[bytes]]]:
    """Context manager that creates a temporary folder, and a pipe into which the ids of Ray processes are written.

    At the end of the block, or if this process is killed, the processes whose ids are in the pipe are killed and the folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="slm_ray_", dir="/tmp" if os.path.isdir("/tmp") else None))
    remover = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal does not reach the script
    )
    assert remover.stdin is not None
    try:
        yield folder, remover.stdin
    finally:
        remover.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            remover.wait(_REMOVE_SECONDS)


def _descendant_pids() -> list[int]:
    """Return the process ids of all descendants of this process, read from /proc, or [] if the system has no /proc."""
    if not has_feature("proc"):
        return []
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    descendants, newest = [], [os.getpid()]
    while newest:
        newest = [pid for pid, parent in parents.items() if parent in newest]
        descendants += newest
    return descendants


@contextmanager
def _start_fewer_processes() -> Iterator[None]:
    """Context manager in which ray.init starts only the processes that a search needs.

    The autoscaler's monitor, the log monitor and the API server (without dashboard) are not needed for a cluster of one node whose logs are
    not shown. These three processes take 270 MB, and 3 s of the 8 s that ray.init takes on two busy cores. ray.init has no options to leave
    out processes. The context manager has no effect if the installed version of Ray lacks the names that are replaced.
    """
    try:
        from ray._private import parameter
        from ray._private.node import Node

        options: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
        parameter.RayParams(**options)
        replaced: list[tuple[Any, str, Any]] = [
            (parameter, "RayParams", partial(parameter.RayParams, **options)),
            (Node, "start_api_server", lambda self, **options: None),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    except (ImportError, AttributeError, TypeError):  # another version of Ray
        yield
        return
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
