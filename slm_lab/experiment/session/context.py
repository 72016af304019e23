"""What the process that runs a Session provides."""

from __future__ import annotations

from dataclasses import dataclass, field

from slm_lab.experiment.collect.workers.worker_pool import OpenPool, open_pool
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.lib.store import Store


@dataclass(frozen=True)
class SessionContext:
    """What the process that runs a Session provides; the defaults suit a single Session that runs in the current process."""

    stop: Stop = field(default_factory=Stop)
    """Requests the end of training."""
    beat: Beat = no_beat
    """Called with each new phase, see execute.heartbeat."""
    store: Store | None = None
    """Shared arrays of the Sessions that train one net (meta.distributed); None: the Session trains its own net."""
    restart: int = 0
    """Number of processes that died before this one in the same role."""
    resumed: RunPaths | None = None
    """The run from whose last checkpoint the Session continues: an earlier run, or this run after its process was restarted."""
    open_pool: OpenPool = open_pool
    """Starts the rollout workers."""

    @property
    def takes_over(self) -> bool:
        """Whether the Session joins others that already train its net, so that the shared arrays are newer than any checkpoint."""
        return self.store is not None and not self.store.fresh
