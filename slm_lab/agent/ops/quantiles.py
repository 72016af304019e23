"""The quantile regression loss of QR-DQN (arXiv:1710.10044) and the gradient of this loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import A, as_tensor, as_type_of
from slm_lab.agent.ops.losses import LossAndGradient


def quantile_midpoints(number: int) -> Tensor:
    """Return τ̂_i = (2i + 1) / 2N [N], the probabilities of the quantiles that are learned (arXiv:1710.10044, lemma 2)."""
    return (torch.arange(number) + 0.5) / number


def quantile_huber_loss(quantile_BN: A, target_BM: A, weight_B: A | None = None) -> LossAndGradient:
    """Return the quantile Huber loss, the mean of Σ_i E_j[ρ_τ̂i(target_j − θ_i)] over the batch (arXiv:1710.10044, equation 10).

    ρ_τ(u) = |τ − 1{u < 0}| L(u) with the Huber loss L, which is ½ u² for |u| ≤ 1 and |u| − ½ otherwise (equations 9 and 10 with κ = 1). The
    sum over i runs over the N quantiles θ_i. The expectation E_j is the mean over M samples of the target distribution, in any order.

    The targets are sorted once, and sums over all targets in an interval are computed as differences of prefix sums. The computation with
    prefix sums takes N log M instead of N × M operations per sample of the batch. The loss is NaN if a target is not finite.

    Args: quantile_BN: quantiles θ, float32. target_BM: targets, float32. weight_B: weight of each sample in the mean, or None for equal
    weights of 1. The arguments must not have an autograd graph. Returns the loss, and the gradient of the loss with respect to quantile_BN.
    """
    loss_B, grad_BN = _sample_losses(as_tensor(quantile_BN), as_tensor(target_BM))
    weights: Any = 1.0 if weight_B is None else as_tensor(weight_B)
    grad_BN *= weights if weight_B is None else weights.unsqueeze(1)
    rows = len(loss_B)
    return LossAndGradient((loss_B * weights).sum() / rows, as_type_of(quantile_BN, grad_BN / rows))


def _sample_losses(quantile_BN: Tensor, target_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample [B], and the gradient of each loss with respect to the quantiles [B, N], float32."""
    M, tau_N = target_BM.shape[1], quantile_midpoints(quantile_BN.shape[1]).to(quantile_BN.device)
    target_BM = target_BM.sort(dim=1).values
    # float64, because differences of large sums of squares lose precision
    theta_BN, y_BM = quantile_BN.double(), target_BM.double()
    number_BK = torch.arange(M + 1, device=y_BM.device).expand(len(y_BM), -1)
    sum_BK = torch.nn.functional.pad(y_BM.cumsum(1), (1, 0))
    square_BK = torch.nn.functional.pad((y_BM * y_BM).cumsum(1), (1, 0))
    # the targets below θ − 1, below θ and below θ + 1
    low, mid, high = (torch.searchsorted(y_BM, theta_BN + shift) for shift in (-1.0, 0.0, 1.0))

    def inside(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ u and Σ ½ u² over the targets with indices from `begin` to `end` [B, N], for which |u| ≤ 1."""
        n, s, q = (x.gather(1, end) - x.gather(1, begin) for x in (number_BK, sum_BK, square_BK))
        return s - n * theta_BN, 0.5 * (q - 2.0 * theta_BN * s + n * theta_BN**2)

    total_BN = sum_BK[:, -1:]
    below_slope, below_loss = inside(low, mid)
    above_slope, above_loss = inside(mid, high)
    low_sum, high_sum = low * theta_BN - sum_BK.gather(1, low), total_BN - sum_BK.gather(1, high) - (M - high) * theta_BN  # Σ |u|
    below_loss += low_sum - 0.5 * low
    above_loss += high_sum - 0.5 * (M - high)
    loss_BN = (1.0 - tau_N) * below_loss + tau_N * above_loss
    slope_BN = (1.0 - tau_N) * (below_slope - low) + tau_N * (above_slope + (M - high))
    loss_B = loss_BN.sum(1) / M + 0.0 * square_BK[:, -1]  # 0 · ∞ and 0 · NaN are NaN
    return loss_B.float(), (slope_BN / -M).float()
