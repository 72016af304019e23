"""Interface of a net's forward and backward pass (Pass), and its implementation by autograd (GraphPass)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slm_lab.agent.ops.arrays import tensor


class Pass(Protocol):
    """A forward pass of a net, through which gradients can be propagated back once."""

    values: tuple[Any, ...]
    """Outputs without an autograd graph. Either all are tensors, or all are arrays."""

    def select(self, rows: Any, /) -> Pass:
        """Return a pass with only the given rows of the outputs. Gradients of other rows are 0. Args: rows: a slice, or indices [K]."""

    def backward(self, *grads: Any) -> None:
        """Compute the gradients of the net's parameters and add them to `Parameter.grad`, given the gradients of the outputs.

        Args: grads: tensors or arrays, which this method may modify; None for an output that the loss does not depend on.
        """


class GraphPass:
    """A Pass whose gradients autograd computes, from the graph of the outputs.

    Args: outputs: the net's outputs, with their graph. inputs: the tensor whose gradient `input_grad` returns; None if it is not called.
    """

    def __init__(self, *outputs: Tensor, inputs: Tensor | None = None) -> None:
        self.outputs, self._inputs = outputs, inputs
        self.values = tuple(out.detach() for out in outputs)

    def select(self, rows: Any) -> GraphPass:
        return GraphPass(*(out[rows] if isinstance(rows, slice) else out.index_select(0, tensor(rows)) for out in self.outputs))

    def backward(self, *grads: Tensor | np.ndarray | None) -> None:
        pairs = [(out, tensor(grad)) for out, grad in zip(self.outputs, grads, strict=True) if grad is not None and out.requires_grad]
        if pairs:  # else all parameters are frozen
            _scalar(*zip(*pairs, strict=True)).backward()

    def input_grad(self, grad: Tensor) -> Tensor:
        """Return the gradient of `inputs`, given the gradient of the only output. Call this instead of `backward`."""
        assert self._inputs is not None
        return torch.autograd.grad(_scalar(self.outputs, [grad]), self._inputs)[0]


def _scalar(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a scalar whose gradients with respect to `outputs` are `grads`.

    `torch.autograd.backward(outputs, grads)` would do the same, but makes torch import sympy, which takes 0.5 s.
    """
    scalar: Tensor = _KnownGradients.apply(grads, *outputs)
    return scalar


class _KnownGradients(torch.autograd.Function):
    """Function of given tensors that returns a scalar and has given gradients with respect to these tensors."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.grads = grads
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)
