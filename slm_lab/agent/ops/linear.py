"""Matrix products of linear layers, for one net or for a stack of C nets with separate weights.

The shapes are x [B, I], weight [O, I] and bias [O]. For a stack, they are x [C, B, I], weight [C, O, I] and bias [C, 1, O]. If a layer
has many more outputs than inputs, a gradient is computed as its transpose, because BLAS kernels are optimised for wide results; the methods
state the conditions. (For a batch of 256, computing the transpose reduces the time of a gradient of a layer with 23 inputs and 256 outputs
from 100 to 55 µs.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TRANSPOSE_RATIO = 4
"""If a weight has at least this many times as many rows as columns, the gradient of the input is computed in transposed form."""
_ONEDNN_MIN_DIMENSION = 4
"""oneDNN computes only products with at least this number of rows, of inputs and of outputs. With a single row, oneDNN takes up to three
times as long as MKL."""


@dataclass
class MatmulMode:
    """Mode in which a linear layer computes the matrix products of its forward and backward pass. All results are float32.

    With `bfloat16=False`, the results for all values of `onednn` are equal up to rounding.

    Args:
        onednn: minimum size of a float32 product that oneDNN computes, where the size is rows × inputs × outputs, the number of
            multiplications. torch's default library computes smaller products. If `onednn` is 0, oneDNN is not used. The attribute `onednn`
            may be changed later, for all layers that share this object.
        bfloat16: whether the factors and the results of products are rounded to bfloat16.
    """

    onednn: int = 0
    bfloat16: bool = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return x weightᵀ + bias as a new tensor [B, O], or [C, B, O] for a stack."""
        if self.bfloat16:
            return self._matmul(x, weight.mT).add_(bias)
        if self._uses_onednn(x, weight.mT):
            return _onednn_linear(x, weight, bias)
        if x.dim() == 3:
            return torch.baddbmm(bias, x, weight.mT)
        return torch.addmm(bias, x, weight.t())

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient with respect to the weight, gradᵀ x, given `grad`, the gradient with respect to the output."""
        if x.shape[-1] < grad.shape[-1]:
            return self._matmul(x.mT, grad).mT
        return self._matmul(grad.mT, x)

    def add_weight_grad(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add the gradient with respect to the weight, gradᵀ x, to `total` [O, I] in place."""
        # with few inputs the transposed product takes half the time, which outweighs the additional sum
        if self.bfloat16 or 2 * x.shape[-1] <= grad.shape[-1] or self._uses_onednn(grad.mT, x):
            total += self.weight_grad(grad, x)
        elif x.dim() == 3:
            total.baddbmm_(grad.mT, x)
        else:
            total.addmm_(grad.mT, x)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient with respect to the input, grad · weight, given `grad`, the gradient with respect to the output."""
        if weight.shape[-1] * _TRANSPOSE_RATIO <= weight.shape[-2] and not self._uses_onednn(grad, weight):
            return self._matmul(weight.mT, grad.mT).mT
        return self._matmul(grad, weight)

    def call_with_mode(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Call function(*args), and let linear layers inside the call use this MatmulMode. Return the result as a float32 tensor.

        With `bfloat16=True`, torch.autocast converts convolutions and the products of other modules to bfloat16.
        """
        if not self.bfloat16 and not self.onednn:
            return function(*args)
        linear = nullcontext() if torch.compiler.is_compiling() else _LinearLayers(self)  # do not change the modules of an exported net
        with torch.autocast(args[0].device.type, torch.bfloat16) if self.bfloat16 else nullcontext(), linear:
            return function(*args).float()

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        product = torch.bmm if a.dim() == 3 else torch.mm
        if self.bfloat16:
            return product(a.bfloat16(), b.bfloat16()).float()
        return _onednn_linear(a, b.mT) if self._uses_onednn(a, b) else product(a, b)

    def _uses_onednn(self, a: Tensor, b: Tensor) -> bool:
        sizes = (a.shape[-2], a.shape[-1], b.shape[-1])
        return 0 < self.onednn <= math.prod(sizes) and min(sizes) >= _ONEDNN_MIN_DIMENSION


FLOAT32 = MatmulMode()
"""MatmulMode that computes all products in float32 with torch's default library."""


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias, computed by oneDNN. (oneDNN copies a transposed x, but not a transposed weight.)"""
    if x.dim() == 3:
        return torch.stack([_onednn_linear(x[c], weight[c], None if bias is None else bias[c, 0]) for c in range(len(x))])
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@torch.no_grad()
def normalize_rows(weight: Tensor) -> None:
    """Scale each row of a weight [O, I] to norm 1, in place."""
    weight.div_(torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_min_(1e-8))


class LinearFunction(torch.autograd.Function):
    """Autograd function of (x, weight, bias, matmul_mode) that returns x weightᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, matmul_mode: MatmulMode) -> Tensor:
        ctx.matmul_mode = matmul_mode
        ctx.save_for_backward(x, weight)
        return matmul_mode.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # second-order gradients need the derivative of these products, and oneDNN's products have none
        matmul_mode = replace(ctx.matmul_mode, onednn=0) if torch.is_grad_enabled() else ctx.matmul_mode
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            matmul_mode.input_grad(grad, weight) if needs_x else None,
            matmul_mode.weight_grad(grad, x) if needs_weight else None,
            (grad.sum(1, keepdim=True) if grad.dim() == 3 else grad.sum(0)) if needs_bias else None,
            None,
        )


class _LinearLayers(TorchFunctionMode):
    """Context in which F.linear calls LinearFunction, provided that a bias is given and that the input has shape [B, I]."""

    def __init__(self, matmul_mode: MatmulMode) -> None:
        super().__init__()
        self.matmul_mode = matmul_mode

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) == 3 and args[0].dim() == 2 and args[2] is not None:
            return LinearFunction.apply(*args, self.matmul_mode)
        return function(*args, **(kwargs or {}))
