"""Gradients by autograd: those of a net, given those of its outputs, and those of an objective, given the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import tensor


class Pass(Protocol):
    """A forward pass of a net, whose gradient can be propagated once."""

    values: tuple[Any, ...]
    """The outputs, without a graph: all tensors, or all arrays."""

    def select(self, rows: Any, /) -> Pass:
        """Return the same pass with the outputs of some rows, a slice or places [K]. The gradient of the others is 0."""

    def backward(self, *grads: Any) -> None:
        """Add the gradients of the net's parameters to `Parameter.grad`, given those of the outputs.

        Args: grads: tensors or arrays, which may be modified; None for an output that the loss does not depend on.
        """


class GraphPass:
    """Outputs of modules; autograd computes the gradients. Args: inputs: tensor whose gradient `input_grad` returns."""

    def __init__(self, *outputs: Tensor, inputs: Tensor | None = None) -> None:
        self.outputs, self._inputs = outputs, inputs
        """outputs: with their graph."""
        self.values = tuple(out.detach() for out in outputs)

    def select(self, rows: Any) -> GraphPass:
        return GraphPass(*(out[rows] if isinstance(rows, slice) else out.index_select(0, tensor(rows)) for out in self.outputs))

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        pairs = [(out, tensor(grad)) for out, grad in zip(self.outputs, grads, strict=True) if grad is not None and out.requires_grad]
        if pairs:  # else all parameters are frozen
            _scalar(*zip(*pairs, strict=True)).backward()

    def input_grad(self, grad: Tensor) -> Tensor:
        """Return the gradient of `inputs`, given that of the only output; in place of `backward`."""
        assert self._inputs is not None
        return torch.autograd.grad(_scalar(self.outputs, [grad]), self._inputs)[0]


def _scalar(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a scalar whose gradients by the outputs are `grads`. (If `backward` is given them, torch imports sympy, 0.5 s.)"""
    scalar: Tensor = _KnownGradients.apply(grads, *outputs)
    return scalar


class _KnownGradients(torch.autograd.Function):
    """A scalar, given its gradients with respect to tensors, and the tensors."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.grads = grads
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)
