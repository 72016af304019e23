"""Objectives of soft actor-critic, with their gradients in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Callable[[Tensor], Tensor]

REDUCTIONS: dict[str, Reduction] = {
    "min": lambda q_CX: torch.minimum(*q_CX),
    "mean": lambda q_CX: q_CX.mean(0),
}
"""The values of the two critics [2, …] as one […], by critic_reduction."""

REDUCTION_GRADIENTS: dict[str, Reduction] = {
    "min": lambda q_CX: torch.stack((lower_X := (q_CX[0] <= q_CX[1]).float(), 1.0 - lower_X)),
    "mean": lambda q_CX: torch.full_like(q_CX, 1.0 / len(q_CX)),
}
"""Their derivatives with respect to the values of each critic [2, …]."""


def reduction_gradient(reduce: Reduction, q_CX: Tensor) -> Tensor:
    """Return the derivative of a reduction with respect to the values of each critic [C, …]; of one not in REDUCTIONS, by autograd."""
    for name, known in REDUCTIONS.items():
        if reduce is known:
            return REDUCTION_GRADIENTS[name](q_CX)
    leaf_CX = q_CX.detach().requires_grad_()
    return torch.autograd.grad(reduce(leaf_CX).sum(), leaf_CX)[0]


def discrete_soft_value(params_BA: Tensor, q_BA: Tensor, alpha: Tensor | float) -> Tensor:
    """Return V(s) = Σ π(a|s) (Q(s, a) − α log π(a|s)) [B] of a categorical policy with logits [B, A] (arXiv:1910.07207, eq. 10)."""
    logp_BA = F.log_softmax(params_BA, dim=1)
    return (logp_BA.exp() * (q_BA - alpha * logp_BA)).sum(1)


class DiscreteActorLoss(NamedTuple):
    """The loss of a categorical policy, and its gradient."""

    loss: Tensor
    entropy: Tensor
    """Mean entropy of the policy."""
    grad_params_BA: Tensor
    mean_entropy: Tensor | None
    """Moving average of the entropy; without a penalty as it was."""


def discrete_actor_loss(
    params_BA: Tensor, q_BA: Tensor, alpha: Tensor | float, penalty: float = 0.0, mean_entropy: Tensor | None = None
) -> DiscreteActorLoss:
    """Return E[Σ π(a|s) (α log π(a|s) − Q(s, a))] of logits [B, A] (arXiv:1910.07207, eq. 12).

    With a penalty, plus `penalty` / 2 times the squared distance of the entropy to its moving average (after arXiv:2209.10081, eq. 11).

    Args: mean_entropy: the average before; None: there is none yet.
    """
    logp_BA = F.log_softmax(params_BA, dim=1)
    p_BA = logp_BA.exp()
    entropy_B = -(p_BA * logp_BA).sum(1)
    cost_BA = alpha * logp_BA - q_BA
    cost_B = (p_BA * cost_BA).sum(1)
    loss, entropy, after = cost_B.mean(), entropy_B.mean(), mean_entropy
    grad_BA = p_BA * (cost_BA - cost_B.unsqueeze(1))
    if penalty:
        mean = entropy if mean_entropy is None else mean_entropy
        before = torch.where(mean.isfinite(), mean, entropy)
        loss = loss + penalty * 0.5 * (before - entropy).square()
        # ∂ H / ∂ z = −π (log π + H), with logits z
        grad_BA += penalty * (before - entropy) * p_BA * (logp_BA + entropy_B.unsqueeze(1))
        after = torch.where(entropy.isfinite(), torch.lerp(before, entropy, 0.01), before)
    return DiscreteActorLoss(loss, entropy, grad_BA.div_(len(params_BA)), after)
