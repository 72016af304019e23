"""Tests of invalid addresses and unusable nodes: each is reported in one line, with exit code 2, before any file is written."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slm_lab.cli.entry import main
from slm_lab.experiment.events import Event, Notice, Row
from slm_lab.experiment.execute.ray import local_cluster as local
from slm_lab.experiment.execute.ray.connect import Cluster, Node, connect_cluster
from slm_lab.experiment.files.paths import new_run
from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.cluster.remote import RemoteSink, SinkServer, Superseded
from slm_lab.spec.models.spec import Spec
from tests.experiment.cluster.conftest import Nodes, ShellCluster
from tests.experiment.cluster.direct import Direct

DEMO = ["demo.json", "ppo_cartpole"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cluster", "there"], "invalid address 'there'; expected HOST:PORT, auto or local"),
        (["--cluster", "ray://there:1"], "Ray Client (ray://) is not supported"),
        (["dev", "--cluster", "auto"], "--cluster has no effect with dev: it is an option of train, search, study"),
    ],
)
def test_what_is_no_address(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*DEMO, *words])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert told in capsys.readouterr().err


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An address without a server fails within a minute; Ray itself would retry for longer and then exit the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        begin = time.monotonic()
        assert main([*DEMO, "--cluster", address, "--data-dir", str(tmp_path)]) == 2
    assert time.monotonic() - begin < 60.0
    assert f"--cluster {address}: no Ray cluster can be reached there: Connection refused" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_this_machine_is_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="--cluster auto: this machine is not a node of a Ray cluster"), connect_cluster("auto", None):
        pass
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1\n")  # written by a cluster that was killed
    with (
        pytest.raises(UserError, match=r"--cluster auto \(127.0.0.1:1\): no Ray cluster can be reached there"),
        connect_cluster("auto", None),
    ):
        pass


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None if name == "ray" else importlib.util.find_spec(name))
    with (
        pytest.raises(UserError, match=r"--cluster needs the package ray: pip install 'slm-lab\[cluster\]'"),
        connect_cluster("local", None),
    ):
        pass


def test_too_few_resources() -> None:
    cluster = object.__new__(Cluster)
    cluster.address = "here:1"
    nodes = [Node("a", "one", 2.0, 0.0), Node("b", "two", 4.0, 1.0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "nodes", nodes)
        cluster.check_fits("a session", 4, 1)
        cluster.check_total("6 sessions of one net", 6)
        with pytest.raises(UserError, match=r"a session needs 5 cores of one node, and no node has as many .*one: 2 cores, 0 GPUs; two: 4"):
            cluster.check_fits("a session", 5)
        with pytest.raises(UserError, match="7 sessions of one net need 7 cores, and the cluster has 6"):
            cluster.check_total("7 sessions of one net", 7)


def test_rows_of_a_process_that_was_given_up_are_not_written(tmp_path: Path) -> None:
    """Rows of a replaced process are not written: it may still run if only its node was unreachable."""
    server, others = SinkServer(), list[Event]()
    paths = new_run(tmp_path, "small")
    paths.make_dirs()
    old = RemoteSink(Direct(server), paths, 0, 0, 0, others.append)
    old(Row(0, "train", {"frame": 10, "wall_t": 1.0}))
    position = old.sync_and_get_positions(0)
    old(Row(0, "train", {"frame": 20, "wall_t": 2.0}))
    new = RemoteSink(Direct(server), paths, 0, 0, 1, others.append)
    new.truncate_tables(0, position)
    old(Row(0, "train", {"frame": 20, "wall_t": 9.0}))
    with pytest.raises(Superseded):
        old.sync_and_get_positions(0)
    new(Row(0, "train", {"frame": 20, "wall_t": 3.0}))
    new(Notice("hello"))
    assert [(row["frame"], row["wall_t"]) for row in new.read_rows(0, "train")] == [("10", "1.000"), ("20", "3.000")]
    assert others == [Notice("hello")]
    new.close()
    with pytest.raises(Superseded):
        RemoteSink(Direct(server), paths, 0, 0, 0, others.append)
    assert len(complete_rows(paths.session_df(0))) == 2


def test_an_error_of_a_row_reaches_the_session(tmp_path: Path) -> None:
    server = SinkServer()
    paths = new_run(tmp_path, "small")  # the folders for tables do not exist
    sink = RemoteSink(Direct(server), paths, 0, 0, 0, lambda event: None)
    for path in (paths.info_dir, paths.log_dir):
        path.rmdir() if path.exists() else None
    sink(Row(0, "train", {"frame": 10}))
    with pytest.raises(OSError, match="No such file"):
        sink.sync_and_get_positions(0)


def test_a_server_that_is_not_ray(tmp_path: Path) -> None:
    """Connecting to a server that accepts connections and does not reply fails within 10 s."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        begin = time.monotonic()
        with pytest.raises(UserError, match=r"--cluster 127\.0\.0\.1:\d+"), connect_cluster(f"127.0.0.1:{server.getsockname()[1]}", None):
            pass
    assert time.monotonic() - begin < 10.0


