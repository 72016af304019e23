"""Tests of PublishedWeights: a reader gets the latest weights, never a mixture of two versions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.experiment.collect.workers.shared import PublishedWeights
from slm_lab.lib.store import SharedArrays

MakeWeights = Callable[..., PublishedWeights]


def open_weights(fd: int, size: int, fresh: bool = False) -> PublishedWeights:
    """Return weights of `size` parameters in a shared file."""
    policy: Any = SimpleNamespace(flat=FlatParams(torch.nn.Linear(size, 1, bias=False)))
    weights = PublishedWeights(policy, acting_state_size=1)
    SharedArrays(fd, fresh=fresh).attach({"weights": weights})
    return weights


def publish(weights: PublishedWeights, number: float) -> None:
    """Publish vectors whose elements all equal `number`."""
    assert weights.flat is not None
    weights.flat.param.detach().fill_(number)
    weights.publish(int(number), np.array([number]))


def content(weights: PublishedWeights) -> float:
    """Return the number in the pulled weights, after checking that all elements are equal to it."""
    assert weights.flat is not None
    param = weights.flat.param
    assert float(param.min()) == float(param.max()) == weights.version == weights.acting_state[0]
    return float(param[0])


def test_a_reader_gets_the_newest_weights_and_extras(fd: int) -> None:
    writer, reader = open_weights(fd, 8, fresh=True), open_weights(fd, 8)
    assert not reader.pull()
    for number in (1, 2, 3):
        publish(writer, number)
    assert reader.pull()
    assert content(reader) == 3.0
    assert not reader.pull(), "nothing newer"
    late = open_weights(fd, 8)
    assert late.pull(), "a reader that comes later gets them too"
    assert content(late) == 3.0


STEPS = ["begun", "barrier", "param", "extras", "version", "barrier", "done"]
"""The steps of publish, in order; a writer can be interrupted after each of them."""


class Steps:
    """Wraps the arrays of a writer so that `after(number of steps)` is called after each step of publish."""

    def __init__(self, weights: PublishedWeights, after: Callable[[int], None]) -> None:
        self.after, self.count = after, 0
        names = set(STEPS) - {"barrier"}
        for name in names:
            weights._arrays[name] = _Watched(weights._arrays[name], self)  # type: ignore[assignment]
        barrier = weights._barrier

        def watched_barrier() -> None:
            barrier()
            self.step()

        weights._barrier = watched_barrier  # type: ignore[method-assign]

    def step(self) -> None:
        self.count += 1
        self.after(self.count)


class _Watched:
    """An array in which each assignment, and each access to a row to be written, counts as a step."""

    def __init__(self, array: np.ndarray, steps: Steps) -> None:
        self.array, self.steps = array, steps

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[key] = value
        self.steps.step()

    def __getitem__(self, key: Any) -> Any:
        value = self.array[key]
        return _Row(value, self.steps) if self.array.ndim == 2 else value


class _Row(np.ndarray):
    """A row that torch is about to write; when its step is counted, half of it is already overwritten."""

    def __new__(cls, row: np.ndarray, steps: Steps) -> Any:
        half = len(row) // 2
        row[:half] = -1.0  # as in an unfinished copy
        steps.step()
        return row


@pytest.mark.parametrize("steps", range(1, len(STEPS) + 1))
def test_an_interrupted_publication_is_never_read(steps: int, fd: int) -> None:
    """At whatever step the writer dies, readers get the previous publication, and another writer can continue publishing."""
    writer, reader = open_weights(fd, 8, fresh=True), open_weights(fd, 8)
    publish(writer, 1)
    publish(writer, 2)

    def die(count: int) -> None:
        if count == steps:
            raise InterruptedError

    Steps(writer, die)
    with pytest.raises(InterruptedError):
        publish(writer, 3)
    assert reader.pull()
    assert content(reader) == (3.0 if steps == len(STEPS) else 2.0)
    publish(open_weights(fd, 8), 4)
    assert reader.pull()
    assert content(reader) == 4.0


def test_a_reader_that_was_overtaken_reads_again(fd: int) -> None:
    """If the writer publishes `times` times during a copy: once fills the other half, so the copy is valid; twice requires a new copy."""
    for times, copies in ((1, 1), (2, 3)):
        writer, reader = open_weights(fd, 8, fresh=True), open_weights(fd, 8)
        publish(writer, 1)
        overtaken: Any = _Overtaken(reader._arrays["param"], writer, times)
        reader._arrays["param"] = overtaken
        assert reader.pull()
        assert overtaken.copies == copies
        assert content(reader) == (1.0 if times == 1 else 5.0)


class _Overtaken:
    """Weights whose first two reads are interrupted by `times` publications between the first and the second half of the vector."""

    def __init__(self, halves: np.ndarray, writer: PublishedWeights, times: int) -> None:
        self.halves, self.writer, self.times, self.copies = halves, writer, times, 0

    def __getitem__(self, half: int) -> np.ndarray:
        read = self.halves[half].copy()
        self.copies += 1
        if self.copies <= 2:
            for _ in range(self.times):
                publish(self.writer, float(self.writer._arrays["version"].max()) + 1)
            read[4:] = self.halves[half][4:]
        return np.asarray(read)


def hammer(fd: int, size: int, seconds: float, connection: Connection) -> None:
    """Publish vectors of equal numbers as fast as possible."""
    torch.set_num_threads(1)
    writer = open_weights(fd, size)
    end, number = time.monotonic() + seconds, int(writer._arrays["version"].max())
    while time.monotonic() < end:
        number += 1
        publish(writer, number)
    connection.send(number)


def read_while(process: Any, connection: Connection, reader: PublishedWeights, kill_after: int | None = None) -> int:
    """Pull and check until the writer ends, or kill it after `kill_after` pulls. Return the number of pulls."""
    process.start()
    pulls = 0
    while not connection.poll() and process.is_alive():
        if reader.pull():
            content(reader)
            pulls += 1
            if pulls == kill_after:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
    process.join()
    return pulls


@pytest.mark.slow
def test_no_reader_sees_a_torn_vector(fd: int) -> None:
    """The writer is another process: it is first killed at arbitrary moments of a publication, then runs to its end."""
    size, context = 100_000, multiprocessing.get_context("fork")
    reader, threads = open_weights(fd, size, fresh=True), torch.get_num_threads()
    publish(reader, 1)
    torch.set_num_threads(1)  # a fork with threads running may hang
    try:
        ours, theirs = multiprocessing.Pipe()
        for kill_after in range(1, 16):
            read_while(context.Process(target=hammer, args=(fd, size, 60.0, theirs)), ours, reader, kill_after)
            late = open_weights(fd, size)
            assert late.pull()
            content(late)
        pulls = read_while(context.Process(target=hammer, args=(fd, size, 1.0, theirs)), ours, reader)
        assert pulls > 10
        assert ours.recv() > pulls
    finally:
        torch.set_num_threads(threads)
