"""Batch renormalisation (arXiv:1702.03275) and weight normalisation (arXiv:1602.07868)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from slm_lab.agent.ops.arrays import A, clip
from slm_lab.agent.ops.device import is_asynchronous


class BatchRenorm1d(nn.Module):
    """Normalisation by batch statistics that are corrected towards moving statistics (batch renormalisation, arXiv:1702.03275).

    Args:
        num_features: F, the number of features of inputs [B, F] or [B, F, …].
        eps: constant added to a variance before its square root is taken.
        momentum: weight of the newest batch in the moving statistics.
        r_max, d_max: bounds of the corrections r and d after the warm-up. r lies in [1 / r_max, r_max], and d lies in [−d_max, d_max].
        warmup_steps: number of training batches in which the bounds increase linearly, from 1 to r_max and from 0 to d_max. Bounds of 1 and
            0 mean plain batch normalisation.

    Raises ValueError if r_max < 1 or d_max < 0.
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
        # a float, because only float buffers are part of the flat vector, which is saved and shared
        self.register_buffer("steps", torch.zeros(1))

    running_mean: Tensor
    running_var: Tensor
    steps: Tensor

    def forward(self, x_BF: Tensor) -> Tensor:
        if not self.uses_batch_statistics(x_BF):
            return F.batch_norm(x_BF, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        with torch.no_grad():
            rows, x = [0, *range(2, x_BF.dim())], x_BF.to(self.running_mean.dtype)  # float32 statistics also for bfloat16 inputs
            mean_F = x.mean(rows)  # on the CPU, torch.var_mean takes 13 times as long: 3.0 ms for 512 × 1,024
            var_F = (x - mean_F.view(-1, *(1 for _ in rows[1:]))).square_().mean(rows)
            bounds, moving = self.correction_bounds(self.steps), (self.running_mean, self.running_var)
            r_F, d_F = renorm_corrections(mean_F, var_F, *moving, bounds, self.eps)
            self.running_mean.lerp_(mean_F, self.momentum)
            self.running_var.lerp_(var_F, self.momentum)
            self.steps += 1
        # (x̂ r + d) weight + bias is plain batch normalisation with another weight and bias: one kernel
        return F.batch_norm(x_BF, None, None, r_F * self.weight, torch.addcmul(self.bias, d_F, self.weight), True, 0.0, self.eps)

    def uses_batch_statistics(self, x_BF: Tensor) -> bool:
        """Return whether `x_BF` is normalised by batch statistics instead of moving statistics."""
        return self.training and x_BF.shape[0] > 1

    def correction_bounds(self, steps: Tensor | np.ndarray) -> tuple[Any, Any]:
        """Return the current bounds r_max and d_max of the corrections, after `steps` [1] training batches.

        The bounds are floats, or tensors [1] if `steps` is on a CUDA device.
        """
        progress: Any = 1.0
        if self.warmup_steps:
            on_device = isinstance(steps, Tensor) and is_asynchronous(steps)
            progress = (steps / self.warmup_steps).clip(max=1.0) if on_device else min(steps.item() / self.warmup_steps, 1.0)
        return 1.0 + (self.r_max - 1.0) * progress, self.d_max * progress


def renorm_corrections(mean_F: A, var_F: A, moving_mean_F: A, moving_var_F: A, bounds: tuple[Any, Any], eps: float) -> tuple[A, A]:
    """Return the corrections r and d of batch renormalisation [F] (arXiv:1702.03275, Algorithm 1).

    Mean and variance of the batch, and the moving mean and variance, are either all tensors or all arrays.

    Args: bounds: r_max and d_max.
    """
    r_max, d_max = bounds
    moving_std_F = (moving_var_F + eps) ** 0.5
    r_F = clip((var_F + eps) ** 0.5 / moving_std_F, 1.0 / r_max, r_max)
    return r_F, clip((mean_F - moving_mean_F) / moving_std_F, -d_max, d_max)


class LazyBatchRenorm1d(LazyModuleMixin, BatchRenorm1d):
    """BatchRenorm1d that infers `num_features` from the first input."""

    cls_to_become = BatchRenorm1d

    def __init__(
        self, eps: float = 1e-5, momentum: float = 0.01, r_max: float = 3.0, d_max: float = 5.0, warmup_steps: int = 10_000
    ) -> None:
        super().__init__(0, eps, momentum, r_max, d_max, warmup_steps)
        self.weight, self.bias = UninitializedParameter(), UninitializedParameter()  # type: ignore[assignment]  # until the first forward
        self.running_mean, self.running_var = UninitializedBuffer(), UninitializedBuffer()

    def initialize_parameters(self, x_BF: Tensor, *_: Any) -> None:
        """Initialise the lazy parameters for the shape of the first input. torch calls this method before the first forward pass."""
        if self.has_uninitialized_params():
            with torch.no_grad():
                self.num_features = x_BF.shape[1]
                for tensor, value in ((self.weight, 1.0), (self.bias, 0.0), (self.running_mean, 0.0), (self.running_var, 1.0)):
                    tensor.materialize((self.num_features,))  # type: ignore[attr-defined]  # an uninitialised tensor
                    tensor.fill_(value)


class WeightNormLinear(nn.Module):
    """Linear layer with weight normalisation (arXiv:1602.07868, equation 2): the weight vector of each output is w = g v / ‖v‖.

    The parameters v [O, I] (`direction`) and g [O, 1] (`length`) are learned. The layer is initialised like nn.Linear: v is the initial
    weight of nn.Linear, and g contains the norms of the rows of v.

    Args: in_features: I, the number of inputs. out_features: O, the number of outputs. bias: whether to add a bias.
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
        """Draw new random values for all parameters."""
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
    """WeightNormLinear that infers `in_features` from the first input."""

    cls_to_become = WeightNormLinear

    def __init__(self, out_features: int, bias: bool = True) -> None:
        super().__init__(0, out_features, bias)
        self.direction = UninitializedParameter()  # type: ignore[assignment]  # until the first forward

    def initialize_parameters(self, x_BI: Tensor, *_: Any) -> None:
        """Initialise the lazy parameters for the shape of the first input. torch calls this method before the first forward pass."""
        if self.has_uninitialized_params():
            self.in_features = x_BI.shape[-1]
            self.direction.materialize((self.out_features, self.in_features))  # type: ignore[attr-defined]  # not initialised
            self.reset_parameters()
