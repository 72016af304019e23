"""Service times of the parts of A3C on a cluster, measured on this machine."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from threading import Barrier
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np

from slm_lab.agent.optim.trainer import Trainer
from slm_lab.experiment.execute.ray.connect import ActorHandle
from slm_lab.experiment.files.sink import complete_rows
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.cluster.parameter_server import ParameterServer, ParameterServers, closing_server
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import Metrics
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.spec import Spec

ENVS, ROWS = 4, 32
"""Number of envs of a worker, and number of steps of a rollout."""
GIGABIT = 125e6
"""Bandwidth of a network with 1 Gbit/s, in bytes per second."""
_UPDATES = 1000
"""Number of updates in each process that `with_messages` starts."""


@dataclass(frozen=True)
class Times:
    """Service times (s) and message sizes (bytes) of one worker."""

    rollout: float
    """Time of the env steps and the inference of a rollout."""
    gradient: float
    """Time to compute the gradient from a rollout."""
    client: float
    """Time in the worker to create a message from a gradient, and to read the parameters from the answer."""
    server: float
    """Time in a process of the parameter server for one push: the optimizer step and the answer, without the transfer of the message."""
    message: float
    """Round-trip time of a call between two processes. The call and its answer have as many bytes as a push to one server process and the
    answer to this push."""
    sender: float
    """Processor time of the worker, over all threads, for such a call."""
    receiver: float
    """Processor time of the server process for such a call."""
    push: int
    """Size of a push, summed over the processes of the server."""
    pull: int
    """Size of the answer to a push, summed over the processes of the server."""
    processes: int = 1
    """Number of processes of the server; each holds a range of the net's parameters."""
    frames: int = ENVS * ROWS
    """Number of frames of a rollout."""
    bandwidth: float = 10 * GIGABIT
    """Bandwidth of the network at each process of the server, in bytes per second."""
    latency: float = 0.0
    """Round-trip time of the network; 0 on one machine, about 1e-4 within a rack."""


def spec_of(hidden: int, workers: int = 1, frames: int = 10**6) -> Spec:
    """Return a spec of A3C on CartPole.

    Args: hidden: units of each of the two hidden layers.
    """
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


class _Timed(ActorHandle):
    """Handle of a parameter server in this process. The handle measures the time of the server and the sizes of the messages."""

    actor: ParameterServer

    def __init__(self, server: ParameterServer) -> None:
        super().__init__(server)
        self.poll: Callable[[], None] | None = None
        """Function that the driver would call while the Session waits for more server processes."""
        self.served: list[float] = []
        self.inside = 0.0
        """Time spent in `start`, s."""
        self.push = self.pull = 0

    def is_done(self, started: Any) -> bool:
        return True

    def result(self, started: Any) -> Any:
        return started

    def __reduce__(self) -> Any:  # pickled as a reference, since a copy would be another server
        return _handle, (id(self),)

    def start(self, method: str, *args: Any) -> Any:
        begin = perf_counter()
        if method == "status" and self.poll is not None:
            poll, self.poll = self.poll, None
            poll()
            self.poll = poll
        sent, request = _bytes(args)
        middle = perf_counter()
        result = getattr(self.actor, method)(*sent)
        end = perf_counter()
        back, answer = _bytes(result)
        push = Trainer.step_with_remote_gradient.__name__
        if (method == "run" and args[2] == push) or (method == "run_packed" and push.encode() in args[0]):
            self.served.append(end - middle)
            self.push, self.pull = request, answer
        self.inside += perf_counter() - begin
        return back


_HANDLES: dict[int, _Timed] = {}


def _handle(number: int) -> _Timed:
    return _HANDLES[number]


