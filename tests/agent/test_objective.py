"""Tests of the objective in closed form against the same formulas through autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slm_lab.agent.ops import objective
from slm_lab.agent.ops.arrays import ignore_float_errors
from slm_lab.agent.ops.distributions import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    ActionDistribution,
    Bernoulli,
    Beta,
    Categorical,
    MultiCategorical,
    Normal,
    Product,
)
from slm_lab.agent.ops.losses import bounds_loss, clipped_surrogate_loss, policy_gradient_loss
from slm_lab.agent.ops.objective import VALUE_LIMIT, Objective, ObjectiveCoefficients, ObjectiveTerms, differentiate
from slm_lab.lib.records import ActionSpace

B = 64
DISCRETE, CONTINUOUS = ActionSpace("discrete", (5,)), ActionSpace("continuous", dim=3)


def free_normal() -> Normal:
    """Return a Normal whose log_std has entries between the bounds, below the lower bound and at the upper bound (gradient 0)."""
    return Normal(CONTINUOUS, nn.Parameter(torch.tensor([-0.3, LOG_STD_MIN - 1.0, LOG_STD_MAX])))


HYBRID = ActionSpace("hybrid", (3, 2, 4), 8, bits=2)


def product(normal: Callable[[], Normal]) -> Product:
    choices, bits, _ = HYBRID.parts
    return Product(HYBRID, [MultiCategorical(choices), Bernoulli(bits), normal()])


DISTRIBUTIONS: dict[str, Callable[[], ActionDistribution]] = {
    "Categorical": lambda: Categorical(DISCRETE),
    "MultiCategorical": lambda: MultiCategorical(ActionSpace("multi_discrete", (3, 1, 4), 3)),
    "Bernoulli": lambda: Bernoulli(ActionSpace("multi_binary", dim=3)),
    "Normal": lambda: Normal(CONTINUOUS),
    "free Normal": free_normal,
    "Product": lambda: product(lambda: Normal(CONTINUOUS)),
    "Product with a free Normal": lambda: product(free_normal),
}


def rows(distribution: ActionDistribution) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    params = torch.tensor(rng.normal(size=(B, distribution.param_dim)), dtype=torch.float32)
    action, logp = distribution.sample(params.numpy(), rng)
    old = torch.from_numpy(logp) + torch.tensor(rng.normal(size=B) * 0.3, dtype=torch.float32)
    old[:2] += torch.tensor([30.0, -30.0])  # log ratios beyond ±20
    advantage = torch.tensor(rng.normal(size=B), dtype=torch.float32)
    advantage[5:9] = 0.0
    value, target = (torch.tensor(rng.normal(size=B), dtype=torch.float32) for _ in range(2))
    return {
        "params": params,
        "value": value,
        "action": torch.from_numpy(action),
        "old": old,
        "advantage": advantage,
        "target": target,
    }


def by_autograd(
    distribution: ActionDistribution, row: dict[str, Tensor], coefs: ObjectiveCoefficients, params: Tensor, value: Tensor
) -> ObjectiveTerms:
    logp, entropy = distribution.evaluate(params, row["action"])
    if coefs.clip_eps is None:
        policy_loss = policy_gradient_loss(logp, row["advantage"])
    else:
        policy_loss = clipped_surrogate_loss(logp, row["old"], row["advantage"], coefs.clip_eps, coefs.dual_clip)
    target = row["target"]
    if coefs.value_std is not None:
        value, target = ((x / coefs.value_std).clamp(-VALUE_LIMIT, VALUE_LIMIT) for x in (value, target))
    value_loss = F.mse_loss(value, target)
    loss = coefs.policy * policy_loss + coefs.value * value_loss - coefs.entropy * entropy.mean()
    outside = (
        bounds_loss(distribution.loc_and_log_scale(params)[0]) if isinstance(distribution, Normal) and coefs.bounds else torch.zeros(())
    )
    return ObjectiveTerms(loss + coefs.bounds * outside, policy_loss, value_loss, entropy.mean(), logp, outside)


def closed_form(distribution: ActionDistribution, row: dict[str, Tensor], coefs: ObjectiveCoefficients, weight: float = 1.0) -> Any:
    params, value, *others = row.values()
    with ignore_float_errors():
        return Objective(distribution)((params, value), *others, coefs, weight)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "coefs",
    [
        ObjectiveCoefficients(0.5, 0.01, clip_eps=0.2),
        ObjectiveCoefficients(0.7, 0.0, clip_eps=0.1),
        ObjectiveCoefficients(0.5, 0.03, policy=1.3),
        ObjectiveCoefficients(0.5, 0.0, value_std=0.1),
        ObjectiveCoefficients(0.5, 0.01, clip_eps=0.2, dual_clip=1.3),
        ObjectiveCoefficients(0.5, 0.01, clip_eps=0.2, bounds=0.7),
    ],
    ids=str,
)
def test_terms_and_gradients_are_those_of_autograd(name: str, coefs: ObjectiveCoefficients) -> None:
    distribution = DISTRIBUTIONS[name]()
    if not isinstance(distribution, Normal):
        coefs = coefs._replace(bounds=0.0)
    row = rows(distribution)
    outputs = row["params"], row["value"]
    theirs = differentiate(lambda params, value: by_autograd(distribution, row, coefs, params, value), outputs, 1.7)
    ours = closed_form(distribution, row, coefs, 1.7)
    for one, other in zip(ours.terms, theirs.terms, strict=True):
        torch.testing.assert_close(torch.as_tensor(one, dtype=torch.float32), other, rtol=2e-5, atol=2e-5, check_dtype=False)
        assert not other.requires_grad
    grads, expected = [*ours.outputs], [*theirs.outputs]
    if "free" in name:
        assert distribution.gaussian_part is not None
        grads.append(ours.log_std_D)
        expected.append(distribution.gaussian_part.log_std.grad)  # type: ignore[union-attr]
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), other, rtol=1e-4, atol=1e-6)


def test_gradients_add_up_over_microbatches() -> None:
    distribution, coefs = Categorical(DISCRETE), ObjectiveCoefficients(0.5, 0.01)
    row = rows(distribution)
    whole = closed_form(distribution, row, coefs).outputs
    parts = []
    for part in (slice(0, 16), slice(16, B)):
        some = {name: column[part] for name, column in row.items()}
        parts.append(closed_form(distribution, some, coefs, (part.stop - part.start) / B).outputs)
    for one, *others in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(np.concatenate(others), one, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("bad", ["params", "advantage", "target"])
def test_what_is_not_finite_is_not_finite_in_the_loss(bad: str, recwarn: pytest.WarningsRecorder) -> None:
    distribution = Categorical(DISCRETE)
    row = rows(distribution)
    row[bad][3] = float("nan")
    assert not math.isfinite(closed_form(distribution, row, ObjectiveCoefficients(0.5, 0.01, clip_eps=0.2)).terms.loss)
    assert not recwarn.list


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(distribution: Any, device: str = "cpu") -> bool:
        return Objective.supports(distribution, device)

    assert supported(Categorical(DISCRETE))
    assert not supported(Beta(CONTINUOUS))
    assert not supported(Categorical(DISCRETE), "cuda:0")
    monkeypatch.setattr(objective, "CLOSED_FORM", False)
    assert not supported(Categorical(DISCRETE))
