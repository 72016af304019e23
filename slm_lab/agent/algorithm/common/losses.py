"""Regression losses by the names of specs."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from slm_lab.agent.ops.losses import ValueLoss
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.net import LossSpec

LOSSES: dict[str, ValueLoss] = {
    "MSELoss": F.mse_loss,
    "SmoothL1Loss": F.smooth_l1_loss,
    "HuberLoss": F.huber_loss,
    "L1Loss": F.l1_loss,
}
"""Regression losses for values, by the names of torch.nn's modules."""


def build_value_loss(spec: LossSpec) -> ValueLoss:
    """Build the loss that the spec names. Raises SpecError if its arguments are invalid."""
    arguments = {name: value for name, value in spec.kwargs.items() if name != "reduction"}
    loss = partial(LOSSES[spec.name], **arguments)
    try:
        loss(torch.zeros(1), torch.zeros(1))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError("agent", [Problem("agent.net.loss_spec", f"{spec.name}: {error}")]) from error
    return loss
