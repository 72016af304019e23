"""Categorical distributions of returns on fixed atoms (C51, arXiv:1707.06887): the projection onto the atoms, and the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def project_distribution(p_BZ: Tensor, return_B: Tensor, discount_B: Tensor | float, low: float, high: float) -> Tensor:
    """Return probabilities [B, Z] of the distribution of r + γ X, projected onto the atoms of X (arXiv:1707.06887, equation 7).

    X is a random return that has the probabilities `p_BZ` on Z atoms.

    Each atom z moves to r + γ z, clipped to [low, high]. The probability of the moved atom is divided between the two nearest fixed atoms,
    of which the nearer atom gets the greater share.

    Args: p_BZ: probabilities of Z equidistant atoms from `low` to `high`. return_B: r, the discounted sum of rewards. discount_B: γ as a
    number or [B], with 0 for steps that terminated the episode.
    """
    Z = p_BZ.shape[1]
    atom_Z = torch.linspace(low, high, Z, device=p_BZ.device)
    discount = discount_B.unsqueeze(1) if isinstance(discount_B, Tensor) else discount_B
    place_BZ = ((return_B.unsqueeze(1) + discount * atom_Z).clamp(low, high) - low) / ((high - low) / (Z - 1))
    left_BZ = place_BZ.nan_to_num().floor().clamp(0, Z - 2).long()  # NaN is not an index; it remains in the probabilities
    share_BZ = place_BZ - left_BZ
    projected_BZ = torch.zeros_like(p_BZ).scatter_add_(1, left_BZ, p_BZ * (1.0 - share_BZ))
    return projected_BZ.scatter_add_(1, left_BZ + 1, p_BZ * share_BZ)


def lowest_mean_distribution(p_CBZ: Tensor, atom_Z: Tensor) -> Tensor:
    """Return, for each sample of the batch, the distribution with the lowest mean among C critics: [C, B, Z] → [B, Z].

    This selection applies clipped double Q-learning (arXiv:1802.09477) to distributions.

    Args: atom_Z: the returns to which the probabilities belong.
    """
    lowest_B = (p_CBZ @ atom_Z).argmin(0)
    return p_CBZ[lowest_B, torch.arange(p_CBZ.shape[1], device=p_CBZ.device)]


class CategoricalLoss(NamedTuple):
    """Mean cross-entropy between the target and predicted categorical distributions of a batch, with its gradient."""

    loss: Tensor
    grad_BZ: Tensor
    """Gradient of the loss with respect to the logits."""
    divergence_B: Tensor
    """KL divergence between target and prediction for each sample, which is the priority in Rainbow's replay (arXiv:1710.02298)."""


def categorical_loss(logit_BZ: Tensor, target_BZ: Tensor, weight_B: Tensor | None = None) -> CategoricalLoss:
    """Return the mean cross-entropy −Σ m log softmax(logits) over the batch, with its gradient (arXiv:1707.06887, Algorithm 1).

    The arguments must not have an autograd graph.

    Args: target_BZ: target probabilities m. weight_B: weight of each sample in the mean, or None for equal weights of 1.
    """
    logp_BZ = F.log_softmax(logit_BZ, dim=1)
    loss_B = -(target_BZ * logp_BZ).sum(1)
    grad_BZ = (logp_BZ.exp() - target_BZ) / len(logit_BZ)
    divergence_B = loss_B + torch.xlogy(target_BZ, target_BZ).sum(1)
    if weight_B is None:
        return CategoricalLoss(loss_B.mean(), grad_BZ, divergence_B)
    return CategoricalLoss((loss_B * weight_B).mean(), grad_BZ * weight_B.unsqueeze(1), divergence_B)
