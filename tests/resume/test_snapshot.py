"""Test of snapshots: workers continue while the arrays that they share are saved."""

from __future__ import annotations

from bench.snapshot import measure


def test_a_snapshot_of_a_large_net_hardly_stops_the_workers() -> None:
    """The net has 10 million parameters, with Adam. The bound leaves room for a busy machine; bench/snapshot.py measures an idle one."""
    found = measure(10_000_000, 12)
    assert found["updates"] > 100
    assert found["held_median"] < 250.0
