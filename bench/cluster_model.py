"""Frames per second on a cluster, predicted from service times: `python -m bench.cluster_model [--check] [--hidden N]`.

Hogwild across nodes is a closed queue: each of n workers collects a rollout, computes a gradient, sends it to the parameter server, which
serves one message after the other, and waits for the answer. Mean value analysis gives the rate of such a queue (Reiser and Lavenberg
1980): it assumes that service times vary as much as an exponential variable does, which makes it a little too low for steady ones.

Rollout workers for one learner are a pipeline: its rate is that of the slowest of all workers together, the learner, and its network.

`measure` takes the service times from this machine: the parts without Ray in this process, and a message of Ray between two processes.
`--check` trains A3C on 1, 2 and 3 nodes of this machine and prints the measured rate beside the prediction from the times of the round, and
from what the machine's cores do when all are busy (see `with_messages`).
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np
import torch

from slm_lab.experiment.cluster.server import ParameterServer, closing
from slm_lab.experiment.cluster.servers import ParameterServers
from slm_lab.experiment.session import Session
from slm_lab.lib.environment import environment
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.spec import Spec

ENVS, ROWS = 4, 32
_UPDATES = 1000
"""Number of updates of a measurement with messages."""
GIGABIT = 125e6
"""Bytes per second of a network of 1 Gbit/s."""


@dataclass(frozen=True)
class Times:
    """Service times, in seconds, and sizes, in bytes, of one worker."""

    rollout: float
    """Env steps and inference of a rollout."""
    gradient: float
    """From the rollout to the gradient."""
    client: float
    """Of the worker, to make a message of a gradient, and parameters of the answer."""
    server: float
    """In a process of the parameter server, for one push: the optimizer's step and the answer, without the message."""
    message: float
    """Of a call and its answer between two processes with as many bytes as a push to one process and its answer have."""
    sender: float
    """Processor time of the worker for such a message, all threads."""
    receiver: float
    """The same of the server's process."""
    push: int
    pull: int
    """Bytes of a push to all processes of the server, and of their answers."""
    processes: int = 1
    """Number of processes of the server, each with a range of the net's parameters."""
    frames: int = ENVS * ROWS
    """Of a rollout."""
    bandwidth: float = 10 * GIGABIT
    """Of the network at each process of the server, or at the learner."""
    latency: float = 0.0
    """Of the network, there and back; 0 on one machine, some 1e-4 in one rack."""


def closed_queue(workers: int, think: float, service: float) -> float:
    """Return the rate of one server with a closed number of customers, by exact mean value analysis.

    Args: think: seconds of a customer between its answer and its next request; service: seconds of the server per request.
    """
    waiting, rate = 0.0, 0.0
    for number in range(1, workers + 1):
        response = service * (1.0 + waiting)
        rate = number / (think + response)
        waiting = rate * response
    return rate


def hogwild(times: Times, workers: int, cores: float = float("inf")) -> float:
    """Return the frames per second of `workers` that push gradients to one parameter server.

    Args: cores: how many cores' work the machine does on which all of them run, and the server too; infinity: each has a core of its own.
    """
    service = times.server + times.receiver
    network = (times.push + times.pull) / times.processes / times.bandwidth
    sender = times.processes * times.sender
    think = times.rollout + times.gradient + times.client + max(times.message - times.receiver, sender) + times.latency
    rate = closed_queue(workers, think, max(service, network))
    work = times.rollout + times.gradient + times.client + sender + times.processes * service
    return times.frames * min(rate, cores / work)


def impala(times: Times, workers: int, cores: float = float("inf")) -> float:
    """Return the frames per second of `workers` whose rollouts one learner trains on. `push` is then the size of a rollout."""
    learner = times.gradient + times.server + times.receiver
    collect = times.rollout + times.sender
    network = (times.push + times.pull / 4) / times.bandwidth
    rate = min(workers / collect, 1.0 / learner, 1.0 / network, cores / (collect + learner))
    return times.frames * rate


