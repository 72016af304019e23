"""Shipped specs learn on a cluster of three nodes while one node is killed and another one is added."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest

from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.spec.load.loader import load_spec
from tests.experiment.cluster.conftest import Nodes
from tests.experiment.commands import Deed, frame_of, run_while, until

SEEDS = (0, 1, 2)
HOME = re.compile(r"on node (\w+)")


def exchange_a_node(nodes: Nodes, sessions: int, frame: int, of_workers: bool) -> Deed:
    """When Session 0 reaches a frame, kill a node that runs a Session (with `of_workers`, one that runs none) and add a node."""

    def deed(trial: Trial) -> None:
        until(lambda: frame_of(trial.paths, 0) >= frame, seconds=600)
        found = [HOME.search(trial.paths.session_log(index).read_text()) for index in range(sessions)]
        homes = {home[1] for home in found if home}
        victim = next(node for node in nodes.others if (node.node_id in homes) is not of_workers)
        nodes.kill(victim)
        nodes.others.remove(victim)
        nodes.others.append(nodes.add(2))

    return deed


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("file", "sessions", "least"),
    [
        ("ppo_cartpole.json:ppo_cartpole", 4, 450),
        ("appo_cartpole.json:appo_cartpole", 1, 450),
        ("a3c_gae_cartpole.json:a3c_gae_cartpole", 4, 420),
    ],
)
def test_it_learns_while_a_node_is_killed_and_another_comes(
    file: str, sessions: int, least: float, wide_nodes: Nodes, tmp_path: Path
) -> None:
    """The final total_reward, averaged over seeds and Sessions, reaches the score; the node is killed at a quarter of the frames."""
    nodes = wide_nodes
    scores = []
    for seed in SEEDS:
        sets = [f"meta.random_seed={seed}", f"meta.max_session={sessions}", "meta.save_interval=0.5"]
        spec = load_spec(*file.split(":"), sets)
        trial = Trial(spec, plan=Plan(data_dir=tmp_path / str(seed), cluster=nodes.address))
        frames = spec.env.max_frame // (sessions if spec.meta.distributed else 1)
        run_while(trial, exchange_a_node(nodes, sessions, frames // 4, spec.meta.sampler is not None))
        tables = [complete_rows(trial.paths.session_df(index)) for index in range(sessions)]
        assert all(int(table[-1]["frame"]) == frames for table in tables)
        scores.append(mean(float(table[-1]["total_reward"]) for table in tables))
    assert mean(scores) >= least, scores
