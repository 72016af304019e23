"""A rollout: T steps of N envs, as every source of experience yields it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from slm_lab.agent.ops.device import upload


@dataclass(frozen=True)
class Truncations:
    """What is needed to bootstrap the K truncated rows of a rollout."""

    t_K: Tensor
    """int64 [K]: row."""
    n_K: Tensor
    """int64 [K]: env."""
    obs_K: Tensor
    """[K, *shape]: the true last observation."""
    state_KS: Tensor
    """float32 [K, S]: hidden state before that observation."""


@dataclass(frozen=True)
class Rollout:
    """T steps of N envs (or of N episodes, padded to the longest by invalid rows)."""

    obs_TN: Tensor
    """[T + 1, N, *shape]; the last row is the observation to act on next."""
    first_TN: Tensor
    """bool [T + 1, N]: the observation begins an episode. Always on the CPU: it decides where a recurrent net is run anew."""
    action_TN: Tensor
    """[T, N] or [T, N, D]."""
    logp_TN: Tensor
    """float32 [T, N]: log-probability of the action under the policy that chose it; NaN unless requested."""
    version_TN: Tensor
    """int64 [T, N]: version of the policy that chose it."""
    reward_TN: Tensor
    """float32 [T, N]."""
    terminated_TN: Tensor
    """bool [T, N]: cuts the bootstrap."""
    truncated_TN: Tensor
    """bool [T, N]: ends the episode and keeps the bootstrap."""
    valid_TN: Tensor
    """bool [T, N]: false where the row is not a transition; such rows never reach a loss."""
    state_NS: Tensor
    """float32 [N, S]: hidden state before the first observation."""
    truncations: Truncations
    """What bootstraps the truncated rows."""

    @property
    def done_TN(self) -> Tensor:
        return self.terminated_TN | self.truncated_TN

    def to(self, device: str | torch.device) -> Rollout:
        """Return the rollout on `device`; itself if it is there already."""
        if self.obs_TN.device == torch.device(device):
            return self
        moved = {f.name: upload(getattr(self, f.name), device) for f in fields(self) if f.name not in ("first_TN", "truncations")}
        cut = self.truncations
        return replace(self, **moved, truncations=Truncations(*(upload(getattr(cut, f.name), device) for f in fields(cut))))