def _bytes(value: Any) -> tuple[Any, int]:
    """Return a copy of a value, made by pickling, and the number of pickled bytes."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(data, buffers=raw), len(data) + sum(map(len, raw))


Message = Callable[[int, int], tuple[float, float, float]]
"""Function (bytes sent, bytes returned) → (Times.message, Times.sender, Times.receiver)."""


def time_updates(session: Session, after: Callable[[], object] = lambda: None) -> tuple[list[float], list[float]]:
    """Measure the rollouts and updates of a Session that is built but has not run yet.

    Returns two lists, to which the times (s) of each rollout and each update are appended while the Session runs.

    Args: after: function that is called after each update; its time is not included.
    """
    rollouts_s: list[float] = []
    updates_s: list[float] = []
    update, ended = session.agent.update, perf_counter()

    def timed_update() -> Metrics:
        nonlocal ended
        begin = perf_counter()
        metrics: Metrics = update()
        updates_s.append(perf_counter() - begin)
        rollouts_s.append(begin - ended)
        after()
        ended = perf_counter()
        return metrics

    session.agent.update = timed_update
    return rollouts_s, updates_s


def measure(hidden: int, message: Message, updates: int = 200) -> Times:
    """Return the service times (medians over the updates) of A3C with a net that has two hidden layers of `hidden` units."""
    from slm_lab.experiment.session.cluster.remote import RemoteArrays

    spec = spec_of(hidden, frames=updates * ENVS * ROWS)
    with ExitStack() as stack:

        def start(number: int) -> _Timed:
            remote = _Timed(stack.enter_context(closing_server(ParameterServer(spec, session_seeds(0, 0, 0), number))))
            _HANDLES[id(remote)] = remote
            return remote

        servers = ParameterServers(start, lambda: None, lambda number: None)
        remote = cast("_Timed", servers.first)
        remote.poll = servers.poll
        session = Session(spec, context=SessionContext(store=RemoteArrays(remote, spec, 0, lambda: session.parts.env_info)))
        session.build()
        push_update = session.agent.algorithm.trainer.shared.push
        pushes_s: list[float] = []
        clients_s: list[float] = []

        def timed_push(*arguments: Any) -> None:
            begin, inside = perf_counter(), sum(handle.inside for handle in _HANDLES.values())
            push_update(*arguments)
            pushes_s.append(perf_counter() - begin)
            clients_s.append(pushes_s[-1] - sum(handle.inside for handle in _HANDLES.values()) + inside)

        session.agent.algorithm.trainer.shared.push = timed_push
        rollouts_s, updates_s = time_updates(session)
        session.run()
    gradient = median(update - push for update, push in zip(updates_s, pushes_s, strict=True))
    processes, (push, pull) = len(servers.servers), (remote.push, remote.pull)
    _HANDLES.clear()
    parts = median(rollouts_s), gradient, median(clients_s), median(remote.served)
    return Times(*parts, *message(push, pull), processes * push, processes * pull, processes)


class Echo:
    """Ray actor that answers each call with `back` bytes."""

    def __init__(self, back: int) -> None:
        self.answer = np.zeros(back // 4, np.float32)

    def echo(self, values: np.ndarray) -> np.ndarray:
        values.copy()
        return self.answer

    def processor(self) -> float:
        return process_time()


def training_rate(spec: Spec, plan: Plan) -> float:
    """Train with meta.distributed, and return the frames per second: the sum over the workers, each from its first row to its last row."""
    trial = Trial(spec, plan=plan)
    trial.run()
    assert trial.paths is not None
    total = 0.0
    for index in range(spec.meta.max_session):
        first, *_, last = complete_rows(trial.paths.session_df(index))
        total += (float(last["frame"]) - float(first["frame"])) / (float(last["wall_t"]) - float(first["wall_t"]))
    return total


@contextmanager
def echo(address: str, there: int, back: int) -> Iterator[tuple[Callable[[], object], Callable[[], float]]]:
    """Context manager that starts an Echo on a cluster.

    Yields a function that sends `there` bytes to the Echo and receives `back` bytes, and a function that returns the processor time (s) of
    the Echo.
    """
    from slm_lab.experiment.execute.ray.connect import connect_cluster

    with connect_cluster(address, None):
        import ray

        actor: Any = ray.remote(Echo).options(num_cpus=0).remote(back)
        sent = np.zeros(there // 4, np.float32)
        yield lambda: ray.get(actor.echo.remote(sent)).copy(), lambda: ray.get(actor.processor.remote())
        ray.kill(actor)


def ray_message(address: str = "local", calls: int = 300) -> Message:
    """Return a function that measures Ray messages between two processes on this machine."""

    def message(there: int, back: int) -> tuple[float, float, float]:
        with echo(address, there, back) as (call, processor):
            for _ in range(20):
                call()
            before, spans, own = processor(), [], process_time()
            for _ in range(calls):
                begin = perf_counter()
                call()
                spans.append(perf_counter() - begin)
            used = process_time() - own, processor() - before
        return median(spans), used[0] / calls, used[1] / calls

    return message


def _train(hidden: int, address: str, there: int, back: int, barrier: Barrier) -> tuple[float, float, float]:
    """Train a net that is not shared, and call an Echo after each update. Training begins when all processes of the barrier are ready.

    Returns the updates per second, and the median times (s) of a rollout and an update.
    """
    with echo(address, there, back) as (call, _):
        call()
        session = Session(spec_of(hidden, frames=_UPDATES * ENVS * ROWS)).build()
        rollouts_s, updates_s = time_updates(session, call)
        barrier.wait()
        begin = perf_counter()
        session.run()
        rate = _UPDATES / (perf_counter() - begin)
    return rate, median(rollouts_s), median(updates_s)


def with_messages(times: Times, hidden: int, address: str, cores: int) -> tuple[Times, float]:
    """Return the service times with a message after each update, and the capacity of this machine's cores when all are busy.

    A rollout and a gradient take longer with messages between them, since the processor's caches then hold other data too.

    The capacity is the effective number of cores, which is lower than `cores`. To measure it, `cores` + 1 processes train at the same time,
    each with its own Echo. The capacity is the sum of their updates per second, multiplied by the processor time of one update, which is
    measured with a single process.
    """
    context = get_context("spawn")
    with context.Manager() as manager:

        def run(processes: int) -> list[tuple[float, float, float]]:
            barrier = manager.Barrier(processes)
            arguments = [hidden, address, times.push // times.processes, times.pull // times.processes, barrier]
            with ProcessPoolExecutor(processes, context) as pool:
                return list(pool.map(_train, *([argument] * processes for argument in arguments)))

        ((_, rollout, gradient),) = run(1)
        rates = [rate for rate, _, _ in run(cores + 1)]
    work = rollout + gradient + times.sender + times.receiver
    return replace(times, rollout=rollout, gradient=gradient), min(cores, sum(rates) * work)
