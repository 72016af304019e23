"""Parameters that several processes train concurrently: Hogwild! (arXiv:1106.5730), as in A3C (arXiv:1602.01783, Algorithm S3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.store import Store

_FRESH_SECONDS = 0.02
"""Maximum age in seconds of the copied parameters if meta.distributed is "shared" and the store is in another process. (Each check for
newer parameters requires a message to the process of the store.)"""


class SharedParams:
    """Synchronisation of this process's copy of the parameters with the parameters that several processes share.

    A process computes its gradient on a copy of the parameters, applies the gradient to the shared parameters, and then pulls (copies the
    newest shared parameters). In "shared" mode (meta.distributed), a process also pulls the parameters before each gradient and each
    action. If processes computed directly on the shared parameters, other processes would change the parameters between forward and
    backward pass, and the gradient would not belong to any version of the parameters. In an experiment in which processes computed on the
    shared parameters, async SAC learned HalfCheetah more slowly (see docs/hogwild.md). Processes do not wait for each other, unless
    meta.hogwild_lock allows only one update at a time.

    Buffers (batch statistics) are pulled like parameters. An update divides the change of its process's buffers by the number of updates
    that began from the same buffers, and adds the quotient to the shared buffers. The resulting shared buffers are the mean over all
    processes, and change as fast as with one process. Without the division, several stale changes of a variance could make the variance
    negative.

    If the store of the shared parameters is in another process, `push` sends gradients to that process, where
    `apply_remote_update` applies the gradients. The process of the store answers with the newest parameters.

    Args: updates_W: shared array with the number of updates by each process.
    """

    def __init__(self, flat: FlatParams, store: Store, updates_W: np.ndarray) -> None:
        self.flat, self.store, self.updates_W = flat, store, updates_W
        self.report = {"staleness": 0.0, "lock_wait": 0.0, "bytes_pushed": 0.0, "bytes_pulled": 0.0}
        """Metrics of the last update. `staleness` is the number of updates by other processes between the pull of the parameters and the
        update. `lock_wait` is the time in milliseconds that this process waited for the lock, or for the answer of a store in another
        process. `bytes_pushed` and `bytes_pulled` are the numbers of bytes sent to, and received from, a store in another process since the
        previous update."""
        self._pulled_buffer = flat.buffer.clone()
        self.pull()

    @property
    def version(self) -> int:
        """Number of updates of the shared parameters by all processes so far."""
        return int(self.updates_W.sum())

    def pull_if_outdated(self) -> None:
        """In "shared" mode (meta.distributed), pull the parameters if newer parameters exist.

        Call this method before parameters are read.
        """
        if self.store.synced:
            return
        newer = self.store.pull(_FRESH_SECONDS) if self.store.remote else self.version != self._pulled
        if newer:
            self._copy_from_shared()

    def pull(self) -> None:
        """Copy the newest shared parameters and buffers to this process."""
        self.store.pull()
        self._copy_from_shared()

    def _copy_from_shared(self) -> None:
        self._pulled = self.version  # read before copying: updates during the copy count as stale
        self.flat.pull()
        self._pulled_buffer.copy_(self.flat.buffer)

    @contextmanager
    def update_context(self, *, copy: bool = True) -> Iterator[None]:
        """Return a context manager for one update of the shared parameters. The block of the with statement must step `flat.master`.

        After the block, the changes of buffers are added to the shared buffers, and the update is counted.

        Args: copy: whether to copy the newest parameters to this process after the update.
        """
        flat = self.flat
        if flat.master_grad is not flat.grad:
            flat.master_grad.copy_(flat.without_padding(flat.grad))
        started = perf_counter()
        with self.store.updating():
            waited = 1e3 * (perf_counter() - started) if self.store.locked else 0.0
            staleness = self.version - self._pulled
            self.report |= {"staleness": float(staleness), "lock_wait": waited}
            yield
            self._merge_buffers_into_shared(staleness)
            self.updates_W[self.store.index] += 1
            if copy:
                self._copy_from_shared()

    def push(self, section: Callable[..., float], lr_G: list[float], frozen: Sequence[int]) -> None:
        """Send the gradient to the process of the store, which applies the gradient by calling `section` (see lib/store.py).

        Afterwards, copy the new shared parameters to this process.

        Args: section: method of the Trainer that calls `apply_remote_update`. lr_G: learning rate of each optimizer group. frozen: indices
        of the parameters that are not stepped.
        """
        flat, started = self.flat, perf_counter()
        grad = flat.without_padding(flat.grad).cpu().numpy()
        buffers = (flat.buffer.cpu().numpy(), self._pulled_buffer.cpu().numpy()) if flat.buffer.numel() else ()
        staleness = self.store.step(section, grad, lr_G, frozen, self._pulled, *buffers)
        pushed, pulled = self.store.take_traffic()
        waited = 1e3 * (perf_counter() - started)
        self.report = {"staleness": staleness, "lock_wait": waited, "bytes_pushed": float(pushed), "bytes_pulled": float(pulled)}
        self._copy_from_shared()

    def apply_remote_update(self, step: Callable[[], None], pulled: int, buffers: Sequence[np.ndarray]) -> float:
        """Apply the update of another process by calling `step`, which steps `flat.master`. Return the staleness of the update.

        Args:
            pulled: version of the parameters for which the gradient was computed.
            buffers: the sender's buffers after its forward pass, and the buffers that the sender had pulled. `buffers` is empty for nets
                without buffers.
        """
        flat = self.flat
        if buffers:
            flat.buffer.numpy()[:], self._pulled_buffer.numpy()[:] = buffers
        self._pulled = min(pulled, self.version)  # `version` is lower after the store was restored from a snapshot
        with self.update_context(copy=False):
            step()
        return self.report["staleness"]

    def discard_update(self) -> None:
        """Discard the current update, including the changes that forward passes made to buffers."""
        self.report = dict.fromkeys(self.report, 0.0)
        self.pull()

    def _merge_buffers_into_shared(self, staleness: int) -> None:
        flat = self.flat
        if staleness == 0:  # same result, bit by bit, as with a single process
            flat.master_buffer.copy_(flat.buffer)
        else:
            flat.master_buffer.add_((flat.buffer - self._pulled_buffer).to(flat.master_buffer.device), alpha=1.0 / (staleness + 1))