def spec_of(hidden: int, workers: int = 1, frames: int = 10**6) -> Spec:
    """Return A3C of CartPole."""
    net = {
        "name": "MLPNet",
        "hid_layers": [hidden, hidden],
        "hid_layers_activation": "tanh",
        "optim_spec": {"name": "GlobalAdam", "lr": 1e-3},
    }
    algorithm = {"name": "ActorCritic", "lam": 0.95, "training_frequency": ROWS}
    return Spec.model_validate(
        {
            "name": "a3c",
            "agent": {"algorithm": algorithm, "memory": {"name": "OnPolicyBatchReplay"}, "net": net},
            "env": {"name": "CartPole-v1", "num_envs": ENVS, "max_frame": frames},
            "meta": {"random_seed": 0, "distributed": "synced", "max_session": workers, "log_frequency": frames // (4 * workers)},
        }
    )


class _Timed:
    """A process of a parameter server, in this one, that measures itself, and what its messages weigh."""

    node = "here"

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        self.look: Callable[[], None] | None = None
        """The driver's turn while the Session waits for further processes."""
        self.served: list[float] = []
        self.inside = 0.0
        """Seconds in `start`."""
        self.push = self.pull = 0

    def send(self, method: str, *args: Any) -> None: ...

    def call(self, method: str, *args: Any) -> Any:
        return self.start(method, *args)

    def done(self, started: Any) -> bool:
        return True

    def result(self, started: Any) -> Any:
        return started

    def __reduce__(self) -> Any:  # a handle, of which a copy would be another server
        return _handle, (id(self),)

    def start(self, method: str, *args: Any) -> Any:
        begin = perf_counter()
        if method == "status" and self.look is not None:
            look, self.look = self.look, None
            look()
            self.look = look
        sent, request = _bytes(args)
        middle = perf_counter()
        result = getattr(self.server, method)(*sent)
        end = perf_counter()
        back, answer = _bytes(result)
        if (method == "run" and args[2] == "receive") or (method == "run_packed" and b"receive" in args[0]):
            self.served.append(end - middle)
            self.push, self.pull = request, answer
        self.inside += perf_counter() - begin
        return back


_HANDLES: dict[int, _Timed] = {}


def _handle(number: int) -> _Timed:
    return _HANDLES[number]


def _bytes(value: Any) -> tuple[Any, int]:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(data, buffers=raw), len(data) + sum(map(len, raw))


Message = Callable[[int, int], tuple[float, float, float]]
"""message(bytes there, bytes back): Times.message, sender and receiver."""


def measure(hidden: int, message: Message, updates: int = 200) -> Times:
    """Return the service times of A3C with a net of two hidden layers: medians."""
    from slm_lab.experiment.cluster.arrays import RemoteArrays

    spec = spec_of(hidden, frames=updates * ENVS * ROWS)
    with ExitStack() as stack:

        def start(number: int) -> _Timed:
            remote = _Timed(stack.enter_context(closing(ParameterServer(spec, session_seeds(0, 0, 0), number))))
            _HANDLES[id(remote)] = remote
            return remote

        servers = ParameterServers(start, lambda: None, lambda number: None)
        remote = cast("_Timed", servers.first)
        remote.look = servers.look
        session = Session(spec)
        session.store = RemoteArrays(remote, spec, 0, lambda: session.info)
        session.build()
        updates_s: list[float] = []
        rollouts_s: list[float] = []
        ended = [0.0]
        trainer = session.agent.algorithm.trainer
        update, push_update = session.agent.update, trainer.shared.push
        clients_s: list[float] = []
        pushing = [0.0]

        def timed_push(*arguments: Any) -> None:
            begin, inside = perf_counter(), sum(one.inside for one in _HANDLES.values())
            push_update(*arguments)
            pushing[0] = perf_counter() - begin
            clients_s.append(pushing[0] - sum(one.inside for one in _HANDLES.values()) + inside)

        def timed_update() -> Any:
            begin = perf_counter()
            rollouts_s.append(begin - ended[0])
            metrics = update()
            ended[0] = perf_counter()
            updates_s.append(ended[0] - begin - pushing[0])
            return metrics

        trainer.shared.push, session.agent.update = timed_push, timed_update
        session.run()
    rollout, gradient = statistics.median(rollouts_s), statistics.median(updates_s)
    processes, (push, pull) = len(servers.servers), (remote.push, remote.pull)
    _HANDLES.clear()
    server, client = statistics.median(remote.served), statistics.median(clients_s)
    return Times(rollout, gradient, client, server, *message(push, pull), processes * push, processes * pull, processes)


def ray_message(address: str = "local", calls: int = 300) -> Message:
    """Return what measures messages with Ray between two processes of this machine."""

    def message(there: int, back: int) -> tuple[float, float, float]:
        from slm_lab.experiment.cluster.connect import connected

        with connected(address, None):
            import ray

            anything: Any = ray
            actor = anything.remote(num_cpus=0)(_Echo).remote(back)
            sent = np.zeros(there // 4, np.float32)
            for _ in range(20):
                anything.get(actor.echo.remote(sent))
            before, spans, processor = anything.get(actor.processor.remote()), [], process_time()
            for _ in range(calls):
                begin = perf_counter()
                anything.get(actor.echo.remote(sent)).copy()
                spans.append(perf_counter() - begin)
            used = process_time() - processor, anything.get(actor.processor.remote()) - before
        return statistics.median(spans), used[0] / calls, used[1] / calls

    return message


class _Echo:
    """Answers with so many bytes."""

    def __init__(self, back: int) -> None:
        self.answer = np.zeros(back // 4, np.float32)

    def echo(self, values: np.ndarray) -> np.ndarray:
        values.copy()
        return self.answer

    def processor(self) -> float:
        return process_time()


def table(times: Times, what: Callable[..., float]) -> list[str]:
    """Return rows of frames per second for numbers of workers."""
    return [f"| {workers:,} | {what(times, workers):,.0f} |" for workers in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)]


def _train(hidden: int, address: str, there: int, back: int, together: Any) -> tuple[float, float, float]:
    """Train alone with a message to another process after each update, begun when all of `together` are ready.

    Returns the updates per second, and the medians of a rollout and of a gradient in seconds.
    """
    from bench.cluster_model import _Echo  # by the name that other processes find it by
    from slm_lab.experiment.cluster.connect import connected

    with connected(address, None):
        import ray

        anything: Any = ray
        actor = anything.remote(num_cpus=0)(_Echo).remote(back)
        sent = np.zeros(there // 4, np.float32)
        anything.get(actor.echo.remote(sent))
        session = Session(spec_of(hidden, frames=_UPDATES * ENVS * ROWS)).build()
        update, ended = session.agent.update, [0.0]
        rollouts_s: list[float] = []
        gradients_s: list[float] = []

        def update_and_call() -> Any:
            begin = perf_counter()
            metrics = update()
            gradients_s.append(perf_counter() - begin)
            rollouts_s.append(begin - ended[0])
            anything.get(actor.echo.remote(sent)).copy()
            ended[0] = perf_counter()
            return metrics

        session.agent.update = update_and_call
        together.wait()
        begin = ended[0] = perf_counter()
        session.run()
        rate = _UPDATES / (perf_counter() - begin)
        anything.kill(actor)
    return rate, statistics.median(rollouts_s), statistics.median(gradients_s)


def with_messages(times: Times, hidden: int, address: str, cores: int) -> tuple[Times, float]:
    """Return the times of a rollout and a gradient with a message after each, and how many cores' work the machine does when all are busy.

    Both differ from what their parts take alone: caches hold less of one's own, and threads wait for each other. The second is the rate of
    one process more than cores, each with one that answers, times the processor time that a single one takes.
    """
    context = get_context("spawn")
    with context.Manager() as manager:

        def run(processes: int) -> list[tuple[float, float, float]]:
            together = manager.Barrier(processes)
            arguments = [hidden, address, times.push // times.processes, times.pull // times.processes, together]
            with ProcessPoolExecutor(processes, context) as pool:
                return list(pool.map(_train, *([one] * processes for one in arguments)))

        ((_, rollout, gradient),) = run(1)
        rates = [rate for rate, _, _ in run(cores + 1)]
    work = rollout + gradient + times.sender + times.receiver
    return replace(times, rollout=rollout, gradient=gradient), min(cores, sum(rates) * work)


def check(hidden: int, rounds: int, frames: int) -> None:
    """Train on 1, 2 and 3 nodes of this machine; print measured and predicted frames per second of each round."""
    from ray.cluster_utils import Cluster

    from slm_lab.experiment.plan import Plan
    from slm_lab.experiment.sink import complete_rows
    from slm_lab.experiment.trial import Trial

    cores = len(os.sched_getaffinity(0))
    values = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    ratios: dict[int, list[float]] = {1: [], 2: [], 3: []}
    with environment(values), TemporaryDirectory(prefix="slm_", dir="/tmp") as folder:
        for number in range(rounds):
            cluster: Any = Cluster(shutdown_at_exit=False)
            try:
                for workers in ratios:
                    cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
                    if workers == 1:
                        times = measure(hidden, ray_message(str(cluster.address)))
                        times, busy = with_messages(times, hidden, str(cluster.address), cores)
                        _say(f"{times}; {cores} busy cores do the work of {busy:.2f}")
                    trial = Trial(spec_of(hidden, workers, frames), plan=Plan(data_dir=Path(folder), cluster=str(cluster.address)))
                    trial.run()
                    assert trial.paths is not None
                    measured = 0.0
                    for index in range(workers):
                        rows = complete_rows(trial.paths.session_df(index))
                        seconds = float(rows[-1]["wall_t"]) - float(rows[0]["wall_t"])
                        measured += (float(rows[-1]["frame"]) - float(rows[0]["frame"])) / seconds
                    predicted = hogwild(times, workers, busy)
                    ratios[workers].append(predicted / measured)
                    _say(f"round {number}, {workers} nodes: measured {measured:,.0f}, predicted {predicted:,.0f} frames/s")
            finally:
                cluster.shutdown()
    for workers, found in ratios.items():
        _say(f"{workers} nodes: predicted / measured, median of {rounds}: {statistics.median(found):.2f}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, and print the prediction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=64, help="units of each of two hidden layers")
    parser.add_argument("--check", action="store_true", help="train on 1 to 3 nodes of this machine, and compare")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=200_000)
    arguments = parser.parse_args()
    _say(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores")
    if arguments.check:  # by itself: a process cannot use clusters with and without a token
        return check(arguments.hidden, arguments.rounds, arguments.frames)
    times = measure(arguments.hidden, ray_message())
    for name, value in vars(times).items():
        _say(f"{name}: {f'{1e3 * value:.3f} ms' if isinstance(value, float) and value < 1.0 else f'{value:,.0f}'}")
    far = replace(times, latency=1e-4)
    _say("\n| workers | frames/s, each on a core of its own, 10 Gbit/s, 0.1 ms there and back |\n|---|---|")
    _say("\n".join(table(far, hogwild)))


if __name__ == "__main__":
    main()
