"""Parameters that several processes train at once: Hogwild! (arXiv:1106.5730), as A3C does it (arXiv:1602.01783, Algorithm S3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.store import Store

_FRESH_SECONDS = 0.02
"""Age of parameters that "shared" mode tolerates if they are in another process: it takes a message to look for newer ones."""


class SharedParams:
    """Synchronises one process's copy of the parameters with the shared parameters.

    A process computes its gradient on a copy, applies it to the shared parameters, and then pulls. In "shared" mode it also pulls before
    each gradient and each action, so that every read is of the latest. (A process that computed on the shared parameters themselves, which
    others move between its forward and its backward pass, would compute a gradient that belongs to no version of the parameters: async SAC
    then learned HalfCheetah more slowly, docs/hogwild.md.) Nobody waits for anybody, unless meta.hogwild_lock lets one update in at a time.

    Buffers (batch statistics) are pulled as parameters are. An update adds its change of them, divided by the number of updates that began
    from the same statistics: they are the mean over all processes, and move as fast as with one. Added undivided, many stale changes of a
    variance could make it negative.

    If the store is in another process, a process sends its gradient, which is applied there (`gradient`, `receive`), and gets the newest
    parameters in the answer.

    Args: updates_W: updates by each process.
    """

    def __init__(self, flat: FlatParams, store: Store, updates_W: np.ndarray) -> None:
        self.flat, self.store, self.updates_W = flat, store, updates_W
        self.report = {"staleness": 0.0, "lock_wait": 0.0, "bytes_pushed": 0.0, "bytes_pulled": 0.0}
        """Of the last update: updates by others between pull and push; milliseconds it waited for the lock, or for the answer of a store in
        another process; bytes sent to that process and received from it since the update before."""
        self._pulled_buffer = flat.buffer.clone()
        self.pull()

    @property
    def version(self) -> int:
        """Updates of the shared parameters so far, by all processes."""
        return int(self.updates_W.sum())

    def refresh(self) -> None:
        """Pull before a read, in "shared" mode."""
        if self.store.synced:
            return
        newer = self.store.pull(_FRESH_SECONDS) if self.store.remote else self.version != self._pulled
        if newer:
            self._copy()

    def pull(self) -> None:
        """Bring this process's copy up to date."""
        self.store.pull()
        self._copy()

    def _copy(self) -> None:
        self._pulled = self.version  # read first: updates that come in between count as missed
        self.flat.pull()
        self._pulled_buffer.copy_(self.flat.buffer)

    @contextmanager
    def updating(self, *, copy: bool = True) -> Iterator[None]:
        """One update: the block steps `flat.master`; then buffers are combined, the update is counted, and this process pulls (`copy`)."""
        flat = self.flat
        if flat.master_grad is not flat.grad:
            flat.master_grad.copy_(flat.packed(flat.grad))
        asked = perf_counter()
        with self.store.update():
            waited = 1e3 * (perf_counter() - asked) if self.store.locked else 0.0
            staleness = self.version - self._pulled
            self.report |= {"staleness": float(staleness), "lock_wait": waited}
            yield
            self._combine_buffers(staleness)
            self.updates_W[self.store.index] += 1
            if copy:
                self._copy()

    def push(self, section: Callable[..., float], lr_G: list[float], frozen: Sequence[int]) -> None:
        """Send the gradient to the process of the store, where `section` calls `receive`; then pull the new parameters.

        Args: lr_G: learning rate of each group. frozen: indices of the parameters that are not stepped.
        """
        flat, asked = self.flat, perf_counter()
        grad = flat.packed(flat.grad).cpu().numpy()
        buffers = (flat.buffer.cpu().numpy(), self._pulled_buffer.cpu().numpy()) if flat.buffer.numel() else ()
        staleness = self.store.step(section, grad, lr_G, frozen, self._pulled, *buffers)
        pushed, pulled = self.store.take_traffic()
        waited = 1e3 * (perf_counter() - asked)
        self.report = {"staleness": staleness, "lock_wait": waited, "bytes_pushed": float(pushed), "bytes_pulled": float(pulled)}
        self._copy()

    def receive(self, step: Callable[[], None], pulled: int, buffers: Sequence[np.ndarray]) -> float:
        """Take the update of a process elsewhere, with a step of `flat.master`; return its staleness.

        Args:
            pulled: version of the parameters that it was computed with.
            buffers: those after the update and as they were pulled; empty for a net without.
        """
        flat = self.flat
        if buffers:
            flat.buffer.numpy()[:], self._pulled_buffer.numpy()[:] = buffers
        self._pulled = min(pulled, self.version)  # less after the store was restored from a snapshot
        with self.updating(copy=False):
            step()
        return self.report["staleness"]

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
