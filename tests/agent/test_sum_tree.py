"""Tests of the sum tree against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_lab.agent.replay.replay import SumTree

SIZES = [1, 2, 63, 64, 65, 4095, 4096, 4097, 64**3 + 1]
"""Sizes of trees with one to four levels, including full levels and one leaf more."""
quick = settings(max_examples=60, deadline=None)


def filled(size: int, seed: int, zeros: float = 0.5) -> tuple[SumTree, np.ndarray]:
    """Return a tree with integer weights, so that every sum is exact, and the weights."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 9, size).astype(np.float64) * (rng.random(size) >= zeros)
    weights[rng.integers(size)] = 5.0  # at least one is positive
    tree = SumTree(size)
    tree.set(np.arange(size), weights)
    return tree, weights


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.99])
def test_find_is_a_search_in_the_running_sum(size: int, zeros: float) -> None:
    tree, weights = filled(size, size, zeros)
    assert tree.total == weights.sum()
    rng = np.random.default_rng(1)
    edges = np.cumsum(weights)
    masses = np.concatenate([rng.random(500) * tree.total, edges[:-1][:500], [0.0, np.nextafter(tree.total, 0.0)]])
    masses = masses[masses < tree.total]
    found = tree.find_by_cumulative_weight(masses)
    assert np.array_equal(found, np.searchsorted(edges, masses, side="right"))
    assert (weights[found] > 0.0).all()


@quick
@given(st.integers(1, 5000), st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5)), min_size=1, max_size=40), max_size=6))
def test_sets_against_an_array(size: int, rounds: list[list[tuple[int, int]]]) -> None:
    """Weights equal those of an array. If an index occurs twice in one call, the last weight counts."""
    tree, twin = SumTree(size), np.zeros(size)
    for pairs in rounds:
        index = np.array([number % size for number, _ in pairs])
        tree.set(index, np.array([weight for _, weight in pairs], np.float64))
        for i, (_, weight) in zip(index, pairs, strict=True):
            twin[i] = weight
        assert tree.total == twin.sum()
        assert np.array_equal(tree.get(np.arange(size)), twin)
        if twin.any():
            masses = np.arange(int(twin.sum())).astype(np.float64)  # each index is found as often as its weight
            assert np.array_equal(np.bincount(tree.find_by_cumulative_weight(masses), minlength=size), twin)


@quick
@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(-300, 300))
def test_rounding_never_finds_a_weight_of_zero(size: int, seed: int, exponent: int) -> None:
    """A weight of 0 is never found, for weights of any magnitude beside others 10^12 times as large, up to the total weight."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-12, 0, size) * 10.0**exponent
    weights = np.where(rng.random(size) < 0.7, 0.0, scale)
    weights[rng.integers(size)] = 10.0**exponent
    tree = SumTree(size)
    tree.set(np.arange(size), weights)
    masses = np.concatenate([rng.random(50) * tree.total, [0.0, tree.total, np.nextafter(tree.total, 0.0)]])
    assert (weights[tree.find_by_cumulative_weight(masses)] > 0.0).all()


def test_no_error_builds_up() -> None:
    """Sums are recomputed, so a tree that has held large weights is as exact as a new tree."""
    rng = np.random.default_rng(0)
    tree = SumTree(200)
    for _ in range(300):
        tree.set(rng.integers(0, 200, 32), 10.0 ** rng.uniform(-10, 15, 32))
    last = rng.random(200)
    tree.set(np.arange(200), last)
    fresh = SumTree(200)
    fresh.set(np.arange(200), last)
    assert tree.total == fresh.total