@pytest.mark.slow
def test_too_few_cores_in_fact(nodes: Nodes, make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    """A cluster with too few cores for the Sessions of one net, or for a Session and its workers, is refused; nothing is written."""

    def told(**meta: Any) -> str:
        with pytest.raises(UserError) as error:
            Trial(make_spec(meta=meta), plan=Plan(data_dir=tmp_path / "data", cluster=nodes.address)).run()
        return str(error.value)

    assert "4 sessions of one net need 4 cores, and the cluster has 3" in told(max_session=4, distributed="synced")
    assert "(meta.sampler.num_workers) need 5 cores, and the cluster has 3" in told(sampler={"num_workers": 4})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("ray", "python"), [("2.50.1", None), (None, "3.99.1")])
def test_another_version_of_ray_or_python(
    ray: str | None, python: str | None, shell_cluster: Callable[..., ShellCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another version of Ray or Python is refused. The head wrote the other versions to the store of the cluster, where Ray checks them."""
    import ray as installed

    known = (ray or installed.__version__, python or platform.python_version())
    cluster = shell_cluster(f"import ray._private.utils\nray._private.utils.compute_version_info = lambda: {known!r}")
    begin = time.monotonic()
    assert main([*DEMO, "--cluster", cluster.address, "--data-dir", str(tmp_path / "data")]) == 2
    assert time.monotonic() - begin < 30.0
    told = capsys.readouterr().err
    assert f"--cluster {cluster.address}: cannot connect" in told
    for version in (ray or python, installed.__version__ if ray else platform.python_version()):
        assert str(version) in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nodes_that_differ_or_do_not_see_the_storage(
    shell_cluster: Callable[..., ShellCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, cluster = tmp_path / "data", shell_cluster()
    data.mkdir()

    def told(*words: str) -> str:
        begin = time.monotonic()
        assert main([*DEMO, "--cluster", cluster.address, "--data-dir", str(data), *words]) == 2
        assert time.monotonic() - begin < 60.0
        assert list(data.iterdir()) == []
        return capsys.readouterr().err

    other = tmp_path / "packages" / "torch-0.1.dist-info"  # precedes the real one on the module path
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    node = cluster.add(PYTHONPATH=os.pathsep.join([str(other.parent), os.environ["PYTHONPATH"]]))
    assert "has other versions: torch 0.1 (here " in told()
    node.kill()
    cluster.add(hidden=data)
    for words, shown in (
        ((), f"cannot use the data folder {data} (No such file or directory)"),
        (("--storage", f"file://{data}"), f"cannot use --storage file://{data}"),
        (("--storage", "memory://lab"), "cannot use --storage memory://lab"),
    ):
        text = told(*words)
        assert shown in text
        assert f"--cluster {cluster.address}: " in text


@pytest.mark.parametrize(("message", "starts"), [("The current node timed out during startup.", 2), ("no room on the disk", 1)])
def test_a_start_that_times_out_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, message: str, starts: int) -> None:
    made: list[str] = []

    def late(**options: Any) -> None:
        made.append(options["address"])
        if len(made) == 1:
            raise RuntimeError(message)

    nothing = SimpleNamespace(init=late, shutdown=lambda: None, is_initialized=lambda: False, cluster_resources=dict)
    monkeypatch.setitem(sys.modules, "ray", nothing)
    with nullcontext() if starts == 2 else pytest.raises(UserError, match=message), local.LocalCluster(1, 0):
        pass
    assert len(made) == starts
