"""Runs of each algorithm with each engine on a Ray cluster, as in tests/experiment/test_pairs.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slm_lab.lib.process import temporary_environment
from tests.experiment.cluster.conftest import RAY, Nodes
from tests.experiment.test_pairs import TRAINS, check_run

ON_CLUSTERS = [pair for pair in TRAINS if pair[1] in ("shared", "synced", "sampler")]


@pytest.fixture(scope="module")
def common_nodes() -> Iterator[Nodes]:
    """Return a cluster of two nodes with two cores each, shared by all tests of this file."""
    pytest.importorskip("ray")
    with temporary_environment(RAY):
        made = Nodes(2, 2)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), ON_CLUSTERS)
def test_a_pair_trains_on_a_cluster(name: str, engine: str, common_nodes: Nodes, tmp_path: Path) -> None:
    check_run(name, engine, tmp_path, common_nodes.address)
