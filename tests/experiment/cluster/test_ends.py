"""However the driver ends, its processes and files are removed, and a cluster that was already running continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files import bundle as state
from tests.experiment.cluster.conftest import ShellCluster
from tests.experiment.commands import PATIENCE, Command, frame_of, until

SECONDS = 60.0
"""Bound for the end of all processes of a killed driver; about 5 s on an idle machine."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_driver(number: signal.Signals, command: Callable[..., Command], spec_body: Callable[..., dict[str, Any]]) -> None:
    made = command(spec_body(env={"max_frame": 10_000_000}, meta={"save_interval": 0.2}))
    process = made.start("--cluster", "local")
    until(made.has_rows(1), process)
    until(made.paths.checkpoint(0, "last").exists, process)
    os.kill(process.pid, number)
    output = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), output
    made.leaves_nothing(SECONDS)
    bundle = state.load(made.paths.checkpoint(0, "last"))
    assert bundle["policies"][0]["clock"]["frame"] > 0
    if number == signal.SIGINT:
        assert "saving checkpoints" in output
        assert made.paths.trial_metrics().exists()


CLUSTER_SECONDS = 30.0
"""Bound for the end of the processes of a killed driver on a cluster; less than 1 s, also on a busy machine."""
NETS = {
    "a3c": {"algorithm": {"name": "ActorCritic", "training_frequency": 32}, "meta": {"max_session": 2, "distributed": "synced"}},
    "impala": {
        "algorithm": {"with_vtrace": True, "lam": 1.0},
        "meta": {"sampler": {"async_rl": True, "num_workers": 1, "num_envs_per_worker": 4, "inference": "local"}},
    },
}
TITLES = {"a3c": {"SinkServer", "ParameterServer", "TaskActor"}, "impala": {"SinkServer", "TaskActor"}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a3c", "impala"])
def test_a_driver_that_is_killed_leaves_the_cluster_as_it_was(
    kind: str, shell_cluster: Callable[..., ShellCluster], command: Callable[..., Command], spec_body: Callable[..., dict[str, Any]]
) -> None:
    """No process, shared memory or temporary file of the run remains. Head, second node and driver are three processes from a shell."""
    cluster = shell_cluster()
    cluster.add()
    body = spec_body(env={"max_frame": 10_000_000}, meta={"save_interval": 0.2, "log_frequency": 2000} | NETS[kind]["meta"])
    body["agent"]["algorithm"] = NETS[kind]["algorithm"] if kind == "a3c" else body["agent"]["algorithm"] | NETS[kind]["algorithm"]
    if kind == "impala":
        del body["env"]["num_envs"]
    made = command(body)
    before = shared_memory(cluster)
    temporary = {*cluster.temp.iterdir()}
    process = made.start("--cluster", cluster.address)
    until(made.has_rows(1), process)
    until(made.paths.checkpoint(0, "last").exists, process)
    assert {title.split(".")[0] for title in cluster.busy().values()} >= TITLES[kind]
    during = shared_memory(cluster)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=CLUSTER_SECONDS)
    until(lambda: cluster.busy() == {}, seconds=CLUSTER_SECONDS)
    made.leaves_nothing(CLUSTER_SECONDS)
    until(lambda: shared_memory(cluster) <= before, seconds=CLUSTER_SECONDS)
    assert not any(Path(file).exists() for file in during - before)
    assert {*cluster.temp.iterdir()} == temporary
    assert all(node.process.poll() is None for node in cluster.made)
    frame = frame_of(made.paths, 0)
    made.spec_file.write_text(made.spec_file.read_text().replace("10000000", "8000"))
    again = made.start("--cluster", cluster.address)
    output = again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 0, output
    assert frame > 0
    until(lambda: cluster.busy() == {}, seconds=CLUSTER_SECONDS)


def shared_memory(cluster: ShellCluster) -> set[str]:
    """Return the shared memory that processes of the nodes have open: files below /dev/shm, or made by memfd_create."""
    found: set[str] = set()
    for process in cluster.members():
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                if (target := os.readlink(entry)).startswith(("/dev/shm/", "/memfd:")):
                    found.add(target)
    return found
