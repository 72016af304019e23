"""Number of concurrent trials, and the resources of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slm_lab.experiment.execute.executor import Resources
from slm_lab.experiment.plan import Plan, session_processes
from slm_lab.lib.limits import cores
from slm_lab.lib.log import notice
from slm_lab.spec.models.spec import Spec


@dataclass(frozen=True)
class TrialShare:
    """Resources of each trial, and the number of concurrent trials."""

    concurrent: int
    """Number of trials that run concurrently."""
    cores: float
    """Number of CPU cores that each trial reserves."""
    gpus: float
    sessions: int
    """Number of Sessions of a trial that run concurrently."""
    nodes: tuple[float, ...] = ()
    """Cores of each node of a cluster; () for this machine."""

    @property
    def resources(self) -> Resources:
        """Resources of each trial."""
        return Resources(self.cores, self.gpus)


def available_cores(spec: Spec, plan: Plan) -> int:
    """Return the number of cores of a search: with --jobs N, the cores of N Sessions; else all cores."""
    return cores() if plan.jobs is None else plan.jobs * session_processes(spec.meta)


def trial_resources(spec: Spec, plan: Plan, target: int, gpus: float, nodes: Sequence[float] = ()) -> TrialShare:
    """Return how `target` trials share the cores and `gpus` of this machine, or of the nodes of a cluster.

    A trial takes a core for each process of its concurrent Sessions, and at least meta.search_resources.cpu. With a scheduler all Sessions
    of a trial run concurrently, even if there are fewer cores, since the scheduler compares means over Sessions at common frames. Sessions
    of one net also run concurrently. In population-based training all trials run concurrently, since it compares them at common frames.
    """
    meta, processes = spec.meta, session_processes(spec.meta)
    available = int(max(nodes)) if nodes else available_cores(spec, plan)
    together = bool(meta.distributed) or meta.search_scheduler is not None or meta.search_algorithm == "pbt"
    sessions = meta.max_session if together else max(1, min(meta.max_session, available // processes))
    share = min(max(meta.search_resources.cpu, sessions * processes), available)
    room = sum(int(node // share) for node in nodes or [available])
    if nodes and plan.jobs is not None:
        room = min(room, max(1, plan.jobs // sessions))
    concurrent, gpu = max(1, room), meta.search_resources.gpu
    if gpu and not gpus:
        notice(f"meta.search_resources.gpu is {gpu:g}, and this machine has no GPU for the search; its trials share the cores")
    if gpu and gpus:
        concurrent = max(1, min(concurrent, int(gpus / gpu)))
    concurrent = min(target, concurrent)
    if meta.search_algorithm == "pbt":
        concurrent, share = target, _equal_share(nodes or [available], target)
        gpu = min(gpu, gpus / target)
    return TrialShare(concurrent, share, min(gpu, gpus) if gpus else 0.0, sessions, tuple(nodes))


def _equal_share(nodes: Sequence[float], target: int) -> float:
    """Return the maximum number of cores that each of `target` concurrent trials can have."""
    shares = {node / part for node in nodes if node for part in range(1, target + 1)}
    return max(share for share in shares if sum(int(node / share + 1e-9) for node in nodes) >= target)
