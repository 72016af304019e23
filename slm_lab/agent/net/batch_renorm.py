"""Batch renormalisation (arXiv:1702.03275)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from slm_lab.agent.ops.device import is_asynchronous


class BatchRenorm1d(nn.Module):
    """Normalises [B, F] or [B, F, …] by batch statistics corrected towards the moving ones, Algorithm 1 of the paper.

    Args:
        num_features: F.
        momentum: how far the moving statistics follow each batch.
        eps: added to variances.
        warmup_steps: training batches over which the bounds of the correction widen linearly from none (plain batch
            normalisation) to r ≤ 3 and |d| ≤ 5.
    """

    R_MAX, D_MAX = 3.0, 5.0

    def __init__(self, num_features: int, momentum: float = 0.01, eps: float = 1e-3, warmup_steps: int = 100_000) -> None:
        super().__init__()
        self.num_features, self.momentum, self.eps, self.warmup_steps = num_features, momentum, eps, warmup_steps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        # a float, so that it is one of the flat buffers, which are saved and shared
        self.register_buffer("steps", torch.zeros(1))

    running_mean: Tensor
    running_var: Tensor
    steps: Tensor

    def forward(self, x_BF: Tensor) -> Tensor:
        if not self.training or len(x_BF) < 2:
            return F.batch_norm(x_BF, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        with torch.no_grad():
            r_F, d_F = self._corrections(x_BF)
        # x̂ r + d, scaled and shifted, is plain batch normalisation with another scale and shift: one kernel
        return F.batch_norm(x_BF, None, None, r_F * self.weight, torch.addcmul(self.bias, d_F, self.weight), True, 0.0, self.eps)

    def _corrections(self, x_BF: Tensor) -> tuple[Tensor, Tensor]:
        """r and d of the paper, which carry no gradient; then the moving statistics follow the batch."""
        var_F, mean_F = torch.var_mean(x_BF, [0, *range(2, x_BF.dim())], correction=0)
        progress: Any = 1.0  # on a CUDA device a tensor [1]
        if self.warmup_steps:
            there = is_asynchronous(self.steps)
            progress = (self.steps / self.warmup_steps).clamp(max=1.0) if there else min(self.steps.item() / self.warmup_steps, 1.0)
        r_max, d_max = 1.0 + (self.R_MAX - 1.0) * progress, self.D_MAX * progress
        scale_F = torch.rsqrt(self.running_var + self.eps)
        r_F = torch.sqrt(var_F + self.eps).mul_(scale_F).clamp_(1.0 / r_max, r_max)
        d_F = torch.sub(mean_F, self.running_mean).mul_(scale_F).clamp_(-d_max, d_max)
        self.running_mean.lerp_(mean_F, self.momentum)
        self.running_var.lerp_(var_F, self.momentum)
        self.steps += 1
        return r_F, d_F


class LazyBatchRenorm1d(LazyModuleMixin, BatchRenorm1d):
    """BatchRenorm1d that takes its size from the first input."""

    cls_to_become = BatchRenorm1d

    def __init__(self, momentum: float = 0.01, eps: float = 1e-3, warmup_steps: int = 100_000) -> None:
        super().__init__(0, momentum, eps, warmup_steps)
        self.weight, self.bias = UninitializedParameter(), UninitializedParameter()  # type: ignore[assignment]  # until the first forward
        self.running_mean, self.running_var = UninitializedBuffer(), UninitializedBuffer()

    def initialize_parameters(self, x_BF: Tensor, *_: Any) -> None:
        """Called by torch before the first forward."""
        if self.has_uninitialized_params():
            with torch.no_grad():
                self.num_features = x_BF.shape[1]
                for tensor, value in ((self.weight, 1.0), (self.bias, 0.0), (self.running_mean, 0.0), (self.running_var, 1.0)):
                    tensor.materialize((self.num_features,))  # type: ignore[attr-defined]  # an uninitialised one
                    tensor.fill_(value)
