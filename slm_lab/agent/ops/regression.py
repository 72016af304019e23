"""Regression losses by the names of specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.ops.arrays import A, clip
from slm_lab.agent.ops.losses import symlog
from slm_lab.spec.models.net import LossSpec
from slm_lab.spec.report import Problem, SpecError


def _squared(error: A) -> tuple[A, A]:
    return error * error, 2.0 * error


def _smooth_l1(error: A, beta: float = 1.0) -> tuple[A, A]:
    if beta == 0.0:
        return _absolute(error)
    slope = clip(error / beta, -1.0, 1.0)
    return slope * (error - 0.5 * beta * slope), slope


def _huber(error: A, delta: float = 1.0) -> tuple[A, A]:
    slope = clip(error, -delta, delta)
    return slope * (error - 0.5 * slope), slope


def _absolute(error: A) -> tuple[A, A]:
    slope = np.sign(error) if isinstance(error, np.ndarray) else torch.sign(error)
    return slope * error, slope


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Any, Any]]]] = {
    "MSELoss": (F.mse_loss, _squared),
    "SmoothL1Loss": (F.smooth_l1_loss, _smooth_l1),
    "HuberLoss": (F.huber_loss, _huber),
    "L1Loss": (F.l1_loss, _absolute),
}
"""Regression losses for values, by the names of torch.nn's modules: (prediction, target) → the mean loss, with a graph;
(error) → the loss of each element, and its derivative."""


class LossAndGradient(NamedTuple):
    """A loss, and its gradient with respect to the predictions."""

    loss: Tensor | float
    grad: Any
    """Of the type and shape of the predictions."""


class ValueLoss:
    """A regression loss for values. Raises SpecError if the arguments in the spec are invalid."""

    def __init__(self, spec: LossSpec) -> None:
        self.function, self.each = LOSSES[spec.name]
        self.arguments: dict[str, Any] = {name: value for name, value in spec.kwargs.items() if name != "reduction"}
        allowed = list(inspect.signature(self.each).parameters)[1:]
        if unknown := sorted(self.arguments.keys() - set(allowed)):
            message = f"{spec.name} has no argument '{unknown[0]}'; allowed: {', '.join(allowed) or 'none'}"
            raise SpecError("agent", [Problem(f"agent.net.loss_spec.{unknown[0]}", message)])
        try:
            self(torch.zeros(1), torch.zeros(1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError("agent", [Problem("agent.net.loss_spec", f"{spec.name}: {error}")]) from error

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss, as the function of torch.nn.functional."""
        return self.function(prediction, target, **self.arguments)

    def with_gradient(self, prediction: A, target: A, count: int, weight: A | None = None) -> LossAndGradient:
        """Return the sum of all elements' losses divided by `count`, and its gradient with respect to the predictions.

        For arrays the loss is a float. No argument carries an autograd graph. Args: weight: of each element, broadcast; None: all 1.
        """
        each, slope = self.each(prediction - target, **self.arguments)
        if weight is not None:
            each, slope = each * weight, slope * weight
        if isinstance(each, np.ndarray):
            return LossAndGradient(float(np.add.reduce(each, axis=None)) / count, slope * np.float32(1.0 / count))
        return LossAndGradient(each.sum() / count, slope / count)

    def symlog_with_gradient(self, prediction: Tensor, target: Tensor, count: int, weight: Tensor | None = None) -> LossAndGradient:
        """Do what `with_gradient` does for predictions and targets that are compared as symlog(x)."""
        loss, grad = self.with_gradient(symlog(prediction), symlog(target), count, weight)
        return LossAndGradient(loss, grad / (1.0 + prediction.abs()))  # the derivative of symlog
