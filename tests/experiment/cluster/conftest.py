"""Fixtures for tests on a Ray cluster: several nodes on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.lib.process import temporary_environment
from tests.experiment.commands import processes_with, until


class Nodes:
    """A Ray cluster of `count` nodes with `cores` cores each; the driver runs on the first node."""

    def __init__(self, count: int, cores: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self.folder = tempfile.mkdtemp(prefix="slm_", dir="/tmp")  # short, because the length of socket paths is limited
        os.makedirs(os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray"), exist_ok=True)  # Cluster writes its address there
        self.cluster: Any = Cluster(shutdown_at_exit=False)
        try:
            self.head = self.add(cores, temp_dir=self.folder)
            self.others = [self.add(cores) for _ in range(count - 1)]
        except BaseException:
            self.close()
            raise

    def add(self, cores: int = 1, **keys: Any) -> Any:
        return self.cluster.add_node(num_cpus=cores, include_dashboard=False, object_store_memory=80 * 2**20, **keys)

    def kill(self, node: Any) -> None:
        """Kill all processes of a node."""
        self.cluster.remove_node(node, allow_graceful=False)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
"""Environment variables of the nodes and of a process that connects to them."""


@pytest.fixture
def ray_environment() -> Iterator[None]:
    """Set the environment variables of the nodes and of a process that connects to them."""
    pytest.importorskip("ray")
    with temporary_environment(RAY):
        yield


@pytest.fixture
def nodes(ray_environment: None) -> Iterator[Nodes]:
    """Return a cluster of three nodes with one core each."""
    made = Nodes(3)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def wide_nodes(ray_environment: None) -> Iterator[Nodes]:
    """Return a cluster of three nodes with two cores each."""
    made = Nodes(3, 2)
    try:
        yield made
    finally:
        made.close()


class ShellNode(NamedTuple):
    """A node started by `ray start --block`, with the processes of its process group."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kill all processes of the node."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ShellCluster:
    """Nodes with one core each, started as from a shell, with a private temporary folder and ports. `temp` is their TMPDIR.

    Args: before: Python code that the process which starts the head runs first.
    """

    def __init__(self, before: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slm_", dir="/tmp"))  # short, because the length of socket paths is limited
        self.temp = self.folder / "tmp"
        self.temp.mkdir()
        self.made: list[ShellNode] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        try:
            options = [
                "--head",
                f"--port={self.port}",
                f"--temp-dir={self.folder / 'ray'}",
                "--include-dashboard=false",
                "--dashboard-port=0",
            ]
            self.head = self._start(options, before)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, hidden: Path | None = None, **environ: str) -> ShellNode:
        """Start a node. The folder `hidden` is empty for it."""
        return self._start([f"--address={self.address}"], hidden=hidden, **environ)

    def _start(self, options: list[str], before: str = "", hidden: Path | None = None, **environ: str) -> ShellNode:
        sizes = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--min-worker-port=0", "--max-worker-port=0"]
        local = ["--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--disable-usage-stats"]
        code = f"{before}\nfrom ray.scripts.scripts import main\nmain()"
        words = [sys.executable, "-c", code, "start", *options, *sizes, *local, "--block"]
        if hidden is not None:
            words = [*_private_mounts(), "sh", "-c", 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh", str(hidden), *words]
        if shutil.which("setpriv") is not None:  # the node ends whenever this process ends
            words = ["setpriv", "--pdeathsig", "TERM", *words]
        node = self._run(words, environ)
        if "timed out during startup" in node.log.read_text():  # happens on a busy machine
            node.kill()
            node = self._run(words, environ)
        assert node.process.poll() is None, node.log.read_text()
        return node

    def _run(self, words: list[str], environ: dict[str, str]) -> ShellNode:
        log = self.folder / f"node{len(self.made)}.log"
        with log.open("wb") as file:
            variables = os.environ | {"TMPDIR": str(self.temp)} | environ
            process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True, env=variables)
        self.made.append(ShellNode(process, log))
        until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None)
        return self.made[-1]

    def members(self) -> list[int]:
        """Return the ids of all processes of the nodes."""
        return processes_with(f"TMPDIR={self.temp}")

    def busy(self) -> dict[int, str]:
        """Return the processes of tasks and actors, as id → title such as TaskActor.run, without idle workers and Ray's agents."""
        found = {}
        for pid in self.members():
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
                if title.startswith("ray::") and not re.fullmatch(r"ray::(IDLE|\w+Agent)", title):
                    found[pid] = title.removeprefix("ray::")
        return found

    def close(self) -> None:
        for node in self.made:
            node.kill()
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _private_mounts() -> list[str]:
    """Return a command that runs another command with private mounts; skip the test if they are not allowed."""
    words = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        allowed = False
    return words if allowed else pytest.skip("mounts of its own are not allowed")


@pytest.fixture
def shell_cluster(ray_environment: None) -> Iterator[Callable[..., ShellCluster]]:
    """Return a function that starts a separate cluster and returns its head."""
    made: list[ShellCluster] = []

    def make(before: str = "") -> ShellCluster:
        made.append(ShellCluster(before))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Started(NamedTuple):
    """A process of a Session, as its log records it."""

    pid: int
    node: str
    restart: int


def processes(paths: RunPaths, sessions: int) -> list[list[Started]]:
    """Return the processes of each Session, in the order of their start."""
    pattern = re.compile(r"process (\d+) on node (\w+) of \S+, restart (\d+)")
    texts = [paths.session_log(index).read_text() for index in range(sessions)]
    return [[Started(int(pid), node, int(restart)) for pid, node, restart in pattern.findall(text)] for text in texts]
