"""Parameters that several processes train at once: Hogwild! (arXiv:1106.5730), as A3C does it (arXiv:1602.01783, Algorithm S3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.store import SharedArrays


class SharedParams:
    """Between one process's copy of the parameters and the shared ones.

    A process computes its gradient on a copy, applies it to the shared parameters, and then pulls. In "shared" mode it also pulls before
    each gradient and each action, so that every read is of the latest. (A process that computed on the shared parameters themselves,
    which others move between its forward and its backward pass, would get the gradient of no net: async SAC then learned HalfCheetah more
    slowly, docs/hogwild.md.) Nobody waits for anybody, unless meta.hogwild_lock lets one update in at a time.

    Buffers (batch statistics) are pulled as parameters are. An update adds its change of them, divided by the number of updates that began
    from the same statistics: they are the mean over all processes, and move as fast as with one. Added undivided, many stale changes of a
    variance could make it negative.

    Args: updates_W: updates by each process.
    """

    def __init__(self, flat: FlatParams, store: SharedArrays, updates_W: np.ndarray) -> None:
        self.flat, self.store, self.updates_W = flat, store, updates_W
        self.report = {"staleness": 0.0, "lock_wait": 0.0}
        """Of the last update: updates by others between pull and push; milliseconds it waited for the lock."""
        self._pulled_buffer = flat.buffer.clone()
        self.pull()

    @property
    def version(self) -> int:
        """Updates of the shared parameters so far, by all processes."""
        return int(self.updates_W.sum())

    def refresh(self) -> None:
        """Pull before a read, in "shared" mode."""
        if not self.store.synced and self.version != self._pulled:
            self.pull()

    def pull(self) -> None:
        """Bring this process's copy up to date."""
        self._pulled = self.version  # read first: updates that come in between count as missed
        self.flat.pull()
        self._pulled_buffer.copy_(self.flat.buffer)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """One update: the block steps `flat.master`; then buffers are combined, the update is counted, and this process pulls."""
        flat = self.flat
        if flat.master_grad is not flat.grad:
            flat.master_grad.copy_(flat.packed(flat.grad))
        asked = perf_counter()
        with self.store.update():
            waited = 1e3 * (perf_counter() - asked) if self.store.locked else 0.0
            staleness = self.version - self._pulled
            self.report = {"staleness": float(staleness), "lock_wait": waited}
            yield
            self._combine_buffers(staleness)
            self.updates_W[self.store.index] += 1
            self.pull()

    def skip(self) -> None:
        """Discard an update, and with it what its forward pass changed in the buffers."""
        self.report = dict.fromkeys(self.report, 0.0)
        self.pull()

    def _combine_buffers(self, staleness: int) -> None:
        flat = self.flat
        if staleness == 0:  # bit for bit as alone
            flat.master_buffer.copy_(flat.buffer)
        else:
            flat.master_buffer.add_((flat.buffer - self._pulled_buffer).to(flat.master_buffer.device), alpha=1.0 / (staleness + 1))
