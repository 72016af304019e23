"""Tests of rollout workers on other nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from tests.experiment.cluster.conftest import Nodes
from tests.experiment.commands import frame_of, rows, run_while, until

IMPALA: dict[str, Any] = {
    "agent": {
        "algorithm": {
            "name": "PPO",
            "with_vtrace": True,
            "time_horizon": 32,
            "minibatch_size": 128,
            "training_epoch": 1,
            "lam": 1.0,
        },
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {"name": "MLPNet", "hid_layers": [64, 64], "hid_layers_activation": "tanh", "optim_spec": {"name": "Adam", "lr": 0.002}},
    },
    "env": {"name": "CartPole-v1", "max_frame": 60_000},
    "meta": {
        "random_seed": 0,
        "log_frequency": 2000,
        "sampler": {"async_rl": True, "num_workers": 2, "num_envs_per_worker": 4, "inference": "local"},
    },
}
TIMES = re.compile(r"wall_t|fps|.*_busy")


@pytest.mark.slow
def test_impala_ends_while_a_worker_s_node_is_killed_and_another_comes(nodes: Nodes, tmp_path: Path) -> None:
    """The learner continues with the remaining worker and with the one on the new node; the policy lag is measured."""
    spec = load_spec({"impala": IMPALA}, "impala")
    trial = Trial(spec, plan=Plan(data_dir=tmp_path, cluster=nodes.address))
    counts: list[int] = []

    def deed(trial: Trial) -> None:
        until(lambda: frame_of(trial.paths, 0) >= 4000)
        log = trial.paths.session_log(0).read_text()
        home = re.search(r"on node (\w+)", log)
        victim = next(node for node in nodes.others if node.node_id != home[1])
        nodes.kill(victim)
        at_death = frame_of(trial.paths, 0)
        until(lambda: frame_of(trial.paths, 0) >= at_death + 4000)  # with one worker; with none until a node is added if both were lost
        counts.append(frame_of(trial.paths, 0))
        nodes.add()

    result = run_while(trial, deed)
    assert counts
    table = complete_rows(trial.paths.session_df(0))
    assert table[-1]["frame"] == "60000"
    assert max(float(row["lag_mean"]) for row in table) > 0
    assert result.metrics["final_return"] > 50
    assert "rollout worker" in trial.paths.session_log(0).read_text()


@pytest.mark.slow
def test_workers_in_turns_collect_what_those_of_one_machine_do(
    nodes: Nodes, spec_body: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    sampler = {"num_workers": 2, "num_envs_per_worker": 4, "num_batches_per_epoch": 4, "async_rl": False}
    body = spec_body(env={"max_frame": 4000, "normalize_obs": True}, meta={"sampler": sampler, "log_frequency": 500})
    del body["env"]["num_envs"]
    spec: Spec = load_spec({"small": body}, "small")
    tables = []
    for folder, cluster in (("cluster", nodes.address), ("here", None)):
        trial = Trial(spec, plan=Plan(data_dir=tmp_path / folder, cluster=cluster))
        trial.run()
        tables.append([{key: value for key, value in row.items() if not TIMES.fullmatch(key)} for row in rows(trial.paths.session_df(0))])
    assert len(tables[0]) == 8
    assert tables[0] == tables[1]
