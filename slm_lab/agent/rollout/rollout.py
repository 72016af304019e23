"""A rollout: T steps of N envs, as every source of experience yields it. In tensors, or for small nets in numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Generic

import numpy as np
import torch

from slm_lab.agent.ops.arrays import A, array
from slm_lab.agent.ops.device import upload


@dataclass(frozen=True)
class Truncations(Generic[A]):
    """What is needed to bootstrap the K truncated rows of a rollout."""

    t_K: A
    """int64 [K]: row."""
    n_K: A
    """int64 [K]: env."""
    obs_K: A
    """[K, *shape]: the true last observation."""
    state_KS: A
    """float32 [K, S]: hidden state before that observation."""


@dataclass(frozen=True)
class Rollout(Generic[A]):
    """T steps of N envs (or of N episodes, padded to the longest by invalid rows)."""

    obs_TN: A
    """[T + 1, N, *shape]; the last row is the observation to act on next."""
    first_TN: A
    """bool [T + 1, N]: the observation begins an episode. Always on the CPU: it decides where a recurrent net is run anew."""
    action_TN: A
    """[T, N] or [T, N, D]."""
    logp_TN: A
    """float32 [T, N]: log-probability of the action under the policy that chose it; NaN unless requested."""
    version_TN: A
    """int64 [T, N]: version of the policy that chose it."""
    reward_TN: A
    """float32 [T, N]."""
    terminated_TN: A
    """bool [T, N]: cuts the bootstrap."""
    truncated_TN: A
    """bool [T, N]: ends the episode and keeps the bootstrap."""
    valid_TN: A
    """bool [T, N]: false where the row is not a transition; such rows never reach a loss."""
    state_NS: A
    """float32 [N, S]: hidden state before the first observation."""
    truncations: Truncations[A]
    """What bootstraps the truncated rows."""

    @property
    def done_TN(self) -> A:
        return self.terminated_TN | self.truncated_TN

    @cached_property
    def arrays(self) -> Rollout[np.ndarray]:
        """The rollout in numpy, in the same memory if it is on the CPU."""
        cut = Truncations(*(array(getattr(self.truncations, f.name)) for f in fields(Truncations)))
        return Rollout(**{f.name: array(getattr(self, f.name)) for f in fields(self) if f.name != "truncations"}, truncations=cut)

    def to(self: Rollout, device: str | torch.device) -> Rollout:
        """Return the rollout on `device`; itself if it is there already."""
        if self.obs_TN.device == torch.device(device):
            return self
        moved = {f.name: upload(getattr(self, f.name), device) for f in fields(self) if f.name not in ("first_TN", "truncations")}
        cut = self.truncations
        return replace(self, **moved, truncations=Truncations(*(upload(getattr(cut, f.name), device) for f in fields(cut))))
