"""Losses of policies and values as means over a batch [B], to be minimised, and the regression losses that a spec can name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.ops.arrays import A, clip, where
from slm_lab.spec.models.net import LossSpec
from slm_lab.spec.report import Problem, SpecError


def _check_shapes(*tensors: Tensor) -> None:
    shape = tensors[0].shape
    if len(shape) != 1 or any(t.shape != shape for t in tensors):
        raise ValueError(f"expected tensors of the same shape [B], got {[tuple(t.shape) for t in tensors]}")


def policy_gradient_loss(logp_B: Tensor, advantage_B: Tensor) -> Tensor:
    """Policy gradient loss −E[log π(a|s) · Â] (Williams 1992, and arXiv:1602.01783, section 4)."""
    _check_shapes(logp_B, advantage_B)
    return torch.dot(logp_B, advantage_B) / -len(logp_B)


def clipped_surrogate_loss(
    logp_B: Tensor, old_logp_B: Tensor, advantage_B: Tensor, clip_eps: float, dual_clip: float | None = None
) -> Tensor:
    """Clipped surrogate loss of PPO: −E[min(r Â, clip(r, 1−ε, 1+ε) Â)] with r = π/π_old (arXiv:1707.06347, equation 7).

    With `dual_clip` = c, the minimum is at least c Â where Â < 0, so that a large ratio r has no gradient (arXiv:1912.09729, dual-clip
    PPO).

    The minimum is computed as min(r Â, Â + ε|Â|), which needs half as many kernels forward and backward. The two formulas for the minimum
    are equal, because the clip has an effect only above 1+ε for Â > 0 and below 1−ε for Â < 0. The log ratio is clamped to ±20, because exp
    of greater values can overflow, which would make the gradient NaN.
    """
    _check_shapes(logp_B, old_logp_B, advantage_B)
    bound_B = torch.add(advantage_B, advantage_B.abs(), alpha=clip_eps)
    ratio_B = torch.exp(F.hardtanh(logp_B - old_logp_B, -20.0, 20.0))  # a clamp whose backward is one kernel
    surrogate_B = torch.minimum(ratio_B * advantage_B, bound_B)
    if dual_clip is not None:
        surrogate_B = torch.where(advantage_B < 0.0, torch.maximum(surrogate_B, dual_clip * advantage_B), surrogate_B)
    return -surrogate_B.mean()


SOFT_BOUND = 1.1
"""Absolute value above which `bounds_loss` penalises the mean of an action. (The bounds of actions are ±1.)"""


def bounds_loss(loc_BD: Tensor) -> Tensor:
    """Penalty for action means outside the action bounds: E[Σ_d ((|μ_d| − 1.1)₊)²] for means μ [B, D] and bounds ±1 (as in rl_games)."""
    return F.relu(loc_BD.abs() - SOFT_BOUND).square().sum(1).mean()


def clipped_value_loss(value_B: Tensor, old_value_B: Tensor, target_B: Tensor, clip_eps: float) -> Tensor:
    """Clipped value loss of PPO: ½ E[max((V − y)², (V_clip − y)²)] for targets y, as in OpenAI's PPO code.

    V_clip is the value V clipped to [V_old − ε, V_old + ε].
    """
    _check_shapes(value_B, old_value_B, target_B)
    near_B = old_value_B + (value_B - old_value_B).clamp(-clip_eps, clip_eps)
    return 0.5 * torch.maximum((value_B - target_B).square(), (near_B - target_B).square()).mean()


def self_imitation_policy_loss(logp_B: Tensor, return_B: Tensor, value_B: Tensor, weight_B: Tensor) -> Tensor:
    """Policy loss of self-imitation learning: −E[w log π(a|s) · (R − V(s))₊] (arXiv:1806.05635, equation 2).

    Minimising this loss increases the probability of actions whose return R exceeded V. No gradient flows into V.

    Args: weight_B: importance weights w.
    """
    _check_shapes(logp_B, return_B, value_B, weight_B)
    return -(weight_B * logp_B * (return_B - value_B.detach()).clamp(min=0.0)).mean()


def self_imitation_value_loss(value_B: Tensor, return_B: Tensor, weight_B: Tensor) -> Tensor:
    """Value loss of self-imitation learning: E[w ½ ((R − V(s))₊)²] (arXiv:1806.05635, equation 3).

    The loss only raises V, towards returns above V.
    """
    _check_shapes(value_B, return_B, weight_B)
    return 0.5 * (weight_B * (return_B - value_B).clamp(min=0.0).square()).mean()


def expectile_loss(error: A, tau: float) -> tuple[A, A]:
    """Return the expectile loss |τ − 1(u < 0)| u² of each error u, and its derivative with respect to u (arXiv:2110.06169, equation 5).

    The prediction y that minimises the mean loss of the errors x − y is the τ-expectile of x, which is the mean for τ = 0.5 and the maximum
    for τ → 1.

    Args: error: errors u of any shape.
    """
    scaled = where(error < 0, (1.0 - tau) * error, tau * error)
    return scaled * error, 2.0 * scaled


def symlog(x: Tensor) -> Tensor:
    """Return sign(x) · ln(|x| + 1) for x of any shape (arXiv:2301.04104, equation 9)."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def _squared_loss_and_slope(error: A) -> tuple[A, A]:
    return error * error, 2.0 * error


