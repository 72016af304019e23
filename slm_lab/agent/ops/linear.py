"""Matrix products of linear layers, for one net and for a stack of C nets with weights of their own.

Shapes: x [B, I], weight [O, I], bias [O]; of a stack x [C, B, I], weight [C, O, I], bias [C, 1, O]. A product whose result is much
narrower than high is computed as its transpose: BLAS kernels are laid out for wide results (layer 23 → 256, 256 rows: 100 µs become 55).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_NARROW = 4
"""Ratio of height to width of the weight from which the gradient of the input is computed as its transpose."""


@dataclass(frozen=True)
class Products:
    """How a layer computes its product and the two of its gradients. Results are float32, and equal to rounding.

    Args:
        onednn: smallest number of rows, columns and inner terms from which oneDNN computes a float32 product; 0: never. Other products are
            computed by the library that torch uses by itself.
        bfloat16: factors are rounded to bfloat16, and so is the product.
    """

    onednn: int = 0
    bfloat16: bool = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return x weightᵀ + bias, in a new tensor [B, O]; of a stack [C, B, O]."""
        if self.bfloat16:
            return self._product(x, weight.mT).add_(bias)
        if self._by_onednn(x, weight.mT):
            return _onednn(x, weight, bias)
        if x.dim() == 3:
            return torch.baddbmm(bias, x, weight.mT)
        return torch.addmm(bias, x, weight.t())

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight, given that of the output: gradᵀ x."""
        if x.shape[-1] < grad.shape[-1]:
            return self._product(x.mT, grad).mT
        return self._product(grad.mT, x)

    def add_weight_grad(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add the gradient of the weight to `total` [O, I]."""
        # with few inputs the transposed product is twice as fast, which outweighs one more addition
        if self.bfloat16 or 2 * x.shape[-1] <= grad.shape[-1] or self._by_onednn(grad.mT, x):
            total += self.weight_grad(grad, x)
        elif x.dim() == 3:
            total.baddbmm_(grad.mT, x)
        else:
            total.addmm_(grad.mT, x)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input, given that of the output: grad weight."""
        if weight.shape[-1] * _NARROW <= weight.shape[-2]:
            return self._product(weight.mT, grad.mT).mT
        return self._product(grad, weight)

    def run(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Return function(*args), its products in bfloat16 (by torch.autocast) if this is so, and the result float32."""
        if not self.bfloat16:
            return function(*args)
        with torch.autocast(args[0].device.type, torch.bfloat16):
            return function(*args).float()

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        product = torch.bmm if a.dim() == 3 else torch.mm
        if self.bfloat16:
            return product(a.bfloat16(), b.bfloat16()).float()
        return _onednn(a, b.mT) if self._by_onednn(a, b) else product(a, b)

    def _by_onednn(self, a: Tensor, b: Tensor) -> bool:
        return 0 < self.onednn <= min(*a.shape[-2:], b.shape[-1])


FLOAT32 = Products()
"""As torch does by itself."""


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias by oneDNN, which copies an x that is transposed, but not such a weight."""
    if x.dim() == 3:
        return torch.stack([_onednn(x[c], weight[c], None if bias is None else bias[c, 0]) for c in range(len(x))])
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def bias_grad(grad: Tensor) -> Tensor:
    """Return the gradient of the bias, given that of the output: its sum over rows."""
    return grad.sum(1, keepdim=True) if grad.dim() == 3 else grad.sum(0)
