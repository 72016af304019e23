"""The engine "ray": each Session of a trial in a process on some node of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slm_lab.experiment.collect.workers.ray_pool import with_local_inference
from slm_lab.experiment.events import End, Notice
from slm_lab.experiment.execute.ray.connect import Cluster, connected, on_node
from slm_lab.experiment.execute.ray.remote import LOST_NODE, RemoteActor, died
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.storage import Location, StoredPath
from slm_lab.experiment.plan import session_processes
from slm_lab.experiment.run.job import SAVING, STOP_SECONDS, Job
from slm_lab.experiment.session.cluster.parameter_server import ParameterServer
from slm_lab.experiment.session.cluster.parameter_servers import ParameterServers
from slm_lab.experiment.session.cluster.remote_sink import SinkServer
from slm_lab.experiment.session.cluster.session_actor import ClusterTask, Ready, SessionWorker
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.spec import Spec

_POLL = 0.2
"""Seconds between two looks at events."""
_CLOSE_SECONDS = 10.0
"""Time that a Session has to close its envs after it has ended."""
_LOST = 10
"""Maximum number of processes of a Session that die with their node before they have built it."""
SERVER_OPTIONS: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
"""Options of Ray for a process of a parameter server. Events are what Ray's dashboard shows of each call."""
_PENDING_SECONDS = 20.0
"""Time after which a Session that waits for a free core is a notice."""


def run_on_cluster(job: Job) -> list[End]:
    """Run each Session on a node of the cluster job.plan.cluster.

    Raises UserError if the cluster cannot be used, SpecError if the spec requires one machine.
    """
    job = replace(job, spec=with_local_inference(job.spec))
    with connected(job.plan.cluster or "local", _checkpoint_dir(job)) as cluster:
        job.emit(Notice(str(cluster)))
        return _ClusterSessions(job, cluster).run()


def _checkpoint_dir(job: Job) -> Location:
    """Return the folder that all nodes read and write."""
    if job.resumed is not None:
        return job.resumed.checkpoint_dir
    return job.plan.data_dir.absolute() if job.plan.storage is None else StoredPath(job.plan.storage)


@dataclass
class _Running:
    """A Session with its process."""

    task: ClusterTask
    actor: Any
    pending: Any
    """What its process will return: Ready, later End."""
    since: float
    """When it was started, in seconds of monotonic()."""
    deaths: int = 0
    """Number of its processes that died after the Session was built."""
    ready: Ready | None = None
    begun: bool = False


