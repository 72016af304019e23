"""Frames per second on a cluster, predicted from service times: `python -m bench.cluster_model [--check] [--hidden N]`.

Hogwild across nodes is a closed queueing network. Each of n workers repeatedly collects a rollout, computes a gradient, sends the gradient
to the parameter server and waits for the answer; the server handles one message after the other. Mean value analysis (Reiser and Lavenberg
1980) gives the rate of such a network. The analysis assumes exponentially distributed service times, so the predicted rate is slightly too
low for service times that vary less.

The service times are measured on this machine (bench.cluster_times): the parts without Ray in this process, and a Ray message between two
processes. With `--check`, A3C is trained on 1, 2 and 3 nodes on this machine, and the measured rate is printed beside the prediction. This
prediction uses service times that were measured in the same round and with messages between the parts, and the capacity of the machine's
cores when all cores are busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.cluster_times import Times, measure, ray_message, spec_of, training_rate, with_messages
from slm_lab.experiment.plan import Plan
from slm_lab.lib.process import temporary_environment


def closed_queue(workers: int, think: float, service: float) -> float:
    """Return the rate of one server with a fixed number of customers (`workers`), by exact mean value analysis.

    Args:
        think: time between an answer to a customer and the next request of this customer, s.
        service: time of the server per request, s.
    """
    waiting, rate = 0.0, 0.0
    for number in range(1, workers + 1):
        response = service * (1.0 + waiting)
        rate = number / (think + response)
        waiting = rate * response
    return rate


def hogwild(times: Times, workers: int, cores: float = float("inf")) -> float:
    """Return the frames per second of `workers` that push gradients to one parameter server.

    Args: cores: effective number of cores that the workers and the server share (see with_messages); infinity: each process has its own
        core.
    """
    service = times.server + times.receiver
    network = (times.push + times.pull) / times.processes / times.bandwidth
    sender = times.processes * times.sender
    think = times.rollout + times.gradient + times.client + max(times.message - times.receiver, sender) + times.latency
    rate = closed_queue(workers, think, max(service, network))
    work = times.rollout + times.gradient + times.client + sender + times.processes * service
    return times.frames * min(rate, cores / work)


def table(times: Times) -> list[str]:
    """Return table rows with the predicted frames per second for several numbers of workers."""
    return [f"| {workers:,} | {hogwild(times, workers):,.0f} |" for workers in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)]


def check(hidden: int, rounds: int, frames: int) -> None:
    """Train on 1, 2 and 3 nodes on this machine, and print the measured and predicted frames per second of each round."""
    from ray.cluster_utils import Cluster

    cores = len(os.sched_getaffinity(0))
    values = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    ratios: dict[int, list[float]] = {1: [], 2: [], 3: []}
    with temporary_environment(values), TemporaryDirectory(prefix="slm_", dir="/tmp") as folder:
        for number in range(rounds):
            cluster = Cluster(shutdown_at_exit=False)
            try:
                for workers in ratios:
                    cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
                    if workers == 1:
                        times = measure(hidden, ray_message(str(cluster.address)))
                        times, capacity = with_messages(times, hidden, str(cluster.address), cores)
                        _say(f"{times}; capacity of {cores} cores: {capacity:.2f}")
                    plan = Plan(data_dir=Path(folder), cluster=str(cluster.address))
                    measured = training_rate(spec_of(hidden, workers, frames), plan)
                    predicted = hogwild(times, workers, capacity)
                    ratios[workers].append(predicted / measured)
                    _say(f"round {number}, {workers} nodes: measured {measured:,.0f}, predicted {predicted:,.0f} frames/s")
            finally:
                cluster.shutdown()
    for workers, round_ratios in ratios.items():
        _say(f"{workers} nodes: predicted / measured, median of {rounds}: {statistics.median(round_ratios):.2f}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure the service times and print the prediction."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster_model", description="Predict the frames per second on a cluster.")
    parser.add_argument("--hidden", type=int, default=64, help="units of each of the two hidden layers")
    parser.add_argument("--check", action="store_true", help="train on 1, 2 and 3 nodes on this machine, and compare with the prediction")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --check (5)")
    parser.add_argument("--frames", type=int, default=200_000, help="frames of each run of --check (200,000)")
    arguments = parser.parse_args()
    _say(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores")
    if arguments.check:  # no other measurement: one process cannot use both a cluster with a token and a cluster without one
        return check(arguments.hidden, arguments.rounds, arguments.frames)
    times = measure(arguments.hidden, ray_message())
    for name, value in vars(times).items():
        _say(f"{name}: {f'{1e3 * value:.3f} ms' if isinstance(value, float) and value < 1.0 else f'{value:,.0f}'}")
    far = replace(times, latency=1e-4)
    _say("\n| workers | frames/s (one core per worker, 10 Gbit/s, round trip of 0.1 ms) |\n|---|---|")
    _say("\n".join(table(far)))


if __name__ == "__main__":
    main()
