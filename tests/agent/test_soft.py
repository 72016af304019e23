"""Tests of the objectives of soft actor-critic against the same formulas through autograd."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from slm_lab.agent.ops.objective import REDUCTION_GRADIENTS, REDUCTIONS, discrete_actor_loss, discrete_soft_value, reduction_gradient


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_differentiated(name: str) -> None:
    q_CB = torch.randn(2, 7).requires_grad_()
    (expected,) = torch.autograd.grad(REDUCTIONS[name](q_CB).sum(), q_CB)
    torch.testing.assert_close(REDUCTION_GRADIENTS[name](q_CB.detach()), expected)
    torch.testing.assert_close(reduction_gradient(lambda q: 3.0 * REDUCTIONS[name](q), q_CB.detach()), 3.0 * expected)


def test_soft_value_of_two_actions_by_hand() -> None:
    """π = (0.25, 0.75), Q = (1, 2), α = 0.5: 0.25 · 1 + 0.75 · 2 + 0.5 · H with H = 0.5623."""
    value = discrete_soft_value(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[1.0, 2.0]]), 0.5)
    assert value.item() == pytest.approx(1.75 + 0.5 * 0.562335, rel=1e-5)


@pytest.mark.parametrize("mean", [None, 0.4, float("nan")])
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_the_gradient_of_the_actor_is_that_of_autograd(penalty: float, mean: float | None) -> None:
    params_BA, q_BA = torch.randn(9, 4).requires_grad_(), torch.randn(9, 4)
    before = None if mean is None else torch.tensor(mean)
    found = discrete_actor_loss(params_BA.detach(), q_BA, 0.3, penalty, before)
    policy = Categorical(logits=params_BA)
    entropy = policy.entropy().mean()
    reference = entropy.detach() if mean is None or mean != mean else mean  # the entropy itself if there is no average yet
    loss = (policy.probs * (0.3 * policy.logits - q_BA)).sum(1).mean() + penalty / 2 * (reference - entropy) ** 2
    (expected,) = torch.autograd.grad(loss, params_BA)
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.entropy, entropy.detach())
    torch.testing.assert_close(found.grad_params_BA, expected, rtol=1e-4, atol=1e-6)
    if penalty:
        assert found.mean_entropy.item() == pytest.approx(0.99 * float(reference) + 0.01 * entropy.item(), rel=1e-5)
    else:
        assert found.mean_entropy is before
