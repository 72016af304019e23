"""Target networks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.store import Arrays, Named, SharedArray, SharedArrays
from slm_lab.spec.net import NetSpec

Net = TypeVar("Net", bound=nn.Module)


class TargetNet(Generic[Net]):
    """A target network: a periodic copy of the source net (Mnih et al. 2015), or a moving average (arXiv:1509.02971, Algorithm 1).

    Args:
        net: a module built like the source net.
        source: parameters of the source net.
        spec: update_type, update_frequency (frames) and polyak_coef (weight of the source).
    """

    def __init__(self, net: Net, source: FlatParams, spec: NetSpec, device: str = "cpu") -> None:
        self.net, self.source, self.spec = net, source, spec
        self.flat = FlatParams(net, device=device)
        self.copy_source()
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        net.eval()
        self._store: SharedArrays | None = None
        self._updates_done = np.zeros(1, np.int64)
        self._pulled = 0

    @property
    def updates_done(self) -> int:
        """Multiples of update_frequency for which the net has been updated."""
        return int(self._updates_done[0])

    def shared_arrays(self) -> Named:
        return self.flat.shared_arrays() | {"followed": SharedArray(self._updates_done, "single")}

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        self._store, self._updates_done = store, arrays["followed"]
        self._pulled = self.updates_done
        self.flat.use_master(arrays)

    def copy_source(self) -> None:
        """Copy the parameters of the source net."""
        self.flat.load(self.source.packed(self.source.param), self.source.buffer)

    def pull(self) -> None:
        """Bring this process's copy up to date with shared arrays that were restored."""
        self._pulled = self.updates_done
        self.flat.pull()

    def refresh(self) -> None:
        """Pull the parameters before a read, if another process has updated them."""
        if self._store is not None and self._pulled != self._updates_done[0]:
            self._pulled = self.updates_done  # read first: an update in between is pulled the next time
            self.flat.fill(self.flat.master)

    @torch.no_grad()
    def update(self, frame: int) -> None:
        """Update from the source net, once for each multiple of update_frequency frames that was crossed since the last call.

        Of several processes one does it.
        """
        due = frame // self.spec.update_frequency
        if due > self._updates_done[0]:
            with self._claim() as mine:
                if mine and due > self._updates_done[0]:
                    self._update(due - self.updates_done)
                    self._updates_done[0] = due
        if self._store is not None:
            self._pulled = self.updates_done
            self.flat.pull()

    def _claim(self) -> AbstractContextManager[bool]:
        return nullcontext(True) if self._store is None else self._store.claim("target")

    def _update(self, times: int) -> None:
        if self.spec.update_type == "replace":
            self.flat.master.copy_(self.source.master)
        else:  # several moving averages in one
            self.flat.master.lerp_(self.source.master, 1.0 - (1.0 - self.spec.polyak_coef) ** times)
        self.flat.master_buffer.copy_(self.source.master_buffer)

    def state_dict(self) -> dict[str, Any]:
        self.refresh()
        return {**self.flat.state_dict(), "followed": self.updates_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if it does not match the network."""
        self.flat.load_state_dict(state)
        self._updates_done[0] = self._pulled = int(state["followed"])