def _smooth_l1_loss_and_slope(error: A, beta: float = 1.0) -> tuple[A, A]:
    if beta == 0.0:
        return _absolute_loss_and_slope(error)
    slope = clip(error / beta, -1.0, 1.0)
    return slope * (error - 0.5 * beta * slope), slope


def _huber_loss_and_slope(error: A, delta: float = 1.0) -> tuple[A, A]:
    slope = clip(error, -delta, delta)
    return slope * (error - 0.5 * slope), slope


def _absolute_loss_and_slope(error: A) -> tuple[A, A]:
    slope = np.sign(error) if isinstance(error, np.ndarray) else torch.sign(error)
    return slope * error, slope


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Any, Any]]]] = {
    "MSELoss": (F.mse_loss, _squared_loss_and_slope),
    "SmoothL1Loss": (F.smooth_l1_loss, _smooth_l1_loss_and_slope),
    "HuberLoss": (F.huber_loss, _huber_loss_and_slope),
    "L1Loss": (F.l1_loss, _absolute_loss_and_slope),
}
"""Regression losses for values, by the names of modules in torch.nn. Each value of LOSSES is a pair of functions. The first function maps
(prediction, target) to the mean loss with an autograd graph. The second function maps errors (prediction − target) to the loss of each
element and its derivative."""


class LossAndGradient(NamedTuple):
    """A loss, and the gradient of the loss with respect to the predictions."""

    loss: Tensor | float
    grad: Any
    """Gradient of the loss, with the type and shape of the predictions."""


class ValueLoss:
    """A regression loss for values, built from a spec. Raises SpecError if the arguments in the spec are invalid."""

    def __init__(self, spec: LossSpec) -> None:
        self.function, self.loss_and_slope = LOSSES[spec.name]
        self.arguments: dict[str, Any] = {name: value for name, value in spec.kwargs.items() if name != "reduction"}
        allowed = list(inspect.signature(self.loss_and_slope).parameters)[1:]
        if unknown := sorted(self.arguments.keys() - set(allowed)):
            message = f"{spec.name} has no argument '{unknown[0]}'; allowed: {', '.join(allowed) or 'none'}"
            raise SpecError("agent", [Problem(f"agent.net.loss_spec.{unknown[0]}", message)])
        try:
            self(torch.zeros(1), torch.zeros(1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError("agent", [Problem("agent.net.loss_spec", f"{spec.name}: {error}")]) from error

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss with an autograd graph, computed by the function of torch.nn.functional."""
        return self.function(prediction, target, **self.arguments)

    def with_gradient(self, prediction: A, target: A, count: int, weight: A | None = None) -> LossAndGradient:
        """Return the sum of the losses of all elements, divided by `count`, and the gradient of this value with respect to the predictions.

        If the predictions are arrays, the loss is a float. Predictions and targets must not have an autograd graph.

        Args: weight: weights of the elements, which are broadcast to the shape of the predictions, or None for equal weights of 1.
        """
        losses, slopes = self.loss_and_slope(prediction - target, **self.arguments)
        if weight is not None:
            losses, slopes = losses * weight, slopes * weight
        if isinstance(losses, np.ndarray):
            return LossAndGradient(float(np.add.reduce(losses, axis=None)) / count, slopes * np.float32(1.0 / count))
        return LossAndGradient(losses.sum() / count, slopes / count)

    def symlog_with_gradient(self, prediction: Tensor, target: Tensor, count: int, weight: Tensor | None = None) -> LossAndGradient:
        """Return the loss between symlog(prediction) and symlog(target), and the gradient of this loss with respect to `prediction`.

        See `with_gradient` for the arguments.
        """
        loss, grad = self.with_gradient(symlog(prediction), symlog(target), count, weight)
        return LossAndGradient(loss, grad / (1.0 + prediction.abs()))  # the derivative of symlog
