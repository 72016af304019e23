"""Tests of the throughput model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cluster_model import closed_queue, hogwild
from bench.cluster_times import Times, measure

TIMES = Times(rollout=2e-3, gradient=9e-4, client=1e-4, server=2e-4, message=1e-3, sender=3e-4, receiver=4e-4, push=40_000, pull=40_000)


def test_a_closed_queue() -> None:
    """One customer never waits; many are served at the server's rate; two customers match a calculation by hand: (1 − S/(Z+S)) …"""
    assert closed_queue(1, 3.0, 1.0) == pytest.approx(0.25)
    assert closed_queue(1000, 3.0, 1.0) == pytest.approx(1.0)
    assert closed_queue(2, 1.0, 1.0) == pytest.approx(2.0 / (1.0 + 1.5))


def test_what_limits() -> None:
    assert hogwild(TIMES, 1) == pytest.approx(128 / 4.2e-3)
    assert hogwild(TIMES, 1000) == pytest.approx(128 / 6e-4, rel=1e-3)  # limited by the server
    assert hogwild(replace(TIMES, bandwidth=8e7), 1000) == pytest.approx(128 / 1e-3, rel=1e-3)  # limited by its network
    assert hogwild(TIMES, 4, cores=2) == pytest.approx(128 * 2 / 3.9e-3)  # limited by the cores


def test_service_times_are_measured() -> None:
    times = measure(16, lambda there, back: (1e-3, 3e-4, 4e-4), updates=20)
    assert min(times.rollout, times.gradient, times.client, times.server) > 0.0
    assert 2_000 < times.pull < times.push < 12_000
