"""Target networks."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.store import Arrays, Named, SharedArray, Store, is_shared
from slm_lab.spec.models.net import NetSpec

Net = TypeVar("Net", bound=nn.Module)


class TargetNet(Generic[Net]):
    """A target network: a periodic copy of the source net (Mnih et al., 2015), or its moving average (arXiv:1509.02971, Algorithm 1).

    Args:
        net: a module built like the source net.
        source: parameters of the source net.
        spec: net spec with the keys update_type, update_frequency (in frames, only for update_type "replace") and polyak_coef (weight of
            the source net).

    The algorithm calls `update` if `claim_due_update` returns True. With update_type "polyak" and polyak_coef > 0, an update is due at
    every call of `claim_due_update`. With update_type "replace", one update is due every update_frequency frames.
    """

    def __init__(self, net: Net, source: FlatParams, spec: NetSpec, device: str = "cpu") -> None:
        self.net, self.source, self.spec = net, source, spec
        self.flat = FlatParams(net, device=device)
        self.flat.division = source.division
        self.copy_source()
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        net.eval()
        self._store: Store | None = None
        self._multiples_handled = np.zeros(1, np.int64)
        """Number of multiples of update_frequency for which an update has been done (only for update_type "replace")."""
        self._updates_done = np.zeros(1, np.int64)
        self._pulled = 0

    @property
    def updates_done(self) -> int:
        """Number of updates of the target network so far, by all processes."""
        return int(self._updates_done[0])

    def shared_arrays(self) -> Named:
        counts = {"followed": SharedArray(self._multiples_handled, "single"), "updates": SharedArray(self._updates_done, "merge")}
        return self.flat.shared_arrays() | counts

    def attach(self, store: Store, arrays: Arrays) -> None:
        self._store, self._multiples_handled, self._updates_done = store, arrays["followed"], arrays["updates"]
        self._pulled = self.updates_done
        self.flat.use_shared_arrays(arrays, store.serves)

    def copy_source(self) -> None:
        """Copy the parameters and buffers of the source net to the target network."""
        self.flat.load(self.source.without_padding(self.source.param), self.source.buffer)

    def pull(self) -> None:
        self._pulled = self.updates_done
        self.flat.pull()

    def pull_if_outdated(self) -> None:
        """Update this process's copy of the target network's parameters if another process has changed these parameters.

        Call this method before using the target network.
        """
        if self._store is not None and self._pulled != self._updates_done[0]:
            if self._store.remote:
                self._store.pull()
            self._pulled = self.updates_done  # set before the copy: if another update follows during the copy, the next call copies again
            self.flat.copy_to_param(self.flat.master)

    def claim_due_update(self, frame: int) -> bool:
        """Return whether to update the target network at `frame`.

        With update_type "replace", the result is True once for each multiple of update_frequency. If several processes call this method for
        the same multiple of update_frequency, only one of the processes gets True. If no process calls this method when an update becomes
        due, the next call returns True.
        """
        if self.spec.update_type == "polyak":
            return self.spec.polyak_coef > 0.0
        multiples = frame // self.spec.update_frequency
        if multiples <= self._multiples_handled[0]:
            return False
        if self._store is None:
            return self._claim_update(multiples)
        return bool(self._store.run_if_free("target", self._claim_update, multiples))

    def _claim_update(self, multiples: int) -> bool:
        if multiples <= self._multiples_handled[0]:
            return False
        self._multiples_handled[0] = multiples
        return True

    def update(self) -> None:
        """Copy the source net to the target network, or move the target network towards the source net by polyak_coef.

        If several processes share the target network, only one process updates the target network at a time.
        """
        if self._store is None:
            self._update()
        else:
            self._store.run_locked("target", self._update)
            self._pulled = self.updates_done
            self.flat.pull()

    @torch.no_grad()
    def _update(self) -> None:
        self.flat.sync_parameters()
        if self.spec.update_type == "replace":
            self.flat.master.copy_(self.source.master)
        else:
            self.flat.master.lerp_(self.source.master, self.spec.polyak_coef)
        self.flat.master_buffer.copy_(self.source.master_buffer)
        self._updates_done[0] += 1

    def state_dict(self) -> dict[str, Any]:
        if is_shared(self._store):
            return {}
        self.pull_if_outdated()
        return {**self.flat.state_dict(), "followed": int(self._multiples_handled[0]), "updates": self.updates_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if this state does not match the target network."""
        if is_shared(self._store):
            return
        self.flat.load_state_dict(state)
        self._multiples_handled[0] = int(state["followed"])
        self._updates_done[0] = self._pulled = int(state["updates"])
