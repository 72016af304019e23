"""Tests of losses against numbers computed by hand, and of their gradients against autograd."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.ops.losses import (
    LOSSES,
    ValueLoss,
    bounds_loss,
    clipped_surrogate_loss,
    clipped_value_loss,
    policy_gradient_loss,
    symlog,
)
from slm_lab.spec.models.net import LossSpec
from slm_lab.spec.report import SpecError


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [*((name, {}) for name in LOSSES), ("SmoothL1Loss", {"beta": 0.3}), ("SmoothL1Loss", {"beta": 0.0}), ("HuberLoss", {"delta": 0.4})],
    ids=str,
)
def test_gradient_of_a_regression_loss_is_that_of_autograd(name: str, arguments: dict[str, Any], weighted: bool) -> None:
    loss = ValueLoss(LossSpec(name=name, **arguments))
    rng = torch.Generator().manual_seed(0)
    target, weight = torch.randn(2, 9, generator=rng), torch.rand(9, generator=rng)
    prediction = (target + torch.linspace(-2.0, 2.0, 9)).requires_grad_()  # includes an error of 0
    each = torch.stack([loss(one, other) for one, other in zip(prediction.flatten(), target.flatten(), strict=True)]).view(2, 9)
    expected = (each * (weight if weighted else 1.0)).sum() / 9
    (grad,) = torch.autograd.grad(expected, prediction)
    rows = prediction.detach(), target, weight
    for found, own in (
        loss.with_gradient(rows[0], rows[1], 9, rows[2] if weighted else None),
        loss.with_gradient(rows[0].numpy(), rows[1].numpy(), 9, rows[2].numpy() if weighted else None),
    ):
        assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
        np.testing.assert_allclose(own, grad, rtol=1e-5, atol=1e-7)


def test_invalid_arguments_of_a_loss() -> None:
    for arguments, path in (({"beta": -1.0}, "agent.net.loss_spec"), ({"size_average": True}, "agent.net.loss_spec.size_average")):
        with pytest.raises(SpecError) as caught:
            ValueLoss(LossSpec(name="SmoothL1Loss", **arguments))
        assert [problem.path for problem in caught.value.problems] == [path]


def test_policy_gradient() -> None:
    assert float(policy_gradient_loss(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -1.0]))) == pytest.approx(-(-3.0 + 2.0) / 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [(1.5, 1.0, 1.2), (1.5, -1.0, -1.5), (0.5, 1.0, 0.5), (0.5, -1.0, -0.8), (1.1, 2.0, 2.2)],
)
def test_clipped_surrogate(ratio: float, advantage: float, objective: float) -> None:
    """The four corners of figure 1 of arXiv:1707.06347 and a point inside the clipping range."""
    old = torch.tensor([-0.7])
    loss = clipped_surrogate_loss(old + math.log(ratio), old, torch.tensor([advantage]), 0.2)
    assert float(loss) == pytest.approx(-objective, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [(5.0, -1.0, -3.0, 0.0), (2.0, -1.0, -2.0, -2.0), (0.5, -1.0, -0.8, 0.0), (5.0, 1.0, 1.2, 0.0), (1.1, 2.0, 2.2, 2.2)],
)
def test_dual_clip(ratio: float, advantage: float, objective: float, slope: float) -> None:
    """c = 3: if a bad action has become more than three times as likely, its loss is at most three times its advantage."""
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate_loss(logp, torch.zeros(1), torch.tensor([advantage]), 0.2, dual_clip=3.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-objective, rel=1e-5)
    assert float(logp.grad) == pytest.approx(-slope, rel=1e-5)


def test_bounds_loss() -> None:
    """Means of two actions with two components, two of which exceed ±1.1 by 0.4 and 0.2."""
    assert float(bounds_loss(torch.tensor([[1.5, 0.0], [-1.3, 1.05]]))) == pytest.approx((0.16 + 0.04) / 2)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_that_overflows_has_a_finite_gradient(log_ratio: float, advantage: float) -> None:
    logp = torch.tensor([log_ratio, 0.1], requires_grad=True)
    loss = clipped_surrogate_loss(logp, torch.zeros(2), torch.tensor([advantage, 1.0]), 0.2)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()
    assert float(logp.grad[1]) < 0.0, "the others learn"


def test_clipping_stops_the_gradient() -> None:
    logp = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    clipped_surrogate_loss(logp, torch.zeros(2), torch.ones(2), 0.2).backward()
    assert logp.grad.tolist() == pytest.approx([0.0, -0.5])


def test_clipped_value() -> None:
    value, old, target = torch.tensor([2.0, 1.05]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0])
    # first: |2−3|² = 1 against |1.2−3|² = 3.24; second: inside the clip, both |1.05−3|²
    assert float(clipped_value_loss(value, old, target, 0.2)) == pytest.approx(0.5 * (3.24 + 1.95**2) / 2)


def test_symlog_inverse() -> None:
    x = torch.tensor([-1000.0, -1.0, 0.0, 0.5, 1e4])
    y = symlog(x)
    assert torch.allclose(y.sign() * y.abs().expm1(), x, rtol=1e-4)
    assert float(symlog(torch.tensor(math.e - 1.0))) == pytest.approx(1.0)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="the same shape"):
        policy_gradient_loss(torch.zeros(3, 1), torch.zeros(3))
