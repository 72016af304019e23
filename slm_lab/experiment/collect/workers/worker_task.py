"""The tasks of a pool of rollout workers: a rollout worker, and the inference server."""

from __future__ import annotations

import os
import shutil
import time
from multiprocessing import current_process
from multiprocessing.connection import Listener
from typing import Any

import torch

from slm_lab.experiment.collect.workers.inference import InferenceServer
from slm_lab.experiment.collect.workers.link import MemoryEnd, WorkerEnd
from slm_lab.experiment.collect.workers.shared import WorkerConfig, sampler_of
from slm_lab.experiment.collect.workers.worker import RolloutWorker, seed_process
from slm_lab.experiment.execute.executor import Context
from slm_lab.experiment.execute.heartbeat import CLOSING
from slm_lab.spec.report import SpecError

SAVE, LOAD = "save", "load"
"""Orders between two rounds: (SAVE, number of the request): send the state; (LOAD, state or None, resumes): continue a run."""
_ORPHAN_SECONDS = 10.0
"""Time for which workers are answered after the learner was killed, so that they can close their envs."""


def run_worker(context: Context, config: WorkerConfig, link: WorkerEnd) -> None:
    """Collect rollouts into the requested slots until a stop is requested.

    Messages: ("built", EnvInfo), after the first order ("ready",), then ("rollout", slot, Collected, …) for each slot that is ordered, and
    ("state", number, state) when asked; or ("user_error", SpecError).
    """
    if sampler_of(config.spec).async_rl and hasattr(os, "nice"):
        os.nice(link.niceness)
    torch.set_num_threads(1)
    seed_process(config)
    try:
        worker = RolloutWorker(config, context.beat)
    except SpecError as error:
        context.send("user_error", error)
        return
    worker.stop = context.stop
    context.send("built", worker.info)
    if (first := context.receive()) is None:
        return
    link.connect(worker, first, context)
    context.send("ready")
    while (order := context.receive()) is not None:
        _carry_out(order, worker, link, context)
    context.beat(CLOSING)
    worker.close()


def _carry_out(order: Any, worker: RolloutWorker, link: WorkerEnd, context: Context) -> None:
    """Collect into a slot, or load or send the state, or do what the link does."""
    match order:
        case int(slot):
            report = worker.collect(slot)
            if not context.stop.requested:
                link.send(worker, slot, report, context)
        case (kind, saved, resumes) if kind == LOAD:
            worker.resume_process(saved, resumes)
        case (kind, request) if kind == SAVE:
            context.send("state", request, worker.state_dict())
        case _:
            link.take(order)


def run_inference(context: Context, config: WorkerConfig, link: MemoryEnd) -> None:
    """Serve inference requests until killed; if the learner was killed, until the workers have ended. Message: ("ready",)."""
    server = InferenceServer(config, link.store, context.beat)
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
