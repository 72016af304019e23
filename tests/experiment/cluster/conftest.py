"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slm_lab.experiment.paths import RunPaths
from slm_lab.lib.environment import environment


class Nodes:
    """Nodes with so many cores each; the driver is on the first one."""

    def __init__(self, count: int, cores: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self.folder = tempfile.mkdtemp(prefix="slm_", dir="/tmp")  # short, for the paths of sockets
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


@contextmanager
def three_nodes(cores: int) -> Iterator[Nodes]:
    """Three nodes with so many cores each."""
    pytest.importorskip("ray")
    root = str(Path(__file__).parents[3])
    values = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with environment(values | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}):
        made = Nodes(3, cores)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Three nodes with a core each."""
    with three_nodes(1) as made:
        yield made


@pytest.fixture
def wide_nodes() -> Iterator[Nodes]:
    """Three nodes with two cores each."""
    with three_nodes(2) as made:
        yield made


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
