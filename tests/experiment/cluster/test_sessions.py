"""Tests of trials on a cluster of three nodes, one of which is killed while another one is added."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.resume import read_run
from slm_lab.spec.models.spec import Spec
from tests.experiment.cluster.conftest import Nodes, ShellCluster, processes
from tests.experiment.commands import Deed, frame_of, rows, run_while, until

MakeSpec = Callable[..., Spec]


def exchange_a_node(nodes: Nodes, sessions: int, frame: int) -> Deed:
    """When all Sessions reach a frame, kill a node that runs one of them, not the driver's node, and add a node."""

    def deed(trial: Trial) -> None:
        until(lambda: all(frame_of(trial.paths, index) >= frame for index in range(2)))
        assert trial.paths is not None
        homes = {entry[-1].node for entry in processes(trial.paths, 2)}
        victim = next(node for node in nodes.others if node.node_id in homes)
        nodes.kill(victim)
        nodes.add()

    return deed


def plan(nodes: Nodes, folder: Path) -> Plan:
    return Plan(data_dir=folder, cluster=nodes.address)


@pytest.mark.slow
def test_four_sessions_end_while_a_node_is_killed_and_another_comes(nodes: Nodes, make_spec: MakeSpec, tmp_path: Path) -> None:
    """The Session on the killed node continues from its checkpoint; its rows equal those of an uninterrupted run."""
    meta = {"max_session": 4, "save_interval": 0.5, "log_frequency": 2000}
    spec = make_spec(env={"max_frame": 60_000}, meta=meta)
    trial = Trial(spec, plan=plan(nodes, tmp_path))
    run_while(trial, exchange_a_node(nodes, 4, 4000))
    started = processes(trial.paths, 4)
    assert len({one.pid for entry in started for one in entry}) >= 5
    assert len({one.node for entry in started for one in entry}) >= 3
    assert sorted(len(entry) for entry in started) == [1, 1, 1, 2]
    assert read_run(trial.paths).sessions_to_run == []
    straight = Trial(spec, plan=Plan(data_dir=tmp_path / "straight")).run()
    for index in range(4):
        assert rows(trial.paths.session_df(index)) == rows(straight.paths.session_df(index))


