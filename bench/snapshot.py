"""Pause of the workers while their shared arrays are copied: `python -m bench.snapshot [--parameters N] [--snapshots N]`.

The shared arrays are those of a net with Adam: parameters and two moments. One process copies them. Another process continuously updates a
few of the parameters, and measures how long each update takes, including the wait for the copy.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch

from slm_lab.lib.store import Arrays, Lock, Named, SharedArray, SharedArrays, Store, create_shared_file

NAMES = ("params", "optim/exp_avg", "optim/exp_avg_sq")


class Net:
    """The shared arrays of a net with the given number of parameters."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters
        self.arrays: Mapping[str, np.ndarray] = {}

    def shared_arrays(self) -> Named:
        return {name: SharedArray(np.zeros(self.parameters, np.float32), "step") for name in NAMES}

    def attach(self, store: Store, arrays: Arrays) -> None:
        self.arrays = arrays


class TimedArrays(SharedArrays):
    """Shared arrays that measure how long a snapshot blocks other processes."""

    def __init__(self, fd: int, index: int) -> None:
        super().__init__(fd, index, 2)
        self.held: list[float] = []

    @contextmanager
    def _record_lock(self, lock: Lock, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
        with super()._record_lock(lock, wait=wait, shared=shared) as mine:
            begin = time.perf_counter()
            try:
                yield mine
            finally:
                if lock == "snapshot" and not shared:
                    self.held.append(time.perf_counter() - begin)


def _update(fd: int, parameters: int, ready: int, results: int) -> None:
    """Update parameters until SIGTERM; then write the time of the longest update (s) and the number of updates to the pipe `results`."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *arguments: ended.append(1))
    net = Net(parameters)
    store = SharedArrays(fd, 1, 2, fresh=False)
    store.attach({"net": net})
    values, longest, count = net.arrays["params"][:1000], 0.0, 0
    os.write(ready, b"x")
    while not ended:
        begin = time.perf_counter()
        with store.updating():
            values += 1.0
        longest, count = max(longest, time.perf_counter() - begin), count + 1
    os.write(results, json.dumps([longest, count]).encode())


def measure(parameters: int, snapshots: int) -> dict[str, float]:
    """Return the results by name; times are in milliseconds.

    held_median and held_longest are times for which a snapshot held the locks. delay_longest is the time of the longest update in the
    process that updates parameters, and updates is the number of updates in this process.
    """
    net, fd = Net(parameters), create_shared_file()
    store = TimedArrays(fd, 0)
    store.attach({"net": net})
    ready, results = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _update(fd, parameters, ready[1], results[1])
        finally:
            os._exit(0)
    try:
        os.read(ready[0], 1)
        for _ in range(snapshots):
            time.sleep(0.02)
            store.snapshot()
    finally:
        os.kill(child, signal.SIGTERM)
        longest, count = json.loads(os.read(results[0], 1000))
        os.waitpid(child, 0)
        for end in (*ready, *results):
            os.close(end)
        store.arrays, net.arrays = {}, {}
        os.close(fd)
    held = [1000 * seconds for seconds in store.held]
    return {"held_median": median(held), "held_longest": max(held), "delay_longest": 1000 * longest, "updates": count}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.snapshot", description="Measure the pause of workers during a snapshot of shared arrays."
    )
    parser.add_argument("--parameters", type=int, default=10_000_000, help="number of parameters of the net (10 million)")
    parser.add_argument("--snapshots", type=int, default=50, help="number of snapshots (50)")
    options = parser.parse_args()
    found = measure(options.parameters, options.snapshots)
    size = options.parameters * 4 * len(NAMES) / 2**20
    sys.stdout.write(
        f"cpu: {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores\n"
        f"{options.parameters:,} parameters with Adam: {size:.0f} MiB; {options.snapshots} snapshots\n"
        f"locks held: median {found['held_median']:.1f} ms, longest {found['held_longest']:.1f} ms\n"
        f"longest of {found['updates']:,} updates in another process: {found['delay_longest']:.1f} ms\n"
    )


if __name__ == "__main__":
    main()
