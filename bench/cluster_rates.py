"""Rates of a parameter server on this machine: `python -m bench.cluster_rates [push] [a3c] [--rounds 5] [--processes N …]`.

- push: updates per second, with Adam, of a net with 1.7 M parameters. One worker repeatedly sends a gradient to the server and receives the
  new parameters. For comparison, "bare call" measures the calls per second of a Ray actor that receives as many bytes, copies them, and
  returns as many bytes.
- a3c: frames per second of A3C on CartPole with 2 workers, each with 4 environments and rollouts of 32 steps, through Ray and in shared
  memory.

The cases of a round are measured one after the other; each round begins with another case. The command prints the median and the range of
each rate over the rounds.
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

from bench.cluster_times import Echo, spec_of, training_rate
from slm_lab.experiment.execute.ray.connect import ActorHandle, connect_cluster
from slm_lab.experiment.plan import Plan
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
def polling(servers: ParameterServers) -> Iterator[None]:
    """Context manager that polls the processes of a parameter server in a thread, as the driver of a trial does."""
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
    """Return the number of calls of `call` per second."""
    for _ in range(5):
        call()
    begin, calls = perf_counter(), 0
    while perf_counter() < begin + seconds:
        call()
        calls += 1
    return calls / (perf_counter() - begin)


def pushes(processes: int | None) -> float:
    """Return the number of pushes per second to a parameter server; each push includes its pull.

    Args: processes: number of processes of the server; None: as many as a trial has.
    """
    from bench.cluster_rates import _Divided  # other processes could not import __main__._Divided

    spec = spec_of(HIDDEN)

    def start(number: int) -> ActorHandle:
        import ray

        server = ray.remote(_Divided).options(num_cpus=0, enable_task_events=False)
        return ActorHandle(server.remote(processes, spec, session_seeds(0, 0, 0), number))

    divide_among(processes)
    with connect_cluster("local", None):
        servers = ParameterServers(start, lambda: None, lambda number: None)
        session = Session(spec, context=SessionContext(store=RemoteArrays(servers.first, spec, 0, lambda: session.parts.env_info)))
        with polling(servers):
            session.build()
        trainer = session.agent.algorithm.trainer
        assert trainer is not None
        assert trainer.shared is not None
        shared = trainer.shared
        assert abs(trainer.flat.size - 1.7e6) < 0.01e6
        trainer.flat.grad.copy_(torch.from_numpy(np.random.default_rng(0).normal(size=trainer.flat.size).astype(np.float32)))
        lr_G = [group.optimizer.lr for group in trainer.groups]
        pushes_per_s = rate(lambda: shared.push(trainer.step_with_remote_gradient, lr_G, trainer.flat.frozen))
        session.close()
    return pushes_per_s


def divide_among(processes: int | None) -> None:
    """Let this process divide the parameters of a net with HIDDEN units among the given number of server processes."""
    if processes is not None:
        store._RANGE = -(-1_710_000 // processes)


class _Divided(ParameterServer):
    """A parameter server that calls `divide_among` in its own process."""

    def __init__(self, processes: int | None, *arguments: Any) -> None:
        divide_among(processes)
        super().__init__(*arguments)


def bare_calls() -> float:
    """Return the calls per second of a Ray actor that receives and returns as many bytes as a push and its answer have."""
    sent = np.zeros(1_700_000, np.float32)
    with connect_cluster("local", None):
        import ray

        actor: Any = ray.remote(Echo).options(num_cpus=0, enable_task_events=False).remote(sent.nbytes)
        return rate(lambda: ray.get(actor.echo.remote(sent)).copy())


def a3c(cluster: str | None, frames: int) -> float:
    """Return the frames per second of A3C.

    Args: cluster: address of the Ray cluster; None: shared memory.
    """
    with (
        TemporaryDirectory(prefix="slm_", dir="/tmp") as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        return training_rate(spec_of(64, WORKERS, frames), Plan(data_dir=Path(folder), cluster=cluster))


def compare(cases: dict[str, Callable[[], float]], rounds: int, unit: str, base: str) -> None:
    """Print the rate of each case, and its ratio to the rate of the case `base` in the same round."""
    measured: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            measured[name].append(in_new_process(cases[name]))
            say(f"round {number}: {name}: {measured[name][-1]:,.1f} {unit}/s (load {os.getloadavg()[0]:.1f})")
    for name, rates in measured.items():
        ratios = [this / other for this, other in zip(rates, measured[base], strict=True)]
        spread = f"{median(rates):,.1f} ({min(rates):,.1f} to {max(rates):,.1f}) {unit}/s"
        say(f"{name}: {spread}, {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) × {base}")


def in_new_process(case: Callable[[], float]) -> float:
    """Return the result of a function that is called in a new process, since one process cannot use two clusters with different tokens."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(case).result()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print the rates."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster_rates", description="Measure rates of a parameter server.")
    # argparse also checks the value without arguments, []
    parser.add_argument("cases", nargs="*", choices=["push", "a3c", []], metavar="CASE", help="push or a3c (default: both)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each case (5)")
    parser.add_argument("--frames", type=int, default=400_000, help="frames of each run of A3C (400,000)")
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="also measure push with these numbers of server processes")
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