class _ClusterSessions:
    """The Sessions of a job: those that wait, those that run, and how the others ended. As in engine.py, where they are child processes."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        import ray

        self._ray: Any = ray
        self.job, self.cluster = job, cluster
        self.waiting = deque(job.indices)
        self.running: list[_Running] = []
        self.ends: list[End] = []
        self.paths: RunPaths | None = None
        self.deadline: float | None = None
        self._noticed = False
        self.gpus = gpu_share(job, cluster)
        cluster.check_fits("a session", 1, self.gpus)
        if job.spec.meta.distributed:
            cluster.check_total(f"{len(job.indices)} sessions of one net", len(job.indices))
        if job.spec.meta.sampler is not None:
            cluster.check_total("a session and its rollout workers (meta.sampler.num_workers)", session_processes(job.spec.meta))
        local = self._ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=on_node(cluster.own))
        self.sink = local(SinkServer).remote()
        self.servers = ParameterServers(self._serve, self._checkpoint, self._restarted) if job.spec.meta.distributed else None
        resources = {"num_cpus": 1, "num_gpus": self.gpus}
        remote = self._ray.remote(**resources, max_restarts=0, scheduling_strategy="SPREAD", concurrency_groups={"control": 1})
        self.worker = remote(SessionWorker)

    def run(self) -> list[End]:
        meta = self.job.spec.meta
        concurrent = self.job.plan.concurrent_sessions(meta)
        if meta.sampler is not None:  # else the learners could take the cores that their workers wait for
            concurrent = min(concurrent, int(sum(node.cores for node in self.cluster.nodes) // session_processes(meta)))
        try:
            while self.waiting or self.running:
                if self.job.stop.requested:
                    self._stop()
                while self.waiting and len(self.running) < concurrent:
                    self.running.append(self._start(self._task(self.waiting.popleft())))
                self._wait()
                self._begin()
            self._emit_events()
        finally:
            for one in self.running:
                self._ray.kill(one.actor)
            self._ray.kill(self.sink)
            for server in self.servers.servers if self.servers is not None else ():
                assert isinstance(server, RemoteActor)
                self._ray.kill(server.actor)
        return self.ends

    def _serve(self, number: int) -> RemoteActor:
        """Start a process of the parameter server. If it dies, Ray starts it again."""
        job, meta = self.job, self.job.spec.meta
        assert meta.random_seed is not None
        seeds = session_seeds(meta.random_seed, 0 if job.plan.common_seeds else job.trial, 0)
        strategy = "SPREAD" if number else on_node(self.cluster.own, soft=True)
        limits = {"max_restarts": meta.max_restart, "max_task_retries": -1}
        remote = self._ray.remote(**SERVER_OPTIONS, **limits, scheduling_strategy=strategy)
        return RemoteActor(remote(ParameterServer).remote(job.spec, seeds, number))

    def _checkpoint(self) -> Location | None:
        paths = self.paths or self.job.resumed
        return None if paths is None else paths.trial_checkpoint(self.job.trial)

    def _restarted(self, number: int) -> None:
        name = f"process {number} of the parameter server" if number else "the parameter server"
        self.job.emit(Notice(f"{name} ended and was restarted; the sessions continue from the last checkpoint"))

    def _task(self, index: int) -> ClusterTask:
        job = self.job
        plan = replace(job.plan, cluster=None, jobs=None, engine=None, data_dir=job.plan.data_dir.absolute())
        if self.gpus and plan.device is not None:
            plan = replace(plan, device="cuda")  # Ray shows a process the GPUs that it was given
        return ClusterTask(job.spec, index, job.trial, plan, Path(os.getcwd()), resumed=job.resumed)

    def _start(self, task: ClusterTask) -> _Running:
        server = None if self.servers is None else self.servers.first
        actor = self.worker.remote(task, RemoteActor(self.sink), server)
        return _Running(task, actor, actor.build.remote(), time.monotonic())

    def _wait(self) -> None:
        """Handle what has happened, after waiting for at most _POLL seconds."""
        pending = {one.pending: one for one in self.running if one.pending is not None}
        if pending:
            done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=_POLL)
        else:
            time.sleep(_POLL)
            done = []
        if self.servers is not None:
            self.servers.look()
        self._emit_events()
        for future in done:
            one = pending[future]
            one.pending = None
            try:
                self._handle(one, self._ray.get(future))
            except self._ray.exceptions.RayError as error:
                self._died(one, died(error))
        late = [one for one in self.running if one.ready is None and time.monotonic() > one.since + _PENDING_SECONDS]
        if late and not self._noticed:
            self._noticed = True
            self.job.emit(
                Notice(f"{len(late)} session{'s' * (len(late) > 1)} still wait for a free core of the cluster, or are being built")
            )

    def _emit_events(self) -> None:
        for event in self._ray.get(self.sink.take.remote()):
            self.job.emit(event)

    def _handle(self, one: _Running, result: Ready | End) -> None:
        if isinstance(result, End):
            self._end(one, result)
        elif result.choices is not None:
            one.ready = result
        elif result.error is not None:
            if self.paths is None:
                raise result.error
            self._end(one, End(one.task.index, "failed", str(result.error)))
        elif self.job.stop.requested:
            self._end(one, End(one.task.index, "stopped"))
        else:
            self._end(one, End(one.task.index, "failed", result.failure))

    def _died(self, one: _Running, reason: str) -> None:
        """The process of a Session, or its node, is gone: the Session is restarted from its last checkpoint."""
        task, most = one.task, self.job.spec.meta.max_restart
        name = f"session {task.index}"
        deaths = one.deaths + 1
        if one.ready is None and reason == LOST_NODE and task.restart < most + _LOST:  # Ray had placed it on a node that was dead already
            deaths = one.deaths
        if self.job.stop.requested or deaths > most:
            restarts = f" after {one.deaths} restart{'s' * (one.deaths != 1)} (meta.max_restart)" if one.deaths else ""
            self._end(one, End(task.index, "failed", f"its process ended{restarts}: {reason}"))
            return
        if deaths > one.deaths:
            self.job.emit(Notice(f"{name}: its process ended: {reason}; restarting it ({deaths} of {most})"))
        self._ray.kill(one.actor)
        again = replace(task, restart=task.restart + 1, resumed=self.paths or task.resumed, begun=task.begun or one.begun)
        self.running[self.running.index(one)] = replace(self._start(again), deaths=deaths)

    def _begin(self) -> None:
        """Let Sessions train that were built; those that train one net, together."""
        ready = [one for one in self.running if one.ready is not None and not one.begun]
        if self.job.stop.requested:
            return
        if self.job.spec.meta.distributed and self.paths is None and len(ready) < len(self.running):
            return
        for one in ready:
            assert one.ready is not None
            assert one.ready.choices is not None
            self.paths = self.paths or self.job.open_run(one.ready.choices)
            one.begun, one.pending = True, one.actor.train.remote(self.paths)

    def _end(self, one: _Running, end: End) -> None:
        if one.begun and end.status != "failed":
            closing = one.actor.close.remote()
            self._ray.wait([closing], timeout=_CLOSE_SECONDS)
        self._ray.kill(one.actor)
        self.running.remove(one)
        self._emit_events()
        self.ends.append(end)
        self.job.emit(end)

    def _stop(self) -> None:
        """Let those that have begun save themselves; the others have nothing to save."""
        self.waiting.clear()
        if self.deadline is None:
            self.deadline = time.monotonic() + STOP_SECONDS
            if any(one.begun for one in self.running):
                self.job.emit(Notice(SAVING))
            for one in list(self.running):
                if one.begun:
                    one.actor.stop.options(concurrency_group="control").remote()
                else:
                    self._end(one, End(one.task.index, "stopped"))
        elif time.monotonic() > self.deadline:
            for one in list(self.running):
                self._end(one, End(one.task.index, "failed", f"did not save itself within {STOP_SECONDS:g} s"))


def gpu_share(job: Job, cluster: Cluster) -> float:
    """Return the GPUs of a Session: 1 if its net computes on one and there is one."""
    return float(_wants_gpu(job.spec, job.plan.device) and any(node.gpus >= 1 for node in cluster.nodes))


def _wants_gpu(spec: Spec, device: str | None) -> bool:
    if device is not None:
        return device != "cpu"
    return spec.agent.net is not None and spec.agent.net.gpu is not False
