"""One net that many Sessions train at once: Hogwild! (arXiv:1106.5730), as A3C does it (arXiv:1602.01783, Algorithm S3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import numpy as np
from torch import Tensor

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.heap import Heap
from slm_lab.lib.log import notice


class SharedParams:
    """Between the gradients of one Session and the parameters that all train.

    A Session computes on a copy, applies its gradient to the global parameters, and then pulls. In "shared" it pulls before each
    gradient and each action too, so that every read sees the latest. (On the global parameters themselves, which others move between its
    forward and its backward pass, a gradient is that of no net: async SAC then learned HalfCheetah more slowly, docs/hogwild.md.)
    Nothing waits for anything, unless meta.hogwild_lock lets one update in at a time.

    Buffers (batch statistics) are pulled as parameters are. An update adds what it changed in them, divided by the updates that began
    from the same statistics: so they are the mean over all Sessions, and move as fast as with one. Added whole, many stale changes of a
    variance could make it negative.
    """

    def __init__(self, flat: FlatParams, heap: Heap) -> None:
        self.flat, self.heap = flat, heap
        self.updates_S = heap.array(np.zeros(heap.sessions, np.int64))
        """Updates of each Session; their sum is the version of the global parameters."""
        self.report = {"staleness": 0.0, "lock_wait": 0.0}
        """Of the last update: global updates of others between pull and push; milliseconds it waited for the lock."""
        self._pulled_buffer = flat.buffer.clone()
        self._pull()
        self._finite = self._silent = True

    @property
    def version(self) -> int:
        """Updates of the global parameters so far."""
        return int(self.updates_S.sum())

    def refresh(self) -> None:
        """Before a read, and so before a gradient: in "shared" it is of the latest."""
        if not self.heap.synced and self.version != self._pulled:
            self._pull()

    def check(self, loss: Tensor) -> None:
        """Keep a gradient whose loss is not finite from the global parameters."""
        self._finite = self._finite and math.isfinite(loss.item())

    def push(self, step: Callable[[], None], squares: float) -> None:
        """Apply the gradient, of squared norm `squares`, by `step`, unless it is not finite; then pull."""
        if not (self._finite and math.isfinite(squares)):
            self._hold_back()
            return
        if self.flat.master_grad is not self.flat.grad:
            self.flat.master_grad.copy_(self.flat.grad)
        asked = perf_counter()
        with self.heap.update():
            waited = 1e3 * (perf_counter() - asked) if self.heap.locked else 0.0
            staleness = self.version - self._pulled
            self.report = {"staleness": float(staleness), "lock_wait": waited}
            step()
            self._add_buffer(staleness)
            self.updates_S[self.heap.index] += 1
            self._pull()

    def _pull(self) -> None:
        self._pulled = self.version  # read first: what comes in between counts as missed
        self.flat.pull()
        self._pulled_buffer.copy_(self.flat.buffer)

    def _add_buffer(self, staleness: int) -> None:
        flat = self.flat
        if staleness == 0:  # nobody came in between; bit for bit as alone
            flat.master_buffer.copy_(flat.buffer)
        else:
            flat.master_buffer.add_((flat.buffer - self._pulled_buffer).to(flat.master_buffer.device), alpha=1.0 / (staleness + 1))

    def _hold_back(self) -> None:
        self._finite = True
        self.report = dict.fromkeys(self.report, 0.0)
        self._pull()
        if self._silent:
            self._silent = False
            notice(f"Session {self.heap.index}: a loss or gradient is not finite; such updates are kept from the global net")
