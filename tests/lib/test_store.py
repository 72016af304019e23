"""Tests of shared arrays, with the views of several processes in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from slm_lab.lib.clock import Clock
from slm_lab.lib.store import Arrays, Division, Named, SharedArray, SharedArrays, create_shared_file, divide_vector, prefixed_arrays


class Part:
    def __init__(self, value: float) -> None:
        self.weights, self.count = np.full(3, value), np.zeros(1, np.int64)

    def shared_arrays(self) -> Named:
        return {"weights": SharedArray(self.weights, "step"), "count": SharedArray(self.count, "own")}

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        self.weights, self.count = arrays["weights"], arrays["count"]


@pytest.fixture
def fd() -> Iterator[int]:
    file = create_shared_file()
    yield file
    os.close(file)


def test_names_decide_the_layout(fd: int) -> None:
    """The layout does not depend on the order in which two processes list their parts."""
    one, other = (Part(1.0), Part(2.0)), (Part(1.0), Part(2.0))
    SharedArrays(fd, 0, 2).attach({"a": one[0], "b": one[1]})
    SharedArrays(fd, 1, 2).attach({"b": other[1], "a": other[0]})
    one[0].weights[1] = 7.0
    one[1].count[0] = 3
    assert other[0].weights.tolist() == [1.0, 7.0, 1.0]
    assert other[1].weights.tolist() == [2.0, 2.0, 2.0]
    assert other[1].count.tolist() == [[3], [0]]
    assert list(prefixed_arrays({"a": one[0]})) == ["a/weights", "a/count"]


def test_a_restarted_process_finds_the_values(fd: int) -> None:
    part, clock = Part(1.0), Clock()
    SharedArrays(fd).attach({"part": part, "clock": clock})
    part.weights += 1.0
    clock.tick(8)
    again, later = Part(9.0), Clock()
    SharedArrays(fd, fresh=False).attach({"clock": later, "part": again})
    assert again.weights.tolist() == [2.0, 2.0, 2.0]
    assert (later.frame, later.prev_frame) == (8, 8)


def test_a_vector_is_divided_by_its_size_alone() -> None:
    assert divide_vector(0).bounds == (0, 0)
    assert divide_vector(2**21).bounds == (0, 2**21)
    assert divide_vector(2**21 + 1).bounds == (0, 2**20, 2**21 + 1)
    assert divide_vector(10**9).processes == 8
    starts = (0, 2_000_001, 5_000_007)
    bounds = divide_vector(7_400_000, starts).bounds
    assert len(bounds) == 5
    assert (bounds[0], bounds[-1]) == (0, 7_400_000)
    for bound in bounds[1:-1]:  # a bound is aligned relative to the start of the part it divides
        assert (bound - max(start for start in starts if start <= bound)) % 64 == 0
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert max(sizes) - min(sizes) <= 2 * 64


def test_the_parts_of_a_divided_array() -> None:
    """Each process gets the part of a divided array in its range, also if the array begins inside the vector."""
    array = SharedArray(np.arange(10, 16), "step", Division((0, 4, 12, 20)), begin=10)
    assert [array.values[array.process_slice(process)].tolist() for process in range(4)] == [[], [10, 11], [12, 13, 14, 15], []]
