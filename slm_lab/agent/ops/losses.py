"""Losses over a batch [B], each the mean, to be minimised."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _check(*tensors: Tensor) -> None:
    shape = tensors[0].shape
    if len(shape) != 1 or any(t.shape != shape for t in tensors):
        raise ValueError(f"expected tensors of the same shape [B], got {[tuple(t.shape) for t in tensors]}")


def policy_gradient_loss(logp_B: Tensor, advantage_B: Tensor) -> Tensor:
    """−E[log π(a|s) · Â] (Williams 1992; arXiv:1602.01783, section 4)."""
    _check(logp_B, advantage_B)
    return torch.dot(logp_B, advantage_B) / -len(logp_B)


def clipped_surrogate_loss(logp_B: Tensor, old_logp_B: Tensor, advantage_B: Tensor, clip_eps: float) -> Tensor:
    """−E[min(r Â, clip(r, 1−ε, 1+ε) Â)] with r = π/π_old, eq. 7 of arXiv:1707.06347.

    Computed as min(r Â, Â + ε|Â|), which is the same: the clip binds only above 1+ε for Â > 0 and below 1−ε for Â < 0. It takes
    half the kernels forward and backward. log r is kept within ±20: beyond that exp overflows, and its gradient would be NaN.
    """
    _check(logp_B, old_logp_B, advantage_B)
    bound_B = torch.add(advantage_B, advantage_B.abs(), alpha=clip_eps)
    ratio_B = torch.exp(F.hardtanh(logp_B - old_logp_B, -20.0, 20.0))  # a clamp whose backward is one kernel
    return -torch.minimum(ratio_B * advantage_B, bound_B).mean()


def clipped_value_loss(value_B: Tensor, old_value_B: Tensor, target_B: Tensor, clip_eps: float) -> Tensor:
    """½ E[the larger of the squared errors of V and of V kept within ±ε of its old prediction] (as in OpenAI's PPO code)."""
    _check(value_B, old_value_B, target_B)
    near_B = old_value_B + (value_B - old_value_B).clamp(-clip_eps, clip_eps)
    return 0.5 * torch.maximum((value_B - target_B).square(), (near_B - target_B).square()).mean()


def self_imitation_policy_loss(logp_B: Tensor, return_B: Tensor, value_B: Tensor, weight_B: Tensor) -> Tensor:
    """−E[w log π(a|s) · (R − V(s))₊], eq. 2 of arXiv:1806.05635: actions that turned out better than V are made likelier.

    `weight_B` are importance weights. No gradient flows into V.
    """
    _check(logp_B, return_B, value_B, weight_B)
    return -(weight_B * logp_B * (return_B - value_B.detach()).clamp(min=0.0)).mean()


def self_imitation_value_loss(value_B: Tensor, return_B: Tensor, weight_B: Tensor) -> Tensor:
    """E[w ½ ((R − V(s))₊)²], eq. 3 of arXiv:1806.05635: V is only ever raised, towards returns above it."""
    _check(value_B, return_B, weight_B)
    return 0.5 * (weight_B * (return_B - value_B).clamp(min=0.0).square()).mean()


def symlog(x: Tensor) -> Tensor:
    """sign(x) · ln(|x| + 1), eq. 9 of arXiv:2301.04104. Any shape."""
    return torch.sign(x) * torch.log1p(torch.abs(x))
