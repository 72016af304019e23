"""Run the Sessions of a trial on a Ray cluster. Each Session is a task on a node of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from slm_lab.experiment.collect.workers.worker_pool import open_cluster_pool, with_local_inference
from slm_lab.experiment.events import Notice
from slm_lab.experiment.execute.executor import Resources
from slm_lab.experiment.execute.ray.connect import ActorHandle, Cluster, connect_cluster
from slm_lab.experiment.execute.ray.ray_executor import RayExecutor
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.storage import Location, StoredPath
from slm_lab.experiment.plan import count_session_processes
from slm_lab.experiment.run.sessions import SessionHost, SessionsJob
from slm_lab.experiment.session.cluster.parameter_server import ParameterServer, ParameterServers
from slm_lab.experiment.session.cluster.remote import RemoteArrays, RemoteSink, SinkServer
from slm_lab.experiment.session.session_process import SessionTask
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.spec import Spec


@contextmanager
def cluster_host(job: SessionsJob) -> Iterator[tuple[Spec, SessionHost]]:
    """Yield (spec of the job, adapted to the cluster job.plan.cluster; SessionHost that runs the Sessions on this cluster).

    Raises UserError if the cluster cannot be used, or SpecError if the spec requires a single machine.
    """
    job = replace(job, spec=with_local_inference(job.spec))
    with connect_cluster(job.plan.cluster or "local", _checkpoint_dir(job)) as cluster:
        job.emit(Notice(str(cluster)))
        meta = job.spec.meta
        with RayExecutor(meta.stall_notice, meta.stall_limit) as executor:
            yield job.spec, _ClusterHost(job, cluster, executor)


def _checkpoint_dir(job: SessionsJob) -> Location:
    """Return the folder of the checkpoints, which all nodes of the cluster must be able to read and write."""
    if job.resumed is not None:
        return job.resumed.checkpoint_dir
    return job.plan.data_dir.absolute() if job.plan.storage is None else StoredPath(job.plan.storage)


class _ClusterHost:
    """The SessionHost that runs each Session as a task on a node of a Ray cluster."""

    restarts = True

    def __init__(self, job: SessionsJob, cluster: Cluster, executor: RayExecutor) -> None:
        self.job, self.cluster, self.executor = job, cluster, executor
        meta = job.spec.meta
        self.concurrent, processes = job.plan.concurrent_sessions(meta), count_session_processes(meta)
        self.resources = Resources(1, session_gpus(job, cluster))
        cluster.check_fits("a session", 1, self.resources.gpus)
        if meta.distributed:
            cluster.check_total(f"{len(job.indices)} sessions of one net", len(job.indices))
        if meta.sampler is not None:
            cluster.check_total("a session and its rollout workers (meta.sampler.num_workers)", processes)
            # otherwise the learners could reserve the cores for which their workers wait
            self.concurrent = min(self.concurrent, int(sum(node.cores for node in cluster.nodes) // processes))
        self.sinks = partial(RemoteSink, executor.start_server_actor(SinkServer, node=cluster.own_node, max_restarts=0), track=meta.track)
        self._checkpoint: Location | None = None if job.resumed is None else job.resumed.trial_checkpoint(job.trial)
        self.servers = (
            ParameterServers(self._start_parameter_server, lambda: self._checkpoint, self._notify_restart) if meta.distributed else None
        )

    def task(self, index: int) -> SessionTask:
        job = self.job
        plan = replace(job.plan, cluster=None, jobs=None, engine=None, data_dir=job.plan.data_dir.absolute())
        if self.resources.gpus and plan.device is not None:
            plan = replace(plan, device="cuda")  # Ray makes only the assigned GPUs visible to a process
        return SessionTask(
            job.spec,
            index,
            job.trial,
            plan,
            None if self.servers is None else partial(RemoteArrays, self.servers.first),
            resumed=job.resumed,
            open_sink=self.sinks,
            open_pool=open_cluster_pool,
            locks=False,
        )

    def poll(self, paths: RunPaths | None) -> None:
        if self.servers is not None:
            if paths is not None:
                self._checkpoint = paths.trial_checkpoint(self.job.trial)
            self.servers.poll()

    def _start_parameter_server(self, number: int) -> ActorHandle:
        """Start process `number` of the parameter server. Ray restarts a process of the parameter server if it dies."""
        job, meta = self.job, self.job.spec.meta
        seeds = session_seeds(meta.random_seed, 0 if job.plan.common_seeds else job.trial, 0)
        # Ray needs task events only for its dashboard
        options = {"max_restarts": meta.max_restart, "max_task_retries": -1, "enable_task_events": False}
        return self.executor.start_server_actor(
            ParameterServer, job.spec, seeds, number, node=None if number else self.cluster.own_node, **options
        )

    def _notify_restart(self, process: int) -> None:
        name = f"process {process} of the parameter server" if process else "the parameter server"
        self.job.emit(Notice(f"{name} ended and was restarted; the sessions continue from the last checkpoint"))


def session_gpus(job: SessionsJob, cluster: Cluster) -> float:
    """Return the number of GPUs that a Session reserves: 1 if the Session's net computes on a GPU and a node has a GPU, otherwise 0."""
    return float(_wants_gpu(job.spec, job.plan.device) and any(node.gpus >= 1 for node in cluster.nodes))


def _wants_gpu(spec: Spec, device: str | None) -> bool:
    if device is not None:
        return device != "cpu"
    return spec.agent.net is not None and spec.agent.net.gpu is not False
