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


class GlobalNet:
    """Between the gradients of one Session and the parameters that all train.

    In "shared" a Session computes on the global parameters themselves, so that every read sees the latest. In "synced" it computes on a
    copy, applies its gradient to the global ones, and then pulls; on a device of its own so too, but pulls also before each update of
    "shared". Buffers (batch statistics) go and come with updates. Nothing waits for anything, unless meta.hogwild_lock lets one update
    in at a time.
    """

    def __init__(self, flat: FlatParams, heap: Heap) -> None:
        self.flat, self.heap = flat, heap
        self.updates_S = heap.array(np.zeros(heap.sessions, np.int64))
        """Updates of each Session; their sum is the version of the global parameters."""
        self.report = {"staleness": 0.0, "lock_wait": 0.0}
        """Of the last update: global updates of others between pull and push; milliseconds it waited for the lock."""
        self._pulled = self.version
        self._finite = self._silent = True

    @property
    def version(self) -> int:
        """Updates of the global parameters so far."""
        return int(self.updates_S.sum())

    def begin(self) -> None:
        """Before an update's gradients: in "shared" what is read from here on is the latest."""
        if not self.heap.synced:
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
            self.report = {"staleness": float(self.version - self._pulled), "lock_wait": waited}
            step()
            self.flat.master_buffer.copy_(self.flat.buffer)
            self.updates_S[self.heap.index] += 1
            self._pull()

    def _pull(self) -> None:
        self._pulled = self.version  # read first: what comes in between counts as missed
        self.flat.pull()

    def _hold_back(self) -> None:
        self._finite = True
        self.report = dict.fromkeys(self.report, 0.0)
        self._pull()
        if self._silent:
            self._silent = False
            notice(f"Session {self.heap.index}: a loss or gradient is not finite; such updates are kept from the global net")
