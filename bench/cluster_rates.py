"""Rates of a parameter server on this machine: `python -m bench.cluster_rates [push] [a3c] [--rounds 5] [--processes N …]`.

- push: updates per second, with Adam, of a net with 1.7 M parameters. One worker repeatedly sends a gradient to the server and receives the
  new parameters. For comparison: calls per second of a Ray actor that receives and copies as many bytes, and returns as many.
- a3c: frames per second of A3C on CartPole with 2 workers, each with 4 environments and rollouts of 32 steps, through Ray and in shared
  memory.

The cases of a round are measured one after the other, beginning with another case in each round. The command prints the medians over the
rounds and their range.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.cluster_times import Echo, spec_of
from slm_lab.experiment.execute.ray.connect import ActorHandle, connect_cluster
from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.cluster.parameter_server import ParameterServer, ParameterServers
from slm_lab.experiment.session.cluster.remote import RemoteArrays
from slm_lab.experiment.session.session import Session
from slm_lab.lib import store
from slm_lab.lib.rng import session_seeds

HIDDEN = 918
"""Units of each hidden layer of the two nets, which together have 1.7 M parameters."""
WORKERS = 2


@contextmanager
def looked_after(servers: ParameterServers) -> Iterator[None]:
    """Poll the processes of a server in a thread during the with-block, as the driver of a trial does."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(0.05):
            servers.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rate(call: Callable[[], object], seconds: float = 3.0) -> float:
    """Return how often `call` can be called per second."""
    for _ in range(5):
        call()
    begin, calls = perf_counter(), 0
    while perf_counter() < begin + seconds:
        call()
        calls += 1
    return calls / (perf_counter() - begin)


def pushes(processes: int | None) -> float:
    """Return the rate of a push with its pull, per second, for a server with `processes` processes; None: as many as a trial has."""
    from bench.cluster_rates import _Divided  # imported under the name by which other processes find it

    spec = spec_of(HIDDEN)

    def start(number: int) -> ActorHandle:
        import ray

        server = ray.remote(_Divided).options(num_cpus=0, enable_task_events=False)
        return ActorHandle(server.remote(processes, spec, session_seeds(0, 0, 0), number))

    divide_among(processes)
    with connect_cluster("local", None):
        servers = ParameterServers(start, lambda: None, lambda number: None)
        session = Session(spec, context=SessionContext(store=RemoteArrays(servers.first, spec, 0, lambda: session.parts.info)))
        with looked_after(servers):
            session.build()
        trainer = session.agent.algorithm.trainer
        assert trainer is not None
        assert trainer.shared is not None
        shared = trainer.shared
        assert abs(trainer.flat.size - 1.7e6) < 0.01e6
        trainer.flat.grad.copy_(torch.from_numpy(np.random.default_rng(0).normal(size=trainer.flat.size).astype(np.float32)))
        lr_G = [group.optimizer.lr for group in trainer.groups]
        found = rate(lambda: shared.push(trainer.receive, lr_G, trainer.flat.frozen))
        session.close()
    return found


def divide_among(processes: int | None) -> None:
    """Let this process divide the parameters of a net with HIDDEN units among the given number of server processes."""
    if processes is not None:
        store._RANGE = -(-1_710_000 // processes)


class _Divided(ParameterServer):
    """A parameter server in a separate process, for which `divide_among` is called there."""

    def __init__(self, processes: int | None, *arguments: Any) -> None:
        divide_among(processes)
        super().__init__(*arguments)


def bare_calls() -> float:
    """Return the calls per second of an actor that receives and returns as many bytes as a push and its answer have."""
    sent = np.zeros(1_700_000, np.float32)
    with connect_cluster("local", None):
        import ray

        actor: Any = ray.remote(Echo).options(num_cpus=0, enable_task_events=False).remote(sent.nbytes)
        return rate(lambda: ray.get(actor.echo.remote(sent)).copy())


def a3c(cluster: str | None, frames: int) -> float:
    """Return the frames per second of A3C: the sum over the workers, each from its first row to its last."""
    with TemporaryDirectory(prefix="slm_", dir="/tmp") as folder:
        trial = Trial(spec_of(64, WORKERS, frames), plan=Plan(data_dir=Path(folder), cluster=cluster))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            trial.run()
        assert trial.paths is not None
        total = 0.0
        for index in range(WORKERS):
            rows = complete_rows(trial.paths.session_df(index))
            first, last = rows[0], rows[-1]
            total += (float(last["frame"]) - float(first["frame"])) / (float(last["wall_t"]) - float(first["wall_t"]))
        return total


def compare(cases: dict[str, Callable[[], float]], rounds: int, unit: str, base: str) -> None:
    """Print the rate of each case, and its ratio to the rate of the case `base` in the same round."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(apart(cases[name]))
            say(f"round {number}: {name}: {found[name][-1]:,.1f} {unit}/s (load {os.getloadavg()[0]:.1f})")
    for name, rates in found.items():
        ratios = [one / other for one, other in zip(rates, found[base], strict=True)]
        spread = f"{median(rates):,.1f} ({min(rates):,.1f} to {max(rates):,.1f}) {unit}/s"
        say(f"{name}: {spread}, {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) × {base}")


def apart(case: Callable[[], float]) -> float:
    """Call a function in a separate process, since a process cannot use two clusters with different tokens one after the other."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(case).result()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=["push", "a3c", []], help="absent: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=400_000, help="of a run of A3C")
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="also with servers of these numbers of processes")
    arguments = parser.parse_args()
    say(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores")
    if not arguments.cases or "push" in arguments.cases:
        cases: dict[str, Callable[[], float]] = {"bare call": bare_calls, "push": partial(pushes, None)}
        cases |= {f"push, {number} processes": partial(pushes, number) for number in arguments.processes}
        compare(cases, arguments.rounds, "calls", "bare call")
    if not arguments.cases or "a3c" in arguments.cases:
        frames = arguments.frames
        runs: dict[str, Callable[[], float]] = {"shared memory": partial(a3c, None, frames), "through Ray": partial(a3c, "local", frames)}
        compare(runs, arguments.rounds, "frames", "shared memory")


if __name__ == "__main__":
    main()
