"""Formulas of soft actor-critic: values of several critics as one, and the actor's losses with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda q_CX: torch.minimum(*q_CX),
    "mean": lambda q_CX: q_CX.mean(0),
}
"""The values of the two critics [2, …] as one […], by critic_reduction."""

_REDUCTION_GRADIENTS: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    REDUCTIONS["min"]: lambda q_CX: torch.stack((lower_X := (q_CX[0] <= q_CX[1]).float(), 1.0 - lower_X)),
    REDUCTIONS["mean"]: lambda q_CX: torch.full_like(q_CX, 1.0 / len(q_CX)),
}


def reduction_gradient(reduce: Callable[[Tensor], Tensor], q_CX: Tensor) -> Tensor:
    """Return the derivative of the reduced values with respect to those of each critic [C, …]; by autograd for a reduction of a user."""
    if reduce in _REDUCTION_GRADIENTS:
        return _REDUCTION_GRADIENTS[reduce](q_CX)
    leaf_CX = q_CX.detach().requires_grad_()
    return torch.autograd.grad(reduce(leaf_CX).sum(), leaf_CX)[0]


class DiscreteLoss(NamedTuple):
    """The actor's loss over discrete actions."""

    loss: Tensor
    entropy: Tensor
    grad_BA: Tensor
    """Gradient of the logits."""


def discrete_policy_loss(
    logits_BA: Tensor, q_BA: Tensor, alpha: Tensor | float, penalty: float = 0.0, mean_entropy: Tensor | None = None
) -> DiscreteLoss:
    """E[Σ π (α log π − Q)], eq. 12 of arXiv:1910.07207; plus penalty · ½ (mean_entropy − H)², after eq. 11 of arXiv:2209.10081.

    Args: mean_entropy: moving average of the entropy []; None before the first.
    """
    logp_BA = F.log_softmax(logits_BA, dim=1)
    p_BA = logp_BA.exp()
    entropy_B = -(p_BA * logp_BA).sum(1)
    cost_BA = alpha * logp_BA - q_BA
    cost_B = (p_BA * cost_BA).sum(1)
    loss, entropy = cost_B.mean(), entropy_B.mean()
    # with logits z: ∂ Σ π c / ∂ z = π (c − Σ π c), where the derivative of log π adds nothing;  ∂ H / ∂ z = −π (log π + H)
    grad_BA = p_BA * (cost_BA - cost_B.unsqueeze(1))
    if penalty:
        gap = _or_first(mean_entropy, entropy) - entropy
        loss = loss + penalty * 0.5 * gap.square()
        grad_BA += penalty * gap * p_BA * (logp_BA + entropy_B.unsqueeze(1))
    return DiscreteLoss(loss, entropy, grad_BA.div_(len(logits_BA)))


def moving_entropy(mean: Tensor | None, entropy: Tensor) -> Tensor:
    """Return the moving average [] after one more entropy; one that is not finite is ignored."""
    before = _or_first(mean, entropy)
    return torch.where(entropy.isfinite(), torch.lerp(before, entropy, 0.01), before)


def _or_first(mean: Tensor | None, entropy: Tensor) -> Tensor:
    return entropy if mean is None else torch.where(mean.isfinite(), mean, entropy)
