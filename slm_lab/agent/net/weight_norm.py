"""Weight normalisation (arXiv:1602.07868)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter


class WeightNormLinear(nn.Module):
    """Linear layer [B, I] → [B, O] whose weight is w = g v / ‖v‖ for each output, eq. 2 of the paper; v and g [O, 1] are learned.

    It starts as nn.Linear does: v is its initial weight and g the length of each row.

    Args: in_features: I. out_features: O. bias: whether to add one.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.direction = nn.Parameter(torch.empty(out_features, in_features))
        self.length = nn.Parameter(torch.empty(out_features, 1))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        if in_features:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        with torch.no_grad():
            self.direction.copy_(linear.weight)
            self.length.copy_(torch.linalg.vector_norm(linear.weight, dim=1, keepdim=True))
            if self.bias is not None:
                self.bias.copy_(linear.bias)

    def forward(self, x_BI: Tensor) -> Tensor:
        weight_OI = self.direction * (self.length / torch.linalg.vector_norm(self.direction, dim=1, keepdim=True))
        return F.linear(x_BI, weight_OI, self.bias)


class LazyWeightNormLinear(LazyModuleMixin, WeightNormLinear):
    """WeightNormLinear that takes its number of inputs from the first input."""

    cls_to_become = WeightNormLinear

    def __init__(self, out_features: int, bias: bool = True) -> None:
        super().__init__(0, out_features, bias)
        self.direction = UninitializedParameter()  # type: ignore[assignment]  # until the first forward

    def initialize_parameters(self, x_BI: Tensor, *_: Any) -> None:
        """Called by torch before the first forward."""
        if self.has_uninitialized_params():
            self.in_features = x_BI.shape[-1]
            self.direction.materialize((self.out_features, self.in_features))  # type: ignore[attr-defined]  # an uninitialised one
            self.reset_parameters()
