"""What the child processes of a worker pool run: a rollout worker, or the inference server."""

from __future__ import annotations

import os
import shutil
import time
from multiprocessing import current_process
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any

from slm_lab.experiment.collect.workers.shared import WorkerConfig
from slm_lab.experiment.execute.heartbeat import CLOSING
from slm_lab.lib.store import SharedArrays
from slm_lab.spec.report import SpecError

if TYPE_CHECKING:
    from slm_lab.experiment.collect.workers.worker import RolloutWorker
    from slm_lab.experiment.execute.executor import Context
    from slm_lab.experiment.execute.local.child import SharedFd

CONNECT = "connect"
"""Order: the shared arrays are there; build the policies and begin episodes."""
SAVE, LOAD = "save", "load"
"""Orders between two rounds: (SAVE, number of the request): send the state; (LOAD, state or None, resumes): continue a run."""
_NICE = 5
"""In async mode the learner has priority: if cores are fewer than processes, the data that it trains on limits the run more often than
the envs do, and workers that run ahead of it only wait."""

_ORPHAN_SECONDS = 10.0
"""Time for which workers are answered after the learner was killed, so that they can close their envs."""


def run_worker(context: Context, config: WorkerConfig, memory: SharedFd) -> None:
    """Collect rollouts into the requested slots until a stop is requested.

    Messages: ("built", EnvInfo), ("ready",), then ("rollout", slot, Collected) for each, and ("state", number, state) when asked; or
    ("user_error", SpecError).
    """
    from slm_lab.experiment.collect.workers.inference import CentralInference
    from slm_lab.experiment.collect.workers.worker import RolloutWorker, seed_process

    assert config.spec.meta.sampler is not None
    if config.spec.meta.sampler.async_rl and hasattr(os, "nice"):
        os.nice(_NICE)
    seed_process(config)
    try:
        worker = RolloutWorker(config, context.beat)
    except SpecError as error:
        context.send("user_error", error)
        return
    context.send("built", worker.info)
    if context.receive() != CONNECT:
        return
    worker.attach(SharedArrays(memory.fd, fresh=False))
    if config.address:
        buffers = worker.arrays.buffers[config.index]
        worker.inference = CentralInference(config.address, config.index, buffers, worker.subscriber)
    worker.stop = context.stop
    context.send("ready")
    while (order := context.receive()) is not None:
        _carry_out(order, worker, context)
    context.beat(CLOSING)
    worker.close()


def _carry_out(order: Any, worker: RolloutWorker, context: Context) -> None:
    """Collect into a slot, or load or send the state."""
    from slm_lab.experiment.files.bundle import set_rng_state, to_tensors

    match order:
        case int():
            report = worker.collect(order)
            if not context.stop.requested:
                context.send("rollout", order, report)
        case (kind, saved, resumes) if kind == LOAD:
            if worker.resume(saved, resumes):
                set_rng_state(to_tensors(saved["rng"]), "cpu")
        case (kind, request) if kind == SAVE:
            context.send("state", request, worker.state_dict())


def run_inference(context: Context, config: WorkerConfig, memory: SharedFd) -> None:
    """Serve inference requests until killed; if the learner was killed, until the workers have ended. Message: ("ready",)."""
    from slm_lab.experiment.collect.workers.inference import InferenceServer

    server = InferenceServer(config, SharedArrays(memory.fd, fresh=False), context.beat)
    if os.path.exists(config.address):  # of a server that was killed
        os.unlink(config.address)
    with Listener(config.address, "AF_UNIX", backlog=256, authkey=current_process().authkey) as listener:
        context.send("ready")
        server.accept(listener)
        while not context.stop.requested:
            server.serve()
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while server.clients and time.monotonic() < deadline:
            server.serve()
    shutil.rmtree(os.path.dirname(config.address), ignore_errors=True)  # the learner's work, but it is gone
