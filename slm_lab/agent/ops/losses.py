"""Losses over a batch [B], each the mean, to be minimised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ElementLoss = Callable[[Tensor, Tensor], Tensor]
"""Regression loss per element: (prediction_B, target_B) → loss_B."""


def _check(*tensors: Tensor) -> None:
    shape = tensors[0].shape
    if len(shape) != 1 or any(t.shape != shape for t in tensors):
        raise ValueError(f"expected tensors of one shape [B], got {[tuple(t.shape) for t in tensors]}")


def policy_gradient_loss(logp_B: Tensor, advantage_B: Tensor) -> Tensor:
    """−E[log π(a|s) · Â] (Williams 1992; arXiv:1602.01783, section 4)."""
    _check(logp_B, advantage_B)
    return -(logp_B * advantage_B).mean()


def clipped_surrogate_loss(logp_B: Tensor, old_logp_B: Tensor, advantage_B: Tensor, clip_eps: float) -> Tensor:
    """−E[min(r Â, clip(r, 1−ε, 1+ε) Â)] with r = π/π_old, eq. 7 of arXiv:1707.06347."""
    _check(logp_B, old_logp_B, advantage_B)
    ratio_B = torch.exp(logp_B - old_logp_B)
    clipped_B = ratio_B.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    return -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean()


def clipped_value_loss(value_B: Tensor, old_value_B: Tensor, target_B: Tensor, clip_eps: float, loss_fn: ElementLoss) -> Tensor:
    """The larger of the loss of V and of V kept within ±ε of its old prediction (as in OpenAI's PPO code)."""
    _check(value_B, old_value_B, target_B)
    near_B = old_value_B + (value_B - old_value_B).clamp(-clip_eps, clip_eps)
    return torch.maximum(loss_fn(value_B, target_B), loss_fn(near_B, target_B)).mean()


def symlog(x: Tensor) -> Tensor:
    """sign(x) · ln(|x| + 1), eq. 9 of arXiv:2301.04104. Any shape."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """The inverse of symlog: sign(x) · (exp(|x|) − 1). Any shape."""
    return torch.sign(x) * torch.expm1(torch.abs(x))
