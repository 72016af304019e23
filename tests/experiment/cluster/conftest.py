"""A Ray cluster of several nodes on this machine."""

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
    """Nodes with so many cores each; the driver is on the first one."""

    def __init__(self, count: int, cores: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self.folder = tempfile.mkdtemp(prefix="slm_", dir="/tmp")  # short, for the paths of sockets
        os.makedirs(os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray"), exist_ok=True)  # where Cluster writes its address
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
"""Variables of nodes, and of a process that connects to them."""


@pytest.fixture
def ray_environment() -> Iterator[None]:
    """Of nodes and of this process, if it connects to them."""
    pytest.importorskip("ray")
    with temporary_environment(RAY):
        yield


@pytest.fixture
def nodes(ray_environment: None) -> Iterator[Nodes]:
    """Three nodes with a core each."""
    made = Nodes(3)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def wide_nodes(ray_environment: None) -> Iterator[Nodes]:
    """Three nodes with two cores each."""
    made = Nodes(3, 2)
    try:
        yield made
    finally:
        made.close()


class ShellNode(NamedTuple):
    """A node that `ray start --block` has started, with the processes of its group."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kill all processes of the node."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ShellCluster:
    """Nodes with a core each, started as from a shell, with a temporary folder and ports of their own. `temp` is their TMPDIR.

    Args: before: Python code that the process which starts the head runs first.
    """

    def __init__(self, before: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slm_", dir="/tmp"))  # short, for the paths of sockets
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
        """Start a node. It does not see what is in the folder `hidden`."""
        return self._start([f"--address={self.address}"], hidden=hidden, **environ)

    def _start(self, options: list[str], before: str = "", hidden: Path | None = None, **environ: str) -> ShellNode:
        sizes = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--min-worker-port=0", "--max-worker-port=0"]
        local = ["--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--disable-usage-stats"]
        code = f"{before}\nfrom ray.scripts.scripts import main\nmain()"
        words = [sys.executable, "-c", code, "start", *options, *sizes, *local, "--block"]
        if hidden is not None:
            words = [*_private_mounts(), "sh", "-c", 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh", str(hidden), *words]
        if shutil.which("setpriv") is not None:  # the node ends with this process, however that ends
            words = ["setpriv", "--pdeathsig", "TERM", *words]
        node = self._run(words, environ)
        if "timed out during startup" in node.log.read_text():  # on a machine with much else to do
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
        """All processes of the nodes."""
        return processes_with(f"TMPDIR={self.temp}")

    def busy(self) -> dict[int, str]:
        """Those that run what a driver has sent: number → title, such as TaskActor.run. Not those that wait, and Ray's agents."""
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
    """The command that runs another one with mounts of its own; skips the test where that is not allowed."""
    words = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        allowed = False
    return words if allowed else pytest.skip("mounts of its own are not allowed")


@pytest.fixture
def shell_cluster(ray_environment: None) -> Iterator[Callable[..., ShellCluster]]:
    """shell_cluster(): the head of a cluster of its own."""
    made: list[ShellCluster] = []

    def make(before: str = "") -> ShellCluster:
        made.append(ShellCluster(before))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Started(NamedTuple):
    """A process of a Session, by its log."""

    pid: int
    node: str
    restart: int


def processes(paths: RunPaths, sessions: int) -> list[list[Started]]:
    """The processes of each Session, in order."""
    pattern = re.compile(r"process (\d+) on node (\w+) of \S+, restart (\d+)")
    texts = [paths.session_log(index).read_text() for index in range(sessions)]
    return [[Started(int(pid), node, int(restart)) for pid, node, restart in pattern.findall(text)] for text in texts]