@pytest.mark.slow
def test_sessions_on_nodes_without_the_data_folder(
    shell_cluster: Callable[..., ShellCluster], make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Session whose node is killed continues from its checkpoint at a URL, and so does `train@`. Tables are local."""
    data, cluster = tmp_path / "data", shell_cluster()
    data.mkdir()
    node = cluster.add(hidden=data)
    meta = {"max_session": 2, "save_interval": 0.5, "log_frequency": 2000}
    spec = make_spec(env={"max_frame": 100_000}, meta=meta)
    trial = Trial(spec, plan=Plan(data_dir=data, cluster=cluster.address, storage=f"file://{tmp_path}/store"))

    def deed(trial: Trial) -> None:
        until(lambda: all(frame_of(trial.paths, index) >= 4000 for index in range(2)))
        until(lambda: len(list(tmp_path.glob("store/*/small_t0_s?_ckpt-last.pt"))) == 2)
        node.kill()
        cluster.add(hidden=data)

    run_while(trial, deed)
    started = processes(trial.paths, 2)
    assert len({one.node for entry in started for one in entry}) >= 2
    assert sorted(len(entry) for entry in started) == [1, 2]
    (store,) = (tmp_path / "store").iterdir()
    assert {path.name for path in store.iterdir()} == {f"small_t0_s{s}_ckpt-{which}.pt" for s in range(2) for which in ("best", "last")}
    assert list(trial.paths.model_dir.iterdir()) == []
    assert trial.paths.trial_metrics().exists()
    capsys.readouterr()
    again = Plan(cluster=cluster.address)
    Trial.resume(trial.paths.root, ["env.max_frame=110000"], plan=again).run()
    assert capsys.readouterr().out.count("continues at frame 100,000; exact") == 2
    straight = Trial(make_spec(env={"max_frame": 110_000}, meta=meta), plan=Plan(data_dir=tmp_path / "straight")).run()
    for index in range(2):
        assert rows(trial.paths.session_df(index)) == rows(straight.paths.session_df(index))


A3C: dict[str, Any] = {
    "agent": {
        "algorithm": {
            "name": "ActorCritic",
            "lam": 0.95,
            "training_frequency": 32,
            "entropy_coef_spec": {"name": "no_decay", "start_val": 0.01},
        },
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {
            "name": "MLPNet",
            "hid_layers": [64, 64],
            "hid_layers_activation": "tanh",
            "optim_spec": {"name": "GlobalAdam", "lr": 0.002},
        },
    },
    "env": {"name": "CartPole-v1", "num_envs": 4, "max_frame": 150_000},
    "meta": {"max_session": 3, "random_seed": 0, "log_frequency": 2000, "distributed": "synced", "save_interval": 0.5},
}


@pytest.mark.slow
def test_a3c_learns_while_a_node_is_killed_and_another_comes(nodes: Nodes, tmp_path: Path) -> None:
    spec = Spec.model_validate({"name": "a3c", **A3C})
    trial = Trial(spec, plan=plan(nodes, tmp_path))
    metrics = run_while(trial, exchange_a_node(nodes, 3, 4000)).metrics
    started = processes(trial.paths, 3)
    assert len({one.node for entry in started for one in entry}) >= 3
    assert sorted(len(entry) for entry in started) == [1, 1, 2]
    assert [complete_rows(trial.paths.session_df(index))[-1]["frame"] for index in range(3)] == ["50000"] * 3
    assert int(state.load(trial.paths.trial_checkpoint())["arrays"]["clock/frames"].sum()) == 150_000
    assert metrics["final_return"] > 100
    assert max(float(row["staleness"]) for row in complete_rows(trial.paths.session_df(0))) > 0


def server_pids(nodes: Nodes) -> list[int]:
    """Return the ids of the processes of the parameter server on these nodes, in the order of their start."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if (entry / "cmdline").read_text().startswith("ray::ParameterServer"):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if nodes.folder in Path(f"/proc/{parent}/cmdline").read_text():
                    found.append(int(entry.name))
    return sorted(found)


def kill_a_server(trial: Trial, nodes: Nodes, number: int, frame: int) -> list[int]:
    """Kill a process of the parameter server once both Sessions reach a frame; return the ids of all its processes."""
    until(lambda: all(frame_of(trial.paths, index) >= frame for index in range(2)))
    until(trial.paths.trial_checkpoint().exists)
    pids = server_pids(nodes)
    os.kill(pids[number], signal.SIGKILL)
    return pids


@pytest.mark.slow
def test_a_parameter_server_that_is_killed_continues_from_the_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    spec = Spec.model_validate({"name": "a3c", **A3C, "meta": {**A3C["meta"], "max_session": 2}})
    trial = Trial(spec, plan=plan(nodes, tmp_path))
    pids: list[int] = []
    metrics = run_while(trial, lambda trial: pids.extend(kill_a_server(trial, nodes, 0, 6000))).metrics
    assert len(pids) == 1
    assert [len(entry) for entry in processes(trial.paths, 2)] == [1, 1]  # the Sessions continued
    arrays = state.load(trial.paths.trial_checkpoint())["arrays"]
    assert int(arrays["clock/frames"].sum()) == 150_000
    assert metrics["final_return"] > 100
    assert int(arrays["agent/trainer/updates"].sum()) < 150_000 / (4 * 32) + 2  # updates since the checkpoint were lost


@pytest.mark.slow
def test_one_of_several_processes_of_a_parameter_server_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    """A net of 2.1 M parameters is split between processes; when one dies, all restore the same checkpoint and training continues."""
    net = {**A3C["agent"]["net"], "hid_layers": [1024, 1024]}
    spec = Spec.model_validate(
        {
            "name": "a3c",
            "agent": {**A3C["agent"], "net": net},
            "env": {**A3C["env"], "max_frame": 30_000},
            "meta": {**A3C["meta"], "max_session": 2},
        }
    )
    trial = Trial(spec, plan=plan(nodes, tmp_path))
    pids: list[int] = []
    run_while(trial, lambda trial: pids.extend(kill_a_server(trial, nodes, 1, 3000)))
    assert len(pids) > 1
    assert [len(entry) for entry in processes(trial.paths, 2)] == [1, 1]
    arrays = state.load(trial.paths.trial_checkpoint())["arrays"]
    assert int(arrays["clock/frames"].sum()) == 30_000
    assert int(arrays["agent/trainer/updates"].sum()) < 30_000 / (4 * 32) + 2  # updates since the checkpoint were lost
    assert all(bool(array.isfinite().all()) for array in arrays.values())
    assert min(float(row["bytes_pushed"]) for row in complete_rows(trial.paths.session_df(0))) > 4 * 2_100_000
