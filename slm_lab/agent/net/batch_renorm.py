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
    """Normalise [B, F] or [B, F, …] by batch statistics corrected towards the moving ones, Algorithm 1 of the paper.

    Args:
        num_features: F.
        eps: added to variances, inside the root.
        momentum: how far the moving statistics follow each batch.
        r_max, d_max: bounds of the correction after the warm-up: r lies in [1 / r_max, r_max], d in [−d_max, d_max].
        warmup_steps: training batches over which the bounds widen linearly from those of plain batch normalisation, 1 and 0.

    Raises ValueError if r_max is below 1 or d_max below 0.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.01,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 10_000,
    ) -> None:
        super().__init__()
        if r_max < 1.0 or d_max < 0.0:
            raise ValueError(f"expected r_max ≥ 1 and d_max ≥ 0; got {r_max} and {d_max}")
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.r_max, self.d_max, self.warmup_steps = r_max, d_max, warmup_steps
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
        rows = [0, *range(2, x_BF.dim())]
        mean_F = x_BF.mean(rows)  # torch.var_mean takes 13 times as long on the CPU: 3.0 ms for 512 × 1,024
        var_F = (x_BF - mean_F.view(-1, *(1 for _ in rows[1:]))).square_().mean(rows)
        progress: Any = 1.0  # on a CUDA device a tensor [1]
        if self.warmup_steps:
            there = is_asynchronous(self.steps)
            progress = (self.steps / self.warmup_steps).clamp(max=1.0) if there else min(self.steps.item() / self.warmup_steps, 1.0)
        r_max, d_max = 1.0 + (self.r_max - 1.0) * progress, self.d_max * progress
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

    def __init__(
        self, eps: float = 1e-5, momentum: float = 0.01, r_max: float = 3.0, d_max: float = 5.0, warmup_steps: int = 10_000
    ) -> None:
        super().__init__(0, eps, momentum, r_max, d_max, warmup_steps)
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
