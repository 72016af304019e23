"""Tests of the quantile Huber loss against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from slm_lab.agent.ops.quantiles import quantile_huber_loss, quantile_midpoints


def by_definition(quantile_BN: Tensor, target_BM: Tensor, weight_B: Tensor) -> Tensor:
    """Return the loss of eq. 10 of arXiv:1710.10044, computed pair by pair."""
    N, M = quantile_BN.shape[1], target_BM.shape[1]
    total = quantile_BN.new_zeros(())
    for b in range(len(quantile_BN)):
        for i in range(N):
            for j in range(M):
                u = target_BM[b, j] - quantile_BN[b, i]
                huber = 0.5 * u**2 if abs(u) <= 1.0 else abs(u) - 0.5
                total = total + weight_B[b] * abs((i + 0.5) / N - float(u < 0)) * huber / M
    return total / len(quantile_BN)


def test_one_pair_by_hand() -> None:
    """τ̂ = ½: a target 0.4 above costs ½ · 0.08 with slope −½ · 0.4; a target 3 below costs ½ · 2.5 with slope ½."""
    loss, grad = quantile_huber_loss(torch.tensor([[1.0]]), torch.tensor([[1.4, -2.0]]))
    assert float(loss) == pytest.approx((0.04 + 1.25) / 2)
    assert grad.tolist() == [[pytest.approx((-0.2 + 0.5) / 2)]]


@pytest.mark.parametrize("scale", [0.3, 2.0, 100.0])
def test_it_is_the_definition(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    quantile_BN, target_BM = (scale * torch.randn(2, n, generator=generator) for n in (4, 5))
    quantile_BN[0, 0] = target_BM[0, 0]  # u = 0
    weight_B = torch.rand(2, generator=generator)
    leaf_BN = quantile_BN.double().requires_grad_()
    expected = by_definition(leaf_BN, target_BM.double(), weight_B.double())
    (expected_grad,) = torch.autograd.grad(expected, leaf_BN)
    loss, grad_BN = quantile_huber_loss(quantile_BN, target_BM, weight_B)
    torch.testing.assert_close(loss, expected.detach().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_BN, expected_grad.float(), rtol=1e-5, atol=1e-6)
    array_loss, array_grad = quantile_huber_loss(quantile_BN.numpy(), target_BM.numpy(), weight_B.numpy())
    assert float(array_loss) == float(loss)
    assert isinstance(array_grad, np.ndarray)
    assert array_grad.tobytes() == grad_BN.numpy().tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_target_that_is_not_finite_gives_no_finite_loss(bad: float) -> None:
    loss, _ = quantile_huber_loss(torch.zeros(2, 3), torch.tensor([[0.0, bad], [0.0, 1.0]]))
    assert not math.isfinite(loss)


def test_its_minimum_is_the_quantiles() -> None:
    """Gradient descent from 0 finds the midpoint quantiles of a wide uniform distribution."""
    target_BM = torch.linspace(0.0, 1000.0, 1001).unsqueeze(0)
    quantile_BN = torch.zeros(1, 4)
    for _ in range(300):
        quantile_BN -= 40.0 * quantile_huber_loss(quantile_BN, target_BM).grad
    torch.testing.assert_close(quantile_BN[0] / 1000.0, quantile_midpoints(4), atol=0.01, rtol=0.0)
