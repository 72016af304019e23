"""Interface of a net's forward and backward pass (ForwardPass), and its implementation with autograd (GraphPass)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import as_tensor


class ForwardPass(Protocol):
    """Result of a forward pass of a net. The gradient can be backpropagated through the net once."""

    values: tuple[Any, ...]
    """Outputs of the net without an autograd graph. Either all outputs are tensors, or all are arrays."""

    def select_rows(self, rows: Any, /) -> ForwardPass:
        """Return a pass whose outputs are the rows `rows` of this pass's outputs. In `backward`, the gradients of other rows are 0.

        Args: rows: rows to select, as a slice or as indices [K].
        """

    def backward(self, *grads: Any) -> None:
        """Compute the gradients of the net's parameters, given the gradients of the outputs, and add the results to `Parameter.grad`.

        Args: grads: one gradient for each output: a tensor or array that this method may modify, or None if the loss does not depend on the
        output.
        """


class GraphPass:
    """A ForwardPass whose gradients are computed by autograd from the graph of the outputs.

    Args: outputs: the net's outputs, with their autograd graph. inputs: the tensor whose gradient `input_grad` returns, or None if
    `input_grad` is not called.
    """

    def __init__(self, *outputs: Tensor, inputs: Tensor | None = None) -> None:
        self.outputs, self._inputs = outputs, inputs
        self.values = tuple(out.detach() for out in outputs)

    def select_rows(self, rows: Any) -> GraphPass:
        return GraphPass(*(out[rows] if isinstance(rows, slice) else out.index_select(0, as_tensor(rows)) for out in self.outputs))

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        pairs = [(out, as_tensor(grad)) for out, grad in zip(self.outputs, grads, strict=True) if grad is not None and out.requires_grad]
        if pairs:  # there are no pairs if all parameters are frozen
            _scalar_with_gradients(*zip(*pairs, strict=True)).backward()

    def input_grad(self, grad: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to `inputs`, given the gradient of the only output.

        Call this method instead of `backward`.
        """
        assert self._inputs is not None
        return torch.autograd.grad(_scalar_with_gradients(self.outputs, [grad]), self._inputs)[0]


def _scalar_with_gradients(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a scalar tensor whose gradients with respect to `outputs` are `grads`.

    `torch.autograd.backward(outputs, grads)` would have the same effect as `backward()` of this scalar, but makes torch import sympy, which
    takes 0.5 s.
    """
    scalar: Tensor = _GivenGradients.apply(grads, *outputs)
    return scalar


class _GivenGradients(torch.autograd.Function):
    """Autograd function that maps tensors to the scalar 0. The gradients with respect to the tensors are given as an argument."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.grads = grads
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)
